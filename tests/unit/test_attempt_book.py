"""AttemptBook: what the coordinator knows of runs, and how it finds ranks that step unevenly."""

from __future__ import annotations

from dataclasses import replace

from ray_lance_stream.coordinator import KEPT_ATTEMPTS, KEPT_TURNS, Attempt, AttemptBook, RankProgress, StepSize
from ray_lance_stream.meter import Tally
from tests.unit.test_state import STATE

STEP = StepSize("2", False, 24, 12)


def told(samples: int) -> RankProgress:
    return RankProgress(replace(STATE, samples_consumed_per_split=samples), Tally(rows=10, elapsed_s=1.0))


def test_ranks_that_step_alike_agree_whatever_their_blocks():
    book, attempt = AttemptBook(), Attempt("a", "run", 3)
    for rank, splits in enumerate((4, 5, 3)):
        assert book.register_step(attempt, rank, (0, 1), StepSize("2", False, 2 * splits, splits)) is None


def test_the_rank_that_differs_is_told_of_the_first_one():
    book, attempt = AttemptBook(), Attempt("a", "run", 2)
    assert book.register_step(attempt, 1, (0, 1), STEP) is None
    assert book.register_step(attempt, 0, (0, 1), replace(STEP, cycles_per_batch="3")) == (1, STEP)
    assert book.register_step(attempt, 0, (0, 1), replace(STEP, drop_last=True)) == (1, STEP)
    assert book.register_step(attempt, 0, (0, 1), STEP) is None


def test_another_pass_another_epoch_and_another_attempt_step_as_they_like():
    book, attempt = AttemptBook(), Attempt("a", "run", 2)
    other = replace(STEP, cycles_per_batch="3")
    assert book.register_step(attempt, 0, (0, 1), STEP) is None
    assert book.register_step(attempt, 1, (0, 2), other) is None  # epoch 0 once more, after set_epoch(0)
    assert book.register_step(attempt, 1, (1, 1), other) is None
    assert book.register_step(Attempt("b", "run", 2), 1, (0, 1), other) is None


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


def test_old_attempts_and_passes_are_forgotten():
    book = AttemptBook()
    for number in range(KEPT_ATTEMPTS + 5):
        book.record(Attempt(str(number), str(number), 1), 0, told(1))
    assert len(book.runs()) == KEPT_ATTEMPTS
    attempt = Attempt("last", "last", 1)
    for epoch in range(KEPT_TURNS + 5):
        assert book.register_step(attempt, 0, (epoch, epoch), STEP) is None
    assert book.register_step(attempt, 1, (0, 0), replace(STEP, cycles_per_batch="9")) is None
