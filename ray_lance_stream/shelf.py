"""The readers and the actors of stages that the coordinator knows, so that a new worker group need not start its own.

They keep no position, so any of them can serve any rank. Pure: how they are started and what time it is are given.
"""

from __future__ import annotations

from collections import Counter
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

    @property
    def place(self) -> tuple[str, int, int]:
        """Tells slots apart; the name of the run is known only once the worker has arrived."""
        return self.attempt_id, self.rank, self.slot


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

    def prepare(self, owner: Owner, node_id: str | None, keep_s: float) -> None:
        """Have a reader at hand for an owner that will `claim` one within `keep_s`."""
        found = self._find(owner)
        if found is None:
            found = self._take(owner, node_id)
        self._replace(found, owner=owner, used_s=self._clock() + keep_s - self._keep_s)

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
        found = self._replace(found, owner=owner, used_s=self._clock())
        # Not where one has died: what ended it may have ended the others too.
        return found.reader, None if fresh else self._stand_in(found)

    def release(self, attempt_id: str, rank: int) -> None:
        """A shard was closed: its readers are idle, and serve whoever asks next."""
        for kept in list(self._kept):
            if _is_of(kept, attempt_id, rank):
                self._replace(kept, owner=None, used_s=self._clock())

    def of_attempt(self, attempt_id: str) -> dict[int, list[Reader]]:
        """The readers of an attempt, by rank."""
        found: dict[int, list[Reader]] = {}
        for kept in self._kept:
            if kept.owner is not None and kept.owner.attempt_id == attempt_id:
                found.setdefault(kept.owner.rank, []).append(kept.reader)
        return found

    def touch(self, attempt_id: str, rank: int) -> None:
        """A rank is alive."""
        for kept in list(self._kept):
            if _is_of(kept, attempt_id, rank):
                self._replace(kept, used_s=max(kept.used_s, self._clock()))

    def sweep(self) -> None:
        """Forget the readers whose owners have long been silent."""
        self._kept = [k for k in self._kept if self._clock() - k.used_s < self._keep_s]

    def _find(self, owner: Owner) -> _Kept | None:
        return next((k for k in self._kept if k.owner is not None and k.owner.place == owner.place), None)

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
    stage: Stage
    worker: Worker
    used_s: float
    users: set[tuple[str, int]] = field(default_factory=set)  # (attempt, rank)


class StageShelf:
    """The actors of stages by stage and number, shared by the ranks that claim the same number.

    An actor holds CPUs or GPUs also while nobody uses it. So one that has been idle for `keep_s` is given back, after
    `spare_s` where somebody else in the cluster waits for resources, and at once where all who used it were closed. Those
    that hold its handle ask again before they use it after a pause, see line.StageActors.

    Args:
        start: starts an actor of a stage.
        keep_s: seconds.
        spare_s: seconds; longer than the time after which its users ask again.
        clock: seconds, monotonic.
    """

    def __init__(
        self, start: Callable[[Stage], Worker], keep_s: float, spare_s: float, clock: Callable[[], float]
    ) -> None:
        self._start = start
        self._keep_s = keep_s
        self._spare_s = spare_s
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
            found = self._kept[key] = _Staffed(stage, self._start(stage), self._clock())
        found.users.add((owner.attempt_id, owner.rank))
        found.used_s = self._clock()
        return found.worker

    def release(self, attempt_id: str, rank: int) -> None:
        """A shard was closed: it uses none any more."""
        for staffed in self._kept.values():
            staffed.users.discard((attempt_id, rank))

    def touch(self, attempt_id: str, rank: int) -> None:
        """A rank is alive, and its pass goes on."""
        for staffed in self._kept.values():
            if (attempt_id, rank) in staffed.users:
                staffed.used_s = self._clock()

    def sweep(self, *, is_short: bool = False) -> list[Worker]:
        """Forget the idle actors and return them, to be ended.

        Args:
            is_short: whether somebody waits for resources.
        """
        idle_s = self._spare_s if is_short else self._keep_s
        since_s = self._clock() - idle_s
        idle = [key for key, each in self._kept.items() if not each.users or each.used_s <= since_s]
        return [self._kept.pop(key).worker for key in idle]

    def held(self) -> list[str]:
        """The actors as text, by stage."""
        counts = Counter(f"{each.stage} ({each.stage.processes})" for each in self._kept.values())
        return [f"{count} x {text}" for text, count in counts.items()]

    def clear(self) -> list[Worker]:
        """Forget all actors and return them."""
        workers = [each.worker for each in self._kept.values()]
        self._kept.clear()
        return workers
