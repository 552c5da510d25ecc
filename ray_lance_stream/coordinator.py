"""StreamCoordinator: assigns split blocks to ranks, owns the readers, knows how far each run is.

The actor is a thin shell around parts that are tested without it. It may die: readers are made on request, plans are computed
from (version, filter), lists of rows are on disk, and the versions of epochs, the split blocks of each worker group and the
scalar position of each run are in the cluster's key-value store, where a restarted coordinator finds them. Ranks report
their positions again within seconds. A checkpoint, never the coordinator, is where a run continues from: the model would be
behind.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import warnings
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray

from ray_lance_stream.actor_method import actor_method
from ray_lance_stream.attempts import Attempt, AttemptBook, PassStart, RankProgress, Turn
from ray_lance_stream.cluster_store import ClusterStore
from ray_lance_stream.config import ReadPlan, RowList, Shared
from ray_lance_stream.epoch_versions import EpochVersions, newest_version
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.planner import PlanBook
from ray_lance_stream.rank_passes import PassConflict
from ray_lance_stream.reader import start_reader
from ray_lance_stream.row_lists import RowLists
from ray_lance_stream.runs import Resize, RunBook, RunSnapshot
from ray_lance_stream.shelf import Owner, Reader, ReaderShelf, StageShelf, Worker
from ray_lance_stream.source import resolve_columns
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.stage_board import BOARD, StageBoard
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from ray_lance_stream.transform import Stage

logger = logging.getLogger(__name__)

CALLS_AT_A_TIME = 16
PLANS_AT_A_TIME = 4  # of their own: ranks that wait for a scan must not keep others from a reader
MAX_RESTARTS = 16
CALL_RETRIES = 3
# A worker group that starts again within this time after the end of the one before finds warm readers.
KEEP_READERS_S = 20.0
# A trainer needs a while from `fit()` to its first batch.
KEEP_SPARE_S = 120.0
# The constructor of a class may take long: its actors are kept from one pass to the next, unless somebody needs their room.
KEEP_STAGE_S = 60.0
SPARE_STAGE_S = 5.0
SWEEP_S = 2.5
KEEP_RUNS_S = 1.0
RUNS = "ray_lance_stream.runs"


@dataclass(frozen=True)
class SplitRequest:
    """What `streaming_split` asks for.

    Attributes:
        stream: name of the stream.
        attempt: the worker group.
        num_splits: S.
        replicas: consecutive ranks that have the same splits.
        ranks: only these ranks; None: all.
        nodes: where the ranks run, in their order; empty where that is not known.
        has_readers: whether the ranks will read at once, so that readers are started on these nodes.
        copy_id: groups that follow one another in a run come from the same copy of the stream.
    """

    stream: str
    attempt: Attempt
    num_splits: int
    replicas: int
    ranks: tuple[int, ...] | None = None
    nodes: tuple[str, ...] = ()
    has_readers: bool = False
    copy_id: str = ""


class StreamCoordinator:
    """One per stream and driver; lives as long as the process that made it and somebody who holds it.

    Args:
        label: stream name, for the dashboard.
        table: what new readers open at once.
        stream_id: tells streams of a cluster apart.
    """

    def __init__(self, label: str, table: TableRef, stream_id: str) -> None:
        self._label = label
        self._stream_id = stream_id
        self._book = AttemptBook()
        self._runs = RunBook()
        self._store = ClusterStore(RUNS)
        self._board = StageBoard(stream_id, ClusterStore(BOARD))
        self._lock = threading.Lock()  # held for moments: never while another process is asked, or a module imported
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._plans = PlanBook(Shared.put)
        self._epochs = EpochVersions(ClusterStore("ray_lance_stream.epoch_versions"))
        self._lists = RowLists()
        self._shelf = ReaderShelf(partial(start_reader, label, table), KEEP_READERS_S, time.monotonic)
        here = ray.get_runtime_context()
        with warnings.catch_warnings():  # of Ray, whose property asks for an id in a way that it has deprecated
            warnings.simplefilter("ignore")
            is_restarted = here.was_current_actor_reconstructed
        if is_restarted:
            self._restore()
        else:  # who has lost readers asks for new ones, never for the spare
            self._shelf.spare(here.get_node_id(), KEEP_SPARE_S)
        self._stages = StageShelf(self._start_stage_worker, KEEP_STAGE_S, SPARE_STAGE_S, time.monotonic)
        self._starting: list[ray.ObjectRef] = []  # actors of stages that have no resources yet
        threading.Thread(target=self._sweep, name="sweep readers", daemon=True).start()
        threading.Thread(target=self._keep, name="keep runs", daemon=True).start()

    def __repr__(self) -> str:
        return f"StreamCoordinator[{getattr(self, '_label', '')}]"  # Ray asks before there is an instance

    # ---- split blocks and positions

    def assign(self, request: SplitRequest) -> dict[int, SplitBlock]:
        """The split block of each rank of a worker group: the r-th contiguous one is that of rank r.

        A group that follows another one takes over its readers, on the nodes where its own ranks are.

        Raises:
            ConfigError: more ranks than splits, or ranks that are no multiple of replicas.
        """
        attempt_id = request.attempt.attempt_id
        with self._lock:
            resize = self._runs.assign(
                request.attempt,
                request.num_splits,
                request.replicas,
                ranks=request.ranks,
                nodes=request.nodes,
                copy_id=request.copy_id,
            )
            run = self._runs.name_of(attempt_id)
            for rank, node_id in enumerate(request.nodes if request.has_readers else ()):
                self._shelf.prepare(Owner(run, attempt_id, rank, 0), node_id, KEEP_SPARE_S)
            blocks = self._runs.blocks_of(attempt_id)
        self._log(request.stream, resize)
        return blocks

    @actor_method(max_task_retries=0)
    def arrive(self, stream: str, attempt: Attempt, rank: int, node_id: str | None, has_reader: bool) -> None:
        """A rank has arrived in its process; with `has_reader` it will read at once, see ReaderShelf.prepare."""
        with self._lock:
            resize = self._runs.arrive(attempt, rank, node_id)
            if has_reader:
                self._shelf.prepare(Owner(attempt.run, attempt.attempt_id, rank, 0), node_id, KEEP_SPARE_S)
        self._log(stream, resize)

    def register_pass(
        self, attempt: Attempt, rank: int, turn: Turn, start: PassStart
    ) -> tuple[int, PassStart] | PassConflict | None:
        """See AttemptBook.register_pass."""
        with self._lock:
            return self._book.register_pass(attempt, rank, turn, start)

    @actor_method(max_task_retries=0)
    def record(self, attempt: Attempt, rank: int, progress: RankProgress) -> PassConflict | None:
        """See AttemptBook.record and RunBook.record."""
        with self._lock:
            conflict = self._book.record(attempt, rank, progress)
            resize = self._runs.record(attempt, rank, progress)
            self._touch(attempt.attempt_id, rank)
        self._log(self._label, resize)
        return conflict

    @actor_method(max_task_retries=0)
    def alive(self, attempt_id: str, rank: int) -> None:
        """See ReaderShelf.touch and StageShelf.touch."""
        with self._lock:
            self._touch(attempt_id, rank)

    def _touch(self, attempt_id: str, rank: int) -> None:
        self._shelf.touch(attempt_id, rank)
        self._stages.touch(attempt_id, rank)

    def snapshot(self, run: str | None) -> RunSnapshot:
        """See RunBook.snapshot."""
        with self._lock:
            found = self._runs.snapshot(run)
            readers: dict[int, list[Reader]] = {}
            for attempt_id in reversed(found.attempt_ids):
                readers |= self._shelf.of_attempt(attempt_id)
        ranks = {
            rank: replace(view, reader=", ".join(_id_of(each) for each in readers[rank]) if rank in readers else None)
            for rank, view in found.ranks.items()
        }
        return replace(found, ranks=ranks)

    def _log(self, stream: str, resize: Resize | None) -> None:
        if resize is not None:  # at a level that Ray forwards to the driver without being told to
            numbers = resize.num_splits, resize.before, resize.now
            logger.warning("stream %r: %d splits: %d workers -> %d", stream, *numbers)

    def _keep(self) -> None:
        while not self._ended.wait(KEEP_RUNS_S):
            try:
                self.keep_runs()
            except Exception as error:
                logger.warning("cannot keep the positions of stream %r in the cluster: %s", self._label, error)

    def keep_runs(self) -> None:
        """Write what a restarted coordinator is to find: at most one value a second and run."""
        with self._writing:
            if self._ended.is_set():
                return
            with self._lock:
                changes = self._runs.changes()
            for attempt_id, text in changes.items():
                key = f"{self._stream_id}/{attempt_id}"
                if text is None:
                    self._store.delete(key)
                else:
                    self._store.put(key, text)

    def _restore(self) -> None:
        try:
            kept = [self._store.get(key) for key in self._store.keys(f"{self._stream_id}/")]
            self._runs.restore(text for text in kept if text is not None)
        except Exception as error:  # no reason not to serve: ranks report again
            logger.warning("cannot take up the positions of stream %r that were kept: %s", self._label, error)

    # ---- readers and actors of stages

    def reader(self, owner: Owner, node_id: str | None, fresh: bool) -> tuple[Reader, Reader | None]:
        """See ReaderShelf.claim.

        The shard holds what it gets, so that a reader outlives neither the shard's process nor this actor, and one that
        is forgotten here goes on for its shard.
        """
        with self._lock:
            return self._shelf.claim(owner, node_id, fresh=fresh)

    def stage_worker(self, owner: Owner, stage: Stage, lost: Worker | None) -> Worker:
        """See StageShelf.claim."""
        import_module("ray_lance_stream.stage_worker")  # and ray.data, which takes a second: not under the lock
        with self._lock:
            return self._stages.claim(owner, stage, lost)

    def _start_stage_worker(self, stage: Stage) -> Worker:
        from ray_lance_stream.stage_worker import start_stage_worker  # imports ray.data, which most streams do without

        worker = start_stage_worker(stage)
        self._starting.append(worker.started.remote())
        return worker

    @actor_method(max_task_retries=0)
    def release(self, attempt_id: str, rank: int) -> None:
        """See ReaderShelf.release and StageShelf.release."""
        with self._lock:
            self._shelf.release(attempt_id, rank)
            self._stages.release(attempt_id, rank)
        self.sweep()

    def _sweep(self) -> None:
        while not self._ended.wait(SWEEP_S):
            try:
                self.sweep()
            except Exception as error:
                logger.warning("cannot look after the processes of stream %r: %s", self._label, error)

    def sweep(self) -> None:
        """Let go what is idle; post what actors of stages this stream holds, and heed what others wait for."""
        with self._lock:
            self._shelf.sweep()
            starting, held = list(self._starting), self._stages.held()
        _, waiting = ray.wait(starting, num_returns=len(starting), timeout=0) if starting else ([], [])
        self._board.post(self._label, held, waits=bool(waiting))
        is_short = bool(held) and any(note.waits for note in self._board.others())
        with self._lock:
            self._starting = [ref for ref in self._starting if ref in waiting or ref not in starting]
            idle = self._stages.sweep(is_short=is_short)
        for worker in idle:
            worker.leave.remote()

    @actor_method(concurrency_group="end", max_task_retries=0)
    def end(self) -> None:
        """End this actor, and with it readers and actors of stages."""
        ray.actor.exit_actor()

    def __ray_shutdown__(self) -> None:
        """Ray calls this when the actor ends without being killed: what is kept of it in the cluster goes."""
        with self._writing:
            self._ended.set()
            self._store.delete(f"{self._stream_id}/")
            self._board.post(self._label, (), waits=False)

    # ---- plans and lists

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

        version = self._epochs.of(attempt_id, epoch, choose)
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


def _id_of(actor: Any) -> str:
    return str(actor._actor_id.hex())


def start_coordinator(label: str, table: TableRef) -> ray.actor.ActorHandle:
    """A coordinator owned by this process."""
    remote: Any = ray.remote
    actor = remote(concurrency_groups={"plans": PLANS_AT_A_TIME, "end": 1})(StreamCoordinator)
    return actor.options(
        num_cpus=0,
        max_concurrency=CALLS_AT_A_TIME,
        max_restarts=MAX_RESTARTS,
        max_task_retries=CALL_RETRIES,
    ).remote(label, table, uuid.uuid4().hex)
