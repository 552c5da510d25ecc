"""ReaderShelf: who gets which reader."""

from __future__ import annotations

from itertools import count

import pytest

from ray_lance_stream.shelf import Owner, ReaderShelf


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf(clock) -> ReaderShelf:
    numbers = count()
    return ReaderShelf(lambda node_id: (next(numbers), node_id), keep_s=10.0, clock=clock)


def owner(attempt: str, rank: int, slot: int = 0, run: str = "run") -> Owner:
    return Owner(run, attempt, rank, slot)


def test_each_slot_keeps_its_reader(shelf):
    first, _ = shelf.claim(owner("a", 0), "n", fresh=False)
    second, stand_in = shelf.claim(owner("a", 1), "n", fresh=False)
    assert first != second
    assert stand_in == first
    assert shelf.claim(owner("a", 0), "n", fresh=False) == (first, None)
    assert len(shelf) == 2


def test_a_spare_serves_the_first_owner_and_stands_in_for_the_others(shelf):
    shelf.spare("n", 60.0)
    assert shelf.claim(owner("a", 0), "n", fresh=False) == ((0, "n"), None)
    assert shelf.claim(owner("a", 1), "n", fresh=False) == ((1, "n"), (0, "n"))
    assert shelf.claim(owner("a", 2), "m", fresh=False) == ((2, "m"), (0, "n"))


def test_readers_of_an_attempt_that_has_ended_are_handed_on(shelf):
    """A resize starts no reader where the old group had one, and only what is missing elsewhere."""
    old = [shelf.claim(owner("a", rank), node, fresh=False)[0] for rank, node in enumerate("nnm")]
    new = [shelf.claim(owner("b", rank), node, fresh=False)[0] for rank, node in enumerate("nnnm")]
    assert new[:2] == old[:2]
    assert new[3] == old[2]
    assert new[2] == (3, "n")


def test_readers_of_another_run_are_not_taken(shelf):
    shelf.claim(owner("a", 0), "n", fresh=False)
    assert shelf.claim(owner("b", 0, run="other"), "n", fresh=False)[0] == (1, "n")
    assert shelf.claim(owner("c", 0, run=""), "n", fresh=False)[0] == (2, "n")
    assert shelf.claim(owner("d", 0, run=""), "n", fresh=False)[0] == (3, "n")


def test_time_that_passes_between_calls_changes_nothing(shelf, clock):
    first, _ = shelf.claim(owner("a", 0), "n", fresh=False)
    shelf.prepare(owner("a", 1), "n", 60.0)
    clock.now_s = 3.0
    assert shelf.claim(owner("a", 1), "n", fresh=False) == ((1, "n"), first)


def test_a_dead_reader_is_replaced_by_a_new_one(shelf):
    shelf.spare("n", 60.0)
    dead, _ = shelf.claim(owner("a", 0), "n", fresh=False)
    shelf.spare("n", 60.0)
    fresh, _ = shelf.claim(owner("a", 0), "n", fresh=True)
    assert fresh not in (dead, (1, "n"))
    assert shelf.claim(owner("a", 0), "n", fresh=False)[0] == fresh


def test_prepared_readers_wait_for_their_owner(shelf):
    shelf.prepare(owner("a", 0), "n", 60.0)
    shelf.prepare(owner("a", 0), "n", 60.0)
    assert len(shelf) == 1
    assert shelf.claim(owner("a", 0), "n", fresh=False) == ((0, "n"), None)


def test_a_worker_that_moved_gets_a_reader_on_its_node(shelf):
    shelf.claim(owner("a", 0), "n", fresh=False)
    assert shelf.claim(owner("a", 0), "m", fresh=False)[0] == (1, "m")


def test_silent_owners_are_forgotten_and_live_ones_are_not(shelf, clock):
    shelf.claim(owner("a", 0), "n", fresh=False)
    shelf.claim(owner("a", 1), "n", fresh=False)
    shelf.spare("n", 30.0)
    clock.now_s = 9.0
    shelf.touch("a", 1)
    shelf.sweep()
    assert len(shelf) == 3
    clock.now_s = 15.0
    shelf.sweep()
    assert len(shelf) == 2
    clock.now_s = 31.0
    shelf.sweep()
    assert len(shelf) == 0


def test_released_readers_serve_whoever_asks_next_and_end_in_time(shelf, clock):
    """Of any attempt, also outside of runs: a new one takes seconds to start."""
    first, _ = shelf.claim(owner("a", 0, run=""), "n", fresh=False)
    shelf.claim(owner("a", 1, run=""), "n", fresh=False)
    shelf.release("a", 0)
    assert shelf.claim(owner("b", 0, run=""), "n", fresh=False)[0] == first
    shelf.release("b", 0)
    clock.now_s = 9.0
    assert shelf.claim(owner("c", 0, run="run"), "n", fresh=False)[0] == first
    shelf.release("c", 0)
    clock.now_s = 20.0
    shelf.sweep()
    assert len(shelf) == 0


def test_a_reader_prepared_before_its_run_is_known_is_found(shelf):
    """Ray Train splits a stream before a worker can name the run; the next group takes the reader over by that name."""
    shelf.prepare(owner("a", 0, run=""), "n", 60.0)
    shelf.prepare(owner("a", 0), "n", 60.0)
    reader, _ = shelf.claim(owner("a", 0), "n", fresh=False)
    assert len(shelf) == 1
    assert shelf.of_attempt("a") == {0: [reader]}
    assert shelf.claim(owner("b", 3), "n", fresh=False)[0] == reader


def test_a_prepared_reader_waits_while_its_worker_loads_a_model(shelf, clock):
    shelf.prepare(owner("a", 0), "n", 60.0)
    clock.now_s = 55.0
    shelf.touch("a", 0)
    shelf.sweep()
    assert len(shelf) == 1
    clock.now_s = 66.0
    shelf.sweep()
    assert len(shelf) == 0
