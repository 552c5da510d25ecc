"""ShardStages: the transforms of one shard, and the windows through which its chunks pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pyarrow as pa
import ray

from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.cursor import ChunkSpan, EpochWalk
from ray_lance_stream.line import ChunkLine, Claim, StageActors, StageTasks, share_of
from ray_lance_stream.pool import ReaderPool
from ray_lance_stream.reader import ReadRequest
from ray_lance_stream.replaced import ReplacedRows
from ray_lance_stream.transform import Stage
from ray_lance_stream.window import ChunkSizer, ReadWindow


class ShardStages:
    """The processes of each stage as one shard uses them, and the rows replaced in its newest pass.

    Args:
        stages: those of the stream.
        name: of the stream.
        rank, world_size: of the shard.
        claim: gets an actor of a stage from the coordinator.
    """

    def __init__(self, stages: Sequence[Stage], name: str, rank: int, world_size: int, claim: Claim) -> None:
        self._who = f"stream {name!r}, rank {rank}"
        self._in_reader = next((stage for stage in stages if stage.processes is None), None)
        self._shares = [(stage, share_of(stage, rank, world_size)) for stage in stages if stage.processes is not None]
        self._actors = {
            stage.key: StageActors(stage, numbers, claim) for stage, numbers in self._shares if stage.is_pool
        }
        self._new_count = partial(ReplacedRows, stages, name, rank)
        self.replaced = self._new_count()

    def new_window(self, readers: ReaderPool, plan: ReadPlan, walk: EpochWalk, config: StreamConfig) -> ReadWindow:
        """The chunks of a pass; counts replaced rows from anew."""
        self.replaced = replaced = self._new_count()
        sizer = ChunkSizer(config, walk.block.size, plan.row_bytes, walk.batch_size or walk.block.size)
        request = partial(self._request, plan, walk)
        return ReadWindow(walk, request, self._line(readers), sizer, config, lambda info: replaced.add(info.replaced))

    def schema(self, readers: ReaderPool, plan: ReadPlan, walk: EpochWalk) -> pa.Schema:
        """Columns and types of what the transforms make of a first cycle, which is read for it."""
        span = walk.next_span(None, 1)
        assert span is not None
        sent = self._line(readers).send(self._request(plan, walk, span))
        return ray.get(sent.block_ref).schema

    def clear(self) -> None:
        """Let all actors go."""
        for actors in self._actors.values():
            actors.clear()

    def _line(self, readers: ReaderPool) -> ChunkLine:
        """The way of the chunks of one pass."""
        stages = [
            self._actors[stage.key] if stage.is_pool else StageTasks(stage, len(numbers) or None)
            for stage, numbers in self._shares
        ]
        return ChunkLine(readers, stages)

    def _request(self, plan: ReadPlan, walk: EpochWalk, span: ChunkSpan) -> ReadRequest:
        return ReadRequest(plan, walk.start.epoch, walk.block, span, self._who, self._in_reader)
