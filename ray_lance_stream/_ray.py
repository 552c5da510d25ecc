"""Every private Ray import of the library, and the thin classes that stand on them. Tested against Ray 2.59 and 2.60."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray._private import worker as ray_worker
from ray._private.state import actors
from ray.data import DataContext
from ray.data._internal.arrow_ops.transform_pyarrow import concat
from ray.data._internal.block_batching.interfaces import Batch, BlockStageTimings, FinalizedBatch, ResolvedBlock
from ray.data._internal.block_batching.iter_batches import (
    DEFAULT_FORMAT_THREADPOOL_NUM_WORKERS,
    BatchIterator,
    _format_in_threadpool,
)
from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry, RefBundle
from ray.data._internal.stats import DatasetStats, TimeSpan
from ray.data._internal.tensor_extensions.arrow import ArrowTensorArray
from ray.data.block import Block, BlockAccessor, BlockMetadata, BlockType
from ray.data.collate_fn import _PinMemoryCollateFnWrapper
from ray.data.iterator import _IterableFromIterator
from ray.train import Checkpoint
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, get_train_fn_utils

from ray_lance_stream.gate import Gate, contained

__all__ = [
    "ArrowTensorArray",
    "BatchIterator",
    "DatasetStats",
    "RayIterable",
    "RefBundle",
    "ShardBatchIterator",
    "as_iterable",
    "attempt_context",
    "block_rows",
    "change_reports",
    "concat_tables",
    "from_batch",
    "in_train_controller",
    "in_train_worker",
    "is_ray_worker",
    "local_mode_name",
    "local_run",
    "owns_cluster",
    "persist",
    "ref_bundle",
    "take_rows",
    "train_rank",
    "unpinned",
    "weak_handle",
    "where_is",
    "within_context",
]


# What Ray's own `iter_*` calls return, and its integrations look for; each `iter()` of it calls what it is made with.
RayIterable = _IterableFromIterator


def as_iterable(make_iterator: Callable[[], Iterator[Any]]) -> Any:
    """What Ray's own `iter_*` calls return: each `iter()` of it calls `make_iterator`."""
    return _IterableFromIterator(make_iterator)


def ref_bundle(ref: Any, num_rows: int, size_bytes: int) -> RefBundle:
    """One block as Ray Data passes it around."""
    metadata = BlockMetadata(num_rows=num_rows, size_bytes=size_bytes, exec_stats=None, input_files=None)
    return RefBundle((BlockEntry(ref, metadata),), owns_blocks=False, schema=None)


def block_rows(block: Block) -> Iterator[dict[str, Any]]:
    """The rows of a block as `iter_rows` gives them."""
    accessor = BlockAccessor.for_block(BlockAccessor.batch_to_block(block))
    return accessor.iter_rows(public_row_format=True)


def from_batch(batch: Any, *, copy: bool) -> pa.Table:
    """A dict of arrays, a DataFrame or a table as Arrow.

    Args:
        batch: the dict's arrays are not copied where they need not be.
        copy: but copy them, where their owner may write to them again.
    """
    if isinstance(batch, Mapping):
        batch = {name: _frozen(column, copy) for name, column in batch.items()}
    return BlockAccessor.batch_to_block(batch, BlockType.ARROW)


def _frozen(column: Any, copy: bool) -> Any:
    """An array that what is made of it cannot write to; the given one stays as it is."""
    if isinstance(column, np.ndarray):
        column = column.copy() if copy else column.view()
        column.flags.writeable = False
    return column


