"""Transforms in readers, tasks and actors: rows, order, losses and failing rows (B22, B47)."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import IterationError, LanceStream, ReadError, StreamShard, TransformError, lance_stream, window
from ray_lance_stream.splits import split_block
from tests.integration.conftest import Shards, flat, ids_of
from tests.support import Oracle, make_table, scan_ids

pytestmark = pytest.mark.timeout(180)

NUM_SPLITS = 12
R = 40
INFLATED_BYTES = 8192
CHUNKS = {"num_splits": NUM_SPLITS, "read_batch_size": 4}


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("transforms") / "t", NUM_SPLITS * R)


@pytest.fixture(scope="module")
def oracle(table) -> np.ndarray:
    """int64 [position, split]: ids of epoch 0."""
    return np.stack(Oracle(scan_ids(table), NUM_SPLITS, 1).epoch(0))


def stamped(batch: dict[str, Any], name: str = "pid", sleep_s: float = 0.0) -> dict[str, Any]:
    """The rows with the process and the time of their transform."""
    begun = time.time()
    time.sleep(sleep_s)
    size = len(batch["id"])
    times = {"begun": np.full(size, begun), "ended": np.full(size, time.time())}
    return {**batch, "value": batch["value"] + 1, name: np.full(size, os.getpid()), **times}


class Stamped:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, batch: dict[str, Any], **options: Any) -> dict[str, Any]:
        return stamped(batch, self.name, **options)


SLOW = {"fn_kwargs": {"sleep_s": 0.05}}
POOL = {"fn_constructor_args": ["pid"], "concurrency": 2}
WAYS = {
    "in the readers": lambda s: s.map_batches(stamped),
    "as a class in the readers": lambda s: s.map_batches(Stamped, fn_constructor_args=["pid"]),
    "in tasks": lambda s: s.map_batches(stamped, concurrency=2, **SLOW),
    "in readers, tasks and actors": lambda s: (
        s.map_batches(stamped, fn_args=["first"])
        .map_batches(stamped, fn_args=["second"], num_cpus=0.5)
        .map_batches(Stamped, **POOL, **SLOW)
    ),
}


def columns_of(shard: StreamShard, *names: str) -> list[np.ndarray]:
    """Columns of a pass."""
    batches = list(shard.iter_batches(batch_size=shard.split_block[1] - shard.split_block[0]))
    return [np.concatenate([batch[name] for batch in batches]) for name in names]


def most_at_once(begun: np.ndarray, ended: np.ndarray) -> int:
    """The largest number of calls that ran at the same time."""
    calls = set(zip(begun.tolist(), ended.tolist(), strict=True))
    return max(sum(b <= at < e for b, e in calls) for at, _ in calls)


@pytest.mark.parametrize("way", WAYS)
def test_rows_and_order_are_those_of_the_stream_without_transforms(shards: Shards, table, oracle, way):
    """For each number of workers; with never more than two processes at once, and with two once both have started."""
    mapped = WAYS[way](shards.stream(table, **CHUNKS))
    calls = way.count(" and ") * 2 + 1
    for world in (1, 2, 3):
        for rank, shard in enumerate(shards.group(mapped, world)):
            block = split_block(NUM_SPLITS, world, rank)
            ids, values, begun, ended = columns_of(shard, "id", "value", "begun", "ended")
            assert np.array_equal(ids.reshape(R, block.size), oracle[:, block.lo : block.hi])
            assert np.array_equal(values, 3 * ids + 1 + calls)
            if "the readers" in way:
                continue
            share = 2 if world == 1 else 1
            until_s, most = time.monotonic() + 30, most_at_once(begun, ended)
            while most < share and time.monotonic() < until_s:
                most = most_at_once(*columns_of(shard, "begun", "ended"))
            assert most == share


@pytest.mark.parametrize(("read_s", "loop_s"), [(0.03, 0.0), (0.0, 0.03)])
def test_stats_tell_whether_the_loop_or_the_loader_is_slow(shards: Shards, table, read_s, loop_s):
    """B51."""
    slow = shards.stream(table, **CHUNKS).map_batches(stamped, fn_kwargs={"sleep_s": read_s})
    shard = shards.of(slow)
    for _ in shard.iter_batches(batch_size=NUM_SPLITS):
        time.sleep(loop_s)
    tally = shard._meter.tally()
    assert (tally.wait_share > 0.6) == (read_s > 0)
    assert (tally.wait_share < 0.4) == (loop_s > 0)
    assert (tally.rows, tally.chunks, tally.retries, tally.chunks_in_flight) == (NUM_SPLITS * R, R // 4, 0, 4)  # ahead
    assert tally.transform_s >= R // 4 * read_s
    assert tally.read_s > 0
    assert f"* Rows received: {NUM_SPLITS * R} (" in shard.stats()
    assert f"* Loop waited for batches: {tally.wait_s:.2f}s ({tally.wait_share:.1%} of its time)" in shard.stats()


def test_the_schema_is_that_of_the_batches(shards: Shards, table):
    shard = shards.of(
        shards.stream(table, **CHUNKS).map_batches(lambda batch: {"half": batch["id"] / 2, "vec": batch["vec"]})
    )
    assert shard.schema().names == ["half", "vec"]
    batch = next(iter(shard.iter_batches(batch_size=12)))
    assert batch["half"].dtype == np.float64
    assert batch["vec"].shape == (12, 4)


def inflated(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "image": np.zeros((len(batch["id"]), INFLATED_BYTES), np.uint8)}


def test_the_byte_bound_holds_for_what_transforms_make(shards: Shards, table):
    """Rows 200 times as large as the table's, which is all that is known when the first chunks are sent."""
    bound = 1 << 20
    stream = shards.stream(table, num_splits=NUM_SPLITS, prefetch_bytes=bound)
    shard = shards.of(stream.map_batches(inflated, concurrency=2))
    most, batches = 0, shard.iter_batches(batch_size=NUM_SPLITS, prefetch_batches=1)
    for batch in itertools.chain(batches, batches):
        assert batch["image"].shape == (NUM_SPLITS, INFLATED_BYTES)
        if shard._pass is not None:
            read = shard._pass._window
            most = max(most, read._last_span.end_row - read._received_rows)
        time.sleep(0.01)
    chunk = bound // (shard._config.prefetch_chunks + 2)
    assert bound / 3 < most * INFLATED_BYTES <= bound + chunk


