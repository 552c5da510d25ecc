"""on_new_version="next_epoch": which version each epoch reads on every rank, whatever happens in between; no Ray.

Positions of ranks and a coordinator without its actor. B38; the rows that come of it: tests/integration/test_snapshots.py.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    StateMismatchError,
    TableError,
    VersionNotFoundError,
    lance_stream,
)
from ray_lance_stream import pin as pin_module
from ray_lance_stream.attempts import Attempt, AttemptBook, PassStart, Turn
from ray_lance_stream.coordinator import StreamCoordinator
from ray_lance_stream.cursor import EpochWalk, Position
from ray_lance_stream.epoch_versions import EpochVersions
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.planner import PlanBook
from ray_lance_stream.restore import StreamPosition
from ray_lance_stream.splits import split_block
from ray_lance_stream.state import StreamState
from tests.fake_ray import without_coordinator

SPLITS = 8


class Kept:
    """Values that outlive a coordinator."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def put_if_absent(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)


def coordinator(kept: Kept) -> StreamCoordinator:
    """One without readers, in this process."""
    made = object.__new__(StreamCoordinator)
    made._lock, made._plans, made._epochs, made._book = Lock(), PlanBook(), EpochVersions(kept), AttemptBook()
    return made


class Run:
    """The ranks of attempts of one stream, and their coordinator."""

    def __init__(self, stream: LanceStream) -> None:
        self.stream = stream
        self.kept = Kept()
        self.coordinator = coordinator(self.kept)
        self._numbers = itertools.count()

    def restart_coordinator(self) -> None:
        self.coordinator = coordinator(self.kept)

    def group(self, world_size: int, state: dict[str, Any] | None = None) -> list[Rank]:
        """A worker group, which starts from a state."""
        attempt = Attempt(str(next(self._numbers)), "run", world_size)
        ranks = [Rank(self, attempt, rank) for rank in range(world_size)]
        for rank in ranks:
            if state is not None:
                rank.position.load(StreamState.from_dict(state))
        return ranks


class Rank:
    """One rank: begins passes, receives rows and is its position's link to the coordinator."""

    def __init__(self, run: Run, attempt: Attempt, rank: int) -> None:
        self._run, self._attempt, self._rank = run, attempt, rank
        plan, config = run.stream._plan, run.stream._config
        self.position = StreamPosition("train", plan, config, attempt.world_size, self)  # type: ignore[arg-type]

    # ---- as CoordinatorLink

    def plan_at(self, *args: Any) -> Any:
        return self._run.coordinator.plan_at(*args)

    def plan_of_epoch(self, epoch: int, plan: Any, first: bool, pinned_as: PinnedAs | None) -> Any:
        return self._run.coordinator.plan_of_epoch(self._attempt.attempt_id, epoch, plan, first, pinned_as)

    def ask_plan_of_epoch(self, epoch: int, plan: Any, pinned_as: PinnedAs | None) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(self.plan_of_epoch(epoch, plan, False, pinned_as))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def agree_on_pass(self, turn: Turn, start: PassStart) -> None:
        assert self._run.coordinator.register_pass(self._attempt, self._rank, turn, start) is None

    def tell(self, state: StreamState, passes: Any) -> None:
        pass

    # ---- what a loop does

    def begin(self) -> int:
        """Begin the next pass; returns the version that it reads."""
        start = self.position.cursor().next_start
        plan = self.position.plan_from(start)
        block = split_block(SPLITS, self._attempt.world_size, self._rank)
        self._walk = EpochWalk(plan.grid, block, start)
        self.position.begin(plan, self._walk, None, False)
        return plan.table.version

    def receive(self, cycles: int | None = None) -> None:
        """Receive some cycles of the running pass, or the rest."""
        rows = self._walk.num_rows if cycles is None else cycles * self._walk.block.size
        self.position.cursor().received(rows)

    def run_epoch(self) -> int:
        version = self.begin()
        self.receive()
        return version

    @property
    def state(self) -> dict[str, Any]:
        return self.position.state().to_dict()

    @property
    def told(self) -> tuple[int, int, int, int]:
        """(epoch, cycle, version, rows) of the state."""
        state = self.state
        return tuple(state[name] for name in ("epoch", "samples_consumed_per_split", "table_version", "num_rows"))  # type: ignore[return-value]


