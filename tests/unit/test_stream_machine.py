"""Streams against a model, whatever happens in whatever order: iterate, break, save, load, resize, kill, set_epoch.

The model is the plan of one worker, over rows that a plain scan found. What runs is the library, on `tests.fake_ray`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ray_lance_stream import (
    ConfigError,
    IterationError,
    LanceStream,
    ReadError,
    StreamShard,
    lance_stream,
    link,
    merge_state_dicts,
    rank_passes,
)
from ray_lance_stream.splits import split_block
from ray_lance_stream.window import MAX_ATTEMPTS
from tests.fake_ray import Cluster
from tests.support import Oracle, make_table, scan_ids

pytestmark = [pytest.mark.timeout(1200), pytest.mark.faults]

SKIPPED = {0: {2, 3}, 1: {0}}  # epoch -> steps
ROWS = 113
RUNS = 100


@dataclass(frozen=True)
class Kind:
    """A stream, and what its oracle has to know."""

    options: dict[str, Any]
    worlds: tuple[int, ...]
    skipped: dict[int, set[int]] = field(default_factory=dict)

    def make(self, path: str) -> LanceStream:
        """The stream."""
        stream = lance_stream(path, **self.options)
        for epoch, steps in self.skipped.items():
            for step in steps:
                stream = stream.skip(epoch=epoch, steps=range(step, step + 1))
        return stream

    def oracle(self, path: str) -> Oracle:
        """The ids of each cycle."""
        return Oracle(
            scan_ids(path, self.options.get("filter")),
            self.num_splits,
            1,
            clump=self.options.get("shuffle_clump_size"),
            drop_remainder=self.options.get("drop_remainder", True),
        )

    @property
    def num_splits(self) -> int:
        """S."""
        return self.options["num_splits"]

    @property
    def replicas(self) -> int:
        """Ranks that share their rows."""
        return self.options.get("replicas", 1)

    def cycles_skipped(self, epoch: int) -> set[int]:
        """Those of the steps."""
        m = self.options.get("global_batch_size", 0) // self.num_splits
        return {step * m + i for step in self.skipped.get(epoch, ()) for i in range(m)}


KINDS = [
    Kind({"num_splits": 12, "global_batch_size": 24}, (1, 2, 3, 4, 5)),
    Kind({"num_splits": 12, "filter": "id % 3 <> 0", "shuffle_clump_size": 4, "read_batch_size": 2}, (1, 2, 4)),
    Kind({"num_splits": 6, "drop_remainder": False, "read_batch_size": 3, "readers_per_worker": 2}, (1, 2, 4)),
    Kind({"num_splits": 12, "global_batch_size": 24, "read_batch_size": 1}, (1, 3, 5), SKIPPED),
    Kind({"num_splits": 6, "replicas": 2, "prefetch_chunks": 2, "read_batch_size": 2}, (2, 4, 6)),
]
Place = tuple[int, int, int]  # epoch, cycle, rows of the open cycle
Epochs = Callable[[int], list[np.ndarray]]  # the ids of each cycle of an epoch


class Rank:
    """What one rank is to receive: the table of docs/design.md, Passes, written down once more."""

    def __init__(self, kind: Kind, epochs: Epochs, world: int, rank: int, place: Place) -> None:
        self.block = split_block(kind.num_splits, world // kind.replicas, rank // kind.replicas)
        self._kind, self._epochs = kind, epochs
        self.place = place
        self.phase = "open"
        self.rows: list[tuple[int, int]] = []  # (cycle, id) of the running pass
        self.start = place
        self.got = 0
        self.batch_size: int | None = None
        self.in_blocks = False

    def rows_from(self, place: Place, batch_size: int | None = None, drop_last: bool = False) -> list[tuple[int, int]]:
        epoch, first, partial = place
        lo, hi = self.block.lo, self.block.hi
        skipped = self._kind.cycles_skipped(epoch)
        ids = self._epochs(epoch)
        cycles = [c for c in range(first, len(ids)) if c not in skipped]
        rows = [(c, int(i)) for c in cycles for i in ids[c][lo:hi]]
        if cycles and cycles[0] == first:
            rows = rows[partial:]
        return rows[: len(rows) - len(rows) % batch_size] if drop_last and batch_size else rows

    @property
    def next_start(self) -> Place:
        return self.place if self.phase == "open" or not self.got else (self.place[0] + 1, 0, 0)

    def begin(self, batch_size: int | None, drop_last: bool) -> None:
        self.start = self.place = self.next_start
        self.rows, self.got, self.phase = self.rows_from(self.start, batch_size, drop_last), 0, "live"
        if not self.rows:
            self.place = (self.start[0] + 1, 0, 0)

    def receive(self, ids: list[int]) -> None:
        assert ids == [i for _, i in self.rows[self.got : self.got + len(ids)]]
        assert ids
        self.got += len(ids)
        if self.got == len(self.rows):
            self.place, self.phase = (self.start[0] + 1, 0, 0), "open"
            return
        cycle = self.rows[self.got - 1][0]
        open_rows = sum(c == cycle for c, _ in self.rows[: self.got]) + (self.start[2] if cycle == self.start[1] else 0)
        is_whole = self.rows[self.got][0] != cycle
        self.place = (self.start[0], cycle + 1, 0) if is_whole else (self.start[0], cycle, open_rows)

    def leave(self) -> None:
        if self.phase == "live":
            self.phase = "left" if self.got else "open"

    def set_epoch(self, epoch: int, restart: bool = False) -> None:
        if self.phase != "open" or self.place[0] != epoch or restart:
            self.place, self.phase = (epoch, 0, 0), "open"


@dataclass
class Form:
    """How a pass delivers."""

    name: str
    batch_size: int | None = None
    drop_last: bool = False
    prefetch: int = 0


def deliver(shard: StreamShard, form: Form) -> Iterator[list[int]]:
    """The ids of each batch, row or block."""
    if form.name == "rows":
        return ([row["id"]] for row in shard.iter_rows())
    if form.name == "blocks":
        bundles, _, _ = shard._to_ref_bundle_iterator()
        return (bundle.blocks[0].ref.get()["id"].to_pylist() for bundle in bundles)
    size = {} if form.batch_size is None else {"batch_size": form.batch_size}
    batches = iter(shard.iter_batches(**size, drop_last=form.drop_last, prefetch_batches=form.prefetch))
    return _ids(batches)


def _ids(batches: Any) -> Iterator[list[int]]:
    try:
        for batch in batches:
            yield batch["id"].tolist()
    finally:
        batches.close()


@dataclass(frozen=True)
class Saved:
    """A state as text, and what it means."""

    text: str
    place: Place
    data_world: int


class Streams(RuleBasedStateMachine):
    """One stream at a time, on a group of ranks that all do the same."""

    cluster: Cluster
    path: str
    saves = Bundle("saves")

    @initialize(number=st.integers(0, len(KINDS) - 1), turn=st.integers(0, 9))
    def start(self, number: int, turn: int) -> None:
        self.cluster.forget()
        self.kind = KINDS[number]
        oracle = self.kind.oracle(self.path)
        self.epochs = functools.cache(oracle.epoch)
        self.begin_stream(turn)

    def begin_stream(self, turn: int = 0) -> None:
        """A stream that resumes from nothing."""
        self.stream = self.kind.make(self.path)
        self.group(turn, (0, 0, 0))

    def group(self, turn: int, place: Place, state: dict[str, Any] | None = None) -> None:
        """A fresh group of ranks."""
        self.world = self.kind.worlds[turn % len(self.kind.worlds)]
        self.shards = self.stream.streaming_split(self.world)
        self.ranks = [Rank(self.kind, self.epochs, self.world, rank, place) for rank in range(self.world)]
        self.passes: list[Iterator[list[int]] | None] = [None] * self.world
        for shard in self.shards if state is not None else ():
            shard.load_state_dict(state)

    @property
    def data_world(self) -> int:
        return self.world // self.kind.replicas

    @property
    def are_together(self) -> bool:
        return len({(rank.place, rank.phase) for rank in self.ranks}) == 1

    @property
    def is_live(self) -> bool:
        return any(rank.phase == "live" for rank in self.ranks)

    # ---- what the loops do

    @rule(
        steps=st.integers(1, 6),
        name=st.sampled_from(["cycles", "odd", "odd", "rows", "blocks"]),
        size=st.integers(1, 40),
        drop_last=st.booleans(),
        prefetch=st.sampled_from([0, 0, 2]),
    )
    def iterate(self, steps: int, name: str, size: int, drop_last: bool, prefetch: int) -> None:
        """A few batches; of the running pass, else of a new one."""
        if not self.is_live:
            self.begin(Form(name, size, drop_last, prefetch))
        for number in range(self.world):
            self.advance(number, steps)

    @rule(name=st.sampled_from(["cycles", "rows", "blocks"]), size=st.integers(1, 3), steps=st.integers(1, 3))
    @precondition(lambda self: self.is_live)
    def begin_anew(self, name: str, size: int, steps: int) -> None:
        """A new pass ends the one before."""
        before = [(each, rank.phase) for each, rank in zip(self.passes, self.ranks, strict=True)]
        self.begin(Form(name, size))
        for number, (ended, phase) in enumerate(before):
            self.advance(number, steps)
            if phase == "live" and ended is not None:
                with pytest.raises(IterationError, match="this iterator has ended"):
                    next(ended)

    def begin(self, form: Form) -> None:
        for number, rank in enumerate(self.ranks):
            batch_size = self.batch_size(rank, form)
            drop_last = form.drop_last and batch_size is not None
            start = rank.next_start
            if batch_size is not None and start[1] == 0 and not rank.rows_from(start, batch_size, drop_last):
                with pytest.raises(ConfigError):
                    deliver(self.shards[number], Form("batches", batch_size, drop_last))
                continue
            rank.leave()
            self.passes[number] = deliver(self.shards[number], Form(form.name, batch_size, drop_last, form.prefetch))
            rank.begin(batch_size, drop_last)
            rank.batch_size, rank.in_blocks = batch_size, form.name == "blocks"
            self.advance(number, 0 if rank.rows else 1)

    def batch_size(self, rank: Rank, form: Form) -> int | None:
        """Rows of a batch; None for rows and blocks."""
        if form.name in ("rows", "blocks"):
            return None
        total = self.kind.options.get("global_batch_size")
        if total is not None:
            return total // self.kind.num_splits * rank.block.size
        is_odd = form.name == "odd" and self.kind.num_splits % self.data_world == 0
        assert form.batch_size is not None
        return form.batch_size if is_odd else (form.batch_size % 4 + 1) * rank.block.size

    def advance(self, number: int, steps: int) -> None:
        """Some batches of a rank, and the end of its pass if that is the end."""
        rank, batches = self.ranks[number], self.passes[number]
        if rank.in_blocks and "read_batch_size" not in self.kind.options:
            steps = ROWS  # to the end: how large blocks are depends on threads
        for _ in range(steps):
            if batches is None:
                break
            left = len(rank.rows) - rank.got
            ids = next(batches, None)
            if ids is None:
                assert left == 0
                rank.leave()
                self.passes[number] = batches = None
            else:
                assert rank.batch_size is None or len(ids) == min(rank.batch_size, left)
                rank.receive(ids)

    @rule()
    @precondition(lambda self: self.is_live)
    def leave(self) -> None:
        """A `break`."""
        for rank in self.ranks:
            rank.leave()
        for each in self.passes:
            if each is not None:
                each.close()
        self.passes = [None] * self.world

    @rule()
    def close(self) -> None:
        """The shards are closed, and may go on."""
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            rank.leave()
            shard.close()
        self.passes = [None] * self.world

    @rule(epoch=st.one_of(st.none(), st.integers(0, 3)), restart=st.booleans())
    def set_epoch(self, epoch: int | None, restart: bool = False) -> None:
        """Also to where they are, as a loop does after a resume."""
        epoch = self.shards[0].epoch if epoch is None else epoch
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            rank.leave()
            rank.set_epoch(epoch, restart)
            shard.set_epoch(epoch, restart=restart)
        self.passes = [None] * self.world

    @rule()
    @precondition(lambda self: {rank.phase for rank in self.ranks} == {"left"} and self.are_together)
    def resume_epoch(self) -> None:
        """They stay in the epoch that they have left."""
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            rank.phase = "open"
            shard.resume_epoch()

    @rule(number=st.integers(0, 4), n=st.integers(1, 30))
    def peek(self, number: int, n: int) -> None:
        """Of one rank, at any time; moves nothing."""
        number %= self.world
        rank, shard = self.ranks[number], self.shards[number]
        rows = rank.rows[rank.got :] if rank.phase == "live" else rank.rows_from(rank.next_start)
        if rank.batch_size is None or rank.phase != "live":  # else there may be more rows than `drop_last` leaves
            assert [row["id"] for row in shard.peek(n)] == [i for _, i in rows][:n]

    @rule(number=st.integers(0, 4), looks=st.integers(1, 2))
    @precondition(
        lambda self: not self.is_live and {rank.phase for rank in self.ranks} == {"open"} and self.are_together
    )
    def look_and_go_back(self, number: int, looks: int) -> None:
        """One rank alone may look at rows if it goes back to where it was."""
        number %= self.world
        shard, state = self.shards[number], self.shards[number].state_dict()
        if len(self.ranks[number].rows_from(self.ranks[number].place)) < 2:
            return  # a pass that it receives as a whole is no look
        for _ in range(looks):
            for _ in shard.iter_rows():
                break
        shard.load_state_dict(state)

    @rule(number=st.integers(0, 4), how=st.sampled_from(["epoch", "row", "batch", "left"]), first=st.integers(0, 4))
    @precondition(lambda self: not self.is_live and self.world > 1 and self.are_together)
    def disagree(self, number: int, how: str, first: int) -> None:
        """One rank is elsewhere: somebody is told, and all begin anew."""
        number %= self.world
        shard = self.shards[number]
        size = self.batch_size(self.ranks[number], Form("cycles", 1))
        if how == "epoch":
            shard.set_epoch(self.ranks[number].next_start[0] + 1)
        elif how == "row":
            next(iter(shard.iter_rows()), None)
        else:
            next(_ids(iter(shard.iter_batches(batch_size=size, prefetch_batches=0))), None)
        if how == "left":
            shard.set_epoch(shard.epoch)  # which is no way back
        told, steps = [], []
        for each in sorted(range(self.world), key=lambda each: (each - first) % self.world):
            rows = self.batch_size(self.ranks[each], Form("cycles", 1))
            try:
                steps.append(len(list(self.shards[each].iter_batches(batch_size=rows, prefetch_batches=0))))
            except ConfigError as error:
                told.append(str(error))
        assert told or max(steps) <= 1  # whoever looks at the only batch of a pass has had all of it
        assert all(
            re.match("all ranks must (begin a pass at the same place|leave a pass at the same step)", each)
            for each in told
        )
        self.begin_stream()

    # ---- states

    @rule(target=saves)
    @precondition(lambda self: len({rank.place for rank in self.ranks}) == 1)
    def save(self) -> Saved:
        states = [shard.state_dict() for shard in self.shards]
        return Saved(json.dumps(merge_state_dicts(states)), self.ranks[0].place, self.data_world)

    @rule(saved=saves, turn=st.integers(0, 9), fresh=st.booleans())
    def resume(self, saved: Saved, turn: int, fresh: bool) -> None:
        """On another number of workers, or the same; from the driver, or by the loop."""
        state = json.loads(saved.text)
        if fresh:
            options = self.kind.options | {"resume_from": state}
            self.stream = lance_stream(self.path, **options)  # the state brings what is skipped
        self.group(turn, (0, 0, 0), None if fresh else state)
        for rank in self.ranks:
            rank.place = self.meant(saved)

    @rule(turn=st.integers(0, 9), fresh=st.booleans(), stays=st.booleans(), sets=st.booleans(), steps=st.integers(1, 6))
    @precondition(lambda self: len({rank.place for rank in self.ranks}) == 1)
    def stop_and_go_on(self, turn: int, fresh: bool, stays: bool, sets: bool, steps: int) -> None:
        """From where the loops are, for some rows."""
        self.resume(self.save(), self.kind.worlds.index(self.world) if stays else turn, fresh)
        if sets:
            self.set_epoch(None)
        self.iterate(steps, "rows", 1, False, 0)

    @rule(saved=saves)
    def load(self, saved: Saved) -> None:
        """Into the shards that are there."""
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            if rank.phase == "live":
                with pytest.raises(IterationError, match="must be loaded before iteration starts"):
                    shard.load_state_dict(json.loads(saved.text))
            elif not self.is_live:
                shard.load_state_dict(json.loads(saved.text))
                rank.place, rank.phase = self.meant(saved), "open"

    def meant(self, saved: Saved) -> Place:
        """The rows of an open cycle come again on another number of workers."""
        epoch, cycle, rows = saved.place
        return epoch, cycle, rows if saved.data_world == self.data_world else 0

    # ---- what is lost

    @rule()
    def kill_readers(self) -> None:
        self.cluster.kill_readers()

    @rule()
    def kill_coordinators(self) -> None:
        self.cluster.kill_coordinators()

    @rule()
    def lose_blocks(self) -> None:
        self.cluster.lose_blocks()

    @rule()
    def move_readers(self) -> None:
        """To another node, or back."""
        self.cluster.is_wide = not self.cluster.is_wide

    @rule(count=st.integers(1, 9))
    def reads_that_kill(self, count: int) -> None:
        """The next reads take their reader along, some of them lost before by another cause."""
        self.cluster.reads_to_lose = count

    @rule()
    @precondition(lambda self: self.is_live)
    def nothing_can_be_read(self) -> None:
        """Each rank is told and keeps its position; then one continues elsewhere, and several, which are apart, begin anew."""
        self.cluster.every_read_dies = True
        for number, rank in enumerate(self.ranks):
            while self.passes[number] is not None:
                try:
                    self.advance(number, 1)
                except ReadError as error:
                    assert f"lost {MAX_ATTEMPTS} times" in str(error)  # noqa: PT017
                    self.passes[number] = None
                    rank.leave()
        self.cluster.every_read_dies = False
        self.positions_are_right()
        if self.world > 1:  # how far they came depends on threads, and what the test does next must not
            self.begin_stream()
        else:
            self.set_epoch(1)

    # ---- what holds at any time

    @invariant()
    def positions_are_right(self) -> None:
        for rank, shard in zip(self.ranks, self.shards, strict=True):
            state = shard.state_dict()
            partial = state["partial"]
            rows = 0 if partial is None else partial["rows"]
            assert (state["epoch"], state["samples_consumed_per_split"], rows) == rank.place
            assert partial is None or partial["world_size"] == self.data_world
            assert shard.epoch == (rank.start[0] if rank.phase == "live" else rank.next_start[0])

    def teardown(self) -> None:
        for shard in getattr(self, "shards", ()):
            shard.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_passes, "SETTLES_S", 0.0)  # a rank that disagrees is told at once, and so
        patch.setattr(link, "TELL_INTERVAL_S", -1.0)  # is one that does not, if the check is wrong
        yield Cluster(patch)


def run(cluster: Cluster, folder: Any, **profile: Any) -> None:
    """The machine, with settings."""
    Streams.cluster = cluster
    Streams.path = make_table(folder / "t", ROWS)
    checks = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, **profile)
    run_state_machine_as_test(Streams, settings=checks)


def test_streams_do_as_the_model(fake, tmp_path):
    """The same runs each time; `make faults` goes on to others."""
    more = int(os.environ.get("FUZZ_RUNS", "0"))
    run(fake, tmp_path, max_examples=more or RUNS, stateful_step_count=30, derandomize=not more, database=None)
