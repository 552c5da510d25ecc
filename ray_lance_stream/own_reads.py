"""OwnReads: the batches that one DataLoader worker makes of a pass, read with Lance in that process, without Ray.

A batch is a function of its number in the pass, so nothing has to be agreed on between workers, and none has a position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data import DataContext
from ray.data.block import BlockAccessor
from ray.data.collate_fn import ArrowBatchCollateFn, CollateFn, NumpyBatchCollateFn, PandasBatchCollateFn

from ray_lance_stream._ray import within_context
from ray_lance_stream.columns import NullInTensorError, TensorCollateFn, null_error, refuse_nulls, with_tensor_columns
from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.cursor import ChunkSpan, EpochWalk, Position
from ray_lance_stream.nullable_ints import refuse_inexact
from ray_lance_stream.own_batches import OwnBatches
from ray_lance_stream.own_read import OwnRead
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.reader import ChunkInfo, ReadRequest
from ray_lance_stream.sizer import ChunkSizer
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.state import SkippedCycles, skipped_in
from ray_lance_stream.transform import Stage

CHUNKS_HELD = 2  # one is handed out, the other one read
BYTES_AT_ONCE = 2**30  # half of what Arrow's strings may have in one read: rows are not all of the same size


class NumpyFunction(NumpyBatchCollateFn):
    """A plain function as a `CollateFn` of Ray: it gets a dict of arrays.

    Args:
        fn: what is called with a batch.
    """

    def __init__(self, fn: Any) -> None:
        self._fn = fn

    def __call__(self, batch: dict[str, np.ndarray]) -> Any:
        """What the function makes of a batch."""
        return self._fn(batch)


@dataclass(frozen=True)
class PassSpec:
    """What the workers of a DataLoader read; the same for all passes but for where they start.

    Attributes:
        name: of the stream.
        rank: of the shard.
        plan: which rows.
        block: splits of the rank.
        skipped: cycles that epochs leave out.
        batch_size: rows of a batch.
        drop_last: leave out a last batch that is not whole.
        collate_fn: what a batch becomes.
        stage: all transforms, if there are any.
        config: sizes of chunks, and how long reads may take.
        context: of the stream; current where users' functions run.
    """

    name: str
    rank: int
    plan: ReadPlan
    block: SplitBlock
    skipped: SkippedCycles
    batch_size: int
    drop_last: bool
    collate_fn: CollateFn[Any]
    stage: Stage | None
    config: StreamConfig
    context: DataContext | None = None

    def walk(self, start: Position) -> EpochWalk:
        """The pass that begins at a position."""
        skipped = skipped_in(self.skipped, start.epoch)
        return EpochWalk(self.plan.grid, self.block, start, skipped, self.batch_size, self.drop_last)


@dataclass(frozen=True)
class BatchesRequest(ReadRequest):
    """A chunk that holds several batches of one worker, which are not next to each other in the pass.

    Attributes:
        spans: of the batches; `span` is from the first cycle to the last one.
    """

    spans: tuple[ChunkSpan, ...] = ()

    def __str__(self) -> str:
        return f"batches of a DataLoader worker in {super().__str__()}"

    def rows(self, plan: StreamPlan) -> np.ndarray:
        """int64 [rows]: offsets in the table, batch after batch."""
        return np.concatenate([self._one(span).rows(plan) for span in self.spans])

    def take(self, rows: np.ndarray) -> pa.Table:
        """Rows of the table by their offsets. A batch is never cut, so where it is more than one read may hold the read is."""
        take, at_once = super().take, max(1, BYTES_AT_ONCE // self.plan.row_bytes)
        return pa.concat_tables([take(rows[first : first + at_once]) for first in range(0, len(rows), at_once)])

    def place(self, plan: StreamPlan, row: int) -> tuple[int, int]:
        """(split, position) of a row of the chunk."""
        for span in self.spans:
            if row < span.num_rows:
                return self._one(span).place(plan, row)
            row -= span.num_rows
        raise IndexError(row)

    def _one(self, span: ChunkSpan) -> ReadRequest:
        return ReadRequest(self.plan, self.epoch, self.block, span)


class OwnReads:
    """The batches of one worker, in their order; one chunk is read while another one is handed out.

    Args:
        spec: what is read.
        start: where the pass begins.
        worker: number of the worker, from 0.
        num_workers: how many share the pass.
        is_ended: whether nobody asks for more of the pass, so that no read is waited for.
    """

    def __init__(
        self,
        spec: PassSpec,
        start: Position,
        worker: int,
        num_workers: int,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec = spec
        self._is_ended = is_ended
        self._walk = spec.walk(start)
        self._own = OwnBatches(self._walk, worker, num_workers)
        self._plan = spec.plan.resolve()
        self._who = f"stream {spec.name!r}, rank {spec.rank}, DataLoader worker {worker}"
        # All workers together keep to the bytes of the rank.
        config = replace(spec.config, prefetch_chunks=max(1, CHUNKS_HELD * (num_workers - 1)))
        self._sizer = ChunkSizer(config, spec.block.size, spec.plan.row_bytes, spec.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, ChunkInfo | None]]:
        """Batches; the first one of each chunk with what is known of the chunk."""
        left = deque(self._own.numbers)
        following = self._send(left)
        while following is not None:
            numbers, request, read = following
            found = read.wait(self._spec.config, self._is_ended)
            if found is None:
                return
            table, info = found
            self._sizer.seen(info)
            following = self._send(left)
            yield from self._batches(table, info, numbers, request)

    def _send(self, left: deque[int]) -> tuple[list[int], BatchesRequest, OwnRead] | None:
        """Have the next batches read, as many as a chunk holds; None where none are left."""
        if not left:
            return None
        cycles = self._sizer.next_cycles()
        count = max(1, cycles * self._spec.block.size // self._spec.batch_size)
        self._sizer.sent(cycles)
        numbers = [left.popleft() for _ in range(min(count, len(left)))]
        spans = tuple(span for number in numbers for span in self._own.spans(number))
        whole = ChunkSpan(spans[0].start, spans[-1].stop, 0, sum(span.num_rows for span in spans), spans[-1].end_row)
        request = BatchesRequest(
            self._spec.plan, self._walk.start.epoch, self._spec.block, whole, self._who, self._spec.stage, spans
        )
        return numbers, request, OwnRead(request, self._plan)

    def _batches(
        self, table: pa.Table, info: ChunkInfo, numbers: list[int], request: BatchesRequest
    ) -> Iterator[tuple[Any, ChunkInfo | None]]:
        rows = self._for_tensors(table, request)
        first, told = 0, info
        for number in numbers:
            size = self._own.num_rows(number)
            yield self._collated(rows.slice(first, size)), told if first == 0 else None
            first += size

    def _for_tensors(self, table: pa.Table, request: BatchesRequest) -> pa.Table:
        """A chunk with its columns of fixed shape as tensors, checked where all columns become some."""
        collate_fn = self._spec.collate_fn
        try:
            rows = with_tensor_columns(table)
            if isinstance(collate_fn, TensorCollateFn):
                collate_fn.prepare(table.schema)
                refuse_nulls(rows)
        except NullInTensorError as error:
            raise null_error(self._spec.name, error, request, self._plan) from None
        return rows

    def _collated(self, rows: pa.Table) -> Any:
        collate_fn = self._spec.collate_fn
        batch: Any = rows
        if not isinstance(collate_fn, ArrowBatchCollateFn):
            batch_format = "pandas" if isinstance(collate_fn, PandasBatchCollateFn) else "numpy"
            if batch_format == "numpy":
                refuse_inexact(rows)
            batch = BlockAccessor.for_block(rows).to_batch_format(batch_format)
        with within_context(self._spec.context):
            return collate_fn(batch)
