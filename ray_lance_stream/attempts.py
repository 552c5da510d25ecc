"""AttemptBook: what the ranks of an attempt begin passes with, and how those that do not go together are found. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_lance_stream.rank_passes import PassConflict, PassProgress, RanksOfPass
from ray_lance_stream.splits import SplitBlock, cycles_per_batch
from ray_lance_stream.state import StreamIdentity, StreamState

if TYPE_CHECKING:
    from ray_lance_stream.meter import Tally

KEPT_ATTEMPTS = 256
KEPT_TURNS = 64


@dataclass(frozen=True)
class StepSize:
    """How a rank steps through a pass. Cycles per batch (a fraction as text) and drop_last must agree between ranks."""

    cycles_per_batch: str
    drop_last: bool
    batch_size: int
    num_splits: int

    @classmethod
    def of(cls, batch_size: int, drop_last: bool, block: SplitBlock) -> StepSize:
        """That of a rank with a block of splits."""
        return cls(str(cycles_per_batch(batch_size, block)), drop_last, batch_size, block.size)

    def agrees(self, other: StepSize) -> bool:
        """Whether both take the same number of steps."""
        return (self.cycles_per_batch, self.drop_last) == (other.cycles_per_batch, other.drop_last)


@dataclass(frozen=True)
class PassStart:
    """What a rank begins a pass with.

    Attributes:
        identity: what fixes its rows.
        step: how it steps; None for a pass without batches.
        listed: fingerprint of the list of the epoch, where the order is listed.
        begun: the pass itself; None for a stream for evaluation, whose passes are whole wherever they begin.
        before: how the passes before it ended.
    """

    identity: StreamIdentity
    step: StepSize | None
    listed: str | None = None
    begun: PassProgress | None = None
    before: tuple[PassProgress, ...] = ()

    def agrees(self, other: PassStart) -> bool:
        """Whether both read the same rows, and take the same number of steps."""
        is_even = self.step.agrees(other.step) if self.step and other.step else self.step == other.step
        return (self.identity, self.listed) == (other.identity, other.listed) and is_even


# (epoch, number of the pass, how often it was begun again, see PassProgress): the same on all ranks that run the same loop.
Turn = tuple[int, int, int]


@dataclass(frozen=True)
class Attempt:
    """One worker group of one run: assignments belong to it, so runs that share a stream do not meet.

    Attributes:
        attempt_id: unique per `streaming_split`.
        run: name of the Ray Train run; "" outside of Ray Train.
        world_size: W.
        split_for_train: whether Ray Train split the stream over a whole worker group.
        group: shards that a stream makes one by one are attempts of their own; those of one group are shown as one.
    """

    attempt_id: str
    run: str
    world_size: int
    split_for_train: bool = False
    group: str = ""

    def is_beside(self, other: Attempt) -> bool:
        """Whether shards of both are ranks of one world."""
        return (self.group, self.world_size) == (other.group, other.world_size)


@dataclass(frozen=True)
class RankProgress:
    """What one rank reports: its state, what it has counted in this attempt, and how far its newest passes are."""

    state: StreamState
    tally: Tally
    passes: tuple[PassProgress, ...] = ()


@dataclass
class _Record:
    attempt: Attempt
    heard: int = 0  # when a rank last reported something, as a count of reports
    starts: dict[Turn, tuple[int, PassStart]] = field(default_factory=dict)  # what the first rank registered
    passes: dict[int, RanksOfPass] = field(default_factory=dict)  # by number
    copies: dict[int, str] = field(default_factory=dict)  # which copy of its shard a rank iterates
    has_copies: bool = False  # a rank iterates several: how they follow one another is not known


class AttemptBook:
    """The passes that ranks have begun, by attempt. Positions of runs are in RunBook.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._heard = 0

    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> PassConflict | None:
        """Note what a rank reports of itself.

        Returns:
            A pass that this rank and another one did not leave together; None where there is none.
        """
        record = self._of(attempt)
        self._note(record, rank, progress.passes)
        return self._conflict(record, rank)

    def register_pass(
        self, attempt: Attempt, rank: int, turn: Turn, start: PassStart
    ) -> tuple[int, PassStart] | PassConflict | None:
        """Note what a rank begins a pass with.

        Returns:
            None where that agrees with the other ranks; else (the rank that came first, what it began with), or, where the
            rank begins at another place or has left a pass at another place, that conflict.
        """
        record = self._of(attempt)
        self._note(record, rank, start.before)
        first = record.starts.get(turn, (rank, start))
        if first[0] == rank:
            first = record.starts[turn] = rank, start
        while len(record.starts) > KEPT_TURNS:
            del record.starts[next(iter(record.starts))]
        if not first[1].agrees(start):
            return first
        if start.begun is None:
            return None
        begun = record.passes.get(start.begun.number)
        elsewhere = None if begun is None else begun.elsewhere(rank, start.begun)
        conflict = elsewhere or self._conflict(record, rank)
        if conflict is not None and conflict.settles_in_s <= 0:
            return conflict
        self._note(record, rank, (start.begun,))
        return None

    def _note(self, record: _Record, rank: int, passes: tuple[PassProgress, ...]) -> None:
        for progress in passes:
            record.has_copies |= record.copies.setdefault(rank, progress.copy) != progress.copy
            if record.has_copies:
                record.passes.clear()
                return
            record.passes.setdefault(progress.number, RanksOfPass()).note(rank, progress, self._clock())
            while len(record.passes) > KEPT_TURNS:
                del record.passes[next(iter(record.passes))]

    def _conflict(self, record: _Record, rank: int) -> PassConflict | None:
        now_s = self._clock()
        found = [each.left_apart(rank, now_s) for each in record.passes.values()]
        return min((each for each in found if each), key=lambda each: each.settles_in_s, default=None)

    def _of(self, attempt: Attempt) -> _Record:
        record = self._records.setdefault(attempt.attempt_id, _Record(attempt))
        self._heard += 1
        record.heard = self._heard
        while len(self._records) > KEPT_ATTEMPTS:
            # One that still runs reports each second, whenever it began.
            del self._records[min(self._records, key=lambda attempt_id: self._records[attempt_id].heard)]
        return record
