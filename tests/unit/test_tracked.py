"""TrackedBatches, on a shard without Ray: a framework that fetches ahead resumes exactly behind what it has trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream import ConfigError, IterationError, ReadError, StateError, train
from ray_lance_stream.cursor import Cursor, EpochWalk, Position
from ray_lance_stream.epoch_pass import ENDED
from ray_lance_stream.integrations import TrackedBatches
from ray_lance_stream.integrations.tracked import MAX_UNTRAINED
from ray_lance_stream.splits import SplitBlock, SplitGrid
from ray_lance_stream.state import PartialCycle, StreamState
from tests.unit.test_state import STATE

EPOCHS = 4


class Shard:
    """What TrackedBatches needs of a shard: one rank's walk, whose rows are (epoch, number)."""

    name = "train"

    def __init__(self, batches: int, batch_size: int = 2, state: dict[str, Any] | None = None) -> None:
        self.evaluation = False
        self._grid = SplitGrid(batches * batch_size, 2)
        self._batch_size = batch_size
        self._cursor = Cursor(Position(0))
        self._running: object = None  # the pass
        self.failures = 0  # so many passes fail before their first batch
        if state is not None:
            self.load_state_dict(state)

    @property
    def epoch(self) -> int:
        return self._cursor.position.epoch if self._cursor.live else self._cursor.next_start.epoch

    def state(self) -> StreamState:
        at = self._cursor.position
        partial = PartialCycle(at.partial_rows, 1) if at.partial_rows else None
        return replace(STATE, epoch=at.epoch, samples_consumed_per_split=at.cycle, partial=partial)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = StreamState.from_dict(state)
        rows = saved.partial.rows if saved.partial else 0
        self._cursor.load(Position(saved.epoch, saved.samples_consumed_per_split, rows))

    @property
    def _moves(self) -> int:
        return self._cursor.moves

    @property
    def is_live(self) -> bool:
        return self._running is not None

    def set_epoch(self, epoch: int) -> None:
        self.close()
        self._cursor.set_epoch(epoch)

    def close(self) -> None:
        self._running = None
        self._cursor.leave()

    def iter_torch_batches(self) -> Any:
        shard = self

        class Batches:
            def __iter__(self) -> Iterator[Any]:
                return shard._pass()

        return Batches()

    def _pass(self) -> Iterator[tuple[int, int]]:
        self.close()
        this = self._running = object()
        walk = EpochWalk(self._grid, SplitBlock(0, 2), self._cursor.next_start)
        self._cursor.begin(walk)
        left = walk.num_rows
        try:
            self.failures -= 1
            if self.failures >= 0:
                raise ReadError("a read failed")
            while left:
                if self._running is not this:
                    raise IterationError(ENDED)
                size = min(self._batch_size, left)
                number = (self._grid.num_rows - left) // self._batch_size
                left -= size
                self._cursor.received(size)
                yield walk.start.epoch, number
        finally:
            if self._running is this:
                self.close()


def tracked(batches: int, **kwargs: Any) -> TrackedBatches:
    return TrackedBatches(Shard(batches, **kwargs))  # type: ignore[arg-type]


def place(batches: TrackedBatches) -> tuple[int, int]:
    state = batches.state_dict()
    return state["epoch"], state["samples_consumed_per_split"]


def test_a_batch_that_was_fetched_ahead_does_not_count() -> None:
    batches = tracked(3)
    running = iter(batches)
    assert [next(running), next(running)] == [(0, 0), (0, 1)]
    assert place(batches) == (0, 0)
    batches.trained()
    assert place(batches) == (0, 1)
    assert next(running) == (0, 2)
    assert next(running, None) is None  # the shard is in the next epoch
    assert place(batches) == (0, 1)
    batches.trained()
    batches.trained()
    assert place(batches) == (1, 0)


def test_gradients_that_wait_for_the_optimizer_do_not_count() -> None:
    batches = tracked(5)
    running = iter(batches)
    for _ in range(3):
        next(running)
    batches.trained(stepped=False)
    batches.trained(stepped=False)
    assert place(batches) == (0, 0)
    batches.trained()
    assert place(batches) == (0, 3)


