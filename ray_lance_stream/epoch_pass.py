"""EpochPass: one pass of a shard over an epoch, as the DataIterator that Ray's batching runs on."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.data import DataContext, DataIterator, Schema

from ray_lance_stream._ray import (
    BatchIterator,
    RefBundle,
    ShardBatchIterator,
    block_rows,
    ref_bundle,
    unpinned,
)
from ray_lance_stream.columns import NullInTensorError, TensorCollateFn, null_error, refuse_nulls, with_tensor_columns
from ray_lance_stream.cursor import EpochWalk
from ray_lance_stream.errors import IterationError, TransformError
from ray_lance_stream.forked import use_ray
from ray_lance_stream.gate import PassedOn
from ray_lance_stream.nullable_ints import refuse_inexact, with_types
from ray_lance_stream.reader import ChunkInfo
from ray_lance_stream.window import ReadWindow

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard

ENDED = "this iterator has ended: its shard has begun another pass, or was closed"


THREADS_END_S = 0.7  # Ray's threads look every 0.1 s whether they may end
_running: weakref.WeakSet[EpochPass] = weakref.WeakSet()


class EpochPass(DataIterator):
    """Begins when its first item is asked for; ends at the last row, at a `break`, or when the shard begins another.

    Args:
        shard: whose rows.
        batch_size: rows per batch, also of what is made of rows; None: blocks.
        drop_last: leave out a last batch that is not whole.
    """

    def __init__(self, shard: StreamShard, batch_size: int | None, drop_last: bool) -> None:
        self._shard = shard
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._types: dict[str, pa.DataType] = {}  # of the columns that transforms make
        self._to_tensors: TensorCollateFn | None = None
        self.counts_rows = False  # in place of batches or blocks
        self._walk: EpochWalk | None = None
        self._window: ReadWindow | None = None
        self._batch_iterator: ShardBatchIterator | None = None
        self._running: Generator[Any, None, None] | None = None  # Ray's own iterator
        self._given_rows = 0

    # ---- three ways to deliver

    def batches(self, **kwargs: Any) -> Generator[Any, None, None]:
        """Batches as Ray makes them."""
        collate_fn = unpinned(kwargs.get("_collate_fn"))
        self._to_tensors = collate_fn if isinstance(collate_fn, TensorCollateFn) else None
        size: Any = None if self.counts_rows else self.batch_size  # Ray's annotation leaves out its own None
        running: Any = iter(super()._iter_batches(batch_size=size, drop_last=self.drop_last, **kwargs))
        self._running = running
        try:
            with closing(running):
                for batch in running:
                    yield batch
                    del batch
                    use_ray()
        except PassedOn as passed:
            original = passed.original
            raise original from original.__cause__
        self._check_complete()  # Ray's iterator also ends when close() ends it
        self._shard._check_together()

    def rows(
        self, rows_of: Callable[[Any], Iterator[dict[str, Any]]] = block_rows, prefetch_batches: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Rows as dicts; each counts when it is handed out.

        Args:
            rows_of: the rows of a block.
            prefetch_batches: blocks that Ray holds ready.
        """
        self.counts_rows = True
        with closing(self.batches(batch_format=None, prefetch_batches=prefetch_batches)) as blocks:
            for block in blocks:
                for row in rows_of(block):
                    self._prepare(1)
                    self._shard._received(1)
                    yield row

    def bundles(self) -> Iterator[RefBundle]:
        """Blocks as references; each counts when it is handed out."""
        self._to_ref_bundle_iterator()
        assert self._window is not None
        try:
            for ref, info in self._window:
                block = self._fetch(ref)
                if block is None:
                    break
                bundle = ref_bundle(ray.put(block), info.num_rows, info.size_bytes)
                self._prepare(info.num_rows)
                self._given_rows += info.num_rows
                self._shard._received(info.num_rows)
                yield bundle
            self._check_complete()
        finally:
            self._on_iteration_end(None)

    # ---- DataIterator

    def _to_ref_bundle_iterator(self) -> Any:
        self._walk, self._window = self._shard._begin_pass(self)
        _running.add(self)
        # A generator would hold each reference until the next one is asked for.
        return map(_bundle, self._window), self._shard._stats, None

    def _create_batch_iterator(self, ref_bundles_iter: Iterator[RefBundle], *args: Any, **kwargs: Any) -> BatchIterator:
        self._batch_iterator = ShardBatchIterator(
            ref_bundles_iter,
            fetch=self._fetch,
            before_batch=self._before_batch,
            on_batch=self._on_batch,
            on_end=self._check_complete,
            context=self._shard.get_context(),
            check_numpy=refuse_inexact,
            **kwargs,
        )
        return self._batch_iterator

    def _on_iteration_end(self, executor: Any) -> None:
        self._shard._end_pass(self)

    def close(self) -> None:
        """Let reads, blocks and threads go, also where the loop keeps a reference to its iterator."""
        _running.discard(self)
        if self._window is not None:
            self._window.close()
        batch_iterator, self._batch_iterator = self._batch_iterator, None  # it refers to this pass
        if batch_iterator is not None:
            batch_iterator.close()
        running, self._running = self._running, None
        if running is not None:
            with suppress(ValueError):  # it is executing: it calls this itself, or another thread waits in it
                running.close()
        if batch_iterator is not None:
            batch_iterator.wait_ended(THREADS_END_S)

    def stats(self) -> str:
        """As the shard's."""
        return self._shard.stats()

    def schema(self) -> Schema:
        """As the shard's."""
        return self._shard.schema()

    def get_context(self) -> DataContext:
        """As the shard's."""
        return self._shard.get_context()

    def _get_dataset_tag(self) -> dict[str, Any]:
        return self._shard._get_dataset_tag()

    # ---- counting

    def _fetch(self, ref: ray.ObjectRef) -> pa.Table | None:
        assert self._window is not None
        fetched = self._window.fetch(ref)
        if fetched is None:
            return None
        block, request = fetched
        try:
            block = self._with_types(block) if self._shard.has_transforms else block
            table = with_tensor_columns(block)
            if self._to_tensors is not None:
                self._to_tensors.prepare(block.schema)
                refuse_nulls(table)
            return table
        except NullInTensorError as error:
            raise null_error(self._shard.name, error, request, request.plan.resolve()) from None

    def _with_types(self, block: pa.Table) -> pa.Table:
        """A chunk that was transformed, with the types of the first one where nulls have made floats of ints."""
        try:
            block = with_types(block, self._types)
        except ValueError as error:
            raise TransformError(
                f"stream {self._shard.name!r}: map_batches must return the same types: {error}"
            ) from None
        self._types = self._types or dict(zip(block.schema.names, block.schema.types, strict=True))
        return block

    def _before_batch(self, rows: int) -> None:
        if not self.counts_rows:
            self._prepare(rows)

    def _on_batch(self, rows: int) -> None:
        self._given_rows += rows
        if not self.counts_rows:
            self._shard._received(rows)

    def _prepare(self, rows: int) -> None:
        """What may fail or take time comes before rows are counted: a batch that is counted is handed out."""
        use_ray()
        if self._shard._pass is not self:
            raise IterationError(ENDED)
        assert self._window is not None
        assert self._walk is not None
        self._shard._report_in_time()
        self._shard._read_ahead(self._window, self._walk, has_room=self._window.received(rows))

    @property
    def walk(self) -> EpochWalk | None:
        """The rows of the pass; None before it begins."""
        return self._walk

    @property
    def is_complete(self) -> bool:
        """Whether the loop has received every row of the pass."""
        return self._walk is not None and self._given_rows == self._walk.num_rows

    def _check_complete(self) -> None:
        assert self._walk is not None
        if self.is_complete:
            return
        if self._shard._pass is not self:
            raise IterationError(ENDED)
        raise IterationError(
            f"the pass over epoch {self._walk.start.epoch} ended after {self._given_rows} of {self._walk.num_rows} "
            "rows: a thread of Ray's batching ended without an error; see the worker's log for its cause"
        )


def _bundle(chunk: tuple[ray.ObjectRef, ChunkInfo]) -> RefBundle:
    ref, info = chunk
    return ref_bundle(ref, info.num_rows, info.size_bytes)


@atexit.register
def _end_running() -> None:
    """Before Ray shuts down, which it does at exit too: an iterator that Python ends later finds Ray gone and says so."""
    for each in list(_running):
        each._shard._end_pass(each, is_left=False)
