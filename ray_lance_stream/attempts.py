"""AttemptBook: what the coordinator knows of runs, and how it finds ranks that do not go together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_lance_stream.state import StreamIdentity, StreamState

if TYPE_CHECKING:
    from ray_lance_stream.meter import Tally

KEPT_ATTEMPTS = 64
KEPT_TURNS = 64


@dataclass(frozen=True)
class StepSize:
    """How a rank steps through a pass. Cycles per batch (a fraction as text) and drop_last must agree between ranks."""

    cycles_per_batch: str
    drop_last: bool
    batch_size: int
    num_splits: int

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
    """

    identity: StreamIdentity
    step: StepSize | None
    listed: str | None = None

    def agrees(self, other: PassStart) -> bool:
        """Whether both read the same rows, and take the same number of steps."""
        is_even = self.step.agrees(other.step) if self.step and other.step else self.step == other.step
        return (self.identity, self.listed) == (other.identity, other.listed) and is_even


# (epoch, which pass of its shard): the same on all ranks that run the same loop. Passes without batches count by
# themselves, down from -1: a rank that looks at some rows does not fall out of step by it.
Turn = tuple[int, int]


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
    """What one rank last told: its state, what it has counted in this attempt, and of how many ranks it is one."""

    state: StreamState
    tally: Tally
    world_size: int = 1


@dataclass
class _Record:
    attempt: Attempt
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    starts: dict[Turn, tuple[int, PassStart]] = field(default_factory=dict)  # what the first rank registered


class AttemptBook:
    """Positions and begun passes by attempt; the newest attempt of a run stands for the run."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> None:
        """Note what a rank tells of itself."""
        self._of(attempt).ranks[rank] = progress

    def register_pass(self, attempt: Attempt, rank: int, turn: Turn, start: PassStart) -> tuple[int, PassStart] | None:
        """Note what a rank begins a pass with.

        Returns:
            None where that agrees with the rank that came first, else (that rank, what it began with).
        """
        starts = self._of(attempt).starts
        first = starts.setdefault(turn, (rank, start))
        while len(starts) > KEPT_TURNS:
            del starts[next(iter(starts))]
        return None if first[1].agrees(start) else first

    def runs(self) -> list[str]:
        """Names of the Ray Train runs that reported a position, oldest first; "" alone where there is none."""
        names = list(dict.fromkeys(r.attempt.run for r in self._records.values() if r.ranks))
        return [name for name in names if name] or names

    def snapshot(self, run: str) -> dict[int, RankProgress]:
        """The ranks of the newest attempt of a run that reported a position, with those of its group."""
        records = [r for r in self._records.values() if r.attempt.run == run and r.ranks]
        if not records:
            return {}
        newest = records[-1].attempt
        shown = [r for r in records if newest.group and r.attempt.is_beside(newest)] or records[-1:]
        told = {rank: told for record in shown for rank, told in record.ranks.items()}
        return {rank: told[rank] for rank in sorted(told)}

    def _of(self, attempt: Attempt) -> _Record:
        record = self._records.get(attempt.attempt_id)
        if record is None:
            record = self._records[attempt.attempt_id] = _Record(attempt)
            while len(self._records) > KEPT_ATTEMPTS:
                del self._records[next(iter(self._records))]
        return record
