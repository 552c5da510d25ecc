"""Every private Ray import of the library, and the thin classes that stand on them. Tested against Ray 2.59 and 2.60."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray._private.state import actors
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
    "attempt_key",
    "block_rows",
    "concat_tables",
    "from_batch",
    "in_train_controller",
    "in_train_worker",
    "local_mode_name",
    "ref_bundle",
    "unpinned",
    "weak_handle",
    "where_is",
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


def concat_tables(tables: list[pa.Table]) -> pa.Table:
    """Tables one after the other, also where tensors differ in shape, and numbers in type as nulls make them."""
    return tables[0] if len(tables) == 1 else concat(tables, preserve_order=True, promote_types=True)


def unpinned(collate_fn: Any) -> Any:
    """The `collate_fn` that `pin_memory=True` has wrapped; any other one as it is."""
    return collate_fn._collate_fn if isinstance(collate_fn, _PinMemoryCollateFnWrapper) else collate_fn


class ShardBatchIterator(BatchIterator):
    """Ray's batch iterator with three hooks, a bound on batches out of order, and threads that end.

    Args:
        ref_bundles: as BatchIterator.
        fetch: the block behind a reference, which it may read again when the object is lost; None ends the iteration.
        on_batch: called in the loop's thread with the number of rows it is about to receive.
        on_end: called in the loop's thread when no batch is left; raises if rows are missing, since Ray's threads
            swallow a BaseException and end as if complete.
        kwargs: as BatchIterator.
    """

    def __init__(
        self,
        ref_bundles: Iterator[RefBundle],
        *,
        fetch: Callable[[ray.ObjectRef], Block | None],
        on_batch: Callable[[int], None],
        on_end: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        kwargs["collate_fn"] = contained(kwargs.get("collate_fn"), "collate_fn")
        kwargs["finalize_fn"] = contained(kwargs.get("finalize_fn"), "finalize_fn")
        super().__init__(ref_bundles, **kwargs)
        self._fetch = fetch
        self._on_batch = on_batch
        self._on_end = on_end
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
        return iter(functools.partial(self._next_block, block_refs), None)

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
        return map(self._through_gate, batches) if self._preserve_order else batches

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
        self._on_batch(batch.metadata.num_rows)
        with super().yield_batch_context(batch):
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


def attempt_key() -> int | None:
    """Identifies the attempt (worker group) whose training function this process runs; None outside of one."""
    if not in_train_worker() or isinstance(get_train_fn_utils(), LocalTrainFnUtils):
        return None
    return id(get_train_context())


def local_run() -> Any:
    """What stands for the `num_workers=0` run whose training function this is, another one in each; None outside of one."""
    utils = get_train_fn_utils() if in_train_worker() else None
    return utils if isinstance(utils, LocalTrainFnUtils) else None


def local_mode_name(stream: Any) -> str | None:
    """The name under which a `num_workers=0` trainer was given `stream`; None outside local mode."""
    run = local_run()
    datasets = (run._dataset_shards or {}) if run is not None else {}
    return next((name for name, dataset in datasets.items() if dataset is stream), None)


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
