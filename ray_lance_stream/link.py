"""CoordinatorLink: what a shard asks of its coordinator and tells it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn

import ray

from ray_lance_stream import train
from ray_lance_stream.attempts import Attempt, PassStart, RankProgress, Turn
from ray_lance_stream.config import ReadPlan, RowList
from ray_lance_stream.error_transport import raise_original
from ray_lance_stream.errors import ConfigError, ReadError
from ray_lance_stream.forked import is_cut_off, use_ray
from ray_lance_stream.meter import Meter
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.rank_passes import PassConflict, PassProgress
from ray_lance_stream.shelf import Owner, Reader, Worker
from ray_lance_stream.state import StreamState
from ray_lance_stream.transform import Stage
from ray_lance_stream.watch import TELL_AGAIN_S

logger = logging.getLogger(__name__)

TELL_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 60.0
END_WAIT_S = 1.0
# Other lists of one epoch are those of two releases: a coordinator that was restarted is on another node.
ONE_RELEASE = "have the same release of lancedb on all nodes, and go on from the last checkpoint"
PEEK = "look at rows on one rank with shard.peek(n), which moves nothing"


class CoordinatorLink:
    """One rank's line to the coordinator. Nothing here waits for another rank.

    Args:
        name: stream name.
        coordinator: the actor.
        attempt: the worker group of this rank.
        rank: this rank.
        meter: what this rank has counted.
        stall_warn_s: after so long without an answer it says so; None: never.
    """

    def __init__(
        self,
        name: str,
        coordinator: ray.actor.ActorHandle,
        attempt: Attempt,
        rank: int,
        meter: Meter,
        stall_warn_s: float | None,
    ) -> None:
        self._name = name
        self._coordinator = coordinator
        self._attempt = attempt
        self._rank = rank
        self._meter = meter
        self._stall_warn_s = stall_warn_s
        self._told_s = 0.0
        self._answer: ray.ObjectRef | None = None  # to the newest report

    def arrive(self, *, has_reader: bool) -> None:
        """This rank is in its process; with `has_reader` its first reader is started, or handed on from an attempt that has
        ended. Waits for nothing."""
        use_ray()
        node_id = ray.get_runtime_context().get_node_id()
        self._coordinator.arrive.remote(self._name, self._named(), self._rank, node_id, has_reader)

    def reader(self, slot: int, fresh: bool) -> tuple[Reader, Reader | None]:
        """The reader of a slot of this rank, and one that is warm where that one was just started.

        Args:
            slot: which of the readers of this rank.
            fresh: the one that the slot had has died.
        """
        return self._ask("reader", self._owner(slot), ray.get_runtime_context().get_node_id(), fresh)

    def stage_worker(self, stage: Stage, number: int, lost: Worker | None) -> Worker:
        """The actor of a stage with a number; another one than `lost`, which has died."""
        return self._ask("stage_worker", self._owner(number), stage, lost)

    def alive(self) -> None:
        """This rank waits for a chunk; waits for nothing itself."""
        self._coordinator.alive.remote(self._attempt.attempt_id, self._rank)

    def release_readers(self) -> None:
        """This shard needs no readers and no actors of stages any more; waits for nothing."""
        if ray.is_initialized():
            self._coordinator.release.remote(self._attempt.attempt_id, self._rank)

    def _named(self) -> Attempt:
        """The attempt with the name of its run, which only the worker knows. Calls may overtake each other."""
        return replace(self._attempt, run=train.run_name())

    def _owner(self, slot: int) -> Owner:
        return Owner(train.run_name(), self._attempt.attempt_id, self._rank, slot)

    def plan_at(self, plan: ReadPlan, version: int, pinned_as: PinnedAs | None) -> ReadPlan:
        """The same stream at another table version; may scan the table, once for all ranks."""
        return self._ask("plan_at", plan, version, pinned_as, timeout_s=None)

    def row_list(self, plan: ReadPlan, epoch: int) -> RowList | None:
        """See RowLists.ask; made once for all ranks."""
        return self._ask("row_list", plan, epoch)

    def row_list_soon(self, plan: ReadPlan, epoch: int) -> ray.ObjectRef:
        """The answer to `row_list`; waits for nothing."""
        return self._coordinator.row_list.remote(plan, epoch)

    def plan_of_epoch(self, epoch: int, plan: ReadPlan, first: bool, pinned_as: PinnedAs | None) -> ReadPlan:
        """See StreamCoordinator.plan_of_epoch; may scan the table, once for all ranks."""
        return self._ask("plan_of_epoch", self._attempt.attempt_id, epoch, plan, first, pinned_as, timeout_s=None)

    def ask_plan_of_epoch(self, epoch: int, plan: ReadPlan, pinned_as: PinnedAs | None) -> Future[ReadPlan]:
        """Ask for the plan of an epoch that comes; waits for nothing."""
        asked: ray.ObjectRef = self._coordinator.plan_of_epoch.remote(
            self._attempt.attempt_id, epoch, plan, False, pinned_as
        )
        return asked.future()

    def agree_on_pass(self, turn: Turn, start: PassStart) -> None:
        """Register what this rank begins a pass with: ranks must do alike, or a collective would hang.

        Raises:
            ConfigError: another rank of this attempt reads other rows, steps differently, begins elsewhere or left a pass at
                another step; names both.
        """
        other = self._ask("register_pass", self._named(), self._rank, turn, start)
        if isinstance(other, PassConflict):
            self._refuse_conflict(other)
        if other is not None:
            self._refuse_pass(turn[0], start, *other)

    def _refuse_pass(self, epoch: int, mine: PassStart, rank: int, theirs: PassStart) -> None:
        where = f"in epoch {epoch} of stream {self._name!r} rank {self._rank}"
        if theirs.identity != mine.identity:
            my_values, their_values = (
                ", ".join(f"{name}={getattr(each, name)!r}" for name in mine.identity.unlike(theirs.identity))
                for each in (mine.identity, theirs.identity)
            )
            raise ConfigError(
                f"all ranks must read the same rows, but {where} reads {my_values} and rank {rank} reads {their_values}; "
                "load the same state on every rank"
            )
        if theirs.listed != mine.listed:
            raise ConfigError(
                f"all ranks must read the same list of rows, but {where} has {mine.listed} and rank {rank} has "
                f"{theirs.listed}; {ONE_RELEASE}"
            )
        assert mine.step is not None
        assert theirs.step is not None
        raise ConfigError(
            f"all ranks must take the same number of cycles per batch, but {where} uses batch_size={mine.step.batch_size} on "
            f"{mine.step.num_splits} splits (drop_last={mine.step.drop_last}) and rank {rank} uses "
            f"batch_size={theirs.step.batch_size} on {theirs.step.num_splits} splits (drop_last={theirs.step.drop_last}); use "
            "shard.local_batch_size(global_batch_size) on every rank"
        )

    def _refuse_conflict(self, found: PassConflict) -> NoReturn:
        pass_of = f"pass {abs(found.mine.number)} over stream {self._name!r}"
        if found.is_at_start:
            mine, theirs = found.mine.start, found.theirs.start
            raise ConfigError(
                f"all ranks must begin a pass at the same place, but in {pass_of} rank {self._rank} begins at {mine} and rank "
                f"{found.rank} at {theirs}; load the same state or call the same set_epoch or resume_epoch on every rank, and "
                f"{PEEK}"
            )
        ranks = sorted([(found.mine, self._rank), (found.theirs, found.rank)], key=lambda each: each[0].steps or 0)
        (first, first_rank), (other, other_rank) = ranks
        unit = "batches" if first.number > 0 else "rows"
        raise ConfigError(
            f"all ranks must leave a pass at the same step, but rank {first_rank} left {pass_of} after {first.steps} {unit}, "
            f"at {first.place}, and rank {other_rank} has received {other.steps} {unit} of it, up to {other.place}; break at "
            f"the same step on every rank, and {PEEK}"
        )

    def is_time_to_tell(self) -> bool:
        """Whether the coordinator has not been told for a while."""
        return time.monotonic() - self._told_s > TELL_INTERVAL_S

    def tell(self, state: StreamState, passes: tuple[PassProgress, ...]) -> None:
        """Report to the coordinator, and to Ray's metrics, where this rank is and what it has counted; waits for nothing."""
        if is_cut_off() or not ray.is_initialized():  # the latter: a pass that the interpreter ends as it exits
            return
        self._told_s = time.monotonic()
        tally, attempt = self._meter.tally(), self._named()
        self._meter.export(tally, state, {"stream": self._name, "rank": str(self._rank), "run": attempt.run})
        answer: ray.ObjectRef = self._coordinator.record.remote(attempt, self._rank, RankProgress(state, tally, passes))
        self._answer = answer if passes and attempt.world_size > 1 else None

    def check_together(self) -> None:
        """Look at the answer to the newest report, if it is there; waits for nothing.

        Raises:
            ConfigError: this rank and another one have not left a pass at the same step.
        """
        found = self._answered(0)
        if found is not None and found.settles_in_s <= 0:
            self._refuse_conflict(found)

    def check_together_at_end(self, tell: Callable[[], None]) -> None:
        """As `check_together`, once a pass is over: waits for the answer, and for a rank that may still go back.

        Args:
            tell: reports again.
        """
        found = self._answered(END_WAIT_S)
        if found is None:
            return
        if found.settles_in_s > 0:
            time.sleep(found.settles_in_s)
            tell()
            found = self._answered(END_WAIT_S)
        if found is not None and found.settles_in_s <= 0:
            self._refuse_conflict(found)

    def _answered(self, timeout_s: float) -> PassConflict | None:
        answer, self._answer = self._answer, None
        if answer is None or not ray.is_initialized():
            return None
        try:
            found: PassConflict | None = ray.get(answer, timeout=timeout_s)
        except ray.exceptions.RayError:  # not there yet, or lost with the coordinator: the next report has another one
            return None
        return found

    def _ask(self, method: str, *args: Any, timeout_s: float | None = ANSWER_TIMEOUT_S) -> Any:
        return ask(self._coordinator, self._name, method, *args, timeout_s=timeout_s, stall_warn_s=self._stall_warn_s)