# ---- losses


@pytest.fixture(scope="module")
def pooled(cluster, table) -> LanceStream:
    """Two actors and a coordinator of their own."""
    return lance_stream(table, **CHUNKS).map_batches(Stamped, **POOL)


def test_actors_go_on_to_the_next_worker_group(pooled):
    found: list[set[int]] = []
    for world in (2, 3):
        group = [pooled.shard(rank, world) for rank in range(world)]
        found += [set(columns_of(shard, "pid")[0].tolist()) for shard in group]
    assert found[0] == found[2] == found[4]  # actor 0 serves ranks 0 and 2 of three
    assert found[1] == found[3] != found[0]
    assert len(found[0]) == len(found[1]) == 1


def test_a_killed_coordinator_takes_readers_and_actors_along_and_nothing_is_lost(pooled, oracle):
    ids, pids = [], []
    for batch in pooled.shard().iter_batches(batch_size=12, prefetch_batches=0):
        ids += ids_of(batch)
        pids += batch["pid"].tolist()
        if len(ids) == 36:
            ray.kill(pooled._coordinator, no_restart=False)
    assert ids == oracle.reshape(-1).tolist()
    assert pids[-1] not in pids[:36]


def test_a_dead_actor_is_replaced_and_all_end_with_the_stream(pooled, oracle, caplog):
    ids, pids, killed = [], [], 0
    shard = pooled.shard()
    for batch in shard.iter_batches(batch_size=12, prefetch_batches=0):
        ids += ids_of(batch)
        pids += batch["pid"].tolist()
        if len(ids) == 36:
            killed = pids[-1]
            os.kill(killed, signal.SIGKILL)
    assert ids == oracle.reshape(-1).tolist()
    assert killed not in pids[-200:]
    assert "read lost (attempt 1 of 4), sent again" in caplog.text
    until_s = time.monotonic() + 30
    while len(set(pids)) < 3:  # the new one is not waited for
        assert time.monotonic() < until_s
        pids += columns_of(shard, "pid")[0].tolist()
    pooled.close()
    while any(Path(f"/proc/{pid}").exists() for pid in set(pids)):
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_a_function_that_kills_every_process_is_told(shards: Shards, table, monkeypatch):
    monkeypatch.setattr(window, "MAX_ATTEMPTS", 2)
    shard = shards.of(shards.stream(table, **CHUNKS).map_batches(die, concurrency=2))
    with pytest.raises(
        ReadError, match=r"cycles \[0, 4\) of .*, then die: lost 2 times, at last to WorkerCrashedError"
    ):
        flat(shard.iter_batches(batch_size=12))


