"""CoordinatorLink: what a shard asks of its coordinator and tells it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ray

from ray_lance_stream import train
from ray_lance_stream.config import ReadPlan
from ray_lance_stream.coordinator import Attempt, RankProgress, StepSize
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.meter import Meter
from ray_lance_stream.shelf import Owner, Reader, Worker
from ray_lance_stream.splits import SplitBlock, cycles_per_batch
from ray_lance_stream.state import StreamState
from ray_lance_stream.transform import Stage

TELL_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 60.0


class CoordinatorLink:
    """One rank's line to the coordinator. Nothing here waits for another rank.

    Args:
        name: stream name.
        coordinator: the actor.
        attempt: the worker group of this rank.
        rank: this rank.
        meter: what this rank has counted.
    """

    def __init__(
        self, name: str, coordinator: ray.actor.ActorHandle, attempt: Attempt, rank: int, meter: Meter
    ) -> None:
        self._name = name
        self._coordinator = coordinator
        self._attempt = attempt
        self._rank = rank
        self._meter = meter
        self._told_s = 0.0
        self._passes = 0

    def prepare_reader(self) -> None:
        """Have the first reader started, or handed on from an attempt that has ended; waits for nothing."""
        self._coordinator.prepare.remote(self._owner(0), ray.get_runtime_context().get_node_id())

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

    def plan_at(self, plan: ReadPlan, version: int) -> ReadPlan:
        """The same stream at another table version; may scan the table, once for all ranks."""
        return self._ask("plan_at", plan, version, timeout_s=None)

    def agree_on_step(self, epoch: int, block: SplitBlock, batch_size: int, drop_last: bool) -> None:
        """Register how this rank steps through an epoch: ranks must step alike, or a collective would hang.

        Raises:
            ConfigError: an earlier rank of this attempt steps differently; names both.
        """
        step = StepSize(str(cycles_per_batch(batch_size, block)), drop_last, batch_size, block.size)
        self._passes += 1
        other = self._ask("register_step", self._named(), self._rank, (epoch, self._passes), step)
        if other is None:
            return
        rank, theirs = other
        raise ConfigError(
            f"all ranks must take the same number of cycles per batch, but in epoch {epoch} of stream {self._name!r} rank "
            f"{self._rank} uses batch_size={batch_size} on {block.size} splits (drop_last={drop_last}) and rank {rank} "
            f"uses batch_size={theirs.batch_size} on {theirs.num_splits} splits (drop_last={theirs.drop_last}); use "
            "shard.local_batch_size(global_batch_size) on every rank"
        )

    def is_time_to_tell(self) -> bool:
        """Whether the coordinator has not been told for a while."""
        return time.monotonic() - self._told_s > TELL_INTERVAL_S

    def tell(self, state: StreamState) -> None:
        """Tell the coordinator and Ray's metrics where this rank is and what it has counted; waits for nothing."""
        if not ray.is_initialized():  # a pass that the interpreter ends as it exits
            return
        self._told_s = time.monotonic()
        tally, attempt = self._meter.tally(), self._named()
        self._meter.export(tally, state, {"stream": self._name, "rank": str(self._rank), "run": attempt.run})
        self._coordinator.record.remote(attempt, self._rank, RankProgress(state, tally))

    def _ask(self, method: str, *args: Any, timeout_s: float | None = ANSWER_TIMEOUT_S) -> Any:
        try:
            return ray.get(getattr(self._coordinator, method).remote(*args), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