def ask(
    coordinator: ray.actor.ActorHandle,
    name: str,
    method: str,
    *args: Any,
    timeout_s: float | None,
    stall_warn_s: float | None,
) -> Any:
    """The answer of the coordinator of stream `name`.

    Args:
        coordinator: the actor.
        name: of the stream, for messages.
        method: what is asked.
        args: of the method.
        timeout_s: after so long without an answer it is an error; None: never.
        stall_warn_s: after so long without an answer a warning says so; None: never.

    Raises:
        ReadError: there is no answer in time.
    """
    use_ray()
    asked = getattr(coordinator, method).remote(*args)
    began_s = time.monotonic()
    end_s = math.inf if timeout_s is None else timeout_s
    tell_s = math.inf if stall_warn_s is None else stall_warn_s
    while True:
        waited_s = time.monotonic() - began_s
        until_s = min(tell_s, end_s)
        try:
            return ray.get(asked, timeout=None if until_s == math.inf else max(until_s - waited_s, 0))
        except ray.exceptions.RayTaskError as error:
            raise_original(error)
        except ray.exceptions.GetTimeoutError:
            what = f"the coordinator of stream {name!r} ({method})"
        if end_s <= tell_s:
            raise ReadError(
                f"no answer for {end_s:.0f} s from {what}: is the driver's process, or its node, overloaded or gone?"
            )
        logger.warning("still waiting after %.0f s for %s", tell_s, what)
        tell_s += TELL_AGAIN_S
