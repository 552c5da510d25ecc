"""Where a shard starts: the state that it continues from, and the position that a state means on this world size."""

from __future__ import annotations

import logging

from ray_lance_stream import train
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.cursor import Position
from ray_lance_stream.splits import SplitGrid
from ray_lance_stream.state import StreamState

logger = logging.getLogger(__name__)


def saved_start(name: str, config: StreamConfig) -> StreamState | None:
    """The state that stream `name` continues from on first use; None: it starts at the beginning.

    The checkpoint that this attempt started from comes first, then `resume_from`. A stream that the checkpoint does not
    mention, while it mentions others, starts fresh.

    Raises:
        StateError: the checkpoint holds no stream state at all.
    """
    if config.evaluation:
        return None
    checkpoint = train.attempt_checkpoint() if config.resume == "auto" else None
    if checkpoint is None:
        return config.resume_state(name)
    saved = train.state_in(checkpoint, name)
    if saved is None:
        logger.warning("the checkpoint %s does not mention stream %r: it starts fresh", checkpoint.path, name)
    return saved


def position_of(saved: StreamState, name: str, grid: SplitGrid, world_size: int, config: StreamConfig) -> Position:
    """The position that a state means for a rank of `world_size` data ranks.

    A state saved inside a cycle is exact on the same world size; on another one the rows of the open cycle come again.
    """
    if saved.global_batch_size != config.global_batch_size:
        logger.warning(
            "stream %r: global_batch_size was %s when the state was saved and is %s now; steps are regrouped from here",
            name,
            saved.global_batch_size,
            config.global_batch_size,
        )
    partial_rows = 0
    if saved.partial is not None and saved.partial.world_size == world_size:
        partial_rows = saved.partial.rows
    elif saved.partial is not None:
        logger.warning(
            "stream %r: the state was saved inside a cycle on %d workers and is loaded on %d: %d rows are delivered "
            "again; save at steps whose global batch is a multiple of num_splits=%d",
            name,
            saved.partial.world_size,
            world_size,
            saved.partial.rows * saved.partial.world_size,
            grid.num_splits,
        )
    position = saved.position()
    if position.cycle >= grid.num_cycles:
        return Position(position.epoch + 1)
    return Position(position.epoch, position.cycle, partial_rows)
