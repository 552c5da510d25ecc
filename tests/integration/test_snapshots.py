"""Rows of versions that move: epochs that take up new ones, ranks that read different ones, and moved tables (B17, B38, B39).

Which version is chosen, and what states say of it, is tested without Ray in tests/unit/test_next_epoch.py.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import ConfigError, LanceStream, StreamShard, lance_stream
from tests.integration.conftest import Shards
from tests.support import Oracle, effective_history, fixed_size, log_loop, make_table, read_logs, scan_ids

pytestmark = pytest.mark.timeout(300)

SPLITS = 8
GLOBAL_BATCH = 16
OPTIONS: dict[str, Any] = {"num_splits": SPLITS, "shuffle_seed": 3, "on_new_version": "next_epoch"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return make_table(tmp_path / "t", 96)


def grow(path: str, num_rows: int = 24) -> int:
    """The next version: more rows, and some fewer."""
    dataset = lance.dataset(path)
    first = int(scan_ids(path).max()) + 1
    ids = np.arange(first, first + num_rows)
    more = pa.table({"id": ids, "value": 3 * ids + 1, "vec": fixed_size(ids)})
    dataset = lance.write_dataset(more, path, mode="append")
    dataset.delete(f"id = {first - 2}")
    dataset.optimize.compact_files()
    return lance.dataset(path).version


def expected(path: str, version: int, epoch: int, filter: str | None = None) -> list[list[int]]:
    """Sorted ids of each global step."""
    ids = scan_ids(path, filter, version)
    oracle = Oracle(ids, SPLITS, GLOBAL_BATCH // SPLITS, seed=3)
    return [sorted(step.tolist()) for step in oracle.epoch(epoch)]


def group(shards: Shards, stream: LanceStream, world_size: int, state: Any = None) -> list[StreamShard]:
    """The shards of one attempt, on the readers that tests share."""
    found = stream.streaming_split(world_size)
    for shard in found:
        shard._supply.readers = shards._pools.setdefault(1, shard._supply.readers)
        if state is not None:
            shard.load_state_dict(state)
    return found


def steps(shard: StreamShard, count: int | None = None) -> list[list[int]]:
    """The ids of the batches of a pass, or of its first ones; then the loop breaks."""
    found: list[list[int]] = []
    for batch in shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH), prefetch_batches=0):
        assert np.array_equal(batch["value"], 3 * batch["id"] + 1)
        found.append(batch["id"].tolist())
        if len(found) == count:
            break
    return found


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global steps of what each rank received."""
    return [sorted(i for part in parts for i in part) for parts in zip(*ranks, strict=True)]


def test_ranks_read_the_same_versions_and_resume_in_them(shards: Shards, path: str) -> None:
    """One rank after the other through two edges, the table growing in every epoch; then on three workers, and on."""
    stream = shards.stream(path, **OPTIONS)
    ranks = group(shards, stream, 2)
    got: list[list[list[list[int]]]] = []
    states: list[list[dict[str, Any]]] = []
    for shard in ranks:
        epochs, told = [], []
        for epoch in range(3):
            assert shard.epoch == epoch
            grow(path)  # before the next epoch is read ahead
            epochs.append(steps(shard, 3 if epoch == 2 else None))
            told.append(shard.state_dict())
        got.append(epochs)
        states.append(told)
    assert states[0] == states[1]
    versions = [state["table_version"] for state in states[0]]
    assert versions[0] == stream._plan.table.version
    assert versions[0] < versions[1] <= versions[2] < lance.dataset(path).version
    assert [(state["epoch"], state["samples_consumed_per_split"]) for state in states[0]] == [(1, 0), (2, 0), (2, 6)]
    for epoch in range(3):
        found = joined([epochs[epoch] for epochs in got])
        assert found == expected(path, versions[epoch], epoch)[: len(found)]
        assert epoch == 2 or len(found) == len(expected(path, versions[epoch], epoch))

    again = shards.stream(path, **OPTIONS)
    resumed = group(shards, again, 3, states[0][2])
    assert joined([steps(shard) for shard in resumed]) == expected(path, versions[2], 2)[3:]
    newest = lance.dataset(path).version
    rows_per_split = len(scan_ids(path)) // SPLITS
    assert [shard.num_rows for shard in resumed] == [
        rows_per_split * (hi - lo) for lo, hi in (shard.split_block for shard in resumed)
    ]
    assert [shard.num_batches(shard.local_batch_size(SPLITS)) for shard in resumed] == [rows_per_split] * 3
    assert joined([steps(shard) for shard in resumed]) == expected(path, newest, 3)