def take_rows(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Rows of a table by their indices, int64 [rows]; tensors too, which Arrow's own `take` does not know."""
    return BlockAccessor.for_block(table).take(rows.tolist())


def concat_tables(tables: list[pa.Table]) -> pa.Table:
    """Tables one after the other, also where tensors differ in shape, and numbers in type as nulls make them."""
    return tables[0] if len(tables) == 1 else concat(tables, preserve_order=True, promote_types=True)


class _CurrentContexts:
    """How many users' functions run under a DataContext that was made current for them, and what was current before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before: DataContext | None = None

    @contextmanager
    def within(self, context: DataContext | None) -> Iterator[None]:
        """`DataContext.get_current()` is this one; None leaves it. It is one for all threads of a process, so that of
        before comes back when no function runs any more."""
        if context is None:
            yield
            return
        with self._lock:
            before = DataContext._set_current(context)
            self._before = self._before if self._running else before
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    DataContext._set_current(self._before)


within_context = _CurrentContexts().within


def unpinned(collate_fn: Any) -> Any:
    """The `collate_fn` that `pin_memory=True` has wrapped; any other one as it is."""
    return collate_fn._collate_fn if isinstance(collate_fn, _PinMemoryCollateFnWrapper) else collate_fn


class ShardBatchIterator(BatchIterator):
    """Ray's batch iterator with four hooks, a bound on batches out of order, and threads that end.

    Args:
        ref_bundles: as BatchIterator.
        fetch: the block behind a reference, which it may read again when the object is lost; None ends the iteration.
        before_batch: called in the loop's thread with the number of rows that it is about to receive; may fail or take time.
        on_batch: called with them as the last thing before the loop has them.
        on_end: called in the loop's thread when no batch is left; raises if rows are missing, since Ray's threads
            swallow a BaseException and end as if complete.
        context: current where users' functions run.
        check_numpy: called with the rows of a batch that becomes numpy arrays.
        kwargs: as BatchIterator.
    """

    def __init__(
        self,
        ref_bundles: Iterator[RefBundle],
        *,
        fetch: Callable[[ray.ObjectRef], Block | None],
        before_batch: Callable[[int], None],
        on_batch: Callable[[int], None],
        on_end: Callable[[], None],
        context: DataContext,
        check_numpy: Callable[[Block], None],
        **kwargs: Any,
    ) -> None:
        collate_fn = kwargs.get("collate_fn")
        if collate_fn is not None:
            collate_fn = within_context(context)(collate_fn)
        kwargs["collate_fn"] = contained(collate_fn, "collate_fn")
        kwargs["finalize_fn"] = contained(kwargs.get("finalize_fn"), "finalize_fn")
        super().__init__(ref_bundles, **kwargs)
        self._fetch = fetch
        self._before_batch = before_batch
        self._on_batch = on_batch
        self._on_end = on_end
        self._check_numpy = check_numpy
        self._closed = False
        self._threads: set[threading.Thread] = set()
        # The thread of the pipeline has one batch ready in any case: a second thread takes more time than it saves.
        self._in_threads = self._prefetch_batches > 1
        self._preserve_order = self._preserve_order and self._in_threads
        self._gate = Gate(self._prefetch_batches + DEFAULT_FORMAT_THREADPOOL_NUM_WORKERS)

    def close(self) -> None:
        """Let the threads end. Those that format do so once nobody holds the iterator; Ray's prefetcher never would."""
        self._closed = True
        self._gate.close()
        self._prefetcher.stop()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the threads have ended: one that lets go of a block while Ray is shut down ends the process."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads - {threading.current_thread()}:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _pipeline(self, ref_bundles: Iterator[RefBundle]) -> Iterator[FinalizedBatch]:
        self._threads.add(threading.current_thread())
        yield from super()._pipeline(ref_bundles)

    def _prefetch_blocks(self, ref_bundles: Iterator[RefBundle]) -> Iterator[Any]:
        try:
            yield from super()._prefetch_blocks(ref_bundles)
        except RuntimeError:  # of a stopped prefetcher
            if not self._closed:
                raise

    def _resolve_block_refs(self, block_refs: Iterator[Any]) -> Iterator[ResolvedBlock]:
        # A generator would hold each block until the next one is asked for.
        next_block: Any = contained(functools.partial(self._next_block, block_refs), "reading")
        return iter(next_block, None)

    def _next_block(self, block_refs: Iterator[Any]) -> ResolvedBlock | None:
        asked_s = time.perf_counter()
        ref = next(block_refs, None)
        if ref is None:
            return None
        came_s = time.perf_counter()
        block = self._fetch(ref)
        if block is None:
            return None
        done_s = time.perf_counter()
        if self._stats:
            self._stats.iter_get_s.add(done_s - came_s)
        return ResolvedBlock(block, BlockStageTimings(TimeSpan(asked_s, came_s), TimeSpan(came_s, done_s)))

    def _blocks_to_batches(self, blocks: Iterator[ResolvedBlock]) -> Iterator[Batch]:
        batches = super()._blocks_to_batches(blocks)
        if self._batch_format in ("numpy", "default"):
            batches = map(self._numpy_checked, batches)
        return map(self._through_gate, batches) if self._preserve_order else batches

    def _numpy_checked(self, batch: Batch) -> Batch:
        self._check_numpy(batch.data)
        return batch

    def _format_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._in_threads:
            return super()._format_batches(batches)
        stats: Any = self._stats  # Ray's annotation leaves out its own None
        return _format_in_threadpool(
            batches,
            stats,
            self._batch_format,
            self._collate_fn,
            num_threadpool_workers=0,
            ensure_copy=self._ensure_copy,
        )

    def _through_gate(self, batch: Batch) -> Batch:
        self._threads.add(threading.current_thread())
        self._gate.enter(batch.metadata.batch_idx)
        return batch

    def _restore_original_batch_order(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return map(self._out_of_gate, super()._restore_original_batch_order(batches))

    def _out_of_gate(self, batch: Batch) -> Batch:
        self._gate.passed()
        return batch

    @contextmanager
    def yield_batch_context(self, batch: FinalizedBatch) -> Iterator[None]:
        self._before_batch(batch.metadata.num_rows)
        with super().yield_batch_context(batch):
            self._on_batch(batch.metadata.num_rows)  # the last thing before the loop has it
            yield

    def after_epoch_end(self) -> None:
        super().after_epoch_end()
        self._on_end()


def in_train_worker() -> bool:
    """Whether this process runs a Ray Train training function; also true in local mode."""
    try:
        get_train_fn_utils()
    except RuntimeError:
        return False
    return True


def attempt_context() -> Any:
    """What stands for the attempt (worker group) whose training function this is; None outside of one, and in local mode."""
    return None if not in_train_worker() or local_run() is not None else get_train_context()


def local_run() -> Any:
    """What stands for the `num_workers=0` run whose training function this is, another one in each; None outside of one."""
    utils = get_train_fn_utils() if in_train_worker() else None
    return utils if isinstance(utils, LocalTrainFnUtils) else None


def local_mode_name(stream: Any) -> str | None:
    """The name under which a `num_workers=0` trainer was given `stream`; None outside local mode."""
    run = local_run()
    datasets = (run._dataset_shards or {}) if run is not None else {}
    return next((name for name, dataset in datasets.items() if dataset is stream), None)


def change_reports(change: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Have every report of this attempt, or local run, made with what `change` makes of its arguments.

    Also those of frameworks: all end in a method of the object that stands for the attempt, and the change ends with it.

    Returns:
        Whether there is such a method, as in the releases of Ray that this was written for.
    """
    run = local_run()
    run = attempt_context() if run is None else run
    report = getattr(run, "report", None)
    if report is None:
        return False
    signature = inspect.signature(report)
    if not {"checkpoint", "checkpoint_upload_mode", "checkpoint_upload_fn"} <= signature.parameters.keys():
        return False

    @functools.wraps(report)
    def changed(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        report(**change(given.arguments))

    try:
        run.report = changed
    except AttributeError:
        return False
    return True


def persist(checkpoint: Checkpoint, directory_name: str) -> Checkpoint:
    """Copy a checkpoint into the storage of this attempt's run, as Ray does without a `checkpoint_upload_fn`."""
    return get_train_context().get_storage().persist_current_checkpoint(checkpoint, directory_name)


def train_rank() -> int | None:
    """The rank of this worker of Ray Train; None in local mode."""
    return None if local_run() is not None else int(get_train_context().get_world_rank())


def is_ray_worker() -> bool:
    """Whether Ray has started this process, for a task or an actor."""
    return bool(ray.is_initialized() and ray_worker.global_worker.mode == ray_worker.WORKER_MODE)


def owns_cluster() -> bool:
    """Whether this process has started the cluster that it is connected to."""
    node = ray_worker._global_node
    return bool(ray.is_initialized() and node is not None and node.is_head())


def in_train_controller() -> bool:
    """Whether this process is the controller of a Ray Train run, or splits streams for it."""
    if not ray.is_initialized():
        return False
    function = ray.get_runtime_context().get_task_function_name() or ""
    return function.split(".")[-2:-1] == ["TrainController"]


def weak_handle(actor: Any) -> Any:
    """A handle of an actor that does not keep it alive, and those that are pickled from it do not either."""
    if actor is None:
        return None
    state, *_ = actor._serialization_helper()
    return ray.actor.ActorHandle._deserialization_helper(state, True, None)


def where_is(actor: ray.actor.ActorHandle) -> str:
    """Id, state, node and process of an actor, as far as the cluster knows them."""
    actor_id = actor._actor_id.hex()
    try:
        known = actors(actor_id)
        state, address, pid = known["State"], known["Address"], known["Pid"]
    except Exception:  # of many kinds, and no reason to fail: this is for a message
        return f"{actor_id} (its place is not known)"
    where = f", on node {address['NodeID']} ({address['IPAddress']}), pid {pid}" if pid else ""
    return f"{actor_id} ({state}{where})"
