"""LanceStream: what a trainer is given in `datasets={...}`. factory.lance_stream() makes it."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.data import DataContext

from ray_lance_stream import train
from ray_lance_stream._ray import in_train_controller, local_mode_name, local_run, weak_handle
from ray_lance_stream.aside import aside
from ray_lance_stream.attempts import Attempt
from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.coordinator import SplitRequest, start_coordinator
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.forked import use_ray
from ray_lance_stream.inspectable import Inspectable
from ray_lance_stream.launcher import warn_of_ranks
from ray_lance_stream.link import ask
from ray_lance_stream.other_loaders import NoLoader, no_such_name
from ray_lance_stream.pin import Pin, PinnedAs
from ray_lance_stream.recorded import plan_to_resume
from ray_lance_stream.runs import block_of
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.splits import SplitBlock, data_rank
from ray_lance_stream.transformable import Transformable

logger = logging.getLogger(__name__)

END_S = 5.0  # for a coordinator to end by itself
_starting = threading.Lock()  # two trainers may pickle one stream at once; it must have one coordinator
OWN = ("_local", "_local_run", "_made")
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
    "has_transforms",
    "resume",
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
        self._group = uuid.uuid4().hex  # of the shards that it makes one by one
        self._copy_id = ""  # which copy of the stream this is, where a trainer splits one again and again
        self._reset_own()

    def _reset_own(self) -> None:
        """What belongs to this process."""
        self._local: StreamShard | None = None
        self._local_run: Any = None
        self._made: list[tuple[weakref.ref[StreamShard], Attempt, int]] = []  # by `shard`

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
        return {key: value for key, value in self.__dict__.items() if key not in OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_own()
        if in_train_controller():
            # Ray keeps the controller of a `fit()` that has ended, which must not keep the coordinator: the trainer
            # that is given the stream holds it until then.
            self._copy_id, self._coordinator = uuid.uuid4().hex, weak_handle(self._coordinator)

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
        copied.name, copied._copy_id = stream.name, stream._copy_id
        copied._coordinator = stream._coordinator_handle()
        return copied

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[StreamShard]:
        """One shard per rank: rank r owns the r-th contiguous block of splits, as the coordinator assigns them.

        Args:
            n: number of ranks.
            equal: must be True: ranks always take the same number of steps.
            locality_hints: node ids of the ranks, in their order: the coordinator starts the readers of a rank on its node.
                Blocks stay in the order of the ranks, since each node reads rows from nearly all files of a shuffled table.

        Raises:
            ConfigError: more ranks than splits; ranks that are no multiple of replicas; hints for other than n ranks.
        """
        if not equal:
            raise ConfigError(
                "equal must be True, got False: the ranks of a stream always take the same number of steps"
            )
        if locality_hints is not None and len(locality_hints) != n:
            raise ConfigError(
                f"locality_hints must name a node for each of {n} ranks, got {len(locality_hints)} of them"
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
        block_of(grid.num_splits, n, 0, self._config.replicas)
        if self._config.global_batch_size is not None:
            grid.cycles_per_step(self._config.global_batch_size)
        attempt = Attempt(uuid.uuid4().hex, "", n, split_for_train=True)
        nodes, has_readers = tuple(locality_hints or ()), not self._config.evaluation
        blocks = self._assigned(self._request(attempt, nodes=nodes, has_readers=has_readers))
        return [self._shard(attempt, rank, blocks[rank]) for rank in range(n)]

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
        attempt = Attempt(uuid.uuid4().hex, train.run_name(), world_size, group=self._group)
        request = self._request(attempt, ranks=(rank,))
        block = block_of(request.num_splits, world_size, rank, self._config.replicas)
        self._announce(request)
        shard = self._shard(attempt, rank, block)
        warn_of_ranks(self.name or self._plan.table.identity, rank, world_size, self._config.evaluation)
        self._made = [each for each in self._made if each[0]() is not None] + [(weakref.ref(shard), attempt, rank)]
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
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is None or not ray.is_initialized():
            return
        ended, _ = ray.wait([coordinator.end.remote()], timeout=END_S)
        if not ended:
            ray.kill(coordinator)

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

    def _request(self, attempt: Attempt, **more: Any) -> SplitRequest:
        """What the coordinator is to assign to the ranks of an attempt."""
        replicas = self._config.replicas
        _, world = data_rank(attempt.world_size, 0, replicas)
        num_splits = self._plan.with_splits(world).grid.num_splits
        return SplitRequest(self.name or "", attempt, num_splits, replicas, copy_id=self._copy_id, **more)

    def _assigned(self, request: SplitRequest) -> dict[int, SplitBlock]:
        """The split block of each rank, from the coordinator."""
        coordinator, stall_warn_s = self._coordinator_handle(), self._config.stall_warn_s
        blocks: dict[int, SplitBlock] = ask(
            coordinator, request.stream, "assign", request, timeout_s=None, stall_warn_s=stall_warn_s
        )
        return blocks

    def _announce(self, request: SplitRequest) -> None:
        """Tell the coordinator of a rank that is made alone, and which ones are gone, whose readers are warm."""
        coordinator = self._coordinator_handle()
        for made, attempt, rank in self._made:
            if made() is None:
                coordinator.release.remote(attempt.attempt_id, rank)
        coordinator.assign.remote(request)

    def _shard(self, attempt: Attempt, rank: int, block: SplitBlock) -> StreamShard:
        name = self.name or local_mode_name(self) or ""
        return StreamShard(
            name, self._plan, self._config, self._coordinator_handle(), attempt, rank, self.context, block
        )

    def _local_shard(self) -> StreamShard:
        run = local_run()
        if self._local is not None and run not in (None, self._local_run):
            self._local.close()  # each run begins anew, as it does in workers
            self._local = None
        if self._local is None:
            self._local, self._local_run = self.shard(), run
            train.register(self._local)
        return self._local
