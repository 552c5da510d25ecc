"""Whoever plans a version gets the same plan (B17), and it is planned once (B32)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import ConfigError, config, coordinator, lance_stream, planner, reader
from ray_lance_stream.config import Shared, SharedLostError
from ray_lance_stream.planner import PlanBook
from tests.fake_ray import Cluster

NUM_ROWS = 2000
FILTER = "value % 3 != 1"

# Of the pinned version 1: whole and filtered.
PLAN = """
import json, sys
from ray_lance_stream.config import ReadPlan
from ray_lance_stream.order import Order
from ray_lance_stream.planner import plan_table
from ray_lance_stream.table import TableRef
told = []
for path in json.loads(sys.argv[1]):
    for filter in (None, {filter!r}):
        plan = plan_table(ReadPlan(TableRef(path, 1), ("id",), filter, Order(1, seed=7), 48, True))
        told.append([plan.resolve().fingerprint(epoch) for epoch in range(3)] + [repr(plan.content)])
print(json.dumps(told))
"""
SETTINGS: list[dict[str, str]] = [
    {},
    {"LANCE_CPU_THREADS": "1", "LANCE_IO_THREADS": "1", "OMP_NUM_THREADS": "1"},
    {"LANCE_CPU_THREADS": "7", "LANCE_IO_THREADS": "64", "LANCE_DEFAULT_BATCH_SIZE": "3"},
    {"LANCE_CPU_THREADS": "2", "LANCE_DEFAULT_IO_BUFFER_SIZE": "4096", "PYTHONHASHSEED": "7"},
]


def tables(directory: Path) -> list[str]:
    """Tables of 1, 7 and 500 fragments, at version 1."""
    rng = np.random.default_rng(0)
    data = pa.table({"id": np.arange(NUM_ROWS), "value": rng.integers(0, 1000, NUM_ROWS)})
    return [
        lance.write_dataset(data, str(directory / f"{count}.lance"), max_rows_per_file=-(-NUM_ROWS // count)).uri
        for count in (1, 7, 500)
    ]


def plans_of(paths: list[str], settings: list[dict[str, str]]) -> list[list[list[str]]]:
    """What one process for each of the settings plans; they run side by side."""
    root = str(Path(__file__).parents[2])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PLAN.format(filter=FILTER), json.dumps(paths)],
            env={**os.environ, "PYTHONPATH": root, **each},
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in settings
    ]
    told = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(settings)
    return [json.loads(text.splitlines()[-1]) for text in told]


def test_ranks_with_other_threads_and_io_plan_alike_whatever_becomes_of_the_table(tmp_path: Path) -> None:
    """B17: fingerprints are compared before and after deletes and compaction, all at the pinned version."""
    paths = tables(tmp_path)
    before = plans_of(paths, SETTINGS[:2])
    for path in paths:
        dataset = lance.dataset(path)
        dataset.delete("id % 5 = 2")
        dataset.optimize.compact_files()
    after = plans_of(paths, SETTINGS[2:])
    assert len({json.dumps(told) for told in before + after}) == 1
    (whole_1, kept_1), (whole_7, kept_7), (whole_500, kept_500) = (before[0][i : i + 2] for i in (0, 2, 4))
    assert whole_1[:3] == whole_7[:3] == whole_500[:3]  # fragments are no part of the order
    assert kept_1[:3] == kept_7[:3] == kept_500[:3]
    assert len({*whole_1, *kept_1}) == 7  # three epochs of each, and the content


# Once for each version and filter


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Version 1 of 100 rows, version 2 of 200."""
    uri = str(tmp_path / "t.lance")
    for start in (0, 100):
        lance.write_dataset(pa.table({"id": np.arange(start, start + 100)}), uri, mode="append" if start else "create")
    return uri


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(version, filter) of each scan for matching rows."""
    found: list[tuple[int, str]] = []
    match_rows = planner.match_rows

    def noted(ref: Any, filter: str) -> np.ndarray:
        found.append((ref.version, filter))
        time.sleep(0.1)
        return match_rows(ref, filter)

    monkeypatch.setattr(planner, "match_rows", noted)
    return found


def test_a_stream_scans_once(path: str, scans: list[tuple[int, str]]) -> None:
    lance_stream(path, num_splits=8, filter="id % 2 = 0")
    assert scans == [(2, "id % 2 = 0")]


def test_a_stream_that_is_resumed_scans_the_recorded_version_alone(path: str, scans: list[tuple[int, str]]) -> None:
    state = lance_stream(lance.dataset(path, version=1), num_splits=8, filter="id < 50").state_dict()
    scans.clear()
    lance_stream(path, num_splits=8, filter="id < 50", resume_from=state)
    assert scans == [(1, "id < 50")]


def test_all_ranks_and_attempts_that_ask_for_a_version_get_the_same_plan(
    path: str, scans: list[tuple[int, str]]
) -> None:
    plan = lance_stream(path, num_splits=8, filter="id % 2 = 0")._plan
    other = lance_stream(path, num_splits=8, filter="id % 2 = 1")._plan
    scans.clear()
    book, start = PlanBook(), threading.Barrier(8)

    def ask(number: int) -> Any:
        start.wait(10)
        return book.at(other if number % 4 == 3 else plan, 1)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert sorted(scans) == [(1, "id % 2 = 0"), (1, "id % 2 = 1")]
    assert len({id(each) for each in found}) == 2
    assert book.at(plan, 1) is found[0]  # a later worker group
    assert found[0].resolve().matched.tolist() == list(range(0, 100, 2))
    assert found[0].order.num_rows == 50


def test_plans_of_versions_long_gone_by_are_let_go(path: str) -> None:
    plan = lance_stream(path, num_splits=8, filter="id >= 0")._plan
    book = PlanBook()
    for _ in range(planner.KEPT_PLANS + 3):
        version = lance.write_dataset(pa.table({"id": np.arange(9)}), path, mode="append").version
        assert book.at(plan, version) is book.at(plan, version)
    assert len(book._plans) == planner.KEPT_PLANS
    assert book.at(plan, 1).order.num_rows == 100


def test_without_a_filter_nothing_is_scanned(path: str, scans: list[tuple[int, str]]) -> None:
    assert PlanBook().at(lance_stream(path, num_splits=8)._plan, 1).order.num_rows == 100
    assert scans == []


def test_a_coordinator_keeps_matched_rows_in_the_object_store_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by the process as well, they would take their room twice."""
    plan = lance_stream(path, num_splits=8, filter="id % 2 = 0")._plan
    put: list[np.ndarray] = []
    monkeypatch.setattr(Shared, "put", lambda rows: put.append(rows) or Shared(rows))
    monkeypatch.setattr(coordinator, "ReaderShelf", MagicMock())
    context = MagicMock(was_current_actor_reconstructed=False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(coordinator.StreamCoordinator, "_sweep", lambda self: None)
    made = coordinator.StreamCoordinator("train", plan.table, "stream")
    assert made.plan_at(plan, 1, None).matched.get() is put[0]
    assert put[0].tolist() == list(range(0, 100, 2))


def test_matched_rows_that_were_lost_are_found_again_once_for_all_reads(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads of a reader run in several threads: one scans, the others wait for it."""
    plan = lance_stream(path, num_splits=8, filter="id % 2 = 0")._plan
    found, scans = plan.matched.get(), []

    def lost(self: Shared[np.ndarray]) -> np.ndarray:
        raise SharedLostError("they died with the coordinator")

    def scan(*args: Any, **options: Any) -> np.ndarray:
        scans.append(args)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(Shared, "get", lost)
    monkeypatch.setattr(config, "match_rows", scan)
    monkeypatch.setattr(reader, "keep_freed_memory", lambda: None)
    made = reader.SplitReader("train", plan.table)
    with ThreadPoolExecutor(4) as pool:
        resolved = list(pool.map(made._resolved, [plan] * 4))
    assert len(scans) == 1
    assert all(each is resolved[0] for each in resolved)


def test_no_call_waits_while_a_coordinator_imports_what_a_stage_needs(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Data takes a second, and `stream.close()` or a question must not wait for it."""
    stream = lance_stream(path, num_splits=8)
    Cluster(monkeypatch)
    stream.shard()
    made = stream._coordinator.instance
    imported: list[str] = []

    def import_module(name: str) -> None:
        assert not made._lock.locked()
        imported.append(name)

    monkeypatch.setattr(coordinator, "import_module", import_module)
    monkeypatch.setattr(made, "_stages", MagicMock())
    made.stage_worker(None, None, None)
    assert imported == ["ray_lance_stream.stage_worker"]


# Columns of another version


def test_columns_of_an_older_version(path: str) -> None:
    lance.dataset(path).add_columns({"twice": "id * 2"})
    every, named = lance_stream(path, num_splits=8), lance_stream(path, num_splits=8, columns=["twice"])
    assert every._plan.columns == ("id", "twice")
    assert PlanBook().at(every._plan, 1).columns == ("id",)
    with pytest.raises(ConfigError, match=r"columns must exist in table .*unknown \['twice'\].*available are \['id'"):
        PlanBook().at(named._plan, 1)
    with pytest.raises(ConfigError, match="No field named twice"):
        PlanBook().at(lance_stream(path, num_splits=8, filter="twice > 3")._plan, 1)