def test_an_iterator_that_was_only_looked_at_is_begun_again() -> None:
    batches = tracked(3)
    assert next(iter(batches)) == (0, 0)
    assert next(iter(batches)) == (0, 0)
    running = iter(batches)
    assert next(running) == (0, 0)
    batches.trained()
    assert next(iter(batches)) == (1, 0)
    assert place(batches) == (0, 1)  # until something of the next epoch is trained
    assert next(iter(batches)) == (1, 0)
    batches.trained()
    assert place(batches) == (1, 1)
    with pytest.raises(IterationError, match="this iterator has ended"):
        next(running)


def test_an_epoch_that_the_framework_cuts_short_is_over() -> None:
    batches = tracked(4)
    batches.leave()  # nothing has begun
    assert place(batches) == (0, 0)
    running = iter(batches)
    for _ in range(3):
        next(running)
    batches.trained()
    batches.leave()
    assert place(batches) == (1, 0)
    assert next(iter(batches)) == (1, 0)
    batches.trained()
    assert place(batches) == (1, 1)


def test_leaving_an_epoch_that_is_whole_changes_nothing() -> None:
    batches = tracked(2)
    for _ in batches:
        batches.trained()
    batches.leave()
    assert place(batches) == (1, 0)
    assert next(iter(batches)) == (1, 0)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("seen", [1, 3])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_that_was_set_after_a_look_is_the_next_one(is_kept, seen, epoch) -> None:
    """Also where the look has brought the shard there already: all of epoch 0, and then epoch 1."""
    batches = tracked(3)
    running = iter(batches)
    for _ in range(seen):
        next(running)
    if not is_kept:
        del running
    batches.shard.set_epoch(epoch)
    assert place(batches) == (epoch, 0)
    assert list(batches) == [(epoch, 0), (epoch, 1), (epoch, 2)]


