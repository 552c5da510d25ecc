"""StreamShard: the `ray.data.DataIterator` of one rank. Position, passes, reads and batch sizes have files of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import ray
from ray.data import DataContext, Schema

from ray_lance_stream import train
from ray_lance_stream._ray import DatasetStats, as_iterable, block_rows
from ray_lance_stream.attempts import Attempt
from ray_lance_stream.batching import BATCH_SIZE_OF_STREAM, BatchSizeRule, StreamSizedIterator, refuse_local_shuffle
from ray_lance_stream.columns import batch_schema, with_tensor_columns
from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.cursor import EpochWalk, Position
from ray_lance_stream.epoch_pass import EpochPass
from ray_lance_stream.errors import is_failing
from ray_lance_stream.forked import is_cut_off, use_ray
from ray_lance_stream.line import with_chunks_for_stages
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.meter import Meter, metrics_text
from ray_lance_stream.other_loaders import NoLoader, no_such_name
from ray_lance_stream.restore import StreamPosition
from ray_lance_stream.resumable import Resumable
from ray_lance_stream.source import projected_schema
from ray_lance_stream.splits import RankShare, SplitBlock
from ray_lance_stream.state import skipped_in
from ray_lance_stream.supply import ChunkSupply
from ray_lance_stream.window import ReadWindow

if TYPE_CHECKING:
    from ray_lance_stream.loader import LoaderPass

logger = logging.getLogger(__name__)

RUNTIME = ("_position", "_pass", "_stats", "_link", "_supply", "_batch_rule", "_meter")


class StreamShard(NoLoader, StreamSizedIterator, Resumable):
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
        self._is_elastic = plan.num_splits is not None
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
        is_first = self.world_rank == 0  # ranks would say the same, and so would the attempts of a run
        attempt = train.current_attempt()
        self._batch_rule = BatchSizeRule(
            self._share,
            self._config.global_batch_size,
            is_elastic=self._is_elastic,
            says=is_first,
            says_default=is_first and (attempt is None or attempt.started_from is None),
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._position.has_delivered and not self.evaluation:
            logger.warning(
                "stream %r, rank %d: a copy of a shard begins where the shard was told to begin, not where its loop is; "
                "load_state_dict(shard.state_dict()) on the copy resumes there",
                self.name,
                self.world_rank,
            )
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

    def __getattr__(self, name: str) -> Any:
        from ray_lance_stream.stream import LanceStream  # which imports this module

        if hasattr(StreamShard, name):
            return object.__getattribute__(self, name)  # a property that has failed with an AttributeError of its own
        raise no_such_name(StreamShard, name, dir(StreamShard), of_stream=dir(LanceStream))

    # ---- what this shard delivers

    @property
    def evaluation(self) -> bool:
        """Whether every pass is whole and never resumed."""
        return self._config.evaluation

    @property
    def has_transforms(self) -> bool:
        """Whether rows go through `map_batches`."""
        return bool(self._config.stages)

    @property
    def resume(self) -> str:
        """ "auto" or "manual", as `lance_stream` was told."""
        return self._config.resume

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
        size = self._batch_size_of_next(BATCH_SIZE_OF_STREAM if batch_size is None else batch_size)
        return self._next_walk(size, drop_last).num_batches

    # ---- iteration

    def iter_rows(self) -> Any:
        """The rows as dicts, counted one by one."""
        return as_iterable(lambda: self._new_pass(None, drop_last=False).rows())

    def _rows(
        self, batch_size: int | None, drop_last: bool, rows_of: Callable[[Any], Iterator[Any]], prefetch_batches: int
    ) -> Iterator[Any]:
        """One pass as rows, counted one by one, of which somebody makes batches."""
        return self._new_pass(batch_size, drop_last).rows(rows_of, prefetch_batches)

    def _iter_batches(self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, drop_last: bool = False, **kwargs: Any) -> Any:
        """What every `iter_*` call of Ray comes down to."""
        refuse_local_shuffle(kwargs)

        def make_iterator() -> Any:
            return self._new_pass(self._batch_size_of_next(batch_size), drop_last).batches(**kwargs)

        return as_iterable(make_iterator)

    def _to_ref_bundle_iterator(self) -> Any:
        """For `materialize()`: one pass as blocks."""
        new_pass = self._new_pass(None, drop_last=False)
        return new_pass.bundles(), self._stats, None

    def _batch_size_of_next(self, batch_size: Any) -> int:
        if batch_size is not BATCH_SIZE_OF_STREAM and batch_size is not None:
            return self._batch_rule.resolve(batch_size)
        return self._batch_rule.resolve(batch_size, self._position.plan_from(self._restore().next_start).grid)

    def _new_pass(self, batch_size: int | None, drop_last: bool) -> EpochPass:
        """A pass that begins when its first item is asked for."""
        use_ray()
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

    def _next_walk(self, batch_size: int | None = None, drop_last: bool = False) -> EpochWalk:
        """The next pass."""
        start = self._restore().next_start
        return self._walk(start, self._position.plan_from(start), batch_size, drop_last)

    def _plan_of_next(self) -> ReadPlan:
        """What the running pass reads, else the next one."""
        cursor = self._restore()
        return self._position.plan if cursor.live else self._position.plan_from(cursor.next_start)

    def peek(self, n: int = 1) -> list[dict[str, Any]]:
        """The next rows that this rank is going to receive, as `iter_rows` gives them, without moving the position.

        Rows of the running pass that the loop has not received yet, else the first ones of the next pass. Needs no other
        rank and moves none, unlike a loop that is left after a first batch.

        Args:
            n: rows, at least 1.

        Returns:
            n rows as dicts by column; fewer where the pass has fewer left.

        Raises:
            ConfigError: n is no positive int.
            StreamError: the rows cannot be read or transformed.
        """
        at_least("n", n, 1)
        use_ray()
        cursor = self._restore()
        self._position.check_is_known()
        start = cursor.position if cursor.live else cursor.next_start
        plan = self._position.with_list(self._plan_of_next(), start.epoch)
        blocks = self._supply.first_blocks(plan, self._walk(start, plan), n)
        return list(islice(chain.from_iterable(block_rows(with_tensor_columns(block)) for block in blocks), n))

    # ---- called by a pass

    def _begin_pass(self, new: EpochPass) -> tuple[EpochWalk, ReadWindow]:
        """End the pass before, move to where the next one starts and return its walk and its window."""
        plan, walk = self._next_pass(new.batch_size, new.drop_last)
        step_rows = new.batch_size or (1 if new.counts_rows and self._share.is_even else None)
        self._position.begin(plan, walk, new.batch_size, new.drop_last, step_rows)
        self._pass = new
        return walk, self._supply.take(plan, walk)

    def _next_loader_pass(self, batch_size: int, drop_last: bool) -> tuple[ReadPlan, EpochWalk]:
        """What DataLoader workers are going to read; the position stays until the pass begins, or is handed out."""
        plan, walk = self._next_pass(batch_size, drop_last)
        self._refuse_empty(walk.start, plan, batch_size, drop_last)
        return plan, walk

    def _begin_loader_pass(self, new: LoaderPass) -> None:
        """As `_begin_pass`, of a pass that DataLoader workers read."""
        self._position.begin(new.plan, new.walk, new.batch_size, new.drop_last, new.batch_size)
        self._pass = new

    def _next_pass(self, batch_size: int | None, drop_last: bool) -> tuple[ReadPlan, EpochWalk]:
        """End the running pass; returns the plan of the next one, with its list, and its walk."""
        use_ray()
        cursor = self._restore()
        if self._pass is not None:
            self._end_pass(self._pass)
        plan = self._position.plan_from(cursor.next_start)
        walk = self._walk(cursor.next_start, plan, batch_size, drop_last)
        return self._position.with_list(plan, walk.start.epoch), walk

    def _report_in_time(self) -> None:
        """Report the position about once a second, before the loop receives a batch: what fails here must lose none.

        Raises:
            ConfigError: this rank and another one have not left a pass at the same step.
        """
        if self._link.is_time_to_tell():
            self._link.check_together()
            self._position.tell()

    def _received(self, rows: int) -> None:
        """Count rows, as the very last thing before the loop receives them."""
        self._meter.received(rows)
        self._position.cursor().received(rows)

    def _read_ahead(self, running: ReadWindow, walk: EpochWalk, has_room: bool) -> None:
        """Read for the next pass where the running one has let a chunk go; called for every batch, and every row."""
        ahead = self._supply.ahead
        if running.all_sent and (has_room or ahead.window is None) and self._supply.may_read_ahead:
            try:
                plan = self._position.plan_ahead(walk.start.epoch + 1)
                if plan is not None:
                    next_walk = partial(
                        self._walk, Position(walk.start.epoch + 1), plan, walk.batch_size, walk.drop_last
                    )
                    self._supply.read_ahead(running, plan, next_walk)
            except (
                Exception
            ) as error:  # of any kind: the running pass does not need it, and the next one meets it again
                logger.warning("stream %r: the next pass is not read ahead: %s", self.name, str(error))
                ahead.give_up()

    def _end_pass(self, ended: EpochPass | LoaderPass, *, is_left: bool = True) -> None:
        """End a pass; with `is_left` False it ends with the process, and its loop has left nothing."""
        if self._pass is not ended:
            return
        self._pass = None
        if is_cut_off():
            return
        if not ended.is_complete:
            self._supply.ahead.drop()
        ended.close()
        self._position.leave(is_left=is_left and not is_failing())

    def _check_together(self) -> None:
        """Once the loop has received a whole pass; see CoordinatorLink.check_together_at_end."""
        self._link.check_together_at_end(self._position.tell)

    # ---- description

    def close(self) -> None:
        """End a running pass and let the readers go; a later `iter_*` call starts new ones."""
        use_ray()
        if self._pass is not None:
            self._end_pass(self._pass)
        self._supply.clear()
        self._link.release_readers()

    def schema(self) -> Schema:
        """Columns and types of the batches; with transforms, those of a first cycle that is read for it."""
        use_ray()
        plan = self._plan_of_next()
        if self._config.stages:
            walk = self._walk(Position(self.epoch), plan)
            return Schema(batch_schema(self._supply.schema(self._position.with_list(plan, self.epoch), walk)))
        return Schema(batch_schema(projected_schema(plan.table, list(plan.columns))))

    def metrics(self) -> dict[str, Any]:
        """What this rank has counted since its shard arrived in its process, as plain numbers: rows, bytes, chunks,
        rows_per_s, wait_share (0 to 1), seconds (wait_s, loop_s, read_s, transform_s, convert_s, elapsed_s), retries,
        replaced_rows, chunks_in_flight, in_flight_bytes. docs/monitoring.md says what each counts."""
        return self._meter.tally().to_dict()

    def stats(self) -> str:
        """Ray Data's own figures of its iterator, `metrics()` as text, and rows that were replaced in this pass."""
        return self._stats.to_summary().to_string() + metrics_text(self.metrics()) + self._supply.replaced

    def get_context(self) -> DataContext:
        """The Ray Data context of the batches."""
        return self._context

    def _get_dataset_tag(self) -> dict[str, Any]:
        return {"dataset": f"lance_stream_{self.name}", "split_index": str(self.world_rank)}
