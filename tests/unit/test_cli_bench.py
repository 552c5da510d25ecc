"""What `bench` tries, how it takes turns, and what it recommends from which figures. Without Ray."""

from __future__ import annotations

import time

import lance
import numpy as np
import pytest

from ray_lance_stream import lance_stream
from ray_lance_stream.cli.bench import changed, recommendations, settings
from ray_lance_stream.cli.trials import ROUNDS, BareTake, Trial, run_rounds
from tests.support import make_table

CLUMP, READERS, LESS = {"shuffle_clump_size": 64}, {"readers_per_worker": 2}, {"prefetch_bytes": 2**25}
MORE = {"read_batch_size": 8, "prefetch_bytes": 2**29}


def measured(options, *rates):
    return Trial(", ".join(options), options, lambda *_: 0.0, list(rates))


def advised(*tried):
    found = recommendations([measured({}, 100.0, 110.0, 90.0), measured({}, 150.0), *tried])
    return [each["options"] for each in found]


def test_settings_are_recommended_for_a_gain_in_every_round():
    assert advised(measured(READERS, 120.0, 130.0, 100.0)) == [READERS]
    assert advised(measured(READERS, 105.0, 115.0, 95.0)) == [{}]  # too little
    assert advised(measured(READERS, 200.0, 200.0, 89.0)) == [{}]  # noise: less in one round
    assert advised(measured(READERS, 200.0), measured(MORE)) == [{}]  # one round says little, and none nothing
    assert advised(measured(MORE, 200.0, 200.0, 200.0), measured(READERS, 130.0, 130.0, 130.0)) == [MORE, READERS]


def test_the_smallest_clump_near_the_best_is_recommended():
    clumps = {c: {"shuffle_clump_size": c} for c in (16, 64, 256)}
    rates = {16: 150.0, 64: 380.0, 256: 400.0}
    assert advised(*(measured(clumps[c], *[rates[c]] * 3) for c in rates)) == [clumps[64]]


def test_less_memory_is_recommended_where_it_costs_nothing():
    assert advised(measured(LESS, 98.0, 107.0, 90.0)) == [LESS]
    assert advised(measured(LESS, 90.0, 100.0, 80.0)) == [{}]
    # Not beside a gain of more memory.
    assert advised(measured(LESS, 100.0, 110.0, 90.0), measured(MORE, 200.0, 200.0, 200.0)) == [MORE]


def test_turns_go_forwards_and_backwards_and_only_the_first_two_share_an_epoch():
    calls = []
    trials = [Trial(name, {}, lambda epoch, _, name=name: calls.append((name, epoch)) or 1.0) for name in "abcd"]
    assert run_rounds(trials, 60, 7, lambda _: None)[0] == ROUNDS
    assert [name for name, _ in calls] == list("abcd" + "abcddcbaabcd")  # the first ones warm up and do not count
    assert all(len(trial.rates) == ROUNDS for trial in trials)
    epochs = {(name, index // 4): epoch for index, (name, epoch) in enumerate(calls[4:])}
    for number in range(ROUNDS):
        assert epochs["a", number] == epochs["b", number]
    assert len(set(epochs.values())) == 3 * ROUNDS
    assert {epoch for _, epoch in calls[:4]} == {7}
    assert min(epochs.values()) == 8


def test_no_turn_begins_when_time_is_up_but_the_first_two():
    def slow(*_):
        time.sleep(0.3)
        return 1.0

    trials = [Trial(name, {}, slow) for name in "abcd"]
    rounds, turn_s = run_rounds(trials, 0.2, 0, lambda _: None)
    assert [len(trial.rates) for trial in trials] == [1, 1, 0, 0]
    assert (rounds, turn_s) == (1, pytest.approx(0.2 / 14))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("bench") / "t", 6500)


def test_what_is_tried(table):
    stream = lance_stream(table, num_splits=5, prefetch_bytes=6000)
    cycles = stream.plan.chunk_bytes // (5 * stream.plan.row_bytes)
    assert settings(stream) == [
        {"shuffle_clump_size": 16},
        {"shuffle_clump_size": 64},
        {"prefetch_bytes": 1500},
        {"read_batch_size": 4 * cycles, "prefetch_bytes": 24000},
        {"readers_per_worker": 2},
    ]
    plain = lance_stream(table, num_splits=5, shuffle=False, read_batch_size=3, readers_per_worker=2)
    assert settings(plain) == [{"readers_per_worker": 4}]
    # A chunk that holds the epoch cannot be larger.
    assert {"read_batch_size"} not in [
        set(each) - {"prefetch_bytes"} for each in settings(lance_stream(table, num_splits=5))
    ]


def test_a_changed_stream_differs_in_the_settings_alone(table):
    given = lance_stream(table, num_splits=10, filter="id % 2 = 0", shuffle_seed=3, prefetch_chunks=3)
    for options in settings(given):
        made = lance_stream(table, num_splits=10, filter="id % 2 = 0", shuffle_seed=3, prefetch_chunks=3, **options)
        found = changed(given, options)
        assert (found.plan, found._config, found._plan.order) == (made.plan, made._config, made._plan.order)
        assert found._plan.matched is given._plan.matched  # the filter is not scanned again


def test_bare_take_reads_the_rows_of_the_epoch(table, monkeypatch):
    stream = lance_stream(table, num_splits=10, columns=["id"])
    take = BareTake(stream, chunk_rows=105)
    assert take.rows_at_a_time == 100
    chunks = take._chunks(3)
    assert all(chunk == sorted(chunk) for chunk in chunks)
    assert [len(chunk) for chunk in chunks] == [100] * 65
    for step in (0, 17):
        assert chunks[step] == np.sort(stream.row_ids(3, step, global_batch_size=100)).tolist()
    taken = []
    dataset = lance.dataset(table)

    class Spy:
        def take(self, rows, columns):
            taken.append((rows, columns))
            return dataset.take(rows, columns=columns)

    monkeypatch.setattr(type(stream._plan.table), "open", lambda self: Spy())
    assert take.rate(3, 0.01) > 0
    assert len(taken) >= take.threads
    assert all(rows in chunks and columns == ["id"] for rows, columns in taken)
