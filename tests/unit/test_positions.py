"""Positions that are given to streams and shards: they travel, ranks must share them, and no batch is counted and lost."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_lance_stream import (
    ConfigError,
    IterationError,
    LanceStream,
    ReadError,
    StateError,
    StreamShard,
    lance_stream,
    link,
    rank_passes,
    train,
)
from ray_lance_stream.state import StreamState
from ray_lance_stream.supply import PassReads
from tests.fake_ray import Cluster
from tests.support import Oracle, make_table, scan_ids

STEP = 24
OPTIONS: dict[str, Any] = {"num_splits": 12, "global_batch_size": STEP, "read_batch_size": 2}
PLACE = r"epoch 0, samples_consumed_per_split"


@pytest.fixture(scope="module")
def fake() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_passes, "SETTLES_S", 0.05)
        patch.setattr(link, "TELL_INTERVAL_S", -1.0)
        cluster = Cluster(patch)
        patch.setattr(logging.root.manager, "disable", 0)
        yield cluster


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """240 rows: ten steps."""
    return make_table(tmp_path_factory.mktemp("positions") / "t", 240)


@pytest.fixture(scope="module")
def steps(path: str) -> list[list[set[int]]]:
    """By epoch and step the ids."""
    oracle = Oracle(scan_ids(path), 12, 2)
    return [[set(np.ravel(step).tolist()) for step in oracle.epoch(epoch)] for epoch in range(4)]


@pytest.fixture
def stream(fake: Cluster, path: str) -> LanceStream:
    return lance_stream(path, **OPTIONS)


def state_at(stream: LanceStream, epoch: int, step: int) -> dict[str, Any]:
    identity = stream._plan.identity(1)
    return StreamState(identity, epoch, 2 * step, STEP).to_dict()


def batches(shard: StreamShard | LanceStream, count: int | None = None) -> list[set[int]]:
    """The ids of the next batches of one pass; then the loop breaks."""
    found = []
    for batch in shard.iter_batches(prefetch_batches=0):
        found.append(set(batch["id"].tolist()))
        if len(found) == count:
            break
    return found


def at(shard: StreamShard | LanceStream) -> tuple[int, int]:
    state = shard.state_dict()
    return state["epoch"], state["samples_consumed_per_split"]


# A position that was given travels


def first_step(shards: list[Any]) -> set[int]:
    return set().union(*(batches(shard, 1)[0] for shard in shards))


WAYS: dict[str, Callable[[LanceStream], list[Any]]] = {
    "a split": lambda stream: stream.streaming_split(2),
    "a shard": lambda stream: [stream.shard(rank, 2) for rank in range(2)],
    "itself": lambda stream: [stream],
    "as the trainer copies it": lambda stream: stream.copy(stream).streaming_split(3),
    "pickled": lambda stream: copy.copy(stream).streaming_split(1),
    "transformed": lambda stream: stream.map_batches(lambda batch: batch).streaming_split(2),
    "with skipped steps": lambda stream: stream.skip(epoch=3, steps=range(2)).streaming_split(2),
    "a shard that is sent": lambda stream: [copy.copy(shard) for shard in stream.streaming_split(2)],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_position_given_to_a_stream_travels(stream, steps, way):
    stream.load_state_dict(state_at(stream, 1, 5))
    assert first_step(WAYS[way](stream)) == steps[1][5]
    stream.set_epoch(1)
    assert first_step(WAYS[way](stream)) == steps[1][0 if way == "itself" else 5]  # whose loop has left the open epoch
    stream.set_epoch(1, restart=True)
    assert first_step(WAYS[way](stream)) == steps[1][0]
    stream.set_epoch(2)
    assert first_step(WAYS[way](stream)) == steps[2][0]


def test_an_epoch_given_to_a_stream_travels(stream, steps):
    stream.set_epoch(3)
    assert first_step(stream.streaming_split(2)) == steps[3][0]
    assert stream.epoch == 3
    with pytest.raises(ConfigError, match="epoch must be an int >= 0, got -1"):
        stream.set_epoch(-1)


def test_the_checkpoint_of_an_attempt_comes_before_the_position_of_the_driver(stream, steps, monkeypatch):
    """A worker group that starts again must not start at the beginning of the run."""
    stream.load_state_dict(state_at(stream, 0, 2))
    reported = StreamState.from_dict(state_at(stream, 1, 7))
    attempt = SimpleNamespace(started_from="a checkpoint", start_of=lambda name: reported)
    monkeypatch.setattr(train, "current_attempt", lambda: attempt)
    assert first_step(stream.streaming_split(2)) == steps[1][7]


def test_what_a_stream_cannot_begin_at_is_refused_on_the_driver(fake, path):
    stream = lance_stream(path, **OPTIONS)
    other = lance_stream(path, num_splits=24)
    for wrong in ({}, state_at(other, 0, 0), {**state_at(stream, 0, 0), "epoch": -1}):
        with pytest.raises(StateError):
            stream.load_state_dict(wrong)
    with pytest.raises(StateError, match="is never resumed"):
        lance_stream(path, evaluation=True).load_state_dict(state_at(stream, 0, 0))
    assert stream._coordinator is None
    assert at(stream) == (0, 0)


def test_a_state_of_as_many_splits_as_workers_fits_the_trainer_that_has_as_many(fake, path):
    stream = lance_stream(path)
    saved = stream.streaming_split(4)[0].state_dict() | {"samples_consumed_per_split": 30}
    stream.load_state_dict(saved)
    assert {at(shard) for shard in stream.streaming_split(4)} == {(0, 30)}


def test_a_position_given_to_a_shard_travels_and_the_progress_of_its_loop_does_not(stream, steps, caplog):
    shard = stream.shard()
    shard.load_state_dict(state_at(stream, 0, 4))
    batches(shard, 2)
    assert not caplog.records
    sent = copy.copy(shard)
    assert "a copy of a shard begins where the shard was told to begin" in caplog.text
    assert batches(sent, 1) == [steps[0][4]]
    shard.resume_epoch()
    assert batches(copy.copy(shard), 1) == [steps[0][6]]
    shard.set_epoch(2)
    assert batches(copy.copy(shard), 1) == [steps[2][0]]


# Staying in an epoch, and its start


def test_a_loop_may_stay_in_the_epoch_that_it_has_left(stream, steps):
    shards = stream.streaming_split(2)
    for shard in shards:
        batches(shard, 3)
    for shard in shards:
        shard.resume_epoch()
        assert (at(shard), shard.epoch, shard.num_batches()) == ((0, 6), 0, 7)
    assert [a | b for a, b in zip(*map(batches, shards), strict=True)] == steps[0][3:]
    with pytest.raises(IterationError, match="no epoch was left"):
        shards[0].resume_epoch()


def test_an_epoch_may_be_begun_again(stream, steps):
    shard = stream.shard()
    shard.load_state_dict(state_at(stream, 1, 3))
    shard.set_epoch(1)
    assert at(shard) == (1, 6)
    shard.set_epoch(1, restart=True)
    assert at(shard) == (1, 0)
    assert batches(shard) == steps[1]


def test_a_dataset_of_pytorch_stays_and_begins_again_as_its_shard(stream):
    dataset = stream.shard().to_torch_dataset(prefetch_batches=0)
    next(iter(dataset))
    dataset.resume_epoch()
    assert dataset.state_dict()["samples_consumed_per_split"] == 2
    dataset.set_epoch(0, restart=True)
    assert dataset.state_dict()["samples_consumed_per_split"] == 0


# Looking at rows


def test_peek_moves_nothing(stream, steps):
    shard = stream.shard()
    rows = [row["id"] for row in stream.shard().iter_rows()]
    assert [row["id"] for row in shard.peek(30)] == rows[:30]
    assert (at(shard), shard._moves, list(shard.peek()[0])) == ((0, 0), 0, list(next(iter(stream.shard().iter_rows()))))
    running = iter(shard.iter_batches(prefetch_batches=0))
    for number in range(9):
        assert set(next(running)["id"].tolist()) == steps[0][number]
        ahead = [row["id"] for row in shard.peek(1000)]
        assert ahead == rows[(number + 1) * STEP :]
    assert set(next(running)["id"].tolist()) == steps[0][9]
    assert {row["id"] for row in shard.peek(STEP)} == steps[1][0]
    with pytest.raises(ConfigError, match="n must be an int >= 1, got 0"):
        shard.peek(0)
    assert {row["id"] for row in stream.peek(STEP)} == steps[0][0]
    doubled = stream.map_batches(lambda batch: {"twice": batch["id"] * 2}).shard()
    assert [row["twice"] for row in doubled.peek(3)] == [2 * i for i in rows[:3]]


def test_questions_move_nothing(stream, steps):
    shards = stream.streaming_split(2)
    shards[0].schema(), shards[0].num_rows, shards[0].num_batches(), shards[0].peek(5), shards[0].state_dict()
    assert shards[0]._moves == 0
    assert [a | b for a, b in zip(*map(batches, shards), strict=True)] == steps[0]


# Ranks that are elsewhere


ELSEWHERE: dict[str, tuple[Callable[[list[StreamShard], Any], Any], str]] = {
    "both load, other steps": (
        lambda shards, at: (shards[0].load_state_dict(at(0, 5)), shards[1].load_state_dict(at(0, 6))),
        f"in pass 1 over stream '' rank 1 begins at {PLACE} 12 and rank 0 at {PLACE} 10; load the same state",
    ),
    "one loads": (
        lambda shards, at: shards[0].load_state_dict(at(0, 5)),
        f"rank 1 begins at {PLACE} 0 and rank 0 at {PLACE} 10",
    ),
    "one sets the epoch": (
        lambda shards, at: shards[1].set_epoch(1),
        f"rank 1 begins at epoch 1, samples_consumed_per_split 0 and rank 0 at {PLACE} 0",
    ),
    "one looks at a row": (
        lambda shards, at: next(iter(shards[0].iter_rows())),
        f"rank 1 begins at {PLACE} 0 and rank 0 at epoch 1, .* shard.peek",
    ),
    "one looks at a batch": (
        lambda shards, at: batches(shards[0], 1),
        f"rank 0 left pass 1 over stream '' after 1 batches, at {PLACE} 2, and rank 1 has received .* shard.peek",
    ),
}


@pytest.mark.parametrize("how", ELSEWHERE)
def test_a_rank_that_is_elsewhere_is_refused(stream, how):
    act, text = ELSEWHERE[how]
    shards = stream.streaming_split(2)
    act(shards, lambda epoch, step: state_at(stream, epoch, step))
    batches(shards[0])
    with pytest.raises(ConfigError, match=text):
        batches(shards[1])


def test_a_rank_that_leaves_early_is_noticed_by_the_one_that_goes_on(stream):
    shards = stream.streaming_split(2)
    going_on = iter(shards[1].iter_batches(prefetch_batches=0))
    next(going_on)
    batches(shards[0], 3)
    with pytest.raises(ConfigError, match=r"rank 0 left pass 1 .* after 3 batches, .* and rank 1 has received"):
        list(going_on)


@pytest.mark.parametrize("options", [{}, {"evaluation": True}])
def test_ranks_that_leave_at_the_same_step_and_looks_at_evaluation_are_fine(fake, path, options):
    stream = lance_stream(path, **OPTIONS, **options)
    shards = stream.streaming_split(3)
    if options:
        batches(shards[1], 2)
    for _ in range(3):
        for shard in shards:
            batches(shard, 3)
    for shard in shards:
        batches(shard)


def test_a_pass_of_evaluation_is_never_resumed(fake, path):
    shard = lance_stream(path, **OPTIONS, evaluation=True).shard()
    batches(shard, 2)
    with pytest.raises(StateError, match="evaluation=True is never resumed"):
        shard.resume_epoch()


# Counted last


def test_what_fails_before_a_batch_is_handed_out_loses_none(stream, steps, monkeypatch):
    shard = stream.shard()
    running = iter(shard.iter_batches(prefetch_batches=0))
    next(running)
    monkeypatch.setattr(shard._link, "tell", lambda *args: (_ for _ in ()).throw(RuntimeError("the driver is gone")))
    with pytest.raises(RuntimeError):
        next(running)
    monkeypatch.undo()
    assert at(shard) == (0, 2)
    shard.resume_epoch()
    assert batches(shard) == steps[0][1:]


def test_an_epoch_that_cannot_be_read_ahead_does_not_end_the_one_before(stream, steps, monkeypatch, caplog):
    shard = stream.shard()
    make = PassReads.__call__
    failing = [1]

    def fails(reads: PassReads, span: Any) -> Any:
        if reads._walk.start.epoch in failing:
            raise ReadError("the store is gone")
        return make(reads, span)

    monkeypatch.setattr(PassReads, "__call__", fails)
    assert batches(shard) == steps[0]
    assert at(shard) == (1, 0)
    assert caplog.text.count("the next pass is not read ahead: the store is gone") == 1
    with pytest.raises(ReadError, match="the store is gone"):
        batches(shard)
    failing.clear()
    shard.set_epoch(1)
    assert batches(shard) == steps[1]


def test_a_chunk_that_could_not_be_sent_is_not_passed_over(stream, monkeypatch):
    shard = stream.shard()
    plan = shard._plan_of_next()
    window = shard._supply.take(plan, shard._walk(shard._restore().next_start, plan))
    send, failures = window._line.send, iter([True, False, True])

    def fails_at_times(request: Any) -> Any:
        if next(failures, False):
            raise ReadError("no reader")
        return send(request)

    monkeypatch.setattr(window._line, "send", fails_at_times)
    rows = 0
    while rows < 240:
        try:
            rows += next(window)[1].num_rows
        except ReadError:
            continue
    with pytest.raises(StopIteration):
        next(window)
    assert rows == 240
