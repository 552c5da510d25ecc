"""StreamShard: the `ray.data.DataIterator` of one rank. Position, passes, reads and batch sizes have files of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.data import DataContext, Schema

from ray_lance_stream import train
from ray_lance_stream._ray_data import DatasetStats, as_iterable
from ray_lance_stream.batching import BATCH_SIZE_OF_STREAM, BatchSizeRule, StreamSizedIterator, refuse_local_shuffle
from ray_lance_stream.columns import batch_schema
from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.coordinator import Attempt
from ray_lance_stream.cursor import Cursor, EpochWalk, Position
from ray_lance_stream.epoch_pass import EpochPass
from ray_lance_stream.line import with_chunks_for_stages
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.meter import Meter
from ray_lance_stream.restore import StreamPosition
from ray_lance_stream.source import projected_schema
from ray_lance_stream.splits import RankShare
from ray_lance_stream.state import StreamState, skipped_in
from ray_lance_stream.supply import ChunkSupply
from ray_lance_stream.window import ReadWindow

RUNTIME = ("_position", "_pass", "_stats", "_link", "_supply", "_batch_rule", "_meter")


class StreamShard(StreamSizedIterator):
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
    ) -> None:
        self.name = name
        self.world_rank = rank
        self._plan = plan.with_splits(attempt.world_size // config.replicas)
        self._config = with_chunks_for_stages(config, attempt.world_size)
        self._coordinator = coordinator
        self._attempt = attempt
        self._context = context.copy()
        # Ray's batch threads finish in any order; with this its iterator puts the batches back in order.
        self._context.execution_options.preserve_order = True
        self._reset_runtime()

    def _reset_runtime(self) -> None:
        self._pass: EpochPass | None = None
        self._stats = DatasetStats(metadata={}, parent=None)
        self._meter = Meter(self._stats, lambda: self._supply.in_flight())
        self._link = CoordinatorLink(self.name, self._coordinator, self._attempt, self.world_rank, self._meter)
        world = self._attempt.world_size
        self._supply = ChunkSupply(self._config, self.name, self.world_rank, world, self._link, self._meter)
        self._position = StreamPosition(self.name, self._plan, self._config, world // self._config.replicas, self._link)
        self._batch_rule = BatchSizeRule(self._share, self._config.global_batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_runtime()
        if train.register(self) and not self.evaluation:
            self._link.prepare_reader()

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
        return RankShare.of(grid, self._attempt.world_size, self.world_rank, self._config.replicas)

    @property
    def split_block(self) -> tuple[int, int]:
        """(lo, hi): the contiguous splits of this rank."""
        block = self._share.block
        return block.lo, block.hi

    @property
    def num_rows(self) -> int:
        """Rows that this rank receives in a whole epoch."""
        return self._walk(Position(self.epoch)).num_rows

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
        return self._walk(cursor.next_start, size, drop_last).num_batches

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
            start = cursor.next_start
            if start.cycle == 0 and not self._walk(start, batch_size, drop_last).num_rows:
                self._batch_rule.refuse_empty_epoch(self._walk(start).num_rows, batch_size)
        return EpochPass(self, batch_size, drop_last)

    def _walk(self, start: Position, batch_size: int | None = None, drop_last: bool = False) -> EpochWalk:
        share, skipped = self._share, skipped_in(self._position.config.skipped, start.epoch)
        return EpochWalk(share.grid, share.block, start, skipped, batch_size, drop_last)

    # ---- called by a pass

    def _begin_pass(self, new: EpochPass) -> tuple[EpochWalk, ReadWindow]:
        """End the pass before, move to where the next one starts and return its walk and its window."""
        cursor = self._restore()
        if self._pass is not None:
            self._end_pass(self._pass)
        walk = self._walk(cursor.next_start, new.batch_size, new.drop_last)
        if new.batch_size is not None:
            self._link.agree_on_step(walk.start.epoch, walk.block, new.batch_size, new.drop_last)
        cursor.begin(walk)
        self._pass = new
        return walk, self._supply.take(self._position.plan, walk)

    def _received(self, rows: int) -> None:
        self._position.cursor().received(rows)
        self._meter.received(rows)
        if self._link.is_time_to_tell():
            self._position.tell()

    def _read_ahead(self, running: ReadWindow, walk: EpochWalk) -> None:
        if running.all_sent and self._supply.may_read_ahead:
            next_walk = partial(self._walk, Position(walk.start.epoch + 1), walk.batch_size, walk.drop_last)
            self._supply.ahead.go_on(running, self._position.plan, next_walk)

    def _end_pass(self, ended: EpochPass) -> None:
        if self._pass is not ended:
            return
        self._pass = None
        if not ended.is_complete:
            self._supply.ahead.drop()
        ended.close()
        self._position.cursor().leave()
        self._position.tell()

    # ---- position

    @property
    def epoch(self) -> int:
        """The epoch that the next pass, or the running one, belongs to."""
        cursor = self._restore()
        return cursor.position.epoch if cursor.live else cursor.next_start.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass epoch `epoch`; ends a running pass.

        Where the open position already lies in that epoch, as after a resume, it stays.
        """
        at_least("epoch", epoch, 0)
        cursor = self._restore()
        if self._pass is not None:
            self._end_pass(self._pass)
        cursor.set_epoch(epoch)

    @property
    def digest(self) -> int:
        """A number in [0, 2**64) for the rows that the newest pass has delivered to this rank, in whole cycles.

        The sum over ranks, modulo 2**64, does not depend on how many there are; it equals the sum of
        `LanceStream.digest` over the steps of the pass. Computed from the order when asked for: costs nothing otherwise.
        """
        epoch, ranges = self._restore().done
        plan, block = self._position.plan.resolve(), self._share.block
        return sum(plan.digest(epoch, block, lo, hi) for lo, hi in ranges) % 2**64

    def state(self) -> StreamState:
        """`state_dict()` as an object."""
        self._restore()
        return self._position.state()

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop as JSON values (< 2 KB): what it has received, not what was prefetched.

        Needs no other rank and no read; the same on every rank at a step boundary.
        """
        return self.state().to_dict()

    def save_state(self, directory: str | os.PathLike[str]) -> None:
        """Write the state into a directory that you make a checkpoint of, for use with plain `ray.train.report`."""
        train.save_state_file(directory, self.name, self.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; comes before everything that Ray Train or `resume_from` would restore.

        Raises:
            StateError: malformed, or this is an evaluation stream.
            StateMismatchError: the state belongs to another row order.
            IterationError: an iterator of this shard is live.
        """
        self._position.load(StreamState.from_dict(state))

    def _restore(self) -> Cursor:
        """The cursor; on first use set to where this shard starts."""
        train.check_worker_group(self._attempt, self.world_rank)
        return self._position.cursor()

    # ---- description

    def close(self) -> None:
        """End a running pass and let the readers go; a later `iter_*` call starts new ones."""
        if self._pass is not None:
            self._end_pass(self._pass)
        self._supply.clear()
        self._link.release_readers()

    def schema(self) -> Schema:
        """Columns and types of the batches; with transforms, those of a first cycle that is read for it."""
        if self._config.stages:
            walk = self._walk(Position(self.epoch))
            return Schema(batch_schema(self._supply.schema(self._position.plan, walk)))
        plan = self._position.plan
        return Schema(batch_schema(projected_schema(plan.table, list(plan.columns))))

    def stats(self) -> str:
        """Ray Data's own figures of its iterator, those of this rank so far, and rows that were replaced in this pass."""
        return self._stats.to_summary().to_string() + self._meter.tally().to_text() + self._supply.replaced

    def get_context(self) -> DataContext:
        """The Ray Data context of the batches."""
        return self._context

    def _get_dataset_tag(self) -> dict[str, Any]:
        return {"dataset": f"lance_stream_{self.name}", "split_index": str(self.world_rank)}