def die(batch: dict[str, Any]) -> dict[str, Any]:
    os._exit(1)


def die_once(batch: dict[str, Any], marker: str, at: int) -> dict[str, Any]:
    if at in batch["id"] and not os.path.exists(marker):
        Path(marker).touch()
        os._exit(1)
    return batch


def test_a_dead_task_is_sent_again(shards: Shards, table, oracle, tmp_path):
    options = {"fn_args": [str(tmp_path / "died"), int(oracle[9, 0])], "concurrency": 2}
    shard = shards.of(shards.stream(table, **CHUNKS).map_batches(die_once, **options))
    assert flat(shard.iter_batches(batch_size=12)) == oracle.reshape(-1).tolist()
    assert (tmp_path / "died").exists()


def warm_up(shards: Shards, table: str) -> None:
    """A reader that is still starting would be what is waited for."""
    flat(shards.of(shards.stream(table, **CHUNKS)).iter_batches(batch_size=12))


def test_a_stage_that_waits_for_resources_is_told(shards: Shards, table, caplog):
    """And waited for: the limit is one of reading."""
    warm_up(shards, table)
    stream = shards.stream(table, **CHUNKS, stall_warn_s=0.5, read_timeout_s=1.5)
    shard = shards.of(stream.map_batches(stamped, resources={"nowhere": 1}))

    def end_when_told() -> None:
        until_s = time.monotonic() + 60
        while "waits for free resources" not in caplog.text and time.monotonic() < until_s:
            time.sleep(0.1)
        time.sleep(2)  # read_timeout_s has passed
        shard._end_pass(shard._pass)

    threading.Thread(target=end_when_told).start()
    with pytest.raises(IterationError):
        flat(shard.iter_batches(batch_size=12))
    text = "for transform stamped, which is slow or waits for free resources (concurrency=None, num_cpus=1, "
    assert f"{text}resources={{'nowhere': 1}} each): epoch 0" in caplog.text
    assert "attempt 1 of 4" in caplog.text
    assert "sent again" not in caplog.text


def slow_once(batch: dict[str, Any], marker: str) -> dict[str, Any]:
    if not os.path.exists(marker):
        Path(marker).touch()
        time.sleep(3)
    return batch


def test_a_slow_function_in_a_reader_is_told_and_waited_for(shards: Shards, table, oracle, tmp_path, caplog):
    """The reader answers meanwhile, and its time with what users write has no limit."""
    warm_up(shards, table)
    stream = shards.stream(table, **CHUNKS, stall_warn_s=0.5, read_timeout_s=1.5)
    shard = shards.of(stream.map_batches(slow_once, fn_args=[str(tmp_path / "slept")]))
    assert flat(shard.iter_batches(batch_size=12)) == oracle.reshape(-1).tolist()
    assert re.search(r"reader with transform slow_once \w+ \(ALIVE, .*\), which has been transforming for", caplog.text)
    assert "sent again" not in caplog.text


# ---- failing rows


def decode(batch: dict[str, Any], bad: list[int]) -> dict[str, Any]:
    for each in batch["id"].tolist():
        if each in bad:
            raise ValueError(f"bad row {each}")
    return batch


