"""AttemptBook: what the coordinator knows of runs, and how it finds ranks that do not go together."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from ray_lance_stream.attempts import (
    KEPT_ATTEMPTS,
    KEPT_TURNS,
    Attempt,
    AttemptBook,
    PassStart,
    RankProgress,
    StepSize,
)
from ray_lance_stream.meter import Tally
from ray_lance_stream.state import StreamIdentity
from tests.unit.test_state import OTHER, STATE

STEP = StepSize("2", False, 24, 12)
START = PassStart(STATE.identity, STEP)


def with_step(**changes: Any) -> PassStart:
    return replace(START, step=replace(STEP, **changes))


def told(samples: int) -> RankProgress:
    return RankProgress(replace(STATE, samples_consumed_per_split=samples), Tally(rows=10, elapsed_s=1.0))


def test_shards_made_one_by_one_are_shown_as_one_world():
    book = AttemptBook()
    for name, world, rank, samples in (("a", 2, 0, 5), ("b", 2, 1, 7), ("c", 2, 1, 3)):
        book.record(Attempt(name, "", world, group="g"), rank, told(samples))
    assert {rank: each.state.samples_consumed_per_split for rank, each in book.snapshot("").items()} == {0: 5, 1: 3}
    book.record(Attempt("d", "", 3, group="g"), 2, told(1))
    assert list(book.snapshot("")) == [2], "of the newest world size"
    book.record(Attempt("e", "", 3, group="other"), 0, told(1))
    assert list(book.snapshot("")) == [0]


def test_ranks_that_step_alike_agree_whatever_their_blocks():
    book, attempt = AttemptBook(), Attempt("a", "run", 3)
    for rank, splits in enumerate((4, 5, 3)):
        assert book.register_pass(attempt, rank, (0, 1), with_step(batch_size=2 * splits, num_splits=splits)) is None


def test_the_rank_that_differs_is_told_of_the_first_one():
    book, attempt = AttemptBook(), Attempt("a", "run", 2)
    assert book.register_pass(attempt, 1, (0, 1), START) is None
    assert book.register_pass(attempt, 0, (0, 1), with_step(cycles_per_batch="3")) == (1, START)
    assert book.register_pass(attempt, 0, (0, 1), with_step(drop_last=True)) == (1, START)
    assert book.register_pass(attempt, 0, (0, 1), START) is None


@pytest.mark.parametrize("step", [STEP, None])
@pytest.mark.parametrize("name", [f.name for f in fields(StreamIdentity)])
def test_the_rank_that_reads_other_rows_is_told_of_the_first_one(name, step):
    """B17: another version too, with or without batches."""
    book, attempt = AttemptBook(), Attempt("a", "run", 2)
    mine = replace(START, step=step)
    theirs = replace(mine, identity=replace(START.identity, **{name: {**OTHER, "table_version": 9}[name]}))
    assert book.register_pass(attempt, 0, (0, 1), mine) is None
    assert book.register_pass(attempt, 1, (0, 1), theirs) == (0, mine)
    assert mine.identity.unlike(theirs.identity) == [name]


def test_the_rank_that_has_another_list_is_told_of_the_first_one():
    """A coordinator that was restarted on another node may have made another one of the same epoch."""
    book, attempt = AttemptBook(), Attempt("a", "run", 2)
    mine = replace(START, listed="0123")
    assert book.register_pass(attempt, 0, (0, 1), mine) is None
    assert book.register_pass(attempt, 1, (0, 1), replace(mine, listed="0124")) == (0, mine)
    assert book.register_pass(attempt, 1, (0, 1), replace(mine)) is None


def test_another_pass_another_epoch_and_another_attempt_step_as_they_like():
    book, attempt = AttemptBook(), Attempt("a", "run", 2)
    other = with_step(cycles_per_batch="3")
    assert book.register_pass(attempt, 0, (0, 1), START) is None
    assert book.register_pass(attempt, 1, (0, 2), other) is None  # epoch 0 once more, after set_epoch(0)
    assert book.register_pass(attempt, 1, (1, 1), other) is None
    assert book.register_pass(Attempt("b", "run", 2), 1, (0, 1), other) is None


def test_the_newest_attempt_stands_for_its_run():
    book = AttemptBook()
    book.record(Attempt("a", "one", 2), 0, told(5))
    book.record(Attempt("b", "two", 1), 0, told(9))
    book.record(Attempt("c", "one", 3), 2, told(6))
    assert book.runs() == ["one", "two"]
    assert {rank: p.state.samples_consumed_per_split for rank, p in book.snapshot("one").items()} == {2: 6}
    assert book.snapshot("three") == {}


def test_shards_outside_of_a_run_do_not_hide_the_only_run():
    book = AttemptBook()
    book.record(Attempt("a", "", 1), 0, told(1))
    assert book.runs() == [""]
    book.record(Attempt("b", "one", 1), 0, told(2))
    assert book.runs() == ["one"]


def test_an_attempt_that_is_still_heard_of_is_not_forgotten():
    """However many have begun since: with it would go what its ranks are compared with."""
    book, old = AttemptBook(), Attempt("old", "old", 2)
    assert book.register_pass(old, 0, (0, 1), START) is None
    book.record(old, 0, told(1))
    for number in range(KEPT_ATTEMPTS + 100):
        book.record(Attempt(str(number), str(number), 1), 0, told(1))
        if number % 50 == 0:
            book.record(old, 0, told(2))
    assert len(book.runs()) == KEPT_ATTEMPTS
    assert book.register_pass(old, 1, (0, 1), with_step(cycles_per_batch="3")) == (0, START)
    assert book.runs()[0] == "old"
    assert book.snapshot("0") == {}


def test_old_attempts_and_passes_are_forgotten():
    book = AttemptBook()
    for number in range(KEPT_ATTEMPTS + 5):
        book.record(Attempt(str(number), str(number), 1), 0, told(1))
    assert len(book.runs()) == KEPT_ATTEMPTS
    attempt = Attempt("last", "last", 1)
    for epoch in range(KEPT_TURNS + 5):
        assert book.register_pass(attempt, 0, (epoch, epoch), START) is None
    assert book.register_pass(attempt, 1, (0, 0), with_step(cycles_per_batch="9")) is None
