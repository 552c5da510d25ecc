"""`to_torch_dataset()` in real DataLoaders: steps, positions and errors with worker processes, spawned and by forkserver.

A worker process takes seconds to start, so each loader here shows many things. `tests/unit/test_own_reads.py` has the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from copy import copy
from typing import Any

import lance
import numpy as np
import pytest
import ray
import torch
from torch.utils.data import DataLoader

from ray_lance_stream import (
    ConfigError,
    IterationError,
    StateError,
    StreamDataLoader,
    StreamDataset,
    TransformError,
    merge_state_dicts,
)
from ray_lance_stream.cursor import Position
from ray_lance_stream.feed import NO_PASS
from ray_lance_stream.own_reads import OwnReads
from tests.integration.conftest import flat, ids_of
from tests.support import Oracle, make_table, scan_ids

NUM_ROWS, NUM_SPLITS, GLOBAL_BATCH, CYCLES = 483, 12, 36, 3  # 14 steps, the last one of a cycle
STEPS = 14


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("torch_dataset") / "t", NUM_ROWS)


@pytest.fixture(scope="module")
def oracle(path) -> Oracle:
    return Oracle(scan_ids(path), NUM_SPLITS, CYCLES)


@pytest.fixture
def stream(shards, path):
    return shards.stream(path, num_splits=NUM_SPLITS, global_batch_size=GLOBAL_BATCH)


def of_rank(step: np.ndarray, rank: int, world: int) -> list[int]:
    """The rows of a global step that a rank receives."""
    lo, hi = rank * NUM_SPLITS // world, (rank + 1) * NUM_SPLITS // world
    return step.reshape(-1, NUM_SPLITS)[:, lo:hi].reshape(-1).tolist()


def children() -> set[int]:
    """Worker processes of this one."""
    return {each.pid for each in multiprocessing.active_children() if each.pid is not None}


def no_children_left(before: set[int]) -> None:
    until_s = time.monotonic() + 10
    while children() - before:
        assert time.monotonic() < until_s, "worker processes are left"
        time.sleep(0.05)


def collect(loader: Any, found: list[Any]) -> None:
    """The batches that come, also where an error ends them."""
    for batch in loader:
        found.append(batch)


# ---- without workers


def test_without_workers_the_position_moves_with_the_loop(shards, stream, oracle):
    dataset = shards.of(stream, 1, 5).to_torch_dataset()
    assert isinstance(dataset, StreamDataset)
    assert "rank=1 of 5" in repr(dataset)
    for epoch, loader in enumerate((DataLoader(dataset, batch_size=None), StreamDataLoader(dataset))):
        expected = [of_rank(step, 1, 5) for step in oracle.epoch(epoch)]
        assert dataset.epoch == epoch
        assert len(loader) == len(dataset) == STEPS
        for number, batch in enumerate(loader):
            assert ids_of(batch) == expected[number]
            assert batch["vec"].dtype == torch.float32
            state = dataset.state_dict()
            at = (state["epoch"], state["samples_consumed_per_split"])
            assert at == ((epoch, CYCLES * (number + 1)) if number < STEPS - 1 else (epoch + 1, 0))
            assert len(loader) == STEPS
    assert number == STEPS - 1


def test_a_stream_is_a_dataset_of_one_worker(stream, oracle):
    dataset = stream.to_torch_dataset(drop_last=True)
    assert [ids_of(batch) for batch in dataset] == [step.tolist() for step in oracle.epoch(0)[:-1]]
    assert stream.epoch == 1
    stream.shard().close()


def test_object_references_do_not_reach_workers(shards, path):
    """They are not processes of Ray's, which could get the values."""
    mapped = shards.stream(path, num_splits=NUM_SPLITS).map_batches(keep, fn_kwargs={"weights": ray.put(1)})
    loader = StreamDataLoader(mapped.to_torch_dataset(batch_size=NUM_SPLITS), num_workers=1)
    with pytest.raises(ConfigError, match=r"keep has object references among its arguments.*num_workers=0"):
        iter(loader)


def keep(batch: dict[str, Any], weights: Any) -> dict[str, Any]:
    return batch