def rows(num_rows: int, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    return pa.table({"id": ids, "value": ids * 3})


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Version 1, of 80 rows: 10 cycles."""
    return lance.write_dataset(rows(80), str(tmp_path / "t.lance")).uri


def grow(path: str, num_rows: int = 16) -> int:
    """The next version, of more rows."""
    return lance.write_dataset(rows(num_rows, 1000), path, mode="append").version


def run_on(path: Any, **options: Any) -> Run:
    return Run(lance_stream(path, **{"num_splits": SPLITS, "on_new_version": "next_epoch", **options}))


# One choice for all ranks


def test_without_it_a_run_stays_on_its_version(path: str) -> None:
    run = run_on(path, on_new_version="stay")
    (rank,) = run.group(1)
    for _ in range(3):
        assert rank.run_epoch() == 1
        grow(path)
    assert run.kept.values == {}


def test_the_first_epoch_reads_the_pinned_version_and_each_later_one_the_newest(path: str) -> None:
    run = run_on(path)
    grow(path)
    (rank,) = run.group(1)
    assert rank.begin() == 1
    assert grow(path) == 3
    rank.receive()
    assert rank.run_epoch() == 3
    assert rank.run_epoch() == 3
    assert rank.position.plan.order.num_rows == 80 + 2 * 16


def test_a_checked_out_version_is_left_after_the_first_epoch(path: str) -> None:
    grow(path)
    run = Run(lance_stream(lance.dataset(path, version=1), num_splits=SPLITS, on_new_version="next_epoch"))
    (rank,) = run.group(1)
    assert [rank.run_epoch() for _ in range(2)] == [1, 2]


def test_ranks_that_come_to_the_edge_at_different_times_read_the_same_version(path: str) -> None:
    run = run_on(path)
    ranks = run.group(3)
    found: list[list[int]] = [[] for _ in ranks]
    for rank, versions in zip(ranks, found, strict=True):  # one after the other, through all epochs
        for _ in range(4):
            versions.append(rank.run_epoch())
            grow(path)
    assert found == [[1, 2, 3, 4]] * 3


def test_ranks_that_come_to_the_edge_at_once_read_the_same_version(path: str) -> None:
    run = run_on(path)
    ranks = run.group(8)
    start = Barrier(9)

    def go(rank: Rank) -> list[int]:
        versions = []
        for _ in range(3):
            start.wait(20)
            versions.append(rank.run_epoch())
        return versions

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(go, rank) for rank in ranks]
        for _ in range(3):
            start.wait(20)
            grow(path)
        found = {tuple(result.result(30)) for result in results}
    assert len(found) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_restarted_coordinator_tells_late_ranks_what_it_told_the_first(path: str, kept: bool) -> None:
    """With `kept` False the control: what is forgotten is chosen anew, and ranks part."""
    run = run_on(path)
    early, late = run.group(2)
    assert [early.run_epoch(), late.run_epoch()] == [1, 1]
    assert grow(path) == 2
    assert early.begin() == 2
    assert grow(path) == 3
    if not kept:
        run.kept.values.clear()
    run.restart_coordinator()
    assert late.begin() == (2 if kept else 3)
    assert early.position.plan.identity(1).unlike(late.position.plan.identity(1)) == (
        [] if kept else ["table_version", "num_rows", "table_content", "table_files"]
    )


def test_attempts_choose_for_themselves(path: str) -> None:
    run = run_on(path)
    (first,), (second,) = run.group(1), run.group(1)
    assert [first.run_epoch(), second.run_epoch()] == [1, 1]
    grow(path)
    assert first.begin() == 2
    grow(path)
    assert second.begin() == 3


def test_an_epoch_that_comes_again_reads_the_same_version(path: str) -> None:
    run = run_on(path)
    (rank,) = run.group(1)
    versions = []
    for _ in range(4):
        versions.append(rank.run_epoch())
        grow(path)
    for epoch in (1, 3, 0, 2):
        rank.position.cursor().set_epoch(epoch)
        assert rank.run_epoch() == versions[epoch]


# The next epoch is read ahead


def test_what_is_asked_for_ahead_is_what_all_ranks_read(path: str) -> None:
    run = run_on(path)
    ahead, other = run.group(2)
    ahead.begin()
    other.begin()
    grow(path)
    assert ahead.position.plan_ahead(1) is None  # it is asked for now
    found = ahead.position.plan_ahead(1)
    assert found is not None
    grow(path)
    assert ahead.told == (0, 0, 1, 80)  # asking moves nothing
    for rank in (ahead, other):
        rank.receive()
        assert rank.begin() == found.table.version == 2
    assert ahead.position.plan is found  # or what was read ahead would be read again


def test_an_answer_that_has_not_come_is_waited_for_at_the_edge_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(path)
    (rank,) = run.group(1)
    rank.begin()
    pending: list[Future[Any]] = []
    monkeypatch.setattr(rank, "ask_plan_of_epoch", lambda *args: (pending.append(Future()), pending[-1])[1])
    grow(path)
    assert [rank.position.plan_ahead(1) for _ in range(5)] == [None] * 5
    assert len(pending) == 1
    rank.receive()
    assert rank.begin() == 2


def test_what_goes_wrong_ahead_is_told_at_the_edge(path: str) -> None:
    run = run_on(path)
    (rank,) = run.group(1)
    rank.begin()
    lance.dataset(path).delete("id >= 3")
    assert [rank.position.plan_ahead(1) for _ in range(3)] == [None] * 3
    rank.receive()
    assert rank.told == (1, 0, 1, 80)
    with pytest.raises(ConfigError, match="3 rows for num_splits=8"):
        rank.begin()


# States


def test_states_name_the_version_of_the_last_row_received(path: str) -> None:
    """At the edge the one of the epoch that is done, on all ranks alike: whether or not they know of the next one."""
    run = run_on(path)
    first, asked, last = run.group(3)
    for rank in (first, asked, last):
        assert rank.told == (0, 0, 1, 80)
        rank.begin()
        rank.receive(4)
        assert rank.told == (0, 4, 1, 80)
    grow(path)
    assert [asked.position.plan_ahead(1) is None for _ in range(2)] == [True, False]
    for rank in (first, asked, last):
        rank.receive(6)
    assert first.begin() == 2
    assert first.state == asked.state == last.state  # begun, asked for ahead, neither
    assert first.told == (1, 0, 1, 80)
    for rank in (asked, last):
        rank.begin()
        assert rank.state == first.state
    for rank in (first, asked, last):
        rank.receive(1)
        assert rank.told == (1, 1, 2, 96)
        rank.receive(11)
        assert rank.told == (2, 0, 2, 96)


@pytest.mark.parametrize("then", ["leave", "set_epoch"])
def test_states_of_a_pass_that_is_left(path: str, then: str) -> None:
    run = run_on(path)
    (rank,) = run.group(1)
    rank.run_epoch()
    grow(path)
    rank.begin()
    rank.receive(3)
    if then == "leave":
        rank.position.cursor().leave()
        assert rank.told == (1, 3, 2, 96)
    else:
        rank.position.cursor().set_epoch(7)
        assert rank.told == (7, 0, 2, 96)
    grow(path)
    assert rank.begin() == 3
    assert rank.told[1:] == (0, 2, 96)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_that_resumes_inside_an_epoch_reads_its_version_to_the_end(path: str, world_size: int) -> None:
    run = run_on(path)
    first, _ = run.group(2)
    first.run_epoch()
    grow(path)
    first.begin()
    first.receive(5)
    state = first.state
    grow(path)
    again = run_on(path)  # a new driver, whose stream pins version 3
    assert again.stream._plan.table.version == 3
    for ranks in (run.group(world_size, state), again.group(world_size, state)):
        for rank in ranks:
            assert rank.state == state
            assert rank.begin() == 2
            assert rank.position.cursor().next_start == Position(1, 5)  # no row of it is received
            rank.receive(7)
            assert rank.told == (2, 0, 2, 96)
            assert rank.begin() == 3
            for epoch in range(5, 9):
                rank.position.cursor().set_epoch(epoch)
                assert rank.run_epoch() == 3
            rank.position.cursor().set_epoch(1)
            assert rank.begin() == 2  # the epoch that it came into


def test_a_run_that_resumes_at_the_edge_takes_up_the_newest_version(path: str) -> None:
    """The one before is done with, and need not be there any more."""
    run = run_on(path)
    (rank,) = run.group(1)
    rank.run_epoch()
    state = rank.state
    assert rank.told == (1, 0, 1, 80)
    grow(path)
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    again = run_on(path)
    for each in again.group(2, state):
        assert each.state == state
        assert each.begin() == 2
    resumed = run_on(path, resume_from=state)
    assert resumed.stream._plan.table.version == 2
    (each,) = resumed.group(1)
    assert each.state == state
    assert each.run_epoch() == 2
    with pytest.raises(VersionNotFoundError, match=r"version 1 of table .*t\.lance.*tag"):
        run_on(path, on_new_version="stay", resume_from=state)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_worker_group_that_starts_again_at_an_edge_goes_on_past_the_pinned_version(
    path: str, world_size: int
) -> None:
    """The version that the driver pinned is older than the recorded one by then."""
    run = run_on(path)
    (rank,) = run.group(1)
    rank.run_epoch()
    grow(path)
    rank.run_epoch()
    state = rank.state
    assert rank.told == (2, 0, 2, 96)
    for newest in (2, 3):
        for again in run.group(world_size, state):
            assert again.state == state
            assert again.run_epoch() == newest
        grow(path)
    resumed = run_on(lance.dataset(path, version=1), resume_from=state)
    assert resumed.group(1)[0].run_epoch() == 4


def test_a_run_may_change_its_mind(path: str) -> None:
    run = run_on(path)
    (rank,) = run.group(1)
    rank.run_epoch()
    state = rank.state
    grow(path)
    (staying,) = run_on(path, on_new_version="stay").group(1, state)
    assert [staying.run_epoch(), staying.run_epoch()] == [1, 1]
    (moving,) = run_on(path).group(1, staying.state)
    assert moving.run_epoch() == 2


# What cannot be served


def shrink(path: str) -> None:
    lance.dataset(path).delete("id >= 5")


def drop_column(path: str) -> None:
    lance.dataset(path).drop_columns(["value"])


def rename_column(path: str) -> None:
    lance.dataset(path).alter_columns({"path": "value", "name": "worth"})


def make_anew(path: str) -> None:
    lance.LanceDataset.drop(path)
    lance.write_dataset(rows(80), path)


BROKEN: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "fewer rows than splits": (shrink, {}, ConfigError, r"5 rows for num_splits=8.*use num_splits <= 5"),
    "no rows": (lambda path: lance.dataset(path).delete("true"), {}, ConfigError, "has none"),
    "no rows that match": (shrink, {"filter": "id >= 5"}, ConfigError, "that matches filter='id >= 5'"),
    "no column": (drop_column, {"columns": ["id", "value"]}, ConfigError, r"unknown \['value'\].*available are \['id'"),
    "one of all columns": (drop_column, {}, ConfigError, r"unknown \['value'\]"),
    "another name": (rename_column, {}, ConfigError, r"unknown \['value'\]"),
    "no column to filter by": (
        drop_column,
        {"columns": ["id"], "filter": "value > 3"},
        ConfigError,
        "No field named value",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_version_that_cannot_be_served_is_refused_at_the_edge_on_all_ranks_alike(path: str, case: str) -> None:
    change, options, kind, text = BROKEN[case]
    run = run_on(path, **options)
    ranks = run.group(2)
    for rank in ranks:
        rank.begin()
    change(path)
    told = []
    for rank in ranks:
        rank.receive(4)
        before = rank.state
        rank.receive()
        assert rank.state["epoch"] == 1
        with pytest.raises(kind, match=rf"(?s)^epoch 1 takes up version 2 of table {path}.*{text}.*'stay'") as error:
            rank.begin()
        told.append(str(error.value))
        assert rank.told[:3] == (1, 0, 1)
        assert before["table_version"] == 1
        lance.write_dataset(rows(80), path, mode="overwrite")
    assert told[0] == told[1]  # although the table was mended in between


def test_a_table_that_was_made_anew_is_told(path: str) -> None:
    grow(path)
    run = run_on(path)
    (rank,) = run.group(1)
    rank.begin()
    rank.receive()
    make_anew(path)
    with pytest.raises(TableError, match=rf"table {path} was made anew: its newest version is 1, below the version 2"):
        rank.begin()


def test_a_table_that_was_made_anew_before_a_resume_is_told(path: str) -> None:
    grow(path)
    (rank,) = run_on(path).group(1)
    rank.run_epoch()
    assert rank.told == (1, 0, 2, 96)
    make_anew(path)
    with pytest.raises(StateMismatchError, match=r"table_version: saved 2, current 1.*made anew"):
        run_on(path).group(1, rank.state)


def test_a_table_that_was_made_anew_is_taken_where_that_is_allowed(path: str) -> None:
    grow(path)
    (rank,) = run_on(path).group(1)
    rank.run_epoch()
    make_anew(path)
    (again,) = run_on(path, allow_moved=True).group(1, rank.state)
    assert again.state == rank.state
    assert again.run_epoch() == 1
    assert again.told == (2, 0, 1, 80)


@pytest.mark.parametrize("place", ["driver", "worker"])
def test_a_moved_table_takes_up_its_newest_version_at_an_edge(
    path: str, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Written anew there, and grown: the recorded version, which is read to its end, is nowhere in it."""
    for _ in range(2):
        grow(path)
    (rank,) = run_on(path).group(1)
    rank.run_epoch()
    assert rank.told == (1, 0, 3, 112)
    other = lance.write_dataset(rows(200), str(tmp_path / "other.lance")).uri
    with pytest.raises(StateMismatchError, match="table_uri"):
        run_on(other).group(1, rank.state)
    if place == "driver":
        (again,) = run_on(other, allow_moved=True, resume_from=rank.state).group(1)
    else:
        (again,) = run_on(other, allow_moved=True).group(1, rank.state)
    assert again.position.cursor().where[0] == Position(1)
    grow(other)
    assert again.run_epoch() == 2
    assert again.told == (2, 0, 2, 216)
    assert f"{path}, was moved: epoch 1 takes up the newest version of {other}" in caplog.text


def test_the_list_of_an_epoch_that_is_over_is_not_looked_for_in_a_moved_table(path: str, tmp_path: Path) -> None:
    (rank,) = run_on(path, order="lancedb").group(1)
    rank.run_epoch()
    state = {**rank.state, "listed": {"epoch": 0, "fingerprint": "of 80 rows", "made_by": "lancedb"}}
    other = lance.write_dataset(rows(96), str(tmp_path / "other.lance")).uri
    (again,) = run_on(other, order="lancedb", allow_moved=True).group(1, state)
    assert again.begin() == 1
    with pytest.raises(AttributeError, match="row_list"):  # where that epoch is what is read, it would be asked for
        run_on(path, order="lancedb").group(1, {**state, "epoch": 0, "samples_consumed_per_split": 3})


def test_columns_that_are_new_come_where_none_are_named(path: str) -> None:
    named, every = run_on(path, columns=["id"]).group(1)[0], run_on(path).group(1)[0]
    for rank in (named, every):
        rank.run_epoch()
    lance.dataset(path).add_columns({"twice": "id * 2"})
    for rank, columns in ((named, ("id",)), (every, ("id", "value", "twice"))):
        assert rank.run_epoch() == 2
        assert rank.position.plan.columns == columns


def test_a_filter_is_matched_anew(path: str) -> None:
    run = run_on(path, filter="id % 2 = 0")
    (rank,) = run.group(1)
    rank.run_epoch()
    assert rank.told == (1, 0, 1, 40)
    grow(path)
    rank.begin()
    rank.receive(1)
    assert rank.told == (1, 1, 2, 48)
    assert rank.position.plan.resolve().matched.tolist() == list(range(0, 96, 2))  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["next", "", None, True])
