"""StreamCoordinator: assigns split blocks to ranks, owns the readers, knows how far each run is.

The actor is a thin shell around `AttemptBook`, which is pure. It holds nothing that a restart could not rebuild: readers
are made on request, plans are computed from (version, filter), and shards report their position again and again. A
checkpoint, never the coordinator, is where a run continues from: the model would be behind.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from ray_lance_stream.config import ReadPlan
from ray_lance_stream.meter import Tally
from ray_lance_stream.planner import plan_table
from ray_lance_stream.reader import start_reader
from ray_lance_stream.shelf import Owner, Reader, ReaderShelf, StageShelf, Worker
from ray_lance_stream.state import StreamState
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from ray_lance_stream.transform import Stage

CALLS_AT_A_TIME = 16
MAX_RESTARTS = 16
CALL_RETRIES = 3
KEPT_ATTEMPTS = 64
KEPT_TURNS = 64
# A worker group that starts again within this time after the end of the one before finds warm readers.
KEEP_READERS_S = 20.0
# A trainer needs a while from `fit()` to its first batch.
KEEP_SPARE_S = 120.0


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


Turn = tuple[int, int]  # (epoch, which pass of its shard): the same on all ranks that run the same loop


@dataclass(frozen=True)
class Attempt:
    """One worker group of one run: assignments belong to it, so runs that share a stream do not meet.

    Attributes:
        attempt_id: unique per `streaming_split`.
        run: name of the Ray Train run; "" outside of Ray Train.
        world_size: W.
        split_for_train: whether Ray Train split the stream over a whole worker group.
    """

    attempt_id: str
    run: str
    world_size: int
    split_for_train: bool = False


@dataclass(frozen=True)
class RankProgress:
    """What one rank last told: its state, and what it has counted in this attempt."""

    state: StreamState
    tally: Tally


@dataclass
class _Record:
    attempt: Attempt
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    steps: dict[Turn, tuple[int, StepSize]] = field(default_factory=dict)  # what the first rank registered


class AttemptBook:
    """Positions and step sizes by attempt; the newest attempt of a run stands for the run."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> None:
        """Note what a rank tells of itself."""
        self._of(attempt).ranks[rank] = progress

    def register_step(self, attempt: Attempt, rank: int, turn: Turn, step: StepSize) -> tuple[int, StepSize] | None:
        """Note how a rank steps through a pass.

        Returns:
            None where that agrees with the rank that came first, else (that rank, its step size).
        """
        steps = self._of(attempt).steps
        first = steps.setdefault(turn, (rank, step))
        while len(steps) > KEPT_TURNS:
            del steps[next(iter(steps))]
        return None if first[1].agrees(step) else first

    def runs(self) -> list[str]:
        """Names of the Ray Train runs that reported a position, oldest first; "" alone where there is none."""
        names = list(dict.fromkeys(r.attempt.run for r in self._records.values() if r.ranks))
        return [name for name in names if name] or names

    def snapshot(self, run: str) -> dict[int, RankProgress]:
        """The ranks of the newest attempt of a run that reported a position."""
        records = [r for r in self._records.values() if r.attempt.run == run and r.ranks]
        return dict(sorted(records[-1].ranks.items())) if records else {}

    def _of(self, attempt: Attempt) -> _Record:
        record = self._records.get(attempt.attempt_id)
        if record is None:
            record = self._records[attempt.attempt_id] = _Record(attempt)
            while len(self._records) > KEPT_ATTEMPTS:
                del self._records[next(iter(self._records))]
        return record


