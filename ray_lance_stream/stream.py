"""LanceStream: what a trainer is given in `datasets={...}`. factory.lance_stream() makes it."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import ray
from ray.data import DataContext, Dataset

from ray_lance_stream import explain, train
from ray_lance_stream._ray_data import local_mode_name
from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.coordinator import Attempt, RankProgress, start_coordinator
from ray_lance_stream.dataset import epoch_dataset
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.splits import data_rank, split_block
from ray_lance_stream.state import StreamState
from ray_lance_stream.transformable import Transformable

logger = logging.getLogger(__name__)

_starting = threading.Lock()  # two trainers may pickle one stream at once; it must have one coordinator
SHARD_METHODS = (
    "iter_batches",
    "iter_torch_batches",
    "iter_tf_batches",
    "iter_rows",
    "materialize",
    "schema",
    "stats",
    "load_state_dict",
    "save_state",
    "epoch",
    "set_epoch",
    "num_rows",
    "num_batches",
    "local_batch_size",
    "loss_weight",
    "world_rank",
    "split_block",
)


class LanceStream(Transformable):
    """A Lance table as a stream for `TorchTrainer(datasets={"train": stream})`. Made by `lance_stream`.

    Besides what Ray Train needs, it iterates itself, as one worker that owns every split: in local mode
    (`num_workers=0`) `get_dataset_shard` hands it out as it is.
    """

    def __init__(self, plan: ReadPlan, config: StreamConfig, context: DataContext | None = None) -> None:
        self.name: str | None = None
        self.context = context or DataContext.get_current().copy()
        self._plan = plan
        self._config = config
        self._coordinator: ray.actor.ActorHandle | None = None
        self._local: StreamShard | None = None

    def __repr__(self) -> str:
        stages = " -> ".join(str(stage) for stage in self._config.stages)
        transforms = f", transforms={stages}" if stages else ""
        return (
            f"LanceStream(name={self.name!r}, table={self._plan.table.identity!r}, version={self._plan.table.version}, "
            f"rows={self._plan.order.num_rows}, num_splits={self._plan.num_splits}{transforms})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The coordinator must belong to this process: the actors of a worker group die with it.
        if ray.is_initialized():
            self._coordinator_handle()
        return {**self.__dict__, "_local": None}

    def __getattr__(self, name: str) -> Any:
        if name in SHARD_METHODS:
            return getattr(self._local_shard(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- what Ray Train calls

    def set_name(self, name: str) -> None:
        """Called by Ray Train with the key of `datasets={...}`."""
        self.name = name

    def copy(self, stream: LanceStream) -> LanceStream:
        """A copy with a context of its own, on which Ray Train sets its options."""
        copied = LanceStream(stream._plan, stream._config, stream.context.copy())
        copied.name = stream.name
        copied._coordinator = stream._coordinator_handle()
        return copied

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[StreamShard]:
        """One shard per rank: rank r owns the r-th contiguous block of splits.

        Args:
            n: number of ranks.
            equal: must be True: ranks always take the same number of steps.
            locality_hints: not needed: a shard asks for readers on the node where it runs.

        Raises:
            ConfigError: more ranks than splits; ranks that are no multiple of replicas.
        """
        if not equal:
            raise ConfigError(
                "equal must be True, got False: the ranks of a stream always take the same number of steps"
            )
        if self._plan.num_splits is None:
            logger.warning(
                "stream %r: num_splits is the number of workers, %d: this run cannot be resumed on another number of "
                "workers; pass lance_stream(..., num_splits=S) with an S that the worker counts you plan for divide",
                self.name,
                n,
            )
        _, world = data_rank(n, 0, self._config.replicas)
        grid = self._plan.with_splits(world).grid
        split_block(grid.num_splits, world, 0)
        if self._config.global_batch_size is not None:
            grid.cycles_per_step(self._config.global_batch_size)
        attempt = Attempt(uuid.uuid4().hex, "", n, split_for_train=True)
        return [self._shard(attempt, rank) for rank in range(n)]

    def iterator(self) -> StreamShard:
        """The whole stream as one shard, for streams that `DataConfig(datasets_to_split=...)` leaves out."""
        return self.shard()

    # ---- what users call

    def shard(self, rank: int = 0, world_size: int = 1) -> StreamShard:
        """The shard of one rank, for use without Ray Train. Needs no other rank.

        Raises:
            ConfigError: a rank outside of the world, or more ranks than splits.
        """
        data, world = data_rank(world_size, rank, self._config.replicas)
        split_block(self._plan.with_splits(world).grid.num_splits, world, data)
        return self._shard(Attempt(uuid.uuid4().hex, "", world_size), rank)

    def row_ids(
        self, epoch: int, step: int, *, column: str | None = None, global_batch_size: int | None = None
    ) -> np.ndarray | list[Any]:
        """The rows of one global step, for finding the batch behind a loss spike.

        Args:
            epoch: from 0.
            step: from 0, counted from the start of the epoch, skipped steps included.
            column: read this column and return its values instead of row offsets.
            global_batch_size: G, where the stream was made without one.

        Returns:
            int64 [G] row offsets in the pinned table version, or the G values of `column`; in the order of one worker.

        Raises:
            ConfigError: no such step or column, or no global batch size.
        """
        at_least("epoch", epoch, 0)
        rows = explain.step_rows(
            self._plan, epoch, explain.step_cycles(self._plan, self._config, step, global_batch_size)
        )
        return rows if column is None else explain.column_values(self._plan, rows, column)

    def digest(self, epoch: int, step: int, *, global_batch_size: int | None = None) -> int:
        """A number in [0, 2**64) for the rows of one global step.

        Digests add up modulo 2**64: over the steps of a pass and over the ranks, `shard.digest` gives the same sum.

        Raises:
            ConfigError: no such step, or no global batch size.
        """
        at_least("epoch", epoch, 0)
        cycles = explain.step_cycles(self._plan, self._config, step, global_batch_size)
        return explain.step_digest(self._plan, self._config, epoch, cycles)

    def skip(self, epoch: int, steps: range, *, global_batch_size: int | None = None) -> LanceStream:
        """A stream that leaves out some global steps of an epoch, the same on every rank; the state records them.

        Args:
            epoch: from 0.
            steps: steps counted from the start of the epoch.
            global_batch_size: G, where the stream was made without one.

        Raises:
            ConfigError: no such steps, or no global batch size.
        """
        entries = explain.skip_entries(self._plan, self._config, epoch, steps, global_batch_size)
        return self._with(self._config.with_skipped(entries))

    def to_dataset(self, epoch: int = 0, global_batch_size: int | None = None) -> Dataset:
        """One epoch as a `ray.data.Dataset`: the rows that training sees, in the order of one worker. Lazy.

        Columns have the types of `ray.data.read_lance`. `dataset.context.execution_options.preserve_order` keeps the order.
        Transforms of `map_batches` run in the read tasks; where they enlarge rows a lot, Ray Data may cut blocks within a step.

        Args:
            epoch: from 0.
            global_batch_size: G, where it is not the stream's. Blocks hold whole steps of G rows, so that
                `map_batches(..., batch_size=G)` works on steps; without G, and where a step has more than half of
                `target_max_block_size` bytes, they hold whole cycles.

        Raises:
            ConfigError: an epoch or a global batch size that cannot be served, or a transform that asks for more than a CPU.
            VersionNotFoundError: the pinned version is gone.
        """
        saved = self._config.resume_state(self.name or "")
        config = self._config.with_skipped(saved.skipped) if saved else self._config
        return epoch_dataset(self._plan, config, epoch, global_batch_size)

    def state_dict(self, run: str | None = None) -> dict[str, Any]:
        """Where a run is: the position of its slowest rank, as last told (ranks tell about once a second).

        For looking at. A run continues from a checkpoint, never from here.

        Args:
            run: name of the run, where several share this stream.

        Raises:
            ConfigError: several runs and no name, or an unknown name.
        """
        ranks = self._snapshot(run)
        if ranks:
            return min(
                (p.state for p in ranks.values()), key=lambda s: (s.epoch, s.samples_consumed_per_split)
            ).to_dict()
        if self._local is not None:
            return self._local.state_dict()
        start = StreamState(
            self._plan.identity(self._config.replicas), self._config.epoch, 0, self._config.global_batch_size
        )
        saved = self._config.resume_state(self.name or "")
        return (saved or start).to_dict()

    def progress(self, run: str | None = None) -> dict[int, dict[str, Any]]:
        """By rank: epoch, samples_consumed_per_split, rows received in this attempt and rows_per_s, as last told."""
        return {
            rank: {
                "epoch": told.state.epoch,
                "samples_consumed_per_split": told.state.samples_consumed_per_split,
                "rows": told.rows,
                "rows_per_s": told.rows / told.elapsed_s if told.elapsed_s > 0 else 0.0,
            }
            for rank, told in self._snapshot(run).items()
        }

    def close(self) -> None:
        """End the coordinator and with it every reader of this stream; runs that still use it fail."""
        if self._local is not None:
            self._local.close()
            self._local = None
        if self._coordinator is not None:
            if ray.is_initialized():
                ray.kill(self._coordinator)
            self._coordinator = None

    # ---- inside

    def _with(self, config: StreamConfig) -> LanceStream:
        """This stream, delivered in another way; has a coordinator of its own."""
        other = LanceStream(self._plan, config, self.context.copy())
        other.name = self.name
        return other

    def _coordinator_handle(self) -> ray.actor.ActorHandle:
        with _starting:
            if self._coordinator is None:
                self._coordinator = start_coordinator(self.name or self._plan.table.identity, self._plan.table)
            return self._coordinator

    def _shard(self, attempt: Attempt, rank: int) -> StreamShard:
        name = self.name or local_mode_name(self) or ""
        return StreamShard(name, self._plan, self._config, self._coordinator_handle(), attempt, rank, self.context)

    def _local_shard(self) -> StreamShard:
        if self._local is None:
            self._local = self.shard()
            train.register(self._local)
        return self._local

    def _snapshot(self, run: str | None) -> dict[int, RankProgress]:
        if self._coordinator is None:
            return {}
        runs, ranks = cast("tuple[list[str], dict[int, RankProgress]]", ray.get(self._coordinator.snapshot.remote(run)))
        if run is None and len(runs) > 1:
            raise ConfigError(f"several runs use this stream, name one of them: {runs}")
        if run is not None and run not in runs:
            raise ConfigError(f"no run {run!r} has used this stream; runs so far: {runs}")
        return ranks
