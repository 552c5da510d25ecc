"""RunBook: the worker groups of each run, with the split block, the node and the position of every rank. Pure.

The coordinator answers `stream.progress()` and `stream.state_dict()` from it. What has to outlive the coordinator is text,
see `changes` and `restore`: the split blocks of each group and the scalar position of each run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ray_lance_stream.attempts import Attempt, RankProgress
from ray_lance_stream.splits import SplitBlock, data_rank, split_block
from ray_lance_stream.state import StreamState

if TYPE_CHECKING:
    from ray_lance_stream.meter import Tally

KEPT_GROUPS = 64


@dataclass(frozen=True)
class RankView:
    """What is known of a rank.

    Attributes:
        split_block: the splits that it has been assigned.
        node: id of the node where it runs; None where that is not known.
        reader: actor ids of its readers, separated by commas; None before it has one.
        state: where it is; None before it has reported a position.
        tally: what it has counted in this attempt; None as `state`.
    """

    split_block: SplitBlock
    node: str | None = None
    reader: str | None = None
    state: StreamState | None = None
    tally: Tally | None = None


@dataclass(frozen=True)
class RunSnapshot:
    """What is known of one run.

    Attributes:
        runs: names of the runs that use the stream, oldest first; "" alone where none has a name.
        attempt_ids: of the newest worker group, and of the shards that were made one by one beside it; the newest first.
        world_size: W of that group; 0 where there is none.
        state: position of the slowest rank of the newest group that has one.
        ranks: of that group.
    """

    runs: tuple[str, ...]
    attempt_ids: tuple[str, ...] = ()
    world_size: int = 0
    state: StreamState | None = None
    ranks: Mapping[int, RankView] = field(default_factory=dict)


@dataclass
class _Group:
    attempt: Attempt
    number: int  # counts up: the newest group of a run stands for the run
    num_splits: int
    blocks: dict[int, SplitBlock]  # by rank
    replicas: int
    copy_id: str = ""
    is_named: bool = False  # whether a rank has reported the name of the run, which may be ""
    nodes: dict[int, str] = field(default_factory=dict)
    told: dict[int, RankProgress] = field(default_factory=dict)
    restored: StreamState | None = None  # kept by a coordinator that has died, until each rank has reported again
    is_changed: bool = True
    is_kept: bool = False

    @property
    def state(self) -> StreamState | None:
        """The position of the slowest rank."""
        states = [progress.state for progress in self.told.values()]
        if self.restored is not None and len(states) < len(self.blocks):
            states.append(self.restored)
        return min(states, key=_place, default=None)

    def view(self, rank: int) -> RankView:
        told = self.told.get(rank)
        state = self.restored if told is None else told.state
        return RankView(self.blocks[rank], self.nodes.get(rank), None, state, told.tally if told else None)


def _place(state: StreamState) -> tuple[int, int]:
    return state.epoch, state.samples_consumed_per_split


@dataclass(frozen=True)
class Resize:
    """A run whose number of workers has changed."""

    num_splits: int
    before: int
    now: int

    def __str__(self) -> str:
        return f"{self.num_splits} splits: {self.before} workers -> {self.now}"


class RunBook:
    """The worker groups that use a stream. Of many, those that were not heard of for longest are forgotten."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}  # by attempt id; the one that was heard of last is the last
        self._numbers = itertools.count()
        self._gone: list[str] = []

    def assign(
        self,
        attempt: Attempt,
        num_splits: int,
        replicas: int = 1,
        *,
        ranks: Iterable[int] | None = None,
        nodes: Iterable[str] = (),
        copy_id: str = "",
    ) -> Resize | None:
        """Give each rank of a worker group its split block: contiguous ones, in the order of the ranks.

        Args:
            attempt: the group.
            num_splits: S.
            replicas: consecutive ranks that have the same block.
            ranks: only these; the others have attempts of their own. None: all.
            nodes: where the ranks run, in their order, where that is known.
            copy_id: groups that follow one another in a run come from the same copy of the stream.

        Returns:
            What has changed, if the run went on with another number of workers.
        """
        ranks = range(attempt.world_size) if ranks is None else ranks
        blocks = {rank: block_of(num_splits, attempt.world_size, rank, replicas) for rank in ranks}
        before = next((g for g in self._newest_first() if g.copy_id == copy_id and g.attempt.split_for_train), None)
        is_named = not attempt.split_for_train
        group = _Group(attempt, next(self._numbers), num_splits, blocks, replicas, copy_id, is_named)
        group.nodes = dict(enumerate(nodes))
        self._groups[attempt.attempt_id] = group
        self._forget()
        if before is None or not attempt.split_for_train:
            return None
        if copy_id and before.is_named:
            self._name(group, before.attempt.run)
        return _resize(before, group)

    def arrive(self, attempt: Attempt, rank: int, node: str | None) -> Resize | None:
        """A rank has arrived on a node; its attempt has the name of its run. Returns as `assign`."""
        group = self._groups.get(attempt.attempt_id)
        if group is None:  # forgotten: the next report of a position brings it back
            return None
        if node is not None:
            group.nodes[rank] = node
        return self._heard(group, attempt.run)

    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> Resize | None:
        """A rank has reported its position. Returns as `assign`."""
        group = self._groups.get(attempt.attempt_id)
        if group is None:
            identity = progress.state.identity
            ranks = range(attempt.world_size) if attempt.split_for_train else (rank,)
            self.assign(attempt, identity.num_splits, identity.replicas, ranks=ranks)
            group = self._groups[attempt.attempt_id]
        group.told[rank] = progress
        return self._heard(group, attempt.run)

    def name_of(self, attempt_id: str) -> str:
        """Name of the run of a group, as far as it is known."""
        group = self._groups.get(attempt_id)
        return "" if group is None else group.attempt.run

    def blocks_of(self, attempt_id: str) -> dict[int, SplitBlock]:
        """The split blocks of a group, by rank."""
        return dict(self._groups[attempt_id].blocks)

    def snapshot(self, run: str | None) -> RunSnapshot:
        """What is known of a run, or of the only one; its newest group may not have reported anything yet."""
        runs = self._runs()
        if run is None and len(runs) == 1:
            run = runs[0]
            groups = [g for g in self._newest_first() if g.attempt.run == run or not g.is_named]
        else:
            groups = [g for g in self._newest_first() if g.is_named and g.attempt.run == run]
            if run is None and not runs:
                groups = self._newest_first()
        if not groups:
            return RunSnapshot(runs)
        newest = groups[0].attempt
        shown = [g for g in groups if newest.group and g.attempt.is_beside(newest)] or groups[:1]
        views = {rank: group.view(rank) for group in reversed(shown) for rank in group.blocks}
        states = [view.state for view in views.values() if view.state is not None]
        state = min(states, key=_place) if len(shown) > 1 and states else None
        state = state or next((g.state for g in groups if g.state is not None), None)
        return RunSnapshot(
            runs,
            tuple(group.attempt.attempt_id for group in shown),
            newest.world_size,
            state,
            {rank: views[rank] for rank in sorted(views)},
        )

    # ---- what outlives the coordinator

    def changes(self) -> dict[str, str | None]:
        """By attempt id, what is to be kept since the last call; None: no longer.

        Kept are the groups that stand for their run, and those that have not begun.
        """
        found: dict[str, str | None] = dict.fromkeys(self._gone)
        self._gone.clear()
        seen: set[str] = set()
        for group in self._newest_first():
            run = group.attempt.run
            is_over = group.is_named and run in seen
            if group.is_named and group.state is not None:
                seen.add(run)
            if is_over and group.is_kept:
                found[group.attempt.attempt_id] = None
            elif group.is_changed and not is_over:
                found[group.attempt.attempt_id] = _to_json(group)
            group.is_kept, group.is_changed = not is_over, False
        return found

    def restore(self, kept: Iterable[str]) -> None:
        """Take up what a coordinator that has died has kept."""
        groups = sorted((_from_json(text) for text in kept), key=lambda group: group.number)
        for group in groups:
            group.number, group.is_kept, group.is_changed = next(self._numbers), True, False
            self._groups[group.attempt.attempt_id] = group

    # ---- inside

    def _runs(self) -> tuple[str, ...]:
        groups = sorted(self._groups.values(), key=lambda group: group.number)
        names = list(dict.fromkeys(g.attempt.run for g in groups if g.is_named))
        return tuple([name for name in names if name] or names)

    def _newest_first(self) -> list[_Group]:
        return sorted(self._groups.values(), key=lambda group: -group.number)

    def _heard(self, group: _Group, run: str) -> Resize | None:
        self._groups[group.attempt.attempt_id] = self._groups.pop(group.attempt.attempt_id)
        group.is_changed = True
        if group.is_named and group.attempt.run == run:
            return None
        self._name(group, run)
        older = (g for g in self._newest_first() if g.number < group.number and g.attempt.split_for_train)
        before = next((g for g in older if g.attempt.run == run != ""), None)
        return None if before is None else _resize(before, group)

    def _name(self, group: _Group, run: str) -> None:
        group.attempt, group.is_named = replace(group.attempt, run=run), True

    def _forget(self) -> None:
        while len(self._groups) > KEPT_GROUPS:
            oldest = self._groups.pop(next(iter(self._groups)))
            if oldest.is_kept:
                self._gone.append(oldest.attempt.attempt_id)