# ---- with workers that persist


def test_workers_that_persist_go_through_epochs_breaks_and_loads(shards, stream, oracle):
    """One StreamDataLoader of an uneven rank: the position after each step, a break, the next epoch, a resume at a step that is
    no multiple of the workers."""
    before = children()
    shard = shards.of(stream, 1, 5)
    loader = StreamDataLoader(shard.to_torch_dataset(), num_workers=2, persistent_workers=True, prefetch_factor=3)
    expected = {epoch: [of_rank(step, 1, 5) for step in oracle.epoch(epoch)] for epoch in range(6)}

    for number, batch in enumerate(loader):  # a whole epoch
        assert ids_of(batch) == expected[0][number]
        state = loader.state_dict()
        assert state == shard.state_dict()
        assert len(loader) == STEPS
        if number == 4:
            saved = state
        if number < STEPS - 1:
            assert state["samples_consumed_per_split"] == CYCLES * (number + 1)  # not what workers have made
    assert (number, loader.epoch) == (STEPS - 1, 1)
    workers = children() - before
    assert len(workers) == 2

    for number, batch in enumerate(loader):  # left early
        assert ids_of(batch) == expected[1][number]
        if number == 2:
            break
    del batch
    assert loader.state_dict()["samples_consumed_per_split"] == 3 * CYCLES
    assert loader.epoch == 2
    assert [ids_of(batch) for batch in loader] == expected[2]

    loader.load_state_dict(saved)
    assert len(loader) == STEPS - 5
    assert [ids_of(batch) for batch in loader] == expected[0][5:]
    loader.set_epoch(4)
    first = iter(loader)
    assert ids_of(next(first)) == expected[4][0]
    second = iter(loader)  # ends the first
    with pytest.raises(IterationError, match="another pass"):
        next(first)
    del first
    with pytest.raises(IterationError, match="is live"):
        loader.load_state_dict(saved)
    assert len(second) == STEPS
    next(second)
    assert children() - before == workers  # all of it by the same processes
    assert "* Rows received: " in shard.stats()
    assert loader.epoch == 5
    os.kill(min(workers), signal.SIGKILL)
    found: list[Any] = []
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        collect(second, found)
    assert [ids_of(batch) for batch in found] == expected[5][1 : 1 + len(found)]
    assert loader.state_dict()["samples_consumed_per_split"] == CYCLES * (1 + len(found))
    loader.close()
    no_children_left(before)


class InThisProcess:
    """In place of torch's iterator over a process that persists: makes its batches here."""

    started = 0

    def __init__(self, loader: Any) -> None:
        InThisProcess.started += 1
        self._feed = copy(loader.dataset._given or loader.dataset._feed_of_plain_loader())  # a process has its own
        self._reset(loader)

    def _reset(self, loader: Any) -> None:
        self._batches = self._feed.batches()

    def __iter__(self) -> InThisProcess:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


def test_workers_that_persist_are_started_anew_where_an_epoch_reads_something_else(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda loader: InThisProcess(loader))
    monkeypatch.setattr(InThisProcess, "started", 0)
    path = make_table(tmp_path / "t", 96)

    def epoch_of(loader: StreamDataLoader, epoch: int, num_rows: int) -> list[int]:
        ids = flat(loader)
        assert (loader.epoch, sorted(ids)) == (epoch + 1, list(range(num_rows)))
        return ids

    given = {"num_splits": NUM_SPLITS, "global_batch_size": GLOBAL_BATCH}
    for options, starts in (({}, 1), ({"order": "lancedb"}, 3)):
        stream = shards.stream(path, **given, **options)
        loader = StreamDataLoader(shards.of(stream).to_torch_dataset(), num_workers=1, persistent_workers=True)
        found = [epoch_of(loader, epoch, 96) for epoch in range(3)]
        assert InThisProcess.started == starts
        assert found == [[int(row) for step in range(3) for row in stream.row_ids(e, step)] for e in range(3)]
        InThisProcess.started = 0

    stream = shards.stream(path, **given, on_new_version="next_epoch")
    loader = StreamDataLoader(shards.of(stream).to_torch_dataset(), num_workers=1, persistent_workers=True)
    epoch_of(loader, 0, 96)
    lance.write_dataset(lance.dataset(path).to_table().slice(0, 12), path, mode="append")  # ids 0 to 11 once more
    ids = flat(loader)
    assert sorted(ids) == sorted([*range(96), *range(12)])
    assert InThisProcess.started == 2
    assert loader.state_dict()["table_version"] == lance.dataset(path).version


