"""Processes of every kind, nodes and drivers are killed at random moments: nothing is lost, nothing is left (B15, B31).

50 rounds in ten runs; `make faults` has them all, `make test` the first run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pytest

from ray_lance_stream import ReadError, lance_stream, window
from ray_lance_stream.list_cache import FOLDER_VARIABLE
from tests.faults.killer import Killer, killer
from tests.faults.kills import (
    NUM_SPLITS,
    ROUNDS,
    ROUNDS_OF_A_RUN,
    SEED,
    TARGETS,
    Run,
    Table,
    check_history,
    footprint,
    left_behind,
    schedule,
)
from tests.support import Oracle, make_table, scan_ids

pytestmark = [pytest.mark.timeout(400), pytest.mark.faults, pytest.mark.slow]

ALL = os.environ.get("KILL_ROUNDS") == "all"
RUNS = schedule(int(os.environ.get("KILL_SEED", SEED)))


def test_the_schedule_has_every_target_several_times():
    kills = [kill for run in RUNS for kill in run.kills]
    assert len(kills) == ROUNDS
    assert all(count >= 7 for count in Counter(kill.target for kill in kills).values())
    assert {kill.target for kill in kills} == set(TARGETS)
    assert schedule(3) == schedule(3) != schedule(4)
    assert len(RUNS[0].kills) == ROUNDS_OF_A_RUN == ROUNDS // 10


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """Where lists are kept, set before the cluster starts."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="module")
def kills(no_cluster, cache) -> Iterator[Killer]:
    with killer() as made:
        yield made


@pytest.mark.parametrize("run", RUNS if ALL else RUNS[:1], ids=str)
def test_killed_at_random_moments(kills: Killer, cache, tmp_path, run: Run):
    table = Table(tmp_path, run.kind)
    table.make()
    files, before = data_files(table), footprint()
    kills.hit(run, tmp_path)
    assert left_behind(before) == {}  # also of drivers that were killed
    check_history(table)
    assert lance.dataset(table.path).tags.list() == {}
    assert table.grows or data_files(table) == files
    assert [path for path in cache.iterdir() if not path.name.endswith(".ray-lance-stream-list")] == []


def data_files(table: Table) -> set[Path]:
    """What lies in the folder of the table, but for tags."""
    return {path for path in Path(table.path).rglob("*") if path.is_file() and "_refs" not in path.parts}


# ---- a chunk that ends its readers


def crash_at(batch: dict[str, Any], row: int, calls: str) -> dict[str, Any]:
    """Ends the process at once where a row is in the batch."""
    if row in batch["id"]:
        with open(calls, "a") as log:
            log.write(f"{os.getpid()}\n")
        os._exit(1)
    return batch


def test_a_chunk_that_crashes_its_readers_at_once_is_given_up(kills: Killer, tmp_path, monkeypatch):
    """After a bounded number of readers; what comes before it is delivered."""
    monkeypatch.setattr(window, "MAX_ATTEMPTS", 2)
    path, calls = make_table(tmp_path / "t", 480), tmp_path / "calls"
    cycles = Oracle(scan_ids(path), NUM_SPLITS, 1).epoch(0)
    stream = lance_stream(path, num_splits=NUM_SPLITS, read_batch_size=1)
    shard = stream.map_batches(crash_at, fn_args=[int(cycles[7][3]), str(calls)]).shard()
    rows: list[list[int]] = []
    with pytest.raises(ReadError, match=r"cycles \[7, 8\).*lost 2 times, at last to ActorDiedError"):
        rows += (batch["id"].tolist() for batch in shard.iter_batches(batch_size=NUM_SPLITS, prefetch_batches=0))
    assert rows == [ids.tolist() for ids in cycles[: len(rows)]]
    assert len(calls.read_text().split()) == len(set(calls.read_text().split())) == 2
    assert shard.state_dict()["samples_consumed_per_split"] == len(rows) == 7
    shard.close()
    stream.close()
