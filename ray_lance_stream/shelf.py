"""The readers and the actors of stages that the coordinator knows, so that a new worker group need not start its own.

They keep no position, so any of them can serve any rank. Pure: how they are started and what time it is are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_lance_stream.transform import Stage

Reader = Any  # an actor handle, a handle of nothing in tests
Worker = Any  # so is this: an actor of a stage


@dataclass(frozen=True)
class Owner:
    """Who reads with a reader: one slot of one rank of one attempt of a run."""

    run: str
    attempt_id: str
    rank: int
    slot: int


@dataclass(frozen=True)
class _Kept:
    reader: Reader
    node_id: str | None
    owner: Owner | None
    used_s: float


class ReaderShelf:
    """Readers by owner; idle ones are handed on, and forgotten after `keep_s` without a sign of life of their owner.

    A shard holds its readers too. Forgetting one here ends it only if its shard is gone.

    Args:
        start: starts a reader on a node.
        keep_s: seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, start: Callable[[str | None], Reader], keep_s: float, clock: Callable[[], float]) -> None:
        self._start = start
        self._keep_s = keep_s
        self._clock = clock
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def spare(self, node_id: str | None, keep_s: float) -> None:
        """Start a reader that belongs to nobody yet and waits `keep_s` for an owner."""
        self._kept.append(_Kept(self._start(node_id), node_id, None, self._clock() + keep_s - self._keep_s))

    def prepare(self, owner: Owner, node_id: str | None) -> None:
        """Have a reader at hand for an owner that will `claim` one."""
        if self._find(owner) is None:
            self._take(owner, node_id)

    def claim(self, owner: Owner, node_id: str | None, *, fresh: bool) -> tuple[Reader, Reader | None]:
        """The reader of an owner, and a stand-in that is warm where that one was just started.

        Args:
            owner: who asks.
            node_id: where.
            fresh: the reader that the owner had is dead: start another.
        """
        found = self._find(owner)
        if found is not None and (fresh or found.node_id != node_id):
            self._kept.remove(found)
            found = None
        if found is None:
            found = self._take(owner, node_id, started_only=fresh)
        found = self._replace(found, used_s=self._clock())
        # Not where one has died: what ended it may have ended the others too.
        return found.reader, None if fresh else self._stand_in(found)

    def release(self, attempt_id: str, rank: int) -> None:
        """A shard was closed: forget its readers."""
        self._kept = [k for k in self._kept if not _is_of(k, attempt_id, rank)]

    def touch(self, attempt_id: str, rank: int) -> None:
        """A rank is alive."""
        for kept in list(self._kept):
            if _is_of(kept, attempt_id, rank):
                self._replace(kept, used_s=self._clock())

    def sweep(self) -> None:
        """Forget the readers whose owners have long been silent."""
        self._kept = [k for k in self._kept if self._clock() - k.used_s < self._keep_s]

    def _find(self, owner: Owner) -> _Kept | None:
        return next((k for k in self._kept if k.owner == owner), None)

    def _take(self, owner: Owner, node_id: str | None, *, started_only: bool = False) -> _Kept:
        """An idle reader on the node, else a new one. Readers of an older attempt of the run are idle: it has ended."""
        idle = None
        if not started_only:
            idle = next((k for k in self._kept if k.node_id == node_id and _idle_for(k, owner)), None)
        if idle is not None:
            return self._replace(idle, owner=owner, used_s=self._clock())
        kept = _Kept(self._start(node_id), node_id, owner, self._clock())
        self._kept.append(kept)
        return kept

    def _stand_in(self, found: _Kept) -> Reader | None:
        """The oldest reader that was started before this one, on the same node if there is one."""
        older: list[_Kept] = []
        for kept in self._kept:
            if kept.reader is found.reader:
                break
            older.append(kept)
        older.sort(key=lambda kept: kept.node_id != found.node_id)  # stable
        return older[0].reader if older else None

    def _replace(self, kept: _Kept, **changes: Any) -> _Kept:
        index = next(i for i, k in enumerate(self._kept) if k.reader is kept.reader)
        self._kept[index] = replace(self._kept[index], **changes)
        return self._kept[index]


def _is_of(kept: _Kept, attempt_id: str, rank: int) -> bool:
    return kept.owner is not None and (kept.owner.attempt_id, kept.owner.rank) == (attempt_id, rank)


def _idle_for(kept: _Kept, owner: Owner) -> bool:
    if kept.owner is None:
        return True
    return kept.owner.run == owner.run != "" and kept.owner.attempt_id != owner.attempt_id


@dataclass
class _Staffed:
    worker: Worker
    told_s: dict[tuple[str, int], float] = field(default_factory=dict)  # (attempt, rank) -> last word of who uses it


class StageShelf:
    """The actors of stages by stage and number, shared by the ranks that claim the same number.

    One that nobody has used for `keep_s` is forgotten; the shards that hold it keep it alive, as a reader.

    Args:
        start: starts an actor of a stage.
        keep_s: seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, start: Callable[[Stage], Worker], keep_s: float, clock: Callable[[], float]) -> None:
        self._start = start
        self._keep_s = keep_s
        self._clock = clock
        self._kept: dict[tuple[str, int], _Staffed] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def claim(self, owner: Owner, stage: Stage, lost: Worker | None) -> Worker:
        """The actor of a stage with the number `owner.slot`.

        Args:
            owner: who asks.
            stage: what it runs.
            lost: the actor of that number that has died, so that the first rank that notices has another one started.
        """
        key = (stage.key, owner.slot)
        found = self._kept.get(key)
        if found is None or found.worker == lost:
            found = self._kept[key] = _Staffed(self._start(stage))
        found.told_s[owner.attempt_id, owner.rank] = self._clock()
        return found.worker

    def release(self, attempt_id: str, rank: int) -> None:
        """A shard was closed: it uses none any more."""
        for staffed in self._kept.values():
            staffed.told_s.pop((attempt_id, rank), None)
        self.sweep()

    def touch(self, attempt_id: str, rank: int) -> None:
        """A rank is alive."""
        for staffed in self._kept.values():
            if (attempt_id, rank) in staffed.told_s:
                staffed.told_s[attempt_id, rank] = self._clock()

    def sweep(self) -> None:
        """Forget the actors whose users have long been silent."""
        now_s = self._clock()
        self._kept = {
            key: each for key, each in self._kept.items() if any(now_s - s < self._keep_s for s in each.told_s.values())
        }
