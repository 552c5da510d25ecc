"""ChunkSupply: where the chunks of one shard come from: readers, processes of stages, and the windows of its passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pyarrow as pa

from ray_lance_stream.ahead import ReadAhead
from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.cursor import ChunkSpan, EpochWalk, without
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.line import ChunkLine, StageActors, StageTasks, share_of
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.listed_plans import ListedPlans
from ray_lance_stream.meter import Meter
from ray_lance_stream.pool import ReaderPool
from ray_lance_stream.reader import ReadRequest
from ray_lance_stream.replaced import ReplacedRows
from ray_lance_stream.sizer import ChunkSizer
from ray_lance_stream.transform import Stage
from ray_lance_stream.window import ReadWindow


class PassReads:
    """The reads of one pass.

    Args:
        plan: of its epoch.
        walk: the pass.
        who: stream and rank, for messages.
        stage: what runs where a chunk is read, if anything does.
        lists: knows what to do when the list of the plan is lost.
    """

    def __init__(
        self,
        plan: ReadPlan,
        walk: EpochWalk,
        who: str,
        stage: Stage | None,
        lists: ListedPlans,
    ) -> None:
        self._plan = plan
        self._walk = walk
        self._who = who
        self._stage = stage
        self._lists = lists

    def __call__(self, span: ChunkSpan) -> ReadRequest:
        """The read of a span."""
        return ReadRequest(self._plan, self._walk.start.epoch, self._walk.block, span, self._who, self._stage)

    def again(self, span: ChunkSpan) -> ReadRequest:
        """The read of a span that was lost, perhaps with what its plan refers to."""
        self._plan = self._lists.again(self._plan, self._walk.start.epoch)
        return self(span)


class ChunkSupply:
    """The chunks of one shard.

    Attributes:
        readers: of the shard.
        ahead: what is read for the next pass.

    Args:
        config: of the stream.
        name: of the stream.
        rank, world_size: of the shard.
        link: gets readers and actors of stages from the coordinator.
        meter: counts what comes.
        lists: of the epochs of the shard.
    """

    def __init__(
        self,
        config: StreamConfig,
        name: str,
        rank: int,
        world_size: int,
        link: CoordinatorLink,
        meter: Meter,
        lists: ListedPlans,
    ) -> None:
        stages = config.stages
        self.readers = ReaderPool(config.readers_per_worker, link.reader)
        self._config = config
        self._alive = link.alive
        self._who = f"stream {name!r}, rank {rank}"
        self._in_reader = next((stage for stage in stages if stage.processes is None), None)
        self._shares = [(stage, share_of(stage, rank, world_size)) for stage in stages if stage.processes is not None]
        self._actors = {
            stage.key: StageActors(stage, numbers, link.stage_worker, link.alive)
            for stage, numbers in self._shares
            if stage.is_pool
        }
        self._meter = meter
        self._new_count = partial(ReplacedRows, stages, name, rank)
        self.ahead = ReadAhead()
        self._lists = lists
        self._newest: ReadWindow | None = None
        self._replaced: ReplacedRows | None = None  # in the newest pass
        meter.watch(self.in_flight)

    def take(self, plan: ReadPlan, walk: EpochWalk) -> ReadWindow:
        """The window of a pass that begins."""
        self._newest = self.ahead.take(plan, walk) or self._new_window(plan, walk, None)
        self._replaced = self._newest.replaced
        return self._newest

    def count_replaced(self) -> ReplacedRows:
        """The count of a pass that begins, and whose chunks are read elsewhere."""
        self.ahead.drop()
        self._newest, self._replaced = None, self._new_count(self._meter.replaced)
        return self._replaced

    def read_ahead(self, running: ReadWindow, plan: ReadPlan, next_walk: Callable[[], EpochWalk]) -> None:
        """Send the first reads of the next pass, as there is room."""

        def make() -> tuple[ReadPlan, EpochWalk, ReadWindow]:
            walk = next_walk()
            return plan, walk, self._new_window(plan, walk, running)

        self.ahead.go_on(running, make)

    def in_flight(self) -> tuple[int, int]:
        """(chunks, bytes) of the newest pass, and of what is read ahead."""
        windows = [window for window in (self._newest, self.ahead.window) if window is not None]
        return sum(each.chunks_in_flight() for each in windows), sum(each.held_bytes() for each in windows)

    @property
    def replaced(self) -> str:
        """A line on the rows that were replaced in the newest pass; empty if there are none."""
        return str(self._replaced or "")

    @property
    def may_read_ahead(self) -> bool:
        """Whether two passes may be under way: evaluation comes back to the same epoch, and tasks are counted by pass."""
        is_counted = any(numbers and not stage.is_pool for stage, numbers in self._shares)
        return not self._config.evaluation and not is_counted

    def schema(self, plan: ReadPlan, walk: EpochWalk) -> pa.Schema:
        """Columns and types of what the transforms make of a first cycle, which is read for it."""
        if not walk.num_rows:
            raise ConfigError(f"the columns of transforms are those of a row, but epoch {walk.start.epoch} has none")
        return self.first_blocks(plan, walk, 1)[0].schema

    def first_blocks(self, plan: ReadPlan, walk: EpochWalk, num_rows: int) -> list[pa.Table]:
        """The cycles that hold the first `num_rows` rows of a pass, read and transformed without the loop receiving them."""
        end = walk.position_after(num_rows)
        stop = walk.grid.num_cycles if end.epoch > walk.start.epoch else end.cycle + bool(end.partial_rows)
        everything = (0, walk.grid.num_cycles)
        shown = without(walk.ranges, [(stop, walk.grid.num_cycles)])
        walk = replace(walk, skipped=without([everything], shown))
        # The loop does not receive the rows: they are no part of what it has received, nor of the limit of a pass.
        count = self._new_count(None)
        window = self._window(plan, walk, self._new_sizer(plan, walk), count, self._meter.aside())
        try:
            fetched = [window.fetch(ref) for ref, _ in window]
        finally:
            window.close()
        return [block for block, _ in filter(None, fetched)]

    def clear(self) -> None:
        """Let readers and actors go, and what they have read ahead."""
        self.ahead.drop()
        self.readers.clear()
        for actors in self._actors.values():
            actors.clear()

    def _new_window(self, plan: ReadPlan, walk: EpochWalk, before: ReadWindow | None) -> ReadWindow:
        """The chunks of a pass; `before` is the window of the running pass, where this one is read ahead."""
        if before is None:
            sizer = self._new_sizer(plan, walk)
        elif before.held_bytes() < before.sizer.next_bytes(walk.num_rows) / 2:
            sizer = before.sizer.again(_first_rows(walk))
        else:
            sizer = before.sizer  # the loop has enough to consume before it asks for the first chunk
        return self._window(plan, walk, sizer, self._new_count(self._meter.replaced), self._meter)

    def _window(
        self, plan: ReadPlan, walk: EpochWalk, sizer: ChunkSizer, count: ReplacedRows, meter: Meter
    ) -> ReadWindow:
        return ReadWindow(walk, self._reads(plan, walk), self._line(), sizer, self._config, count, meter)

    def _new_sizer(self, plan: ReadPlan, walk: EpochWalk) -> ChunkSizer:
        return ChunkSizer(self._config, walk.block.size, plan.row_bytes, _first_rows(walk))

    def _line(self) -> ChunkLine:
        """The way of the chunks of one pass."""
        stages = [
            self._actors[stage.key] if stage.is_pool else StageTasks(stage, len(numbers) or None)
            for stage, numbers in self._shares
        ]
        return ChunkLine(self.readers, stages, self._alive)

    def _reads(self, plan: ReadPlan, walk: EpochWalk) -> PassReads:
        return PassReads(plan, walk, self._who, self._in_reader, self._lists)


def _first_rows(walk: EpochWalk) -> int:
    """Rows that the loop waits for first."""
    return walk.batch_size or walk.block.size
