"""RunBook: the split blocks and positions of the ranks of each run, and what of it outlives the coordinator."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from ray_lance_stream import ConfigError, lance_stream
from ray_lance_stream.attempts import Attempt, RankProgress
from ray_lance_stream.meter import Tally
from ray_lance_stream.runs import KEPT_GROUPS, RunBook
from ray_lance_stream.splits import SplitBlock
from tests.fake_ray import Cluster
from tests.support import make_table
from tests.unit.test_state import STATE

SPLITS = STATE.identity.num_splits


def told(samples: int) -> RankProgress:
    return RankProgress(replace(STATE, samples_consumed_per_split=samples), Tally(rows=10, elapsed_s=1.0))


def group(name: str, world_size: int, run: str = "") -> Attempt:
    return Attempt(name, run, world_size, split_for_train=True)


def samples(book: RunBook, run: str | None = None) -> int | None:
    state = book.snapshot(run).state
    return None if state is None else state.samples_consumed_per_split


def restarted(book: RunBook, store: dict[str, str]) -> RunBook:
    for key, value in book.changes().items():
        if value is None:
            del store[key]
        else:
            store[key] = value
    after = RunBook()
    after.restore(store.values())
    return after


def test_blocks_are_known_before_any_rank_reports():
    book = RunBook()
    assert book.assign(group("a", 2), 12, nodes=("n", "m")) is None
    found = book.snapshot(None)
    assert found.attempt_ids == ("a",)
    assert {r: (v.split_block, v.node, v.state) for r, v in found.ranks.items()} == {
        0: (SplitBlock(0, 6), "n", None),
        1: (SplitBlock(6, 12), "m", None),
    }
    with pytest.raises(ConfigError, match="13 workers for num_splits=12"):
        book.assign(group("b", 13), 12)


def test_a_run_that_goes_on_with_other_workers_is_told_once():
    book = RunBook()
    assert book.assign(group("a", 4), 48, copy_id="one") is None
    assert book.arrive(group("a", 4, "run"), 0, "n") is None
    assert book.assign(group("x", 3), 48, copy_id="two") is None  # another run
    assert str(book.assign(group("b", 2), 48, copy_id="one")) == "48 splits: 4 workers -> 2"
    assert book.name_of("b") == "run"
    assert book.record(group("b", 2, "run"), 0, told(5)) is None
    assert book.assign(group("c", 2), 48, copy_id="one") is None


def test_a_run_that_is_begun_again_is_known_by_its_name():
    book = RunBook()
    book.assign(group("a", 4), 48, copy_id="one")
    book.record(group("a", 4, "run"), 0, told(5))
    assert book.assign(group("b", 3), 48, copy_id="two") is None
    assert str(book.arrive(group("b", 3, "run"), 1, "n")) == "48 splits: 4 workers -> 3"
    assert book.arrive(group("b", 3, "run"), 0, "n") is None
    assert samples(book) == 5  # until it reports
    book.record(group("b", 3, "run"), 0, told(6))
    assert samples(book) == 6


def test_the_newest_group_stands_for_its_run():
    book = RunBook()
    for name, world, run, at in (("a", 2, "one", 5), ("b", 1, "two", 9), ("c", 3, "one", 6)):
        book.assign(group(name, world), SPLITS)
        book.record(group(name, world, run), world - 1, told(at))
    assert book.snapshot(None).runs == ("one", "two")
    assert book.snapshot(None).ranks == {}
    assert samples(book, "one") == 6
    assert [v.state is not None for v in book.snapshot("one").ranks.values()] == [False, False, True]
    assert book.snapshot("three").ranks == {}


def test_shards_outside_of_a_run_do_not_hide_the_only_run():
    book = RunBook()
    book.assign(Attempt("a", "", 1), SPLITS, ranks=(0,))
    book.record(Attempt("a", "", 1), 0, told(1))
    assert book.snapshot(None).runs == ("",)
    book.assign(group("b", 1), SPLITS)
    book.record(group("b", 1, "one"), 0, told(2))
    book.assign(Attempt("c", "", 1), SPLITS, ranks=(0,))
    assert book.snapshot(None).runs == ("one",)
    assert samples(book) == 2


def test_what_is_kept_outlives_the_coordinator_and_ranks_correct_it():
    book, store = RunBook(), {}
    book.assign(group("a", 2), SPLITS, nodes=("n", "m"), copy_id="one")
    book.record(group("a", 2, "run"), 0, told(10))
    book.record(group("a", 2, "run"), 1, told(8))
    before = book.snapshot(None)
    book = restarted(book, store)
    after = book.snapshot(None)
    assert (after.runs, after.attempt_ids, after.state) == (before.runs, ("a",), before.state)
    assert {r: (v.split_block, v.node) for r, v in after.ranks.items()} == {
        r: (v.split_block, v.node) for r, v in before.ranks.items()
    }
    book.record(group("a", 2, "run"), 0, told(10))
    assert samples(book) == 8  # the other one has not reported yet
    book.record(group("a", 2, "run"), 1, told(9))
    assert samples(book) == 9
    assert book.assign(group("b", 3), SPLITS, copy_id="one") is not None
    book.record(group("b", 3, "run"), 2, told(10))
    book = restarted(book, store)
    assert list(store) == ["b"]  # the older group is over
    assert samples(book) == 10


def test_a_group_that_was_not_kept_comes_back_with_the_first_report():
    book = RunBook()
    assert book.arrive(group("a", 2, "run"), 1, "n") is None
    book.record(group("a", 2, "run"), 1, told(7))
    assert [v.split_block.size for v in book.snapshot("run").ranks.values()] == [SPLITS // 2] * 2


def test_only_what_has_changed_is_written():
    book = RunBook()
    book.assign(group("a", 1), SPLITS)
    assert list(book.changes()) == ["a"]
    assert book.changes() == {}
    for at in range(5):
        book.record(group("a", 1, "run"), 0, told(at))
    assert list(book.changes()) == ["a"]
    assert book.changes() == {}


def test_groups_that_were_not_heard_of_for_longest_are_forgotten():
    book = RunBook()
    book.assign(group("first", 1), SPLITS)
    for number in range(KEPT_GROUPS + 5):
        book.assign(group(str(number), 1), SPLITS)
        book.record(group("first", 1, "first"), 0, told(1))
        book.changes()
    assert samples(book, "first") == 1
    assert ("0",) not in {book.snapshot(run).attempt_ids for run in book.snapshot(None).runs}


# The coordinator


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_killed_coordinator_answers_as_before(fake: Cluster, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    stream = lance_stream(make_table(tmp_path / "t", 480), num_splits=48)
    stream.set_name("train")
    stream.streaming_split(4)
    first, second = stream.streaming_split(2, locality_hints=["node", "elsewhere"])
    assert "stream 'train': 48 splits: 4 workers -> 2" in caplog.text
    assert [(p["split_block"], p["node"]) for p in stream.progress().values()] == [
        ((0, 24), "node"),
        ((24, 48), "elsewhere"),
    ]
    assert None not in {p["reader"] for p in stream.progress().values()}
    for shard in (first, second):
        for number, _ in enumerate(shard.iter_batches(batch_size=24, prefetch_batches=0)):
            if number == 1:
                break
    assert stream.state_dict()["samples_consumed_per_split"] == 2
    fake.kill_coordinators()
    assert stream.state_dict()["samples_consumed_per_split"] == 2
    assert [p["split_block"] for p in stream.progress().values()] == [(0, 24), (24, 48)]
    puts = fake.store.num_puts
    for shard in (first, second):
        for _ in shard.iter_batches(batch_size=24, prefetch_batches=0):
            break
    fake.coordinators[0].instance.keep_runs()
    fake.coordinators[0].instance.keep_runs()
    assert fake.store.num_puts == puts + 1
    assert stream.state_dict()["epoch"] == 1


def test_hints_for_another_number_of_ranks_are_refused(fake: Cluster, tmp_path):
    stream = lance_stream(make_table(tmp_path / "t", 48), num_splits=48)
    with pytest.raises(ConfigError, match="locality_hints must name a node for each of 2 ranks, got 1"):
        stream.streaming_split(2, locality_hints=["node"])


def test_shards_made_one_by_one_are_shown_as_one_world():
    book = RunBook()

    def record(attempt_id: str, world: int, rank: int, samples: int, group: str = "g") -> dict[int, int]:
        book.record(Attempt(attempt_id, "", world, group=group), rank, told(samples))
        found = book.snapshot(None)
        return {r: view.state.samples_consumed_per_split for r, view in found.ranks.items() if view.state}

    assert record("a", 2, 0, 5) == {0: 5}
    assert record("b", 2, 1, 7) == {0: 5, 1: 7}
    assert record("c", 2, 1, 3) == {0: 5, 1: 3}, "the newest of a rank"
    assert book.snapshot(None).state.samples_consumed_per_split == 3
    assert record("d", 3, 2, 1) == {2: 1}, "of the newest world size"
    assert record("e", 3, 0, 1, group="other") == {0: 1}
