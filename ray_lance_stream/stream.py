"""lance_stream() and LanceStream: what a trainer is given in `datasets={...}`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import ray
from ray.data import DataContext

from ray_lance_stream import explain, train
from ray_lance_stream._ray_data import local_mode_name
from ray_lance_stream.config import DEFAULT_PREFETCH_BYTES, ReadPlan, StreamConfig
from ray_lance_stream.coordinator import Attempt, RankProgress, start_coordinator
from ray_lance_stream.errors import ConfigError, StateMismatchError
from ray_lance_stream.order import Order
from ray_lance_stream.planner import plan_table
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.source import resolve_columns, table_ref, validate_filter
from ray_lance_stream.splits import data_rank, split_block
from ray_lance_stream.state import StreamState, check_fits
from ray_lance_stream.table import StorageOptions

logger = logging.getLogger(__name__)

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


class LanceStream:
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
        return (
            f"LanceStream(name={self.name!r}, table={self._plan.table.identity!r}, version={self._plan.table.version}, "
            f"rows={self._plan.order.num_rows}, num_splits={self._plan.num_splits})"
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
        attempt = Attempt(uuid.uuid4().hex, "", n)
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
        explain.check_epoch(epoch)
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
        explain.check_epoch(epoch)
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
        skipping = LanceStream(self._plan, self._config.with_skipped(entries), self.context.copy())
        skipping.name = self.name
        return skipping

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

    def _coordinator_handle(self) -> ray.actor.ActorHandle:
        if self._coordinator is None:
            self._coordinator = start_coordinator(self.name or self._plan.table.identity)
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


def lance_stream(
    table: Any,
    *,
    num_splits: int | None = None,
    shuffle: bool = True,
    shuffle_seed: int = 0,
    shuffle_clump_size: int | None = None,
    epoch: int = 0,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    order: str = "feistel-1",
    global_batch_size: int | None = None,
    drop_remainder: bool = True,
    evaluation: bool = False,
    read_batch_size: int | None = None,
    prefetch_chunks: int = 4,
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
    readers_per_worker: int = 1,
    replicas: int = 1,
    resume: Literal["auto", "manual"] = "auto",
    resume_from: ray.train.Checkpoint | str | os.PathLike[str] | dict[str, Any] | None = None,
    storage_options: StorageOptions = None,
) -> LanceStream:
    """Stream a Lance or LanceDB table into Ray Train with the same global steps on any number of workers.

    The table version is pinned here. Everything that can be checked is checked here, before any worker starts.

    Args:
        table: a lancedb table, a `lance.LanceDataset`, or the path or URI of a Lance dataset.
        num_splits: S, number of equal splits of the row order, fixed for a run; the worker counts that divide it are
            served best. None: the number of workers, and the run is not elastic.
        shuffle: permute the rows, anew in each epoch; else table order.
        shuffle_seed: seed of the permutation.
        shuffle_clump_size: permute clumps of this many consecutive rows and keep the rows of a clump together: fewer,
            longer reads for less randomness.
        epoch: first epoch.
        columns: columns to read; None: all.
        filter: SQL prefilter; rows that do not match are never read.
        order: id of the row order; see docs/order.md.
        global_batch_size: G, rows of a global step over all ranks, a multiple of num_splits. Makes each rank's share the
            default batch size.
        drop_remainder: leave out the N % S last rows of the order, others in each epoch when shuffled. False delivers
            them too, one more row for the first splits, so ranks may differ by that: for evaluation.
        evaluation: every pass is whole and is never resumed.
        read_batch_size: rows per split of one chunk; None: sized by bytes.
        prefetch_chunks: chunks in flight per worker.
        prefetch_bytes: bytes in flight per worker.
        readers_per_worker: reader actors of one worker.
        replicas: this many consecutive ranks share their rows (tensor or pipeline parallel).
        resume: "auto" restores from the checkpoint that a worker group starts from; "manual" leaves it to
            `shard.load_state_dict`.
        resume_from: a `ray.train.Checkpoint`, its path, or a state dict to continue from in a new run.
        storage_options: object store options; never shown and never saved.

    Raises:
        ConfigError: an argument cannot be served.
        TableError: the table, or the version to resume from, is not there.
        StateError: resume_from holds no state, or one that does not fit.
    """
    if filter is not None and not isinstance(filter, str):
        raise ConfigError(f"filter must be SQL text, got {filter!r}; pass None for all rows")
    if num_splits is not None and (isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1):
        raise ConfigError(f"num_splits must be an int >= 1 or None, got {num_splits!r}")
    config = StreamConfig(
        global_batch_size=global_batch_size,
        epoch=epoch,
        evaluation=evaluation,
        read_batch_size=read_batch_size,
        prefetch_chunks=prefetch_chunks,
        prefetch_bytes=prefetch_bytes,
        readers_per_worker=readers_per_worker,
        replicas=replicas,
        resume=resume,
        resume_states={} if resume_from is None else train.resume_states(resume_from),
    )
    ref = table_ref(table, storage_options)
    plan = ReadPlan(
        table=ref,
        columns=tuple(resolve_columns(ref, columns)),
        filter=filter,
        order=Order(1, shuffle=shuffle, seed=shuffle_seed, clump_size=shuffle_clump_size, order_id=order),
        num_splits=num_splits,
        drop_remainder=drop_remainder,
    )
    if filter is not None:
        validate_filter(ref, filter)
    stream = LanceStream(_planned(plan, config), config)
    if global_batch_size is not None and num_splits is not None:
        stream._plan.grid.cycles_per_step(global_batch_size)
    left_out = stream._plan.grid.num_left_out
    if left_out:
        logger.warning(
            "%d of %d rows are left out of each epoch (num_splits=%d does not divide them)%s; drop_remainder=False "
            "delivers them, for evaluation",
            left_out,
            stream._plan.order.num_rows,
            stream._plan.grid.num_splits,
            ", others in each epoch" if shuffle else "",
        )
    return stream


def _planned(plan: ReadPlan, config: StreamConfig) -> ReadPlan:
    """The plan at the version to resume from, or at the pinned one.

    Raises:
        StateMismatchError: no state of `resume_from` fits.
    """
    saved = _fitting(plan, config)
    if saved is None:
        return plan_table(plan)
    at_saved = plan_table(plan.at(saved.identity.table_version))
    if plan.num_splits is not None:
        check_fits(saved, at_saved.identity(config.replicas))
    return at_saved


def _fitting(plan: ReadPlan, config: StreamConfig) -> StreamState | None:
    """The state of `resume_from` that this stream continues from; the name of the stream is not known yet."""
    states = list(config.resume_states.values())
    if not states:
        return None
    current = plan.identity(config.replicas)
    differences = []
    for saved in states:
        # Row count and, where the world size gives it, the number of splits are known later.
        loose = saved.identity if plan.num_splits is None else None
        now = current.at(saved.identity) if loose is None else current.at(saved.identity, num_splits=loose.num_splits)
        found = saved.identity.differences(now)
        if not found:
            return saved
        differences.append(found)
    raise StateMismatchError(
        min(differences, key=len), "resume_from continues the same row order: make the stream with the saved values"
    )