def test_evaluation_passes_are_whole_and_may_be_repeated(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda loader: InThisProcess(loader))
    path = make_table(tmp_path / "t", 96)
    stream = shards.stream(path, num_splits=7, evaluation=True, drop_remainder=False)
    train = shards.of(shards.stream(path, num_splits=7)).to_torch_dataset(batch_size=21)
    loaders: list[list[Any]] = [[], []]
    for rank in range(2):
        shard = shards.of(stream, rank, 2)
        dataset = shard.to_torch_dataset(batch_size=shard.local_batch_size(14))
        loaders[0].append(StreamDataLoader(dataset, num_workers=1))
        loaders[1].append(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
    for ranks in loaders:
        for _ in range(2):
            assert sorted(flat(ranks[0]) + flat(ranks[1])) == list(range(96))
    plain = DataLoader(train, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    first = flat(plain)
    with pytest.raises(IterationError, match="begun before"):
        next(iter(plain))
    train.set_epoch(0)
    assert flat(plain) == first
    with pytest.raises(IterationError, match="cannot be known here"):
        iter(StreamDataLoader(train, num_workers=1))
    train.set_epoch(1)
    assert flat(plain) not in (first, [])
    train.shard.close()


# ---- with workers of one pass, after a resume in another world


def in_worker(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tells of the process in which it runs."""
    return {"id": batch["id"], "pid": os.getpid(), "has_ray": ray.is_initialized()}


def test_a_plain_loader_goes_on_by_forkserver_and_does_not_lie(shards, stream, oracle):
    """Saved on 5 ranks, loaded on 2; 3 workers and steps that are no multiple of them."""
    before = children()
    states = []
    for rank in range(5):
        shard = shards.of(stream, rank, 5)
        for number, _ in enumerate(StreamDataLoader(shard.to_torch_dataset())):
            if number == 3:
                break
        states.append(shard.state_dict())
    merged = merge_state_dicts(states)
    assert merged["samples_consumed_per_split"] == 4 * CYCLES
    with pytest.raises(StateError, match="different steps"):
        merge_state_dicts([*states[:4], shards.of(stream, 4, 5).state_dict()])

    shard = shards.of(stream, 0, 2, merged)
    dataset = shard.to_torch_dataset(collate_fn=in_worker)
    loader = DataLoader(dataset, batch_size=None, num_workers=3, multiprocessing_context="forkserver")
    found = []
    for batch in loader:
        found.append(batch)
        for ask in (dataset.state_dict, shard.state_dict, shard.digest):
            with pytest.raises(IterationError, match=r"plain DataLoader with workers.*use StreamDataLoader"):
                ask()
    assert [ids_of(batch) for batch in found] == [of_rank(step, 0, 2) for step in oracle.epoch(0)[4:]]
    assert len({batch["pid"] for batch in found}) == 3
    assert [batch["pid"] for batch in found[:7]] == [found[at % 3]["pid"] for at in range(7)]
    assert not any(batch["has_ray"] for batch in found)
    del loader, batch
    no_children_left(before)
    with pytest.raises(IterationError, match=r"set_epoch\(epoch\) and load_state_dict\(state\) say where"):
        next(iter(shard.iter_batches()))
    dataset.set_epoch(1)
    assert dataset.state_dict()["epoch"] == 1
    assert ids_of(next(iter(shard.iter_batches()))) == of_rank(oracle.epoch(1)[0], 0, 2)
    shard.close()


def test_forked_workers_are_refused(shards, stream):
    dataset = shards.of(stream).to_torch_dataset()
    for given in ("fork", multiprocessing.get_context("fork")):
        with pytest.raises(ConfigError, match=r'must not be forked.*pass multiprocessing_context="spawn"'):
            StreamDataLoader(dataset, num_workers=2, multiprocessing_context=given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12 and later, of a fork in a process with threads
        loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(ConfigError, match=r"must not be forked.*use StreamDataLoader"):
            next(iter(loader))


# ---- errors, transforms, options


def double(batch: dict[str, Any]) -> dict[str, Any]:
    if (batch["id"] % 100 == 7).any():
        raise ValueError("seven")
    return {**batch, "twice": 2 * batch["id"]}


def test_replaced_rows_are_counted_over_the_pass(shards, stream, monkeypatch):
    """In the main process, where the limit is kept; the loop has what came before."""
    mapped = stream.map_batches(double, on_transform_error="replace", max_replaced_rows=4)
    shard = shards.of(mapped)
    alone = OwnReads(shard.to_torch_dataset().spec(mapped._plan), Position(0), 0, 1)
    expected = [(ids_of(batch), batch["twice"].tolist()) for batch, _ in alone]
    with pytest.raises(ConfigError, match=r"max_replaced_rows.*use StreamDataLoader"):
        next(
            iter(DataLoader(shard.to_torch_dataset(), batch_size=None, num_workers=1, multiprocessing_context="spawn"))
        )
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda loader: InThisProcess(loader))
    loader = StreamDataLoader(shard.to_torch_dataset(), num_workers=1)
    found = []
    with pytest.raises(
        TransformError, match=r"rank 0: double failed on 5 rows of this pass, more than max_replaced_rows=4"
    ):
        collect(loader, found)
    found = [(ids_of(batch), batch["twice"].tolist()) for batch in found]
    assert 0 < len(found) < STEPS
    assert found == expected[: len(found)]
    assert shard.state_dict()["samples_consumed_per_split"] == len(found) * CYCLES
    assert "Rows replaced in this pass: 5 " in shard.stats()


def fail(batch: dict[str, Any]) -> Any:
    if (batch["id"] == 100).any():
        raise KeyError("row 100")
    return batch


def test_a_failure_of_a_worker_comes_after_the_steps_before_it(shards, stream, oracle):
    before = children()
    shard = shards.of(stream)
    loader = StreamDataLoader(shard.to_torch_dataset(collate_fn=fail), num_workers=2)
    steps = [step.tolist() for step in oracle.epoch(0)]
    at = next(number for number, step in enumerate(steps) if 100 in step)
    found = []
    with pytest.raises(KeyError, match="row 100") as caught:
        collect(loader, found)
    assert all(isinstance(batch["id"], torch.Tensor) for batch in found)  # as a DataLoader converts arrays
    assert [ids_of(batch) for batch in found] == steps[:at]
    assert "in fail" in str(caught.value.__cause__)
    assert shard.state_dict()["samples_consumed_per_split"] == at * CYCLES
    no_children_left(before)
    for batch in loader:  # the next epoch, by new workers
        assert ids_of(batch) == oracle.epoch(1)[0].tolist()
        break
    assert shard.state_dict()["epoch"] == 1
    assert shard.digest() == stream.step_digest(1, 0)
    no_children_left(before)


def test_a_stateful_data_loader_of_torchdata_saves_and_loads_the_state(shards, stream, oracle):
    """Without workers. `tests/unit/test_own_reads.py` has what it is told with some."""
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    first = StatefulDataLoader(shards.of(stream, 1, 2).to_torch_dataset(), batch_size=None)
    for number, _ in enumerate(first):
        if number == 3:
            state = first.state_dict()
            break
    again = StatefulDataLoader(shards.of(stream, 1, 2).to_torch_dataset(), batch_size=None)
    again.load_state_dict(state)
    assert [ids_of(batch) for batch in again] == [of_rank(step, 1, 2) for step in oracle.epoch(0)[4:]]


def test_what_a_loader_cannot_serve_is_refused(shards, stream):
    dataset = shards.of(stream).to_torch_dataset()
    with pytest.raises(ConfigError, match=r"shard.to_torch_dataset\(\) returns, got list"):
        StreamDataLoader([1, 2])
    for options in ({"batch_size": 8}, {"shuffle": True}, {"collate_fn": len}, {"drop_last": True}):
        with pytest.raises(ConfigError, match=f"as the dataset makes them, got {next(iter(options))}"):
            StreamDataLoader(dataset, **options)
    with pytest.raises(ConfigError, match="in_order must be True"):
        StreamDataLoader(dataset, in_order=False)
    StreamDataLoader(dataset, batch_size=None, shuffle=None, drop_last=False, in_order=True)
    StreamDataLoader(dataset, shuffle=False, sampler=None)
    with pytest.raises(ConfigError, match="collate_fn must be a function"):
        shards.of(stream).to_torch_dataset(collate_fn=3)
    with pytest.raises(ConfigError, match="dtypes must not be given"):
        shards.of(stream).to_torch_dataset(collate_fn=len, dtypes=torch.float16)
    with pytest.raises(ConfigError, match="this rank's share of global_batch_size=36"):
        shards.of(stream).to_torch_dataset(batch_size=24)
    on_gpu = stream.map_batches(double, num_gpus=1, batch_size=4)
    loader = StreamDataLoader(shards.of(on_gpu).to_torch_dataset(), num_workers=1)
    for each in (loader, DataLoader(loader.dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")):
        with pytest.raises(
            ConfigError, match=r"run transforms themselves, but double asks for num_gpus.*num_workers=0"
        ):
            iter(each)
        assert loader.epoch == 0
        assert loader.state_dict()["samples_consumed_per_split"] == 0  # nothing is handed out


def test_what_cannot_start_takes_no_epoch(shards, stream, oracle, monkeypatch):
    """Refused for its transforms or its pickling, or with workers that do not start or have died; the epoch is read then."""
    lock = threading.Lock()
    shard = shards.of(stream)
    unpicklable = StreamDataLoader(shard.to_torch_dataset(collate_fn=lambda batch: lock), num_workers=1)
    loader = StreamDataLoader(shard.to_torch_dataset(), num_workers=1, persistent_workers=True)

    def is_dead(iterator: Any, loader: Any) -> None:
        raise RuntimeError("DataLoader worker exited unexpectedly")

    def not_started(loader: Any) -> Any:
        raise OSError("no more processes")

    def fails(loader: StreamDataLoader, kind: type[Exception], text: str) -> None:
        before = loader.state_dict()
        with pytest.raises(kind, match=text):
            iter(loader)
        assert loader.state_dict() == before

    fails(unpicklable, ConfigError, "must be picklable")
    monkeypatch.setattr(DataLoader, "_get_iterator", not_started)
    fails(loader, OSError, "no more processes")
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda loader: InThisProcess(loader))
    assert [ids_of(batch) for batch in loader] == [step.tolist() for step in oracle.epoch(0)]
    with monkeypatch.context() as broken:
        broken.setattr(InThisProcess, "_reset", is_dead)
        fails(loader, RuntimeError, "exited unexpectedly")
        started = InThisProcess.started
    assert [ids_of(batch) for batch in loader] == [step.tolist() for step in oracle.epoch(1)]
    assert InThisProcess.started == started + 1  # others, in place of the dead one
    assert ids_of(next(iter(loader))) == oracle.epoch(2)[0].tolist()
    assert loader._feed[1]._pass.item() == NO_PASS  # workers wait for no read of it


def test_a_stream_and_its_shard_are_asked_alike():
    """In local mode a loop gets the stream itself: what is a method of a shard is none else there."""
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.stream import SHARD_METHODS, LanceStream

    own = {
        name for kind in StreamShard.__mro__ if kind.__module__.startswith("ray_lance_stream") for name in vars(kind)
    }
    public = {name for name in own if not name.startswith("_")}
    missing = {name for name in public if name not in SHARD_METHODS and not hasattr(LanceStream, name)}
    assert missing <= {"get_context", "iter_jax_batches", "to_torch", "to_tf"}, missing
    for name in public & {each for each in dir(LanceStream) if not each.startswith("_")}:
        kinds = [isinstance(getattr(kind, name), property) for kind in (StreamShard, LanceStream)]
        assert kinds[0] == kinds[1], name
