"""StreamDataset: a shard as a `torch.utils.data.IterableDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from ray.data.collate_fn import CollateFn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ray_lance_stream.calling_loader import calling_loader, fetches_lists
from ray_lance_stream.columns import TensorCollateFn
from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.errors import ConfigError, IterationError
from ray_lance_stream.feed import WITHOUT_WORKERS, Feed
from ray_lance_stream.own_reads import NumpyFunction, PassSpec
from ray_lance_stream.transform import in_one_process

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard

FORKED = (
    "the workers of a DataLoader must not be forked, since Lance does not work in a forked process: pass "
    'multiprocessing_context="spawn" or "forkserver", use StreamDataLoader, which does, or num_workers=0'
)


class StreamDataset(IterableDataset[Any]):
    """The batches of a shard as a dataset of PyTorch; made by `shard.to_torch_dataset()`.

    Each item is a batch: give it to a `DataLoader` with `batch_size=None`, or to a `StreamDataLoader`. Each `iter()` is one
    pass, as of what the shard's `iter_*` calls return. With `num_workers=0` the readers of the stream read ahead; with n
    workers, worker i reads and makes the batches i, i + n, i + 2n, ... of the pass itself, so the batches are the same.

    Position and epoch are the shard's.

    Args:
        shard: whose rows.
        batch_size: as of `StreamShard.to_torch_dataset`, and so are the others.
        drop_last: see there.
        dtypes: see there.
        collate_fn: see there.
        prefetch_batches: see there.
    """

    def __init__(
        self,
        shard: StreamShard,
        batch_size: Any,
        *,
        drop_last: bool,
        dtypes: Any,
        collate_fn: Any,
        prefetch_batches: int,
    ) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(
                f"collate_fn must be a function of a batch, or a CollateFn of Ray Data, got {collate_fn!r}"
            )
        if collate_fn is not None and dtypes is not None:
            raise ConfigError("dtypes must not be given with a collate_fn: convert to them in it")
        self._shard: StreamShard | None = shard
        self._asked_batch_size = self._served(batch_size)
        self._drop_last = drop_last
        self._collate_fn: CollateFn[Any] = TensorCollateFn(dtypes) if collate_fn is None else collate_fn
        if not isinstance(self._collate_fn, CollateFn):
            self._collate_fn = NumpyFunction(collate_fn)
        self._prefetch_batches = prefetch_batches
        self._given: Feed | None = None  # that of a StreamDataLoader which starts its workers
        self._feed: Feed | None = None  # in a worker; else of the pass that a plain DataLoader delivers
        self._handed_out: object = None  # which hand-out of the shard's that feed is of

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return {**self.__dict__, "_given": None, "_feed": None, "_handed_out": None}
        return {"_shard": None, "_feed": self._given or self._feed_of_plain_loader()}

    def __repr__(self) -> str:
        return (
            f"StreamDataset({self._shard!r}, batch_size={self._asked_batch_size})" if self._shard else "StreamDataset()"
        )

    @property
    def _batch_size(self) -> int:
        """Rows per batch of the next pass."""
        return self.shard._batch_size_of_next(self._asked_batch_size)

    def __iter__(self) -> Iterator[Any]:
        if fetches_lists():
            self._refuse_lists(calling_loader(self))
        if self._shard is None:
            assert self._feed is not None
            return self._feed.batches()
        if get_worker_info() is not None:
            raise ConfigError(FORKED)
        batches = self._shard.iter_torch_batches(
            batch_size=self._asked_batch_size,
            drop_last=self._drop_last,
            collate_fn=self._collate_fn,
            prefetch_batches=self._prefetch_batches,
            device="cpu",
        )
        return iter(batches)

    def _served(self, batch_size: Any) -> Any:
        """A batch size that was given, if it can be served."""
        self.shard._batch_rule.resolve(batch_size)
        return batch_size

    def __len__(self) -> int:
        """Batches of the running pass, else of the next one: those left of an open epoch after a resume."""
        shard = self.shard
        running = shard._pass.walk if shard._pass is not None else None
        if running is not None and running.batch_size is not None:
            return running.num_batches
        return shard.num_batches(self._batch_size, self._drop_last)

    @property
    def shard(self) -> StreamShard:
        """Whose batches these are.

        Raises:
            IterationError: this is the dataset of a DataLoader worker.
        """
        if self._shard is None:
            raise IterationError(
                "a DataLoader worker knows its own batches and no position: ask the dataset in the main process, and use "
                "StreamDataLoader for a state with workers"
            )
        return self._shard

    @property
    def epoch(self) -> int:
        """The epoch that the next pass, or the running one, belongs to."""
        return self.shard.epoch

    def set_epoch(self, epoch: int, *, restart: bool = False) -> None:
        """See `StreamShard.set_epoch`. With a plain DataLoader with workers it comes before each pass but the first."""
        self.shard.set_epoch(epoch, restart=restart)

    def resume_epoch(self) -> None:
        """See `StreamShard.resume_epoch`."""
        self.shard.resume_epoch()

    def state_dict(self) -> dict[str, Any]:
        """See `StreamShard.state_dict`.

        Raises:
            IterationError: a plain DataLoader with workers delivers the pass, so how far it is cannot be known here.
        """
        return self.shard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StreamShard.load_state_dict`; before the first pass."""
        self.shard.load_state_dict(state)

    # ---- for workers

    def spec(self, plan: ReadPlan) -> PassSpec:
        """What workers read of a plan, which has the list of its epoch.

        Raises:
            ConfigError: a transform asks for what a DataLoader worker has not.
        """
        shard = self.shard
        config = shard._config
        for stage in config.stages:
            if stage.special_options:
                raise ConfigError(
                    f"the workers of a DataLoader run transforms themselves, but {stage} asks for "
                    f"{', '.join(stage.special_options)}: leave it out, or {WITHOUT_WORKERS}"
                )
        return PassSpec(
            shard.name,
            shard.world_rank,
            plan,
            shard._share.block,
            shard._position.config.skipped,
            self._batch_size,
            self._drop_last,
            self._collate_fn,
            in_one_process(config.stages),
            StreamConfig(
                read_batch_size=config.read_batch_size,
                prefetch_bytes=config.prefetch_bytes,
                read_timeout_s=config.read_timeout_s,
                stall_warn_s=config.stall_warn_s,
            ),
            shard.get_context(),
        )

    @contextmanager
    def given(self, feed: Feed) -> Iterator[None]:
        """While workers are started that get a feed."""
        self._given = feed
        try:
            yield
        finally:
            self._given = None

    def _feed_of_plain_loader(self) -> Feed:
        """The feed of the pass that begins where the shard is; the same for all workers of the loader."""
        shard = self.shard
        if (loader := calling_loader(self)) is not None and loader.batch_size is not None:
            self._refuse_lists(loader)
        if any(each.max_replaced_rows is not None for stage in shard._config.stages for each in stage.transforms):
            raise ConfigError(
                "max_replaced_rows is counted over all workers of a DataLoader, which a plain one cannot: use StreamDataLoader"
            )
        if self._feed is None or self._handed_out is not shard._position.handed_out:
            plan, walk = shard._next_loader_pass(self._batch_size, self._drop_last)
            feed = Feed(self.spec(plan), walk.start, told=False, once=not shard.evaluation)
            shard._position.hand_out(plan, walk, self._batch_size, self._drop_last)
            self._feed, self._handed_out = feed, shard._position.handed_out
        return self._feed

    def _refuse_lists(self, loader: DataLoader[Any] | None) -> None:
        """A loader would make batches of batches.

        Raises:
            ConfigError: with what to pass to it.
        """
        got = "one" if loader is None else f"batch_size={loader.batch_size}"
        raise ConfigError(
            f"an item of to_torch_dataset() is a batch, so the DataLoader must be given no size of batches, got {got} (its "
            "default is 1): pass DataLoader(dataset, batch_size=None), or give it rows with to_torch_dataset(rows=True)"
        )