def test_other_words_are_refused(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match='on_new_version must be "stay" or "next_epoch", got'):
        run_on(path, on_new_version=value)


def test_shards_that_know_nothing_of_each_other_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would choose for itself, and ranks could take another number of steps."""
    without_coordinator(monkeypatch)
    stream = run_on(path).stream
    for make in (stream.iterator, lambda: stream.shard(1, 2)):
        with pytest.raises(
            ConfigError, match=r"all ranks must take up the same versions.*or use on_new_version='stay'"
        ):
            make()
    assert len(stream.streaming_split(3)) == 3
    stream.shard()


def test_the_batches_of_the_next_pass_are_counted_in_its_version(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_coordinator(monkeypatch)
    run = run_on(path, global_batch_size=8)
    monkeypatch.setattr(
        CoordinatorLink, "plan_of_epoch", lambda _, *args: run.coordinator.plan_of_epoch("attempt", *args)
    )
    monkeypatch.setattr(CoordinatorLink, "agree_on_pass", lambda *args: None)
    shard = run.stream.shard()
    assert shard.num_batches() == 10
    start = Position(0)
    walk = EpochWalk(run.stream._plan.grid, shard._share.block, start)
    shard._position.begin(shard._position.plan_from(start), walk, 8, False)
    shard._position.cursor().received(8)
    grow(path)
    assert (shard.num_rows, shard.num_batches()) == (80, 12)  # of the running epoch; of the next pass


# Versions that are taken up are kept where the stream is pinned


@pytest.fixture
def tags(path: str) -> Any:
    return lambda: {name: tag["version"] for name, tag in lance.dataset(path).tags.list().items()}


def test_versions_that_epochs_take_up_are_tagged_until_the_run_ends(path: str, tags: Any) -> None:
    run = run_on(path)
    with run.stream.pin("run-1"):
        (rank,) = run.group(1)
        for _ in range(2):
            rank.run_epoch()
            grow(path)
        rank.begin()
        rank.receive(2)
        assert tags() == {"run-1": 1, "run-1-v2": 2, "run-1-v3": 3}
        lance.dataset(path).cleanup_old_versions(
            older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
        )
        (again,) = run_on(path).group(1, rank.state)
        assert again.begin() == 3
    assert tags() == {}


def test_a_recorded_version_is_tagged_as_it_is_resumed(path: str, tags: Any) -> None:
    (rank,) = run_on(path).group(1)
    rank.begin()
    rank.receive(2)
    grow(path)
    run = run_on(path, on_new_version="stay")
    with run.stream.pin("again"):
        with ThreadPoolExecutor(8) as pool:  # ranks load at once
            groups = list(pool.map(lambda _: run.group(1, rank.state), range(8)))
        assert [resumed.begin() for (resumed,) in groups] == [1] * 8
        assert tags() == {"again": 2, "again-v1": 1}
    assert tags() == {}


@pytest.mark.parametrize("at_the_edge", [["early"], ["early", "rank"], ["rank", "early"]], ids=", ".join)
def test_a_run_that_was_thought_dead_takes_no_tag_back(path: str, tags: Any, at_the_edge: list[str]) -> None:
    first, second = run_on(path), run_on(path)
    late = first.stream.pin("run-1")
    (early,) = first.group(1)
    pin = second.stream.pin("run-1")
    (rank,) = second.group(1)
    for each in (early, rank):
        each.run_epoch()
    grow(path)
    for name in at_the_edge:
        assert {"early": early, "rank": rank}[name].begin() == 2
        assert tags() == {"run-1": 1, "run-1-v2": 2}
    late.close()
    assert tags() == {"run-1": 1, **({"run-1-v2": 2} if "rank" in at_the_edge else {})}  # what the second one reads
    pin.close()
    assert tags() == {}


def test_versions_that_are_taken_up_after_the_end_of_a_pin_get_no_tag(
    path: str, tags: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_on(path)
    with run.stream.pin("run-1"):
        (rank,) = run.group(1)
        rank.run_epoch()
        grow(path)
    assert rank.begin() == 2  # of a worker that knows of the pin
    assert tags() == {}
    assert f"version 2 of table {path} is not kept: tag 'run-1' is gone" in caplog.text
    assert run.stream._config.pinned_as is None


@pytest.mark.parametrize("when", ["before the mark", "after the mark", "as it is let go", "as the pin closes"])
def test_a_version_that_is_taken_up_while_the_pin_is_closed_keeps_no_tag(
    path: str, tags: Any, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on(path)
    pin = run.stream.pin("run-1")
    (rank,) = run.group(1)
    rank.run_epoch()
    grow(path)
    mark, delete, closed = PinnedAs._mark, pin_module._delete, []

    def marking(self: PinnedAs, *args: Any) -> None:
        if when in ("before the mark", "as it is let go"):
            pin.close()
        mark(self, *args)
        if when == "after the mark":
            pin.close()

    def deleting(table: Any, dataset: Any, name: str) -> None:
        if when == "as it is let go" and name == "run-1-v2" and not closed:
            closed.append(name)
            pin.close()
        if when == "as the pin closes" and name == "run-1":
            assert rank.begin() == 2
        delete(table, dataset, name)

    monkeypatch.setattr(PinnedAs, "_mark", marking)
    monkeypatch.setattr(pin_module, "_delete", deleting)
    if when == "as the pin closes":
        pin.close()
    else:
        assert rank.begin() == 2
    assert tags() == {}