def block_of(num_splits: int, world_size: int, rank: int, replicas: int) -> SplitBlock:
    """The split block of a rank, of which `replicas` consecutive ones have the same.

    Raises:
        ConfigError: more data ranks than splits, or ranks that are no multiple of replicas.
    """
    data, world = data_rank(world_size, rank, replicas)
    return split_block(num_splits, world, data)


def _resize(before: _Group, now: _Group) -> Resize | None:
    if before.attempt.world_size == now.attempt.world_size:
        return None
    return Resize(now.num_splits, before.attempt.world_size, now.attempt.world_size)


def _to_json(group: _Group) -> str:
    attempt, state = group.attempt, group.state
    return json.dumps(
        {
            "attempt_id": attempt.attempt_id,
            "run": attempt.run,
            "world_size": attempt.world_size,
            "split_for_train": attempt.split_for_train,
            "group": attempt.group,
            "number": group.number,
            "num_splits": group.num_splits,
            "ranks": sorted(group.blocks),
            "replicas": group.replicas,
            "copy_id": group.copy_id,
            "is_named": group.is_named,
            "nodes": sorted(group.nodes.items()),
            "state": None if state is None else state.to_dict(),
        }
    )


def _from_json(text: str) -> _Group:
    kept = json.loads(text)
    attempt = Attempt(kept["attempt_id"], kept["run"], kept["world_size"], kept["split_for_train"], kept["group"])
    state, replicas = kept["state"], kept["replicas"]
    return _Group(
        attempt,
        kept["number"],
        kept["num_splits"],
        {rank: block_of(kept["num_splits"], attempt.world_size, rank, replicas) for rank in kept["ranks"]},
        replicas,
        kept["copy_id"],
        kept["is_named"],
        dict(kept["nodes"]),
        restored=None if state is None else StreamState.from_dict(state),
    )
