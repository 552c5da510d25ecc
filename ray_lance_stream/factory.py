"""lance_stream(): checks everything on the driver, pins the table version, plans, and makes a LanceStream."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import ray.train

from ray_lance_stream import train
from ray_lance_stream.cache_spec import cache_spec
from ray_lance_stream.config import (
    DEFAULT_PREFETCH_BYTES,
    DEFAULT_READ_TIMEOUT_S,
    DEFAULT_STALL_WARN_S,
    ReadPlan,
    StreamConfig,
)
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError
from ray_lance_stream.forked import use_lance
from ray_lance_stream.lancedb_order import check_lancedb_order
from ray_lance_stream.lancedb_state import from_lancedb_state, is_lancedb_state
from ray_lance_stream.launcher import is_first_rank
from ray_lance_stream.order import FEISTEL_1, Order
from ray_lance_stream.other_loaders import refuses_other_arguments
from ray_lance_stream.permutation import with_permutation
from ray_lance_stream.planner import PlanBook, plan_table
from ray_lance_stream.recorded import recorded_plan
from ray_lance_stream.remote import check_remote_order
from ray_lance_stream.source import resolve_columns, table_ref, validate_filter, with_cache
from ray_lance_stream.state import StreamState, remedy_for
from ray_lance_stream.storage_options import StorageOptions
from ray_lance_stream.stream import LanceStream

logger = logging.getLogger(__name__)


@refuses_other_arguments
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
    permutation: Any = None,
    global_batch_size: int | None = None,
    drop_remainder: bool = True,
    evaluation: bool = False,
    read_batch_size: int | None = None,
    prefetch_chunks: int = 4,
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
    readers_per_worker: int = 1,
    read_timeout_s: float | None = DEFAULT_READ_TIMEOUT_S,
    stall_warn_s: float | None = DEFAULT_STALL_WARN_S,
    replicas: int = 1,
    resume: Literal["auto", "manual"] = "auto",
    resume_from: ray.train.Checkpoint | str | os.PathLike[str] | dict[str, Any] | None = None,
    on_new_version: Literal["stay", "next_epoch"] = "stay",
    allow_moved: bool = False,
    storage_options: StorageOptions = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
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
        filter: SQL prefilter; rows that do not match are never read. Columns are written plain or in `backticks`, texts in
            single quotes: double quotes make a text, too.
        order: id of the row order; see docs/order.md. "lancedb" is that of `lancedb.streaming.StreamingDataset`.
        permutation: a permutation table of LanceDB that lists the rows of each split, the same in each epoch. num_splits
            and the table version come from it; splits are cut to the shortest.
        global_batch_size: G, rows of a global step over all ranks, a multiple of num_splits. Makes each rank's share the
            default batch size.
        drop_remainder: leave out the N % S last rows of the order, others in each epoch when shuffled. False delivers
            them too, one more row for the first splits, so ranks may differ by that: for evaluation.
        evaluation: every pass is whole and is never resumed.
        read_batch_size: rows per split of one chunk; None: sized by bytes.
        prefetch_chunks: chunks in flight per worker.
        prefetch_bytes: bytes in flight per worker.
        readers_per_worker: reader actors of one worker.
        read_timeout_s: a read that makes no progress for so long is abandoned: its reader is ended, and the read sent to a
            fresh one, as often as other reads that are lost. None: never (docs/object-storage.md). In a DataLoader worker it
            is an error at once (docs/pytorch.md). Not in the tasks of `to_dataset()`, which are Ray Data's own.
        stall_warn_s: a rank that waits for a chunk for so long says in its log what it waits for, and again each minute.
            None: never. Not in the tasks of `to_dataset()` either.
        replicas: this many consecutive ranks share their rows (tensor or pipeline parallel).
        resume: "auto" restores from the checkpoint that a worker group starts from; "manual" leaves it to
            `shard.load_state_dict`.
        resume_from: a `ray.train.Checkpoint`, its path, or a state dict to continue from in a new run; with
            order="lancedb" also the merged state dict of a `StreamingDataset`.
        on_new_version: what happens when the table gets a newer version. "stay": nothing, a run reads one version. With
            "next_epoch" each epoch takes up the newest version as it begins, the same one on all ranks.
        allow_moved: continue from a state of the same table in another place, or written anew: its uri may differ, its
            schema, row count and fragments must agree.
        storage_options: for the object store, or a picklable function that returns them, which is called again before they
            expire (docs/object-storage.md); never shown and never saved.
        cache_dir: absolute path of a folder in which each node keeps data files of a table in an object store, for later
            epochs and runs. None: no cache. A table in the file system is read in place.
        cache_bytes: of all data files in cache_dir; None: as many as leave a tenth of the disk free.

    Raises:
        ConfigError: an argument cannot be served; or this process was forked from one that had used Lance.
        TableError: the table, or the version to resume from, is not there.
        StateError: resume_from holds no state, or one that does not fit.
    """
    use_lance()
    if filter is not None and not isinstance(filter, str):
        raise ConfigError(f"filter must be SQL text, got {filter!r}; pass None for all rows")
    if num_splits is not None and (isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1):
        raise ConfigError(f"num_splits must be an int >= 1 or None, got {num_splits!r}")
    if shuffle_seed is None:
        raise ConfigError(
            "shuffle_seed must be an int, got None: an order that each run draws for itself could not be resumed; draw a seed, "
            "keep it and pass int(seed), or pass shuffle=False for the order of the table"
        )
    if not isinstance(drop_remainder, bool):
        raise ConfigError(f"drop_remainder must be True or False, got {drop_remainder!r}; pass a bool")
    config = StreamConfig(
        global_batch_size=global_batch_size,
        epoch=epoch,
        evaluation=evaluation,
        read_batch_size=read_batch_size,
        prefetch_chunks=prefetch_chunks,
        prefetch_bytes=prefetch_bytes,
        readers_per_worker=readers_per_worker,
        read_timeout_s=read_timeout_s,
        stall_warn_s=stall_warn_s,
        replicas=replicas,
        resume=resume,
        on_new_version=on_new_version,
        allow_moved=allow_moved,
        resume_states={} if resume_from is None or is_lancedb_state(resume_from) else train.resume_states(resume_from),
    )
    cache = cache_spec(cache_dir, cache_bytes)
    ref = table_ref(table, storage_options)
    check_remote_order(ref, order, permutation)
    plan = ReadPlan(
        table=ref,
        columns=(),  # those of the version that is read, which a permutation may name
        filter=filter,
        order=Order(1, shuffle=shuffle, seed=shuffle_seed, clump_size=shuffle_clump_size, order_id=order),
        num_splits=num_splits,
        drop_remainder=drop_remainder,
        every_column=columns is None,
    )
    if filter is not None:
        validate_filter(ref, filter)
    if permutation is not None:
        plan = with_permutation(plan, permutation, config.takes_up_versions)
    plan = replace(plan, columns=tuple(resolve_columns(plan.table, columns)))
    if cache is not None:
        plan = replace(plan, table=with_cache(plan.table, cache, list(plan.columns)))
    check_lancedb_order(plan, epoch)
    plan = _planned(plan, config)
    if is_lancedb_state(resume_from):
        config = replace(config, resume_states={"": _lancedb_start(resume_from, plan, config)})
    stream = LanceStream(plan, config)
    if global_batch_size is not None and plan.num_splits is not None:
        stream._plan.grid.cycles_per_step(global_batch_size)
    _tell_of_plan(plan, config)
    return stream


