"""StreamPosition: where one shard is, where it started from, and what a saved state means on its world size."""

from __future__ import annotations

import logging

from ray_lance_stream import train
from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.cursor import Cursor, Position
from ray_lance_stream.errors import StateError
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.state import PartialCycle, StreamState, check_fits

logger = logging.getLogger(__name__)


class StreamPosition:
    """The position of a shard, restored on first use; loading a state may move the plan to the recorded version.

    Attributes:
        plan: what is read from here on.
        config: how it is delivered, with the skips of a loaded state.

    Args:
        name: stream name.
        plan: the driver's plan.
        config: the driver's config.
        world_size: data ranks.
        link: to the coordinator.
    """

    def __init__(self, name: str, plan: ReadPlan, config: StreamConfig, world_size: int, link: CoordinatorLink) -> None:
        self.plan = plan
        self.config = config
        self._name = name
        self._world_size = world_size
        self._link = link
        self._cursor: Cursor | None = None

    def cursor(self) -> Cursor:
        """The cursor; on first use set to where this shard starts.

        Raises:
            StateError: the attempt's checkpoint holds no stream state, or one that does not fit.
        """
        if self._cursor is None:
            saved = saved_start(self._name, self.config)
            if saved is None:
                self._cursor = Cursor(Position(self.config.epoch))
            else:
                self.load(saved)
                logger.info(
                    "stream %r continues at epoch %d, samples_consumed_per_split %d",
                    self._name,
                    saved.epoch,
                    saved.samples_consumed_per_split,
                )
            self.tell()
        assert self._cursor is not None
        return self._cursor

    def state(self) -> StreamState:
        """What a checkpoint records: where the loop is."""
        position = self.cursor().position
        return StreamState(
            identity=self.plan.identity(self.config.replicas),
            epoch=position.epoch,
            samples_consumed_per_split=position.cycle,
            global_batch_size=self.config.global_batch_size,
            partial=PartialCycle(position.partial_rows, self._world_size) if position.partial_rows else None,
            skipped=self.config.skipped,
        )

    def tell(self) -> None:
        """Tell the coordinator where this shard is; waits for nothing."""
        self._link.tell(self.state())

    def load(self, saved: StreamState) -> None:
        """Continue from a state, at the table version that it records.

        Raises:
            IterationError: a pass is running.
            StateError: an evaluation stream.
            StateMismatchError: another row order.
            VersionNotFoundError: the recorded version is gone.
        """
        if self.config.evaluation:
            raise StateError("a stream with evaluation=True is never resumed; make it without evaluation=True")
        cursor = self._cursor or Cursor(Position(0))
        cursor.check_not_live()
        plan = self.plan
        if saved.identity.table_version != plan.table.version:
            check_fits(saved, plan.identity(self.config.replicas).at(saved.identity))
            plan = self._link.plan_at(plan, saved.identity.table_version)
        check_fits(saved, plan.identity(self.config.replicas))
        self.plan, self.config = plan, self.config.with_skipped(saved.skipped)
        cursor.load(self._position_of(saved))
        self._cursor = cursor

    def _position_of(self, saved: StreamState) -> Position:
        """The position that a state means here: exact at a cycle boundary, and inside a cycle on the same world size."""
        name, partial, size = self._name, saved.partial, self.config.global_batch_size
        if saved.global_batch_size != size:
            logger.warning(
                "stream %r: global_batch_size was %s when the state was saved and is %s now; steps are regrouped from here",
                name,
                saved.global_batch_size,
                size,
            )
        partial_rows = 0
        if partial is not None and partial.world_size == self._world_size:
            partial_rows = partial.rows
        elif partial is not None:
            logger.warning(
                "stream %r: the state was saved inside a cycle on %d workers and is loaded on %d: %d rows are delivered "
                "again; save at steps whose global batch is a multiple of num_splits=%d",
                name,
                partial.world_size,
                self._world_size,
                partial.rows * partial.world_size,
                self.plan.grid.num_splits,
            )
        if saved.samples_consumed_per_split >= self.plan.grid.num_cycles:
            return Position(saved.epoch + 1)
        return Position(saved.epoch, saved.samples_consumed_per_split, partial_rows)


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