class StreamCoordinator:
    """One per stream and driver; lives as long as the process that made it and somebody who holds it.

    Args:
        label: stream name, for the dashboard.
        table: what new readers open at once.
    """

    def __init__(self, label: str, table: TableRef) -> None:
        self._label = label
        self._book = AttemptBook()
        self._lock = threading.Lock()
        self._plan_lock = threading.Lock()
        self._plans: dict[ReadPlan, ReadPlan] = {}
        self._shelf = ReaderShelf(partial(start_reader, label, table), KEEP_READERS_S, time.monotonic)
        self._shelf.spare(ray.get_runtime_context().get_node_id(), KEEP_SPARE_S)
        self._stages = StageShelf(_start_stage_worker, KEEP_READERS_S, time.monotonic)
        threading.Thread(target=self._sweep, name="sweep readers", daemon=True).start()

    def __repr__(self) -> str:
        return f"StreamCoordinator[{getattr(self, '_label', '')}]"  # Ray asks before there is an instance

    @ray.method(max_task_retries=0)
    def prepare(self, owner: Owner, node_id: str | None) -> None:
        """See ReaderShelf.prepare."""
        with self._lock:
            self._shelf.prepare(owner, node_id)

    def reader(self, owner: Owner, node_id: str | None, fresh: bool) -> tuple[Reader, Reader | None]:
        """See ReaderShelf.claim.

        The shard holds what it gets, so that a reader outlives neither the shard's process nor this actor, and one that
        is forgotten here goes on for its shard.
        """
        with self._lock:
            return self._shelf.claim(owner, node_id, fresh=fresh)

    def stage_worker(self, owner: Owner, stage: Stage, lost: Worker | None) -> Worker:
        """See StageShelf.claim; held as readers are."""
        with self._lock:
            return self._stages.claim(owner, stage, lost)

    @ray.method(max_task_retries=0)
    def release(self, attempt_id: str, rank: int) -> None:
        """See ReaderShelf.release and StageShelf.release."""
        with self._lock:
            self._shelf.release(attempt_id, rank)
            self._stages.release(attempt_id, rank)

    def _sweep(self) -> None:
        while True:
            time.sleep(KEEP_READERS_S / 4)
            with self._lock:
                self._shelf.sweep()
                self._stages.sweep()

    def plan_at(self, plan: ReadPlan, version: int) -> ReadPlan:
        """The plan of the same stream at another table version; computed once.

        Raises:
            VersionNotFoundError: the version is gone.
            ConfigError: the stream cannot be served at that version.
        """
        wanted = plan.at(version)
        with self._plan_lock:
            if wanted not in self._plans:
                self._plans[wanted] = plan_table(wanted)
            return self._plans[wanted]

    def register_step(self, attempt: Attempt, rank: int, turn: Turn, step: StepSize) -> tuple[int, StepSize] | None:
        """See AttemptBook.register_step."""
        with self._lock:
            return self._book.register_step(attempt, rank, turn, step)

    @ray.method(max_task_retries=0)
    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> None:
        """See AttemptBook.record."""
        with self._lock:
            self._book.record(attempt, rank, progress)
            self._touch(attempt.attempt_id, rank)

    @ray.method(max_task_retries=0)
    def alive(self, attempt_id: str, rank: int) -> None:
        """See ReaderShelf.touch and StageShelf.touch."""
        with self._lock:
            self._touch(attempt_id, rank)

    def _touch(self, attempt_id: str, rank: int) -> None:
        self._shelf.touch(attempt_id, rank)
        self._stages.touch(attempt_id, rank)

    def snapshot(self, run: str | None) -> tuple[list[str], dict[int, RankProgress]]:
        """(names of the runs, ranks of `run`, or of the only run)."""
        with self._lock:
            runs = self._book.runs()
            name = run if run is not None else (runs[0] if len(runs) == 1 else None)
            return runs, self._book.snapshot(name) if name is not None else {}


def _start_stage_worker(stage: Stage) -> Worker:
    from ray_lance_stream.stage_worker import start_stage_worker  # imports ray.data, which most streams do without

    return start_stage_worker(stage)


def start_coordinator(label: str, table: TableRef) -> ray.actor.ActorHandle:
    """A coordinator owned by this process."""
    actor: Any = ray.remote(StreamCoordinator)
    return actor.options(
        num_cpus=0,
        max_concurrency=CALLS_AT_A_TIME,
        max_restarts=MAX_RESTARTS,
        max_task_retries=CALL_RETRIES,
    ).remote(label, table)