def _tell_of_plan(plan: ReadPlan, config: StreamConfig) -> None:
    """Say what the user may not expect: rows that an epoch leaves out, or that only some ranks have, and the default steps."""
    order, grid = plan.order, plan.grid
    if not is_first_rank():
        return
    if grid.num_left_out:
        logger.warning(
            "%d of %d rows are left out of each epoch (num_splits=%d does not divide them)%s%s",
            grid.num_left_out,
            order.num_rows,
            grid.num_splits,
            ", others in each epoch" if order.shuffle else "",
            "; drop_remainder=False delivers them, for evaluation" if order.order_id == FEISTEL_1 else "",
        )
    if not plan.drop_remainder and grid.remainder:
        logger.warning(
            "drop_remainder=False: the last %d of %d rows are one more row for the first splits, so ranks may differ by that "
            "and by a batch; do collective operations after the loop",
            grid.remainder,
            order.num_rows,
        )
    if config.global_batch_size is None and plan.num_splits is not None:
        logger.info(
            "no global_batch_size is given: calls without a batch size have global steps of %d rows, on any number of workers",
            grid.default_global_batch_size,
        )


def _lancedb_start(state: Any, plan: ReadPlan, config: StreamConfig) -> StreamState:
    """The state of a StreamingDataset as one of this stream.

    Raises:
        StateError: it does not fit.
    """
    if plan.num_splits is None:
        raise StateError(
            f"resume_from holds the state of a StreamingDataset, which is one of num_splits={state['num_splits']}; pass "
            f"num_splits={state['num_splits']}"
        )
    return from_lancedb_state(state, plan.identity(config.replicas), config.global_batch_size)


def _planned(plan: ReadPlan, config: StreamConfig) -> ReadPlan:
    """The plan at the version to resume from, or at the pinned one.

    Raises:
        StateMismatchError: no state of `resume_from` fits.
    """
    saved = _fitting(plan, config)
    if saved is None:
        return plan_table(plan)
    plans = PlanBook()
    return recorded_plan(plan, saved, config, lambda version: plans.at(plan, version))


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
        found = saved.identity.differences(now, allow_moved=config.allow_moved)
        if not found:
            return saved
        differences.append(found)
    fewest = min(differences, key=len)
    raise StateMismatchError(fewest, remedy_for(fewest))
