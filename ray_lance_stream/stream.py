"""LanceStream: what a trainer is given in `datasets={...}`. factory.lance_stream() makes it."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.data import DataContext

from ray_lance_stream import train
from ray_lance_stream._ray import local_mode_name, local_run
from ray_lance_stream.aside import aside
from ray_lance_stream.attempts import Attempt
from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.coordinator import start_coordinator
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.forked import use_ray
from ray_lance_stream.inspectable import Inspectable
from ray_lance_stream.launcher import warn_of_ranks
from ray_lance_stream.other_loaders import NoLoader, no_such_name
from ray_lance_stream.pin import Pin, PinnedAs
from ray_lance_stream.recorded import plan_to_resume
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.splits import data_rank, split_block
from ray_lance_stream.transformable import Transformable

logger = logging.getLogger(__name__)

_starting = threading.Lock()  # two trainers may pickle one stream at once; it must have one coordinator
SHARD_METHODS = (
    "iter_batches",
    "iter_torch_batches",
    "iter_tf_batches",
    "iter_jax_batches",
    "iter_rows",
    "to_torch_dataset",
    "to_torch",
    "to_tf",
    "materialize",
    "schema",
    "peek",
    "resume_epoch",
    "save_state",
    "state",
    "evaluation",
    "epoch",
    "digest",
    "num_rows",
    "num_batches",
    "local_batch_size",
    "loss_weight",
    "world_rank",
    "split_block",
)


class LanceStream(NoLoader, Transformable, Inspectable):
    """A Lance table as a stream for `TorchTrainer(datasets={"train": stream})`. Made by `lance_stream`.

    Besides what Ray Train needs, it iterates itself, as one worker that owns every split: in local mode
    (`num_workers=0`) `get_dataset_shard` hands it out as it is.
    """

    def __init__(self, plan: ReadPlan, config: StreamConfig, context: DataContext | None = None) -> None:
        self.name: str | None = None
        self.context = context or DataContext.get_current().copy()
        self._plan = plan
        self._config = config
        self._coordinator: ray.actor.ActorHandle | None = None
        self._local: StreamShard | None = None
        self._local_run: Any = None
        self._group = uuid.uuid4().hex  # of the shards that it makes one by one

    def __repr__(self) -> str:
        stages = " -> ".join(str(stage) for stage in self._config.stages)
        transforms = f", transforms={stages}" if stages else ""
        return (
            f"LanceStream(name={self.name!r}, table={self._plan.table.identity!r}, version={self._plan.table.version}, "
            f"rows={self._plan.order.num_rows}, num_splits={self._plan.num_splits}{transforms})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The coordinator must belong to this process: the actors of a worker group die with it.
        if self._coordinator is None and ray.is_initialized():
            aside(self._coordinator_handle)
        return {**self.__dict__, "_local": None, "_local_run": None}

    def __getattr__(self, name: str) -> Any:
        if name in SHARD_METHODS:
            return getattr(self._local_shard(), name)
        if hasattr(LanceStream, name):
            return object.__getattribute__(self, name)  # a property that has failed with an AttributeError of its own
        raise no_such_name(LanceStream, name, [*dir(LanceStream), *SHARD_METHODS])

    # ---- what Ray Train calls

    def set_name(self, name: str) -> None:
        """Called by Ray Train with the key of `datasets={...}`."""
        self.name = name

    def copy(self, stream: LanceStream) -> LanceStream:
        """A copy with a context of its own, on which Ray Train sets its options."""
        copied = LanceStream(stream._plan, stream._config, stream.context.copy())
        copied.name = stream.name
        copied._coordinator = stream._coordinator_handle()
        return copied

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[StreamShard]:
        """One shard per rank: rank r owns the r-th contiguous block of splits.

        Args:
            n: number of ranks.
            equal: must be True: ranks always take the same number of steps.
            locality_hints: not needed: a shard asks for readers on the node where it runs.

        Raises:
            ConfigError: more ranks than splits; ranks that are no multiple of replicas.
        """
        if not equal:
            raise ConfigError(
                "equal must be True, got False: the ranks of a stream always take the same number of steps"
            )
        if self._plan.num_splits is None:
            logger.warning(
                "stream %r: num_splits is the number of workers, %d: this run cannot be resumed on another number of "
                "workers; pass lance_stream(..., num_splits=S) with an S that the worker counts you plan for divide",
                self.name,
                n,
            )
        _, world = data_rank(n, 0, self._config.replicas)
        grid = self._plan.with_splits(world).grid
        split_block(grid.num_splits, world, 0)
        if self._config.global_batch_size is not None:
            grid.cycles_per_step(self._config.global_batch_size)
        attempt = Attempt(uuid.uuid4().hex, "", n, split_for_train=True)
        return [self._shard(attempt, rank) for rank in range(n)]

    def iterator(self) -> StreamShard:
        """The whole stream as one shard, for streams that `DataConfig(datasets_to_split=...)` leaves out.

        Raises:
            ConfigError: on_new_version="next_epoch", where workers that know nothing of each other would read other rows.
        """
        self._refuse_to_part("is read as a whole by each worker", "name it in DataConfig(datasets_to_split=...)")
        return self.shard()

    # ---- what users call

    def shard(self, rank: int = 0, world_size: int = 1) -> StreamShard:
        """The shard of one rank, for use without Ray Train. Needs no other rank.

        Raises:
            ConfigError: a rank outside of the world, or more ranks than splits; several ranks with
                on_new_version="next_epoch".
        """
        if world_size != 1:
            self._refuse_to_part(f"is made for rank {rank} alone", "make all shards at once with streaming_split(n)")
        data, world = data_rank(world_size, rank, self._config.replicas)
        split_block(self._plan.with_splits(world).grid.num_splits, world, data)
        shard = self._shard(Attempt(uuid.uuid4().hex, "", world_size, group=self._group), rank)
        warn_of_ranks(self.name or self._plan.table.identity, rank, world_size, self._config.evaluation)
        return shard

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin at a saved position, whoever iterates this stream: a trainer's workers, the shards of a split, or itself.

        It counts as `resume_from` does: a worker group that starts again resumes from its own checkpoint. Inside of a
        training function with `num_workers=0` it is `StreamShard.load_state_dict`, for this run alone.

        Raises:
            StateError: malformed, or this is an evaluation stream.
            StateMismatchError: the state belongs to another row order.
            VersionNotFoundError: the recorded version is gone.
            IterationError: an iterator of this stream is live.
        """
        if local_run() is not None:
            self._local_shard().load_state_dict(state)
            return
        if self._local is not None:
            self._local.load_state_dict(state)
        self._plan, saved = plan_to_resume(self._plan, state, self._config)
        self._config = self._config.resumed_from(saved)

    def set_epoch(self, epoch: int, *, restart: bool = False) -> None:
        """Begin at an epoch, whoever iterates this stream; arguments and errors as `StreamShard.set_epoch`.

        A worker group that starts again resumes from its own checkpoint. Inside of a training function with
        `num_workers=0` it is `StreamShard.set_epoch`, for this run alone.
        """
        at_least("epoch", epoch, 0)
        if local_run() is not None:
            self._local_shard().set_epoch(epoch, restart=restart)
            return
        if self._local is not None:
            self._local.set_epoch(epoch, restart=restart)
        self._config = self._config.begun_at(epoch, restart=restart)

    def close(self) -> None:
        """End the coordinator and with it every reader of this stream; runs that still use it fail."""
        use_ray()
        if self._local is not None:
            self._local.close()
            self._local = None
        if self._coordinator is not None:
            if ray.is_initialized():
                ray.kill(self._coordinator)
            self._coordinator = None

    def pin(self, tag: str) -> Pin:
        """Keep the versions that this stream reads from being cleaned up: a tag in the table, until the run has ended.

            with stream.pin(tag="run-17"):
                TorchTrainer(..., datasets={"train": stream}).fit()

        Call it before the trainer gets to work. A run that ends with an error keeps its tag, since it may be resumed, and so
        does one whose driver is killed; the next run that pins its stream under this name takes the tag over. See
        docs/snapshots.md.

        Args:
            tag: a name for this run alone, such as the run's own.

        Raises:
            ConfigError: somebody else has made a tag of that name, of another version.
            TableError: the table cannot be written to.
        """
        pin = Pin(self._plan.table, tag, self._unpin)
        self._config = replace(self._config, pinned_as=pin.held_as)
        return pin

    # ---- inside

    def _unpin(self, pinned_as: PinnedAs) -> None:
        if self._config.pinned_as == pinned_as:
            self._config = replace(self._config, pinned_as=None)

    def _refuse_to_part(self, how: str, remedy: str) -> None:
        if self._config.takes_up_versions:
            raise ConfigError(
                "with on_new_version='next_epoch' all ranks must take up the same versions, but a shard of stream "
                f"{self.name!r} {how}: {remedy}, or use on_new_version='stay'"
            )

    def _with(self, config: StreamConfig) -> LanceStream:
        """This stream, delivered in another way; has a coordinator of its own."""
        other = LanceStream(self._plan, config, self.context.copy())
        other.name = self.name
        return other

    def _coordinator_handle(self) -> ray.actor.ActorHandle:
        use_ray()
        with _starting:
            if self._coordinator is None:
                self._coordinator = start_coordinator(self.name or self._plan.table.identity, self._plan.table)
            return self._coordinator

    def _shard(self, attempt: Attempt, rank: int) -> StreamShard:
        name = self.name or local_mode_name(self) or ""
        return StreamShard(name, self._plan, self._config, self._coordinator_handle(), attempt, rank, self.context)

    def _local_shard(self) -> StreamShard:
        run = local_run()
        if self._local is not None and run not in (None, self._local_run):
            self._local.close()  # each run begins anew, as it does in workers
            self._local = None
        if self._local is None:
            self._local, self._local_run = self.shard(), run
            train.register(self._local)
        return self._local
