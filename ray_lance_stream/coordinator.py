"""StreamCoordinator: assigns split blocks to ranks, owns the readers, knows how far each run is.

The actor is a thin shell around parts that are tested without it. It holds nothing that a restart could not rebuild: readers
are made on request, plans are computed from (version, filter), the versions of epochs are kept by the cluster, lists
of rows on disk, and shards report their position again and again. A checkpoint, never the coordinator, is where a run
continues from: the model would be behind.
"""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from ray_lance_stream.actor_method import actor_method
from ray_lance_stream.attempts import Attempt, AttemptBook, PassStart, RankProgress, Turn
from ray_lance_stream.config import ReadPlan, RowList, Shared
from ray_lance_stream.epoch_versions import EpochVersions, newest_version
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.planner import PlanBook
from ray_lance_stream.rank_passes import PassConflict
from ray_lance_stream.reader import start_reader
from ray_lance_stream.row_lists import RowLists
from ray_lance_stream.shelf import Owner, Reader, ReaderShelf, StageShelf, Worker
from ray_lance_stream.source import resolve_columns
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from ray_lance_stream.transform import Stage

CALLS_AT_A_TIME = 16
PLANS_AT_A_TIME = 4  # of their own: ranks that wait for a scan must not keep others from a reader
MAX_RESTARTS = 16
CALL_RETRIES = 3
# A worker group that starts again within this time after the end of the one before finds warm readers.
KEEP_READERS_S = 20.0
# A trainer needs a while from `fit()` to its first batch.
KEEP_SPARE_S = 120.0


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
        self._plans = PlanBook(Shared.put)
        self._epochs: EpochVersions | None = None
        self._lists = RowLists()
        self._shelf = ReaderShelf(partial(start_reader, label, table), KEEP_READERS_S, time.monotonic)
        here = ray.get_runtime_context()
        with warnings.catch_warnings():  # of Ray, whose property asks for an id in a way that it has deprecated
            warnings.simplefilter("ignore")
            is_restarted = here.was_current_actor_reconstructed
        if not is_restarted:  # who has lost readers asks for new ones, never for the spare
            self._shelf.spare(here.get_node_id(), KEEP_SPARE_S)
        self._stages = StageShelf(_start_stage_worker, KEEP_READERS_S, time.monotonic)
        threading.Thread(target=self._sweep, name="sweep readers", daemon=True).start()

    def __repr__(self) -> str:
        return f"StreamCoordinator[{getattr(self, '_label', '')}]"  # Ray asks before there is an instance

    @actor_method(max_task_retries=0)
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

    @actor_method(max_task_retries=0)
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

    @actor_method(concurrency_group="plans")
    def plan_at(self, plan: ReadPlan, version: int, pinned_as: PinnedAs | None) -> ReadPlan:
        """The plan of the same stream at another table version, which is kept from here on where the stream is pinned.

        Raises:
            VersionNotFoundError: the version is gone.
            ConfigError: the stream cannot be served at that version.
        """
        return self._plans.at(plan, version, pinned_as)

    def row_list(self, plan: ReadPlan, epoch: int) -> RowList | None:
        """See RowLists.ask."""
        return self._lists.ask(plan, epoch)

    @actor_method(concurrency_group="plans")
    def plan_of_epoch(
        self, attempt_id: str, epoch: int, plan: ReadPlan, first: bool, pinned_as: PinnedAs | None
    ) -> ReadPlan:
        """The plan of an epoch that takes up the newest version as it begins: one choice for all ranks of an attempt.

        Args:
            attempt_id: of the attempt.
            epoch: which epoch.
            plan: of the version that the driver has pinned.
            first: whether the run begins with this epoch, and so with that version.
            pinned_as: see plan_at.

        Raises:
            ConfigError: the stream cannot be served at that version.
            TableError: the table is gone.
        """

        def choose() -> int:
            version = plan.table.version if first else newest_version(plan.table)
            if pinned_as is not None:
                pinned_as.hold(plan.table.at(version))
            return version

        version = self._epoch_versions().of(attempt_id, epoch, choose)
        if version == plan.table.version:
            return plan
        try:
            resolve_columns(plan.table.at(version), plan.columns)  # none may be lost, also where all of them are read
            return self._plans.at(plan, version)
        except ConfigError as error:
            raise ConfigError(
                f"epoch {epoch} takes up version {version} of table {plan.table.identity}, as on_new_version='next_epoch' "
                f"says, but the stream cannot be served there: {error}. Write a version that fits, or go on from the "
                "checkpoint with on_new_version='stay'"
            ) from None

    def _epoch_versions(self) -> EpochVersions:
        # Imports ray.data, which takes a second, and which most streams do without.
        from ray_lance_stream._ray import KeptByCluster

        with self._lock:
            if self._epochs is None:
                self._epochs = EpochVersions(KeptByCluster("ray_lance_stream.epoch_versions"))
            return self._epochs

    def register_pass(
        self, attempt: Attempt, rank: int, turn: Turn, start: PassStart
    ) -> tuple[int, PassStart] | PassConflict | None:
        """See AttemptBook.register_pass."""
        with self._lock:
            return self._book.register_pass(attempt, rank, turn, start)

    @actor_method(max_task_retries=0)
    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> PassConflict | None:
        """See AttemptBook.record."""
        with self._lock:
            self._touch(attempt.attempt_id, rank)
            return self._book.record(attempt, rank, progress)

    @actor_method(max_task_retries=0)
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
    remote: Any = ray.remote
    actor = remote(concurrency_groups={"plans": PLANS_AT_A_TIME})(StreamCoordinator)
    return actor.options(
        num_cpus=0,
        max_concurrency=CALLS_AT_A_TIME,
        max_restarts=MAX_RESTARTS,
        max_task_retries=CALL_RETRIES,
    ).remote(label, table)