def test_what_is_read_ahead_is_of_the_version_that_the_epoch_reads(shards: Shards, path: str, monkeypatch) -> None:
    """And it is not read again, though the table has moved on once more in between."""
    (shard,) = group(shards, shards.stream(path, read_batch_size=1, prefetch_chunks=3, **OPTIONS), 1)
    sent: list[tuple[int, int, int]] = []
    send = shard._supply.readers.send

    def noted(request: Any) -> Any:
        sent.append((request.plan.table.version, request.epoch, request.span.start))
        return send(request)

    monkeypatch.setattr(shard._supply.readers, "send", noted)
    first = second = 0
    for _ in shard.iter_batches(batch_size=GLOBAL_BATCH, prefetch_batches=0):
        first = first or grow(path)
        ahead = [each for each in sent if each[1] == 1]
        if ahead and not second:
            second = grow(path)
        time.sleep(0.05)  # for the answer
    assert 0 < first < second
    assert {version for version, epoch, _ in sent if epoch == 1} == {first}
    assert joined([steps(shard)]) == expected(path, first, 1)
    assert len(sent) == len(set(sent))
    shard._supply.ahead.drop()


def test_a_killed_coordinator_neither_changes_a_choice_nor_loses_matched_rows(cluster, path: str) -> None:
    """Rank 0 is inside an epoch when it dies, rank 1 before its edge; the rows that the filter matches died with it."""
    filter = "id % 3 != 0"
    stream = lance_stream(path, filter=filter, read_batch_size=2, prefetch_chunks=2, **OPTIONS)
    taken_up = grow(path)
    early, late = stream.streaming_split(2)
    assert joined([steps(early), steps(late)]) == expected(path, stream._plan.table.version, 0, filter)
    found: list[list[int]] = []
    for batch in early.iter_batches(batch_size=early.local_batch_size(GLOBAL_BATCH), prefetch_batches=0):
        found.append(batch["id"].tolist())
        if len(found) == 1:
            assert grow(path) > taken_up
            ray.kill(stream._coordinator, no_restart=False)
    assert joined([found, steps(late)]) == expected(path, taken_up, 1, filter)
    assert early.state_dict() == late.state_dict()
    stream.close()


@pytest.mark.parametrize("batches", [True, False])
def test_ranks_that_read_different_versions_are_told_at_the_start(shards: Shards, path: str, batches: bool) -> None:
    """B17: the rank that comes second is named, with both versions."""
    stay = {**OPTIONS, "on_new_version": "stay"}
    old = group(shards, shards.stream(path, **stay), 1)[0].state_dict()
    new_version = grow(path)
    first, second = group(shards, shards.stream(path, **stay), 2)
    second.load_state_dict(old)

    def begin(shard: StreamShard) -> Any:
        return next(iter(shard.iter_batches(batch_size=8) if batches else shard.iter_rows()))

    begin(first)
    with pytest.raises(
        ConfigError,
        match=rf"rank 1 reads table_version={old['table_version']}, .*rank 0 reads table_version={new_version}, .*same state",
    ):
        begin(second)
    for shard in (first, second):
        shard._pass and shard._end_pass(shard._pass)


def test_a_table_that_was_moved_is_continued_where_that_is_allowed(shards: Shards, path: str, tmp_path: Path) -> None:
    """B39: in a worker, as an automatic resume does it: at the recorded version, by its content."""
    stay = {**OPTIONS, "on_new_version": "stay"}
    (shard,) = group(shards, shards.stream(path, **stay), 1)
    before, state = steps(shard, 2), shard.state_dict()
    grow(path)
    moved = str(tmp_path / "moved")
    shutil.move(path, moved)
    (resumed,) = group(shards, shards.stream(moved, allow_moved=True, **stay), 1, state)
    rest = steps(resumed)
    assert joined([before + rest]) == expected(moved, state["table_version"], 0)
    assert resumed.state_dict()["table_uri"] == moved


@pytest.fixture
def growing(path: str) -> Iterator[None]:
    """The table grows all the time."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(0.7):
            grow(path, 8)

    thread = threading.Thread(target=go_on)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("growing")
def test_a_run_takes_up_new_versions_while_the_table_grows(cluster, path: str, tmp_path: Path) -> None:
    """Two workers, then three from a checkpoint inside of an epoch, each at its own pace."""

    def fit(world_size: int, tag: str, **config: Any) -> None:
        given = {"dir": str(tmp_path), "tag": tag, "global_batch": GLOBAL_BATCH, "epochs": 3, **config}
        DataParallelTrainer(
            log_loop,
            train_loop_config=given,
            datasets={"train": lance_stream(path, **OPTIONS)},
            scaling_config=ScalingConfig(num_workers=world_size),
            run_config=RunConfig(name="run", storage_path=str(tmp_path / "runs")),
        ).fit()

    fit(2, "a", save_every=4, stop_after=9, sleep_s=0.2)
    fit(3, "b", sleep_s=0.1)
    attempts = read_logs(tmp_path)
    assert [attempt.start for attempt in attempts] == [(0, 0), (1, 4)]
    versions: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for attempt in attempts:
        for lines in attempt.ranks.values():
            for line in lines:
                if "ids" in line:
                    versions[line["epoch"]].add(line["version"])
    assert [len(found) for found in versions.values()] == [1, 1, 1]
    read = [version for found in versions.values() for version in found]
    assert read[0] < read[1] <= read[2] <= lance.dataset(path).version
    history = effective_history(attempts, GLOBAL_BATCH // SPLITS)
    for epoch in range(3):
        found = [history[key] for key in sorted(history) if key[0] == epoch]
        assert found == expected(path, read[epoch], epoch)
