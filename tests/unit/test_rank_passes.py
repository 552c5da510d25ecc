"""Ranks that do not begin and leave passes alike are found, whatever the order of their reports; ranks that do never are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream import rank_passes
from ray_lance_stream.attempts import Attempt, AttemptBook, PassStart, RankProgress, StepSize
from ray_lance_stream.cursor import Position
from ray_lance_stream.meter import Tally
from ray_lance_stream.rank_passes import SETTLES_S, PassConflict, RankPasses
from tests.unit.test_state import STATE

CYCLES = 12  # of an epoch; a step is one


class Run:
    """The coordinator's side of an attempt: a book, and reports that may be late, lost or out of order."""

    def __init__(self, world_size: int = 2) -> None:
        self.now_s = 0.0
        self.attempt = Attempt("a", "run", world_size)
        self.restart()
        self.late: list[tuple[int, RankProgress]] = []
        self.ranks = [Rank(self, rank) for rank in range(world_size)]

    def restart(self) -> None:
        """The coordinator has lost its memory."""
        self.book = AttemptBook(lambda: self.now_s)

    def deliver(self, number: int) -> PassConflict | None:
        rank, progress = self.late.pop(number % len(self.late))
        return self.book.record(self.attempt, rank, progress)


class Rank:
    """One rank: begins passes, receives steps, and leaves."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.passes = RankPasses()
        self.at = Position(0)  # where the next pass begins
        self.start = self.at
        self.steps = 0

    def begin(self, *, has_batches: bool = True, splits: int = 6, cycles: str = "1") -> Any:
        """Returns what the coordinator objects to."""
        step = StepSize(cycles, False, splits, splits) if has_batches else None
        begun = self.passes.next(self.at, splits, has_batches=has_batches, step=step)
        self.passes.close()
        start = PassStart(STATE.identity, step, None, begun, self.passes.reported)
        found = self.run.book.register_pass(
            self.run.attempt, self.rank, (self.at.epoch, begun.number, begun.again), start
        )
        if found is None:
            self.passes.begin(begun, 1 if has_batches else None)
            self.start, self.steps = self.at, 0
        return found

    def receive(self, steps: int = 1) -> None:
        self.steps += steps
        if self.place.cycle >= CYCLES:
            self.end("complete")
        else:
            self.passes.note(self.steps, self.place, "running")

    @property
    def place(self) -> Position:
        return Position(self.start.epoch, self.start.cycle + self.steps)

    def end(self, state: Any = "left") -> None:
        self.at = Position(self.start.epoch + 1)
        self.passes.note(self.steps, self.at if state == "complete" else self.place, state)

    def go_to(self, place: Position) -> None:
        self.at = place
        self.passes.go_to(place)

    def report(self) -> PassConflict | None:
        return self.run.book.record(self.run.attempt, self.rank, self.reported())

    def reported(self) -> RankProgress:
        return RankProgress(STATE, Tally(), self.passes.reported)


def loop(rank: Rank, program: list[tuple[str, int]]) -> Iterator[str]:
    """A training loop, which may be interrupted between any two of its steps."""
    for what, number in program:
        if what == "pass":
            assert rank.begin(has_batches=number >= 0) is None
            yield "begun"
            left = CYCLES - rank.start.cycle
            for _ in range(min(abs(number), left)):
                rank.receive()
                yield "received"
            if abs(number) < left:
                rank.end()
        elif what == "back":
            rank.go_to(rank.start)
        elif what == "stay" and rank.place.cycle < CYCLES:
            rank.go_to(rank.place)
        elif what == "epoch":
            rank.go_to(Position(number))
        yield "set"


STEPS = st.one_of(
    st.tuples(st.just("pass"), st.integers(-CYCLES, CYCLES)),
    st.tuples(st.just("pass"), st.integers(1, CYCLES)),
    st.tuples(st.sampled_from(["back", "stay"]), st.just(0)),
    st.tuples(st.just("epoch"), st.integers(0, 2)),
)


@settings(max_examples=150)
@given(program=st.lists(STEPS, min_size=1, max_size=8), seed=st.integers(0, 2**32), world_size=st.integers(2, 4))
def test_ranks_that_do_alike_are_never_refused(program: list[tuple[str, int]], seed: int, world_size: int) -> None:
    """However far one is ahead of another, whichever reports are late, lost or overtake others; nobody waits for a rank."""
    chance = random.Random(seed)
    run = Run(world_size)
    loops = dict(enumerate(loop(rank, program) for rank in run.ranks))
    while loops:
        number = chance.choice(list(loops))
        if next(loops[number], None) is None:
            del loops[number]
        if chance.random() < 0.5:
            run.late.append((number, run.ranks[number].reported()))
        while run.late and chance.random() < 0.5:
            assert run.deliver(chance.randrange(len(run.late))) is None
        if chance.random() < 0.1:
            run.late.clear()
        if chance.random() < 0.02:
            run.restart()
        run.now_s += chance.choice([0.0, 0.0, 10.0])
        assert run.ranks[number].report() is None
    for rank in run.ranks:
        assert rank.report() is None


@settings(max_examples=50)
@given(
    before=st.lists(STEPS, max_size=3),
    first=st.integers(1, CYCLES - 1),
    other=st.integers(1, CYCLES),
    seed=st.integers(0, 2**32),
)
def test_a_rank_that_leaves_a_pass_elsewhere_is_found(
    before: list[tuple[str, int]], first: int, other: int, seed: int
) -> None:
    """Whoever is first, once the reports have come."""
    if first == other:
        return
    chance = random.Random(seed)
    run = Run()
    programs = [[*before, ("epoch", 7), ("pass", steps)] for steps in (first, other)]
    loops = dict(enumerate(loop(*each) for each in zip(run.ranks, programs, strict=True)))
    while loops:
        number = chance.choice(list(loops))
        if next(loops[number], None) is None:
            del loops[number]
        run.ranks[number].report()
    assert all(rank.report() is not None for rank in run.ranks)
    run.now_s += SETTLES_S
    found = run.ranks[0].report()
    assert found is not None
    assert found.settles_in_s == 0
    assert (found.mine.steps, found.rank, found.theirs.steps) == (first, 1, other)
    assert not found.is_at_start
    assert isinstance(run.ranks[0].begin(), PassConflict)


def test_a_pass_that_begins_elsewhere_is_refused_before_its_first_batch() -> None:
    for at in (Position(1), Position(0, 3), Position(0, 0, 1)):
        run = Run()
        assert run.ranks[0].begin() is None
        run.ranks[1].go_to(at)
        found = run.ranks[1].begin()
        assert (found.mine.start, found.rank, found.theirs.start, found.is_at_start) == (at, 0, Position(0), True)
        run.ranks[1].go_to(Position(0))
        assert run.ranks[1].begin() is None  # once it was told where the others are


def test_rows_of_an_open_cycle_may_be_all_that_a_smaller_block_has() -> None:
    """Blocks of three and of two splits, of which two rows each came."""
    run = Run()
    run.ranks[0].go_to(Position(0, 4, 2))
    run.ranks[1].go_to(Position(0, 5))
    assert run.ranks[0].begin(splits=3) is None
    assert run.ranks[1].begin(splits=2) is None
    run = Run()
    run.ranks[0].go_to(Position(0, 4, 1))
    run.ranks[1].go_to(Position(0, 5))
    assert run.ranks[0].begin(splits=3) is None
    assert run.ranks[1].begin(splits=2).is_at_start


def test_a_look_of_one_rank_that_goes_back_is_none() -> None:
    """Also several, of batches and of rows, as long as they take no longer than it takes to settle."""
    run = Run()
    looks, other = run.ranks
    for has_batches in (True, True, False):
        assert looks.begin(has_batches=has_batches) is None
        looks.receive()
        looks.end()
        looks.report()
        run.now_s += 0.1
    assert other.begin() is None
    other.receive(5)
    found = other.report()
    assert found is not None
    assert 0 < found.settles_in_s < SETTLES_S
    looks.go_to(Position(0))
    looks.report()
    run.now_s += 100
    assert other.report() is None
    for _ in range(2):
        assert looks.begin() is None
        looks.receive(CYCLES)
        other.receive(CYCLES - other.steps)
        assert other.report() is looks.report() is None
        assert other.begin() is None


def test_a_look_of_one_rank_that_does_not_go_back_is_found_by_the_one_that_goes_through() -> None:
    run = Run()
    looks, other = run.ranks
    for rank in run.ranks:
        assert rank.begin() is None
    looks.receive()
    looks.end()
    assert looks.report() is None
    assert looks.begin() is None  # at the next epoch
    other.receive()
    assert other.report() is None  # it may still leave at the same step
    run.now_s += SETTLES_S
    other.receive()
    found = other.report()
    assert found is not None
    assert (found.mine.steps, found.rank, found.theirs.steps, found.settles_in_s) == (2, 0, 1, 0)


def test_a_rank_that_has_failed_has_not_left() -> None:
    """Its error must not come together with one of each other rank; where its loop goes on after all, it has."""
    run = Run()
    failed, other = run.ranks
    for rank in run.ranks:
        assert rank.begin() is None
    failed.receive()
    failed.end("running")
    failed.report()
    other.receive(2)
    run.now_s += 100
    assert other.report() is None
    failed.at = Position(1)
    assert failed.begin() is None
    run.now_s += SETTLES_S
    assert other.report() is not None


def test_copies_of_a_shard_are_not_compared() -> None:
    """As in tasks, one for each epoch: which of them come together is not known."""
    run = Run()
    assert run.ranks[0].begin() is None
    copy = Rank(run, 0)
    copy.go_to(Position(1))
    assert copy.begin() is None
    assert run.ranks[1].begin() is None
    run.ranks[1].receive(5)
    copy.receive()
    copy.end()
    copy.report()
    run.now_s += 100
    assert run.ranks[1].report() is None


def test_a_pass_that_could_not_start_is_begun_again_under_its_number() -> None:
    passes = RankPasses()
    begun = passes.next(Position(0), 6, has_batches=True)
    passes.begin(begun, 1)
    passes.take_back()
    assert passes.next(Position(0), 6, has_batches=True) == begun


def test_a_look_in_other_steps_and_back_is_no_difference() -> None:
    run = Run()
    for rank in run.ranks:
        assert rank.begin(cycles="2") is None
    for rank in run.ranks:
        rank.receive()
        rank.end()
        assert rank.report() is None
        rank.go_to(Position(0))
        assert rank.begin(cycles="3") is None
    run.ranks[0].receive()
    assert run.ranks[0].report() is None


@pytest.mark.parametrize(("place", "cycles"), [(Position(1), "1"), (Position(0), "2"), (Position(0), "1")])
def test_after_a_pass_without_rows_ranks_may_begin_elsewhere_and_in_other_steps(place: Position, cycles: str) -> None:
    run = Run()
    for rank in run.ranks:
        assert rank.begin() is None
    for rank in run.ranks:
        rank.passes.take_back()
        rank.go_to(place)
        assert rank.begin(cycles=cycles) is None


def test_ranks_that_begin_apart_after_a_pass_without_rows_are_told() -> None:
    run = Run()
    for rank in run.ranks:
        assert rank.begin() is None
        rank.passes.take_back()
    run.ranks[0].go_to(Position(1))
    run.ranks[1].go_to(Position(2))
    assert run.ranks[0].begin() is None
    assert isinstance(run.ranks[1].begin(), PassConflict)


def test_what_ranks_are_compared_by_costs_no_more_with_many_passes(monkeypatch: Any) -> None:
    run = Run()
    for rank in run.ranks:
        for _ in range(200):
            assert rank.begin() is None
            rank.receive(CYCLES)
        assert len(rank.passes.reported) == 1
    assert len(next(iter(run.book._records.values())).passes) <= 64
    assert rank_passes.KEPT_LEFT == 16
