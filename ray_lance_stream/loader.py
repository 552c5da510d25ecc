"""StreamDataLoader: a DataLoader whose workers may read ahead, and whose position is still that of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ray_lance_stream.config import ReadPlan
from ray_lance_stream.cursor import EpochWalk
from ray_lance_stream.epoch_pass import ENDED
from ray_lance_stream.errors import ConfigError, IterationError
from ray_lance_stream.feed import Feed, Told
from ray_lance_stream.forked import use_ray
from ray_lance_stream.own_batches import OwnBatches
from ray_lance_stream.replaced import ReplacedRows
from ray_lance_stream.state import SkippedCycles
from ray_lance_stream.torch_dataset import FORKED, StreamDataset
from ray_lance_stream.torch_rows import StreamRows

OF_ROWS = ("batch_size", "drop_last", "collate_fn")
OF_THE_DATASET = (*OF_ROWS, "batch_sampler", "sampler", "shuffle")


def as_made(batch: Any) -> Any:
    """What the `collate_fn` of a loader of rows has made stays as it is; torch would convert it once more."""
    return batch


class LoaderPass:
    """One pass that DataLoader workers read: moves the position of the shard as the loop receives batches.

    Nothing has begun before `start`: what cannot be read by workers must not take an epoch.

    Args:
        dataset: whose pass.
    """

    def __init__(self, dataset: StreamDataset) -> None:
        self._shard = dataset.shard
        self.batch_size = dataset._batch_size
        self.drop_last = dataset._drop_last
        plan, walk = self._shard._next_loader_pass(self.batch_size, self.drop_last)
        self.plan: ReadPlan = plan
        self.walk: EpochWalk = walk
        self._all = OwnBatches(walk, 0, 1)
        self._received = 0
        self._batches: Iterator[Told] | None = None
        self._handed_out_s: float | None = None

    def start(self, feed: Feed, start_workers: Callable[[], Iterator[Told]]) -> None:
        """Begin, with workers that read from a feed; where they cannot be started the position stays.

        Args:
            feed: what they read.
            start_workers: returns their batches.
        """
        self._shard._begin_loader_pass(self)
        self._feed = feed
        self._replaced: ReplacedRows = self._shard._supply.count_replaced()
        try:
            self._batches = start_workers()
        except BaseException:
            self.end()
            raise

    def next(self) -> Any:
        """The next batch, counted.

        Raises:
            IterationError: the shard has begun another pass.
            StopIteration: at the end of the pass.
        """
        if self._batches is None:
            raise StopIteration if self.is_complete else IterationError(ENDED)
        use_ray()
        asked_s = time.perf_counter()
        told = next(self._batches, None)
        came_s = time.perf_counter()
        if told is None:
            if not self.is_complete:
                raise IterationError(
                    f"the pass over epoch {self.walk.start.epoch} ended after {self._received} of {self.walk.num_batches} "
                    "batches: a DataLoader worker ended without an error"
                )
            raise StopIteration
        if told.failure is not None:
            raise told.failure.to_error()
        self._count(told, asked_s, came_s)
        return told.batch

    def _count(self, told: Told, asked_s: float, came_s: float) -> None:
        shard = self._shard
        if told.info is not None:
            shard._meter.came(told.info)
            self._replaced.add(told.info.replaced)
        shard._stats.iter_total_blocked_s.add(came_s - asked_s)
        if self._handed_out_s is not None:
            shard._stats.iter_user_s.add(asked_s - self._handed_out_s)
        self._handed_out_s = time.perf_counter()
        shard._report_in_time()
        shard._received(self._all.num_rows(self._received))
        self._received += 1

    @property
    def is_complete(self) -> bool:
        """Whether the loop has received every batch of the pass."""
        return self._received == self.walk.num_batches

    def end(self) -> bool:
        """The loop asks for no more batches; returns whether the pass had not ended before."""
        is_running = self._shard._pass is self
        self._shard._end_pass(self)
        return is_running

    def check_together(self) -> None:
        """See StreamShard._check_together."""
        self._shard._check_together()

    def close(self) -> None:
        """Let the workers go, unless their loader keeps them; these wait for no read of the pass any more."""
        self._feed.end()
        self._batches = None


class _Batches:
    """What a loop iterates: ends its pass when nobody holds it any more, as after a `break`."""

    def __init__(self, running: LoaderPass, loader: StreamDataLoader) -> None:
        self._running = running
        self._loader = loader

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        try:
            return self._running.next()
        except StopIteration:
            if self._running.end():
                self._running.check_together()
            raise
        except BaseException:
            if self._running.end():
                self._loader._end_workers()
            raise

    def __len__(self) -> int:
        return self._running.walk.num_batches

    def __del__(self) -> None:
        self._running.end()


class StreamDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` of a `shard.to_torch_dataset()` that goes on where the loop is, with workers too.

    Its state counts the batches that the loop has received, not those that workers have made ahead: it may be saved and
    loaded at any step, for any other number of workers and of ranks. It is the state of the shard, so
    a report to Ray Train saves it as well.

    Args:
        dataset: of one shard.
        num_workers: processes that read and make batches; 0: Ray's readers read ahead, and batches are made in threads.
        multiprocessing_context: "spawn", which is the default here, "forkserver", or such a context; never "fork".
        options: others of `DataLoader`, such as `prefetch_factor`, `persistent_workers`, `pin_memory`, `timeout` and
            `worker_init_fn`; of rows also `batch_size`, which is the stream's by default, `drop_last` and `collate_fn`.

    Raises:
        ConfigError: no such dataset; "fork"; or an option that is one of the dataset or would change the order.
    """

    def __init__(
        self, dataset: StreamDataset, *, num_workers: int = 0, multiprocessing_context: Any = None, **options: Any
    ) -> None:
        if not isinstance(dataset, StreamDataset):
            raise ConfigError(
                f"StreamDataLoader takes what shard.to_torch_dataset() returns, got {type(dataset).__name__}; use a plain "
                "DataLoader for other datasets"
            )
        collate_fn = None
        if isinstance(dataset, StreamRows):
            dataset = dataset.batched(*(options.pop(name, None) for name in OF_ROWS))
            collate_fn = as_made
        # False is torch's own default of some of them.
        given = sorted(name for name in OF_THE_DATASET if options.get(name) is not None and options[name] is not False)
        if given:
            raise ConfigError(
                f"StreamDataLoader takes batches as the dataset makes them, got {', '.join(given)}: pass batch_size, drop_last "
                "and collate_fn to to_torch_dataset(), or give it rows with to_torch_dataset(rows=True); the stream shuffles "
                "the rows"
            )
        if not options.get("in_order", True):
            raise ConfigError("in_order must be True: batches that come in any order would be other global steps")
        options = {name: value for name, value in options.items() if name not in OF_THE_DATASET}
        context = multiprocessing_context or "spawn"
        if num_workers and "fork" in (context, getattr(context, "_name", None)):
            raise ConfigError(FORKED)
        super().__init__(
            dataset,
            batch_size=None,
            collate_fn=collate_fn,
            num_workers=num_workers,
            multiprocessing_context=context if num_workers else None,
            **options,
        )
        self._stream = dataset
        self._feed: tuple[tuple[ReadPlan, SkippedCycles], Feed] | None = None  # of workers that persist

    def __iter__(self) -> Any:
        """One pass over the stream, from where it is.

        Raises:
            ConfigError: a transform, or a collate_fn, that DataLoader workers cannot run.
        """
        if not self.num_workers:
            return super().__iter__()
        running = LoaderPass(self._stream)
        feed = self._feed_of(running)
        try:
            with self._stream.given(feed):
                running.start(feed, super().__iter__)
        except BaseException:
            self._end_workers()  # one that persisted may have died since the last pass
            raise
        return _Batches(running, self)

    def __len__(self) -> int:
        """Batches of the running pass, else of the next one: those left of an open epoch after a resume."""
        return len(self._stream)

    def _feed_of(self, running: LoaderPass) -> Feed:
        """What the workers read; workers that persist are told where to begin, as long as they read the same plan."""
        spec = self._stream.spec(running.plan)
        key = (spec.plan, spec.skipped)
        if self._iterator is not None and self._feed is not None and self._feed[0] == key:
            self._feed[1].begin_at(running.walk.start)
            return self._feed[1]
        self._end_workers()
        feed = Feed(spec, running.walk.start, told=True, once=False)
        if self.persistent_workers:
            self._feed = key, feed
        return feed

    def _end_workers(self) -> None:
        """Let go of workers that persist; they end with their last holder."""
        self._iterator = None
        self._feed = None

    # ---- position

    @property
    def epoch(self) -> int:
        """The epoch that the next pass, or the running one, belongs to."""
        return self._stream.epoch

    def set_epoch(self, epoch: int, *, restart: bool = False) -> None:
        """See `StreamShard.set_epoch`; not needed for epochs one after another."""
        self._stream.set_epoch(epoch, restart=restart)

    def resume_epoch(self) -> None:
        """See `StreamShard.resume_epoch`."""
        self._stream.resume_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop as JSON values; see `StreamShard.state_dict`."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; see `StreamShard.load_state_dict`."""
        self._stream.load_state_dict(state)

    def close(self) -> None:
        """End the running pass and the workers."""
        shard = self._stream.shard
        if shard._pass is not None:
            shard._end_pass(shard._pass)
        self._end_workers()
