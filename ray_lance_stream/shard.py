"""StreamShard: the `ray.data.DataIterator` of one rank. Position, passes, reads and batch sizes have files of their own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.data import DataContext, Schema

from ray_lance_stream import train
from ray_lance_stream._ray import DatasetStats, as_iterable
from ray_lance_stream.attempts import Attempt
from ray_lance_stream.batching import BATCH_SIZE_OF_STREAM, BatchSizeRule, StreamSizedIterator, refuse_local_shuffle
from ray_lance_stream.columns import batch_schema
from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.cursor import EpochWalk, Position
from ray_lance_stream.epoch_pass import EpochPass
from ray_lance_stream.line import with_chunks_for_stages
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.meter import Meter
from ray_lance_stream.restore import StreamPosition
from ray_lance_stream.resumable import Resumable
from ray_lance_stream.source import projected_schema
from ray_lance_stream.splits import RankShare, SplitBlock
from ray_lance_stream.state import skipped_in
from ray_lance_stream.supply import ChunkSupply
from ray_lance_stream.window import ReadWindow

if TYPE_CHECKING:
    from ray_lance_stream.loader import LoaderPass

RUNTIME = ("_position", "_pass", "_stats", "_link", "_supply", "_batch_rule", "_meter")


class StreamShard(StreamSizedIterator, Resumable):
    """One rank's share of a LanceStream.

    Each `iter()` of what an `iter_*` call returns is one epoch: the first after a resume finishes the open epoch, the
    next ones go on with the next epoch, each in its own order. After a `break` the next one is the next epoch. One pass
    runs at a time: a new one ends the one before it.

    Args:
        name: stream name, as in `datasets={name: ...}`.
        plan: what is read.
        config: how it is delivered.
        coordinator: the stream's coordinator actor.
        attempt: the worker group that this shard belongs to.
        rank: this rank.
        context: Ray Data context of the batches.
        block: the splits that the coordinator has assigned to this rank.
    """

    def __init__(
        self,
        name: str,
        plan: ReadPlan,
        config: StreamConfig,
        coordinator: ray.actor.ActorHandle,
        attempt: Attempt,
        rank: int,
        context: DataContext,
        block: SplitBlock,
    ) -> None:
        self.name = name
        self.world_rank = rank
        self._plan = plan.with_splits(attempt.world_size // config.replicas)
        self._config = with_chunks_for_stages(config, attempt.world_size)
        self._coordinator = coordinator
        self._attempt = attempt
        self._block = block
        self._context = context.copy()
        # Ray's batch threads finish in any order; with this its iterator puts the batches back in order.
        self._context.execution_options.preserve_order = True
        self._reset_runtime()

    def _reset_runtime(self) -> None:
        self._pass: EpochPass | LoaderPass | None = None
        self._stats = DatasetStats(metadata={}, parent=None)
        self._meter = Meter(self._stats)
        self._link = CoordinatorLink(
            self.name, self._coordinator, self._attempt, self.world_rank, self._meter, self._config.stall_warn_s
        )
        world = self._attempt.world_size
        self._position = StreamPosition(self.name, self._plan, self._config, world // self._config.replicas, self._link)
        lists = self._position.lists
        self._supply = ChunkSupply(self._config, self.name, self.world_rank, world, self._link, self._meter, lists)
        self._batch_rule = BatchSizeRule(self._share, self._config.global_batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_runtime()
        if train.register(self):
            self._link.arrive(has_reader=not self.evaluation)

    def __repr__(self) -> str:
        return (
            f"StreamShard(name={self.name!r}, rank={self.world_rank} of {self._attempt.world_size}, "
            f"splits=[{self.split_block[0]}, {self.split_block[1]}) of {self._share.grid.num_splits})"
        )

    # ---- what this shard delivers

    @property
    def evaluation(self) -> bool:
        """Whether every pass is whole and never resumed."""
        return self._config.evaluation

    @property
    def _share(self) -> RankShare:
        grid = self._position.plan.grid  # of the recorded version after a resume
        return RankShare(grid, self._block, self._attempt.world_size // self._config.replicas)

    @property
    def split_block(self) -> tuple[int, int]:
        """(lo, hi): the contiguous splits of this rank."""
        block = self._share.block
        return block.lo, block.hi

    @property
    def num_rows(self) -> int:
        """Rows that this rank receives in the whole epoch that the next pass, or the running one, belongs to."""
        return self._walk(Position(self.epoch), self._plan_of_next()).num_rows

    @property
    def loss_weight(self) -> float:
        """k_r * W / S: multiply the mean loss of a rank with it where blocks differ, and the mean gradient is exact.

        DDP averages the ranks' gradients as equals; a rank with k_r of S splits holds k_r / S of a global step.
        """
        return self._share.loss_weight

    def local_batch_size(self, global_batch_size: int) -> int:
        """m * k: this rank's rows of a global step of `global_batch_size` rows.

        Raises:
            ConfigError: global_batch_size is no positive multiple of num_splits.
        """
        return self._share.local_batch_size(global_batch_size)

    def num_batches(self, batch_size: int | None = None, drop_last: bool = False) -> int:
        """Batches that the next pass delivers: those left of an open epoch after a resume, else those of an epoch."""
        cursor = self._restore()
        size = self._batch_rule.resolve(batch_size if batch_size is not None else BATCH_SIZE_OF_STREAM)
        plan = self._position.plan_from(cursor.next_start)  # not that of the running pass
        return self._walk(cursor.next_start, plan, size, drop_last).num_batches

    # ---- iteration

    def iter_rows(self) -> Any:
        """The rows as dicts, counted one by one."""
        return as_iterable(lambda: self._new_pass(None, drop_last=False).rows())

    def _iter_batches(self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, drop_last: bool = False, **kwargs: Any) -> Any:
        """What every `iter_*` call of Ray comes down to."""
        refuse_local_shuffle(kwargs)

        def make_iterator() -> Any:
            size = self._batch_rule.resolve(batch_size)
            return self._new_pass(size, drop_last).batches(**kwargs)

        return as_iterable(make_iterator)

    def _to_ref_bundle_iterator(self) -> Any:
        """For `materialize()`: one pass as blocks."""
        new_pass = self._new_pass(None, drop_last=False)
        return new_pass.bundles(), self._stats, None

    def _new_pass(self, batch_size: int | None, drop_last: bool) -> EpochPass:
        """A pass that begins when its first item is asked for."""
        cursor = self._restore()
        if batch_size is not None:
            self._refuse_empty(cursor.next_start, self._position.plan_from(cursor.next_start), batch_size, drop_last)
        return EpochPass(self, batch_size, drop_last)

    def _refuse_empty(self, start: Position, plan: ReadPlan, batch_size: int, drop_last: bool) -> None:
        if start.cycle == 0 and not self._walk(start, plan, batch_size, drop_last).num_rows:
            self._batch_rule.refuse_empty_epoch(self._walk(start, plan).num_rows, batch_size)

    def _walk(
        self, start: Position, plan: ReadPlan, batch_size: int | None = None, drop_last: bool = False
    ) -> EpochWalk:
        skipped = skipped_in(self._position.config.skipped, start.epoch)
        return EpochWalk(plan.grid, self._share.block, start, skipped, batch_size, drop_last)

    def _plan_of_next(self) -> ReadPlan:
        """What the running pass reads, else the next one."""
        cursor = self._restore()
        return self._position.plan if cursor.live else self._position.plan_from(cursor.next_start)

    # ---- called by a pass

    def _begin_pass(self, new: EpochPass) -> tuple[EpochWalk, ReadWindow]:
        """End the pass before, move to where the next one starts and return its walk and its window."""
        plan, walk = self._next_pass(new.batch_size, new.drop_last)
        self._position.begin(plan, walk, new.batch_size, new.drop_last)
        self._pass = new
        return walk, self._supply.take(plan, walk)

    def _next_loader_pass(self, batch_size: int, drop_last: bool) -> tuple[ReadPlan, EpochWalk]:
        """What DataLoader workers are going to read; the position stays until the pass begins, or is handed out."""
        plan, walk = self._next_pass(batch_size, drop_last)
        self._refuse_empty(walk.start, plan, batch_size, drop_last)
        return plan, walk

    def _begin_loader_pass(self, new: LoaderPass) -> None:
        """As `_begin_pass`, of a pass that DataLoader workers read."""
        self._position.begin(new.plan, new.walk, new.batch_size, new.drop_last)
        self._pass = new

    def _take_back_loader_pass(self, new: LoaderPass) -> None:
        """Its workers could not be started: the next pass begins where it would have."""
        self._pass = None
        self._position.cursor().take_back()

    def _next_pass(self, batch_size: int | None, drop_last: bool) -> tuple[ReadPlan, EpochWalk]:
        """End the running pass; returns the plan of the next one, with its list, and its walk."""
        cursor = self._restore()
        if self._pass is not None:
            self._end_pass(self._pass)
        plan = self._position.plan_from(cursor.next_start)
        walk = self._walk(cursor.next_start, plan, batch_size, drop_last)
        return self._position.with_list(plan, walk.start.epoch), walk

    def _received(self, rows: int) -> None:
        self._position.cursor().received(rows)
        self._meter.received(rows)
        if self._link.is_time_to_tell():
            self._position.tell()

    def _read_ahead(self, running: ReadWindow, walk: EpochWalk, has_room: bool) -> None:
        """Go on with the next pass where the running one has let a chunk go; called for every batch, and every row."""
        if running.all_sent and (has_room or self._supply.ahead.window is None) and self._supply.may_read_ahead:
            plan = self._position.plan_ahead(walk.start.epoch + 1)
            if plan is not None:
                next_walk = partial(self._walk, Position(walk.start.epoch + 1), plan, walk.batch_size, walk.drop_last)
                self._supply.read_ahead(running, plan, next_walk)

    def _end_pass(self, ended: EpochPass | LoaderPass) -> None:
        if self._pass is not ended:
            return
        self._pass = None
        if not ended.is_complete:
            self._supply.ahead.drop()
        ended.close()
        self._position.cursor().leave()
        self._position.tell()

    # ---- description

    def close(self) -> None:
        """End a running pass and let the readers go; a later `iter_*` call starts new ones."""
        if self._pass is not None:
            self._end_pass(self._pass)
        self._supply.clear()
        self._link.release_readers()

    def schema(self) -> Schema:
        """Columns and types of the batches; with transforms, those of a first cycle that is read for it."""
        plan = self._plan_of_next()
        if self._config.stages:
            walk = self._walk(Position(self.epoch), plan)
            return Schema(batch_schema(self._supply.schema(self._position.with_list(plan, self.epoch), walk)))
        return Schema(batch_schema(projected_schema(plan.table, list(plan.columns))))

    def stats(self) -> str:
        """Ray Data's own figures of its iterator, those of this rank so far, and rows that were replaced in this pass."""
        return self._stats.to_summary().to_string() + self._meter.tally().to_text() + self._supply.replaced

    def get_context(self) -> DataContext:
        """The Ray Data context of the batches."""
        return self._context

    def _get_dataset_tag(self) -> dict[str, Any]:
        return {"dataset": f"lance_stream_{self.name}", "split_index": str(self.world_rank)}