def replacing(stream: LanceStream, bad: list[int], **options: Any) -> LanceStream:
    return stream.map_batches(decode, fn_args=[bad], on_transform_error="replace", **options)


@pytest.fixture(scope="module")
def mended(oracle) -> tuple[list[int], np.ndarray]:
    """(bad ids: two in a row and the first of a split, three elsewhere; ids of the epoch with those replaced)."""
    ids = oracle.copy()
    bad = [(0, 3), (17, 3), (18, 3), (39, 3), (20, 5), (20, 11)]
    ids[0, 3] = oracle[1, 3]
    for position, split in bad[1:]:
        ids[position, split] = ids[position - 1, split]
    return [int(oracle[place]) for place in bad], ids


@pytest.mark.parametrize("options", [{}, {"concurrency": 2}], ids=["in the readers", "in tasks"])
def test_replaced_rows_are_the_same_on_every_world_and_after_a_resume(shards: Shards, table, mended, options):
    """B47: a run on two workers stops between two bad rows that follow each other and goes on with three."""
    bad, ids = mended
    stream = replacing(shards.stream(table, **CHUNKS), bad, **options)
    for world in (1, 2, 3):
        group = shards.group(stream, world)
        parts = [np.reshape(flat(shard.iter_batches(batch_size=NUM_SPLITS // world)), (R, -1)) for shard in group]
        assert np.array_equal(np.concatenate(parts, axis=1), ids)
        told = "".join(shard.stats() for shard in group)
        assert told.count(" -> ") == told.count("stands in") + len(bad)
    first = shards.group(stream, 2)
    for shard in first:
        assert len(list(itertools.islice(shard.iter_batches(batch_size=6), 18))) == 18
    state = first[0].state_dict()
    assert state["samples_consumed_per_split"] == 18
    parts = [np.reshape(flat(s.iter_batches(batch_size=4)), (-1, 4)) for s in shards.group(stream, 3, state)]
    assert np.array_equal(np.concatenate(parts, axis=1), ids[18:])


def test_replaced_rows_are_listed_and_limited(shards: Shards, table, oracle):
    offsets = {int(i): n for n, i in enumerate(scan_ids(table))}
    bad = [int(i) for i in oracle[3:6, 2]]
    stream = shards.stream(table, **CHUNKS)
    shard = shards.of(replacing(stream, bad, max_replaced_rows=3))
    assert len(flat(shard.iter_batches(batch_size=12))) == 480
    by = offsets[int(oracle[2, 2])]
    listed = ", ".join(f"{offsets[each]} -> {by}" for each in bad)
    assert f"Rows replaced in this pass: 3 (row -> stands in): {listed}" in shard.stats()
    assert len(flat(shard.iter_batches(batch_size=12))) == 480  # each pass counts for itself
    shard = shards.of(replacing(stream, bad, max_replaced_rows=2))
    with pytest.raises(
        TransformError, match=rf"failed on 3 rows of this pass, more than max_replaced_rows=2: {listed}"
    ):
        flat(shard.iter_batches(batch_size=12))
    assert shard.state_dict()["samples_consumed_per_split"] < 4


def test_a_split_of_bad_rows_is_an_error(shards: Shards, table, oracle):
    """B47."""
    shard = shards.of(replacing(shards.stream(table, **CHUNKS), oracle[:, 4].tolist()))
    with pytest.raises(TransformError, match=r"position 0 of split 4, and no row can stand in"):
        flat(shard.iter_batches(batch_size=12))


@pytest.mark.parametrize("options", [{}, {"concurrency": 2}], ids=["in the readers", "in tasks"])
def test_the_error_names_row_rank_and_cause(shards: Shards, table, oracle, options):
    bad = int(oracle[7, 9])
    stream = shards.stream(table, **CHUNKS).map_batches(decode, fn_args=[[bad]], **options)
    stream.set_name("train")
    first, second = shards.group(stream, 2)
    assert len(flat(first.iter_batches(batch_size=6))) == 240
    with pytest.raises(
        TransformError, match=f"stream 'train', rank 1: decode failed on row .*id={bad}.*: bad row {bad}"
    ):
        flat(second.iter_batches(batch_size=6))


class Leaves:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        raise SystemExit(7)


@pytest.mark.parametrize("options", [{}, {"num_cpus": 0.5}, {"concurrency": 1}], ids=["readers", "tasks", "actors"])
def test_an_error_comes_once_and_as_it_was_raised(shards: Shards, table, options, caplog, capfd):
    """Chunks that were read ahead fail too, of which Ray says nothing; and a SystemExit ends no process."""
    kind = Refuses if "concurrency" in options else refuse
    for way, expected in ((kind, TransformError), (Leaves if kind is Refuses else leave, SystemExit)):
        shard = shards.of(shards.stream(table, **CHUNKS, prefetch_chunks=8).map_batches(way, **options))
        with pytest.raises(expected) as told, caplog.at_level(logging.WARNING):
            flat(shard.iter_batches(batch_size=12))
        assert shard.metrics()["retries"] == 0
        shard.close()
        assert "Traceback" not in str(told.value)
        if expected is SystemExit:
            assert told.value.code == 7
            continue
        assert type(told.value) is TransformError
        assert type(told.value.__cause__) is Refused
        assert "in refuse" in str(told.value.__cause__.__cause__)
        del told, shard
    gc.collect()
    time.sleep(0.5)
    assert "DeprecationWarning" not in capfd.readouterr().err  # of our own actors
    assert not [text for text in caplog.messages if "Unhandled" in text and ("Refused" in text or "SystemExit" in text)]


class Refused(Exception):
    pass


def refuse(batch: dict[str, Any]) -> dict[str, Any]:
    raise Refused("no")


def leave(batch: dict[str, Any]) -> dict[str, Any]:
    raise SystemExit(7)


class Refuses:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return refuse(batch)


def decode_once_mended(batch: dict[str, Any], marker: str, bad: int) -> dict[str, Any]:
    return batch if os.path.exists(marker) else decode(batch, [bad])


def test_a_pass_after_a_failed_one_is_not_told_of_its_error(shards: Shards, table, oracle, tmp_path):
    arguments = [str(tmp_path / "mended"), int(oracle[8, 0])]
    shard = shards.of(shards.stream(table, **CHUNKS).map_batches(decode_once_mended, fn_args=arguments, concurrency=2))
    with pytest.raises(TransformError, match="bad row"):
        flat(shard.iter_batches(batch_size=12))
    Path(arguments[0]).touch()
    shard.set_epoch(0)
    assert flat(shard.iter_batches(batch_size=12)) == oracle.reshape(-1).tolist()


def count_loop(config: dict[str, Any]) -> None:
    """Each rank writes how many steps it has had."""
    shard = ray.train.get_dataset_shard("train")
    path = Path(config["dir"]) / str(ray.train.get_context().get_world_rank())
    for step, _ in enumerate(shard.iter_batches(batch_size=6, prefetch_batches=1), start=1):
        path.write_text(str(step))
        time.sleep(0.05)


def test_fit_fails_soon_and_with_the_cause(cluster, table, oracle, tmp_path):
    """B22: rank 1 fails alone, in a task that the placement group of the workers has no room for."""
    bad = int(oracle[30, 9])
    stream = lance_stream(table, **CHUNKS).map_batches(decode, fn_args=[[bad]], concurrency=2)
    trainer = DataParallelTrainer(
        count_loop,
        train_loop_config={"dir": str(tmp_path)},
        datasets={"train": stream},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="bad", storage_path=str(tmp_path / "runs")),
    )
    begun_s = time.monotonic()
    with pytest.raises(ray.train.TrainingFailedError) as told:
        trainer.fit()
    assert time.monotonic() - begun_s < 30
    text = str(told.value)
    assert (
        f"stream 'train', rank 1: decode failed on row {scan_ids(table).tolist().index(bad)} of table {table}" in text
    )
    assert f"(id={bad}): ValueError: bad row {bad}" in text
    assert 0 < int((tmp_path / "1").read_text()) <= 30
    stream.close()