@pytest.mark.parametrize("rows", [(3, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("seen", [1, 3])
def test_a_state_that_was_loaded_after_a_look_is_where_it_goes_on(seen, rows) -> None:
    """(0, 1) is where the shard is after a look at one batch, (1, 0) after one at three."""
    batches = tracked(3)
    running = iter(batches)
    for _ in range(seen):
        next(running)
    del running
    batches.shard.load_state_dict(replace(STATE, epoch=rows[0], samples_consumed_per_split=rows[1]).to_dict())
    assert place(batches) == rows
    assert next(iter(batches)) == rows


def test_after_a_rollback_the_state_is_the_loaded_one(monkeypatch) -> None:
    """Until the first batch behind it was trained, and whatever the loop before tells yet."""
    batches = tracked(3)
    monkeypatch.setattr(train, "_shards", {"train": batches.shard})
    for _ in batches:
        batches.trained()
    assert place(batches) == (1, 0)
    running = iter(batches)
    next(running), next(running)
    del running
    batches.shard.load_state_dict(replace(STATE, epoch=3, samples_consumed_per_split=1).to_dict())
    batches.trained()
    batches.leave()
    assert train.live_states()["train"] == batches.state() == batches.shard.state()
    assert place(batches) == (3, 1)
    assert next(iter(batches)) == (3, 1)  # a look, which changes nothing
    assert place(batches) == (3, 1)
    running = iter(batches)
    assert next(running) == (3, 1)
    assert place(batches) == (3, 1)
    batches.trained()
    assert place(batches) == (3, 2)


def test_a_pass_of_the_shard_itself_after_a_look_counts() -> None:
    batches = tracked(3)
    assert next(iter(batches)) == (0, 0)
    assert list(batches.shard.iter_torch_batches()) == [(1, 0), (1, 1), (1, 2)]
    assert place(batches) == (2, 0)
    assert next(iter(batches)) == (2, 0)


def test_a_shard_that_was_closed_after_a_look_begins_again() -> None:
    batches = tracked(3)
    running = iter(batches)
    next(running)
    batches.shard.close()
    assert place(batches) == (0, 0)
    assert next(iter(batches)) == (0, 0)
    with pytest.raises(IterationError, match="this iterator has ended"):
        next(running)


def test_a_loop_that_breaks_out_ends_its_pass() -> None:
    batches = tracked(3)
    for _ in batches:
        batches.trained()
        break
    assert not batches.shard.is_live
    assert place(batches) == (0, 1)
    batches.shard.load_state_dict(batches.state_dict())  # to go on in the epoch; else the next one follows
    assert next(iter(batches)) == (0, 1)


def test_a_loop_that_fails_ends_its_pass() -> None:
    batches = tracked(3)

    def loop() -> None:
        for _ in batches:
            raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        loop()
    assert not batches.shard.is_live
    assert next(iter(batches)) == (0, 0)


def test_an_epoch_that_is_left_ends_its_pass() -> None:
    batches = tracked(3)
    running = iter(batches)
    next(running), next(running)
    batches.trained()
    batches.leave()
    assert not batches.shard.is_live
    with pytest.raises(IterationError, match="this iterator has ended"):
        next(running)
    assert place(batches) == (1, 0)
    assert next(iter(batches)) == (1, 0)


def test_an_iterator_that_goes_late_leaves_the_next_pass_alone() -> None:
    batches = tracked(3)
    first, second = iter(batches), iter(batches)
    assert next(first) == next(second) == (0, 0)
    del first
    assert batches.shard.is_live
    assert next(second) == (0, 1)


def test_an_epoch_that_fails_before_its_first_batch_is_begun_again() -> None:
    batches = tracked(2)
    for _ in batches:
        batches.trained()
    batches.shard.failures = 1
    with pytest.raises(ReadError, match="a read failed"):
        next(iter(batches))
    assert place(batches) == (1, 0)
    assert next(iter(batches)) == (1, 0)
    batches.shard.failures = 1
    with pytest.raises(ReadError, match="a read failed"):
        next(iter(batches))
    batches.shard.set_epoch(3)
    assert place(batches) == (3, 0)
    assert next(iter(batches)) == (3, 0)


def test_while_a_first_batch_is_awaited_the_position_is_that_of_the_weights() -> None:
    """Another thread may save then; gradients of the epoch before may wait for the optimizer still."""
    batches = tracked(2)
    running = iter(batches)
    next(running), next(running)
    batches.trained()
    batches.trained(stepped=False)
    assert next(running, None) is None
    seen = []
    make = batches.iterator_gen

    def watched() -> Iterator[Any]:
        for batch in make():
            seen.append(place(batches))
            yield batch

    batches.iterator_gen = watched
    assert next(iter(batches)) == (1, 0)
    assert seen == [(0, 1)]


def test_an_epoch_without_batches_is_over() -> None:
    """One that was left behind its last whole batch, for example."""
    state = replace(STATE, epoch=0, samples_consumed_per_split=2).to_dict()
    batches = tracked(2, state=state)
    assert list(batches) == []
    assert next(iter(batches)) == (1, 0)


def test_batches_that_are_withheld_change_nothing() -> None:
    batches = tracked(2)
    running = iter(batches)
    next(running)
    batches.trained()
    batches.withheld = True
    assert list(batches) == []
    assert place(batches) == (0, 1)
    batches.withheld = False
    assert next(running) == (0, 1)


def test_more_batches_than_were_handed_out_are_refused() -> None:
    batches = tracked(2)
    with pytest.raises(IterationError, match="all that were handed out are trained already"):
        batches.trained()


def test_a_missing_callback_is_told() -> None:
    with pytest.raises(IterationError, match=f"{MAX_UNTRAINED} batches were handed out and none was told"):
        list(tracked(MAX_UNTRAINED + 1))


def test_an_epoch_that_nobody_tells_of_is_not_begun_again() -> None:
    """B55: a loop of one's own around TrackedBatches. What was only looked at as a whole can be begun again."""
    batches = tracked(3)
    assert not batches.is_untold
    assert list(batches) == [(0, 0), (0, 1), (0, 2)]
    assert batches.is_untold
    for _ in range(2):
        with pytest.raises(IterationError, match=r"all batches of epoch 0 .* none was told.*StreamReportCallback"):
            next(iter(batches))
    batches.shard.set_epoch(0)
    assert not batches.is_untold
    for epoch in range(2):
        for batch in batches:
            assert batch[0] == epoch
            batches.trained()
    assert not batches.is_untold
    assert place(batches) == (2, 0)
    assert len(list(batches)) == 3
    with pytest.raises(IterationError, match="all batches of epoch 2 "):
        next(iter(batches))


@pytest.mark.parametrize("seen", [2, 3])
def test_a_long_look_is_told(seen, caplog) -> None:
    batches = tracked(5)
    running = iter(batches)
    for _ in range(seen):
        next(running)
    with caplog.at_level("WARNING", "ray_lance_stream"):
        assert next(iter(batches)) == (0, 0)
    told = "stream 'train': an iterator was given up after 3 batches and none was told to be trained"
    assert (told in caplog.text) == (seen > 2)


def test_a_stream_for_evaluation_is_refused() -> None:
    shard = Shard(2)
    shard.evaluation = True
    with pytest.raises(ConfigError, match="never resumed, so there is nothing to track"):
        TrackedBatches(shard)  # type: ignore[arg-type]


def test_what_report_saves_is_what_was_trained(monkeypatch, tmp_path) -> None:
    shard, other = Shard(4), Shard(4)
    monkeypatch.setattr(train, "_shards", {"train": shard})
    batches = TrackedBatches(shard)  # type: ignore[arg-type]
    running = iter(batches)
    next(running), next(running)
    batches.trained()
    assert train.live_states()["train"] == batches.state() != shard.state()
    batches.save_state(tmp_path)
    assert train.read_states(train._checkpoint_at(str(tmp_path))) == {"train": batches.state()}
    train._shards["train"] = other  # of another run in this process: these batches are not its
    assert train.live_states()["train"] == other.state()
    train._shards["train"] = shard
    del running, batches
    assert train.live_states()["train"] == shard.state()


def test_a_state_in_a_directory_is_checked_as_ever(tmp_path) -> None:
    (tmp_path / train.STATE_FILE).write_text("{")
    with pytest.raises(StateError, match="is it truncated"):
        tracked(2).save_state(tmp_path)


@given(
    num_batches=st.integers(1, 7),
    ahead=st.integers(0, 3),
    accumulate=st.integers(1, 4),
    looks=st.lists(st.booleans(), min_size=EPOCHS, max_size=EPOCHS),
    kill_at=st.integers(0, 30),
    odd_size=st.booleans(),
)
def test_a_broken_run_trains_what_an_unbroken_one_does(
    num_batches: int, ahead: int, accumulate: int, looks: list[bool], kill_at: int, odd_size: bool
) -> None:
    """A framework that fetches ahead, looks into iterators, and keeps gradients also over the end of an epoch."""
    unbroken = Run(num_batches, odd_size, ahead, accumulate, looks)
    unbroken.go(None, None)
    first = Run(num_batches, odd_size, ahead, accumulate, looks)
    saved = first.go(None, kill_at)
    second = Run(num_batches, odd_size, ahead, accumulate, looks)
    second.go(saved, None)
    assert [*first.weights, *second.weights] == unbroken.weights


class Run:
    """A training loop whose weights are the batches that they have seen; the optimizer steps every few batches."""

    def __init__(self, num_batches: int, odd_size: bool, ahead: int, accumulate: int, looks: list[bool]) -> None:
        self._sizes = {"batches": num_batches, "batch_size": 3 if odd_size else 2}
        self._ahead, self._accumulate, self._looks = ahead, accumulate, looks
        self.weights: list[tuple[int, int]] = []

    def go(self, state: dict[str, Any] | None, kill_at: int | None) -> dict[str, Any]:
        """Train until the end, or until so many batches were trained; returns what would be saved then."""
        batches = TrackedBatches(Shard(**self._sizes, state=state))  # type: ignore[arg-type]
        gradients: list[tuple[int, int]] = []
        trained = 0
        for epoch in range(batches.shard.epoch, EPOCHS):
            if self._looks[epoch]:
                next(iter(batches))
            running, fetched = iter(batches), []
            while True:
                while len(fetched) <= self._ahead and (batch := next(running, None)) is not None:
                    fetched.append(batch)
                if trained == kill_at:
                    return batches.state_dict()
                if not fetched:
                    break
                gradients.append(fetched.pop(0))
                trained += 1
                steps = len(gradients) == self._accumulate
                batches.trained(stepped=steps)
                if steps:
                    self.weights += gradients
                    gradients = []
        return batches.state_dict()
