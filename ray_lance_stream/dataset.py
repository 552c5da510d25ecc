"""One epoch of a stream as a `ray.data.Dataset`: a datasource whose blocks hold whole steps, in the stream's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import ray
from ray.data import DataContext, Dataset
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from ray_lance_stream._ray import concat_tables
from ray_lance_stream.config import MAX_CHUNK_ROWS, ReadPlan, StreamConfig, at_least
from ray_lance_stream.cursor import ChunkSpan, CycleRange, EpochWalk, Position, cycles_in, part
from ray_lance_stream.error_transport import PASSING
from ray_lance_stream.errors import ConfigError, TransformError, text_of
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.reader import ReadRequest, read_chunk
from ray_lance_stream.row_lists import driver_lists
from ray_lance_stream.source import projected_schema
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.state import skipped_in
from ray_lance_stream.transform import Stage, in_one_process

# Ray Data keeps an object per read task and looks at each of them several times before the first one runs.
MAX_READ_TASKS = 1000


def epoch_dataset(plan: ReadPlan, config: StreamConfig, epoch: int, global_batch_size: int | None) -> Dataset:
    """See `LanceStream.to_dataset`."""
    context = DataContext.get_current()
    source = epoch_source(plan, config, epoch, global_batch_size, context)
    # Not left to Ray Data: where it gets fewer tasks than it chose, it cuts each of their blocks into several.
    num_tasks = source.num_tasks(wished_tasks(source.estimate_inmemory_data_size(), context))
    dataset = ray.data.read_datasource(source, override_num_blocks=max(num_tasks, 1))
    dataset.context.execution_options.preserve_order = True
    return dataset


def epoch_source(
    plan: ReadPlan, config: StreamConfig, epoch: int, global_batch_size: int | None, context: DataContext
) -> LanceStreamDatasource:
    """The datasource of `epoch_dataset`; errors as that."""
    at_least("epoch", epoch, 0)
    if global_batch_size is None:
        global_batch_size = config.global_batch_size
    else:
        at_least("global_batch_size", global_batch_size, 1)
    plan = plan.with_splits(1)
    grid = plan.grid
    step_cycles = 1 if global_batch_size is None else grid.cycles_per_step(global_batch_size)
    plan.table.open(fresh=True)  # one that this process has open still answers when its version is gone
    plan = driver_lists.plan_of(plan, epoch)
    walk = EpochWalk(grid, SplitBlock(0, grid.num_splits), Position(epoch), skipped_in(config.skipped, epoch))
    chunk_cycles = cycles_per_chunk(plan, step_cycles, config.chunk_bytes, context.target_max_block_size)
    schema = None if config.stages else projected_schema(plan.table, list(plan.columns))
    whole = EpochPart(plan, epoch, walk.ranges, chunk_cycles, _in_read_tasks(config.stages))
    return LanceStreamDatasource(whole, step_cycles, schema)


def _in_read_tasks(stages: Sequence[Stage]) -> Stage | None:
    """All transforms, as one stage where the rows are read."""
    for stage in stages:
        if stage.special_options:
            raise ConfigError(
                f"to_dataset() runs transforms in plain read tasks, but {stage} asks for "
                f"{', '.join(stage.special_options)}: call to_dataset() on the stream without it, and map_batches on the "
                "dataset"
            )
    return in_one_process(stages)


def cycles_per_chunk(plan: ReadPlan, step_cycles: int, chunk_bytes: int, target_bytes: int | None) -> int:
    """Cycles of one read: whole steps, where Ray Data leaves these whole.

    Args:
        plan: what is read.
        step_cycles: m, cycles of one step.
        chunk_bytes: wished bytes of one read.
        target_bytes: of a block: Ray Data joins reads until they exceed it, and cuts what exceeds it by one half.
    """
    num_splits = plan.grid.num_splits
    cycle_bytes = num_splits * plan.row_bytes
    if target_bytes is not None:
        chunk_bytes = min(chunk_bytes, target_bytes // 4)
    cycles = max(1, min(chunk_bytes // cycle_bytes, MAX_CHUNK_ROWS // num_splits))
    if target_bytes is not None and step_cycles * cycle_bytes > target_bytes // 2:
        return cycles
    return max(1, cycles // step_cycles) * step_cycles


def wished_tasks(num_bytes: int, context: DataContext) -> int:
    """How many blocks Ray Data would choose: neither small nor large ones, and work for each CPU."""
    if not ray.is_initialized():
        ray.init()  # as Ray Data does on first use
    not_small = min(context.read_op_min_num_blocks, num_bytes // context.target_min_block_size)
    not_large = num_bytes // context.target_max_block_size if context.target_max_block_size else 1
    return max(not_small, not_large, 2 * int(ray.cluster_resources().get("CPU", 1)))


@dataclass(frozen=True)
class EpochPart:
    """Some cycles of an epoch, in the order in which one worker that owns every split receives them.

    Attributes:
        plan: what is read.
        epoch: from 0.
        ranges: the cycles, ascending and disjoint.
        chunk_cycles: cycles of one read.
        stage: the transforms, if any.
    """

    plan: ReadPlan
    epoch: int
    ranges: tuple[CycleRange, ...]
    chunk_cycles: int
    stage: Stage | None = None

    @property
    def block(self) -> SplitBlock:
        """All splits."""
        return SplitBlock(0, self.plan.grid.num_splits)

    @property
    def num_rows(self) -> int:
        """Rows of the cycles."""
        return sum(self.plan.grid.block_rows(self.block, lo, hi) for lo, hi in self.ranges)

    @property
    def num_bytes(self) -> int:
        """Estimated Arrow bytes of the rows."""
        return self.num_rows * self.plan.row_bytes

    def chunks(self) -> Iterator[pa.Table]:
        """The rows, one read after another."""
        plan = self.plan.resolve()
        for start in range(0, cycles_in(self.ranges), self.chunk_cycles):
            yield self._chunk(plan, part(self.ranges, start, start + self.chunk_cycles))

    def _chunk(self, plan: StreamPlan, ranges: tuple[CycleRange, ...]) -> pa.Table:
        """The rows of some cycles: several ranges where the stream leaves out cycles between them."""
        tables = []
        for lo, hi in ranges:
            rows = plan.grid.block_rows(self.block, lo, hi)
            span = ChunkSpan(lo, hi, skip_rows=0, num_rows=rows, end_row=rows)
            request = ReadRequest(self.plan, self.epoch, self.block, span, "to_dataset()", self.stage)
            try:
                table, _ = read_chunk(request, plan)
            except PASSING as error:  # Ray Data would lose the process, and read again
                raise TransformError(f"{request.who}: a function of map_batches raised {text_of(error)}") from error
            tables.append(table)
        return concat_tables(tables)


class LanceStreamDatasource(Datasource):
    """Reads an epoch, in tasks of whole steps.

    Not a dataclass: Ray Data exports the fields of those, and storage options would be among them.

    Args:
        epoch: what is read.
        step_cycles: m, cycles of one step; no task ends within a step.
        schema: of what is read; None: not known, as with transforms.
    """

    def __init__(self, epoch: EpochPart, step_cycles: int, schema: pa.Schema | None) -> None:
        super().__init__()
        self._epoch = epoch
        self._step_cycles = step_cycles
        self._schema = schema

    def estimate_inmemory_data_size(self) -> int:
        """Estimated Arrow bytes of the epoch."""
        return self._epoch.num_bytes

    @property
    def _num_steps(self) -> int:
        return -(-cycles_in(self._epoch.ranges) // self._step_cycles)

    def num_tasks(self, parallelism: int) -> int:
        """Read tasks for a wished number of them: none is empty, and a large table does not make more of them."""
        return min(parallelism, self._num_steps, MAX_READ_TASKS)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """`num_tasks` parts of the epoch of about the same size, which end with a step. Costs nothing per row."""
        num_tasks = self.num_tasks(parallelism)
        tasks = []
        for number in range(num_tasks):
            start, stop = (end * self._num_steps // num_tasks * self._step_cycles for end in (number, number + 1))
            own = replace(self._epoch, ranges=part(self._epoch.ranges, start, stop))
            metadata = BlockMetadata(num_rows=own.num_rows, size_bytes=own.num_bytes, exec_stats=None, input_files=None)
            tasks.append(ReadTask(own.chunks, metadata, self._schema, per_task_row_limit))
        return tasks
