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


def test_an_attempt_that_is_still_heard_of_is_not_forgotten():
    """However many have begun since: with it would go what its ranks are compared with."""
    book, old = AttemptBook(), Attempt("old", "old", 2)
    assert book.register_pass(old, 0, (0, 1), START) is None
    book.record(old, 0, told(1))
    for number in range(KEPT_ATTEMPTS + 100):
        book.record(Attempt(str(number), str(number), 1), 0, told(1))
        if number % 50 == 0:
            book.record(old, 0, told(2))
    assert book.register_pass(old, 1, (0, 1), with_step(cycles_per_batch="3")) == (0, START)


def test_old_attempts_and_passes_are_forgotten():
    book = AttemptBook()
    first = Attempt("first", "first", 2)
    assert book.register_pass(first, 0, (0, 1), START) is None
    for number in range(KEPT_ATTEMPTS):
        book.record(Attempt(str(number), str(number), 1), 0, told(1))
    assert book.register_pass(first, 1, (0, 1), with_step(cycles_per_batch="3")) is None, "it is forgotten"
    attempt = Attempt("last", "last", 1)
    for epoch in range(KEPT_TURNS + 5):
        assert book.register_pass(attempt, 0, (epoch, epoch), START) is None
    assert book.register_pass(attempt, 1, (0, 0), with_step(cycles_per_batch="9")) is None
