"""TrackedBatches: for frameworks that fetch batches before they train on them."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ray_lance_stream import train
from ray_lance_stream._ray import RayIterable
from ray_lance_stream.epoch_pass import ENDED
from ray_lance_stream.errors import ConfigError, IterationError
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.state import StreamState
from ray_lance_stream.stream import LanceStream

logger = logging.getLogger(__name__)

MAX_UNTRAINED = 1000  # a framework holds a few, or as many as it accumulates gradients over
MAX_LOOK = 2  # batches of an iterator that a framework throws away
HOW_TO_TELL = "give the framework the StreamReportCallback of ray_lance_stream.integrations with these batches"


def check_reports(reports: bool, options: Mapping[str, Any]) -> None:
    """Refuse options of reports for a callback that makes none.

    Raises:
        ConfigError: names them.
    """
    given = sorted(name for name, value in options.items() if value is not None)
    if given and not reports:
        raise ConfigError(f"with reports=False a callback reports nothing, so leave out {', '.join(given)}")


class TrackedBatches(RayIterable):
    """The torch batches of a shard, and the position behind the last one that is in the weights of the model.

    A shard counts a batch when it is handed out, but a framework may hold it for a while: Lightning knows by the next batch
    that one is not the last, and Hugging Face's Trainer takes all batches of a step at once. Here a batch counts when it was
    trained, which the callback for the framework tells. Once this is made, `ray.train.report` and `ray_lance_stream.report`
    save that position.

    Each `iter()` is one epoch, as with a shard. One of which no batch was trained is begun again: frameworks make iterators
    that they throw away after a first batch. `shard.set_epoch` and `shard.load_state_dict` say otherwise, as ever.
    Where all batches of an epoch were handed out, the next `iter()` raises IterationError if none was told to be trained.

    Attributes:
        shard: of this process.
        is_untold: whether batches were handed out, and no batch was ever told to be trained.
        withheld: whether an `iter()` gives no batch and leaves the position alone, as a callback wants it for a training that
            is over already.

    Args:
        shard: as `ray.train.get_dataset_shard` returns it.
        kwargs: as `iter_torch_batches`.

    Raises:
        ConfigError: a stream for evaluation, which has no position.
    """

    def __init__(self, shard: StreamShard | LanceStream, **kwargs: Any) -> None:
        self.shard: StreamShard = shard._local_shard() if isinstance(shard, LanceStream) else shard
        if self.shard.evaluation:
            raise ConfigError(
                f"stream {self.shard.name!r} is for evaluation and never resumed, so there is nothing to track; pass "
                "shard.iter_torch_batches(...) to the framework"
            )
        super().__init__(partial(iter, self.shard.iter_torch_batches(**kwargs)))
        self.withheld = False
        self._running: Any = None
        self._handed: deque[StreamState] = deque()  # behind each batch that is not trained yet
        self._behind: StreamState | None = None  # the last batch that is in the weights
        self._start: tuple[StreamState, int] | None = None  # where the shard was before the pass, and which epoch it is
        self._is_begun = False  # whether a batch of the pass was trained, or it is over without any
        self._is_whole = False  # whether all batches of the pass were handed out
        self._is_told = False  # whether a batch was ever trained, or an epoch left
        self._moves: int | None = None  # of the shard, as the pass has left it; None: it waits for its first batch
        train.track(self)

    def __repr__(self) -> str:
        return f"TrackedBatches({self.shard!r})"

    # ---- told by a callback

    def trained(self, *, stepped: bool = True) -> None:
        """The first batch that was handed out and not trained yet went through the model.

        Args:
            stepped: whether it is in the weights now, and all before it; else its gradients wait for the optimizer.

        Raises:
            IterationError: no such batch.
        """
        if not self._handed:
            raise IterationError(
                "a batch was told to be trained, but all that were handed out are trained already; give the framework these "
                "batches, and one callback"
            )
        behind = self._handed.popleft()
        self._is_begun = self._is_told = True
        if stepped:
            self._behind = behind

    def leave(self) -> None:
        """The framework is done with this epoch, though batches may be left: its pass ends, the next one is the next epoch."""
        if self._start is None or self._is_moved:
            return
        _, epoch = self._start
        state = self.state()
        self._end()
        self._handed.clear()
        self._is_begun = self._is_told = True
        if state.epoch <= epoch:
            self._behind = replace(state, epoch=epoch + 1, samples_consumed_per_split=0, partial=None)

    # ---- position

    @property
    def is_untold(self) -> bool:
        return bool(self._handed) and not self._is_told and not self._is_moved

    def state(self) -> StreamState:
        """`state_dict()` as an object."""
        return self.shard.state() if self._behind is None or self._is_moved else self._behind

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that is in the weights, as `StreamShard.state_dict`."""
        return self.state().to_dict()

    def save_state(self, directory: str | os.PathLike[str]) -> None:
        """As `StreamShard.save_state`."""
        train.save_state_file(directory, self.shard.name, self.state())

    # ---- one pass

    def __iter__(self) -> Iterator[Any]:
        if self.withheld:
            return
        running = self._begin()
        try:
            for batch in running:
                self._moves = self.shard._moves
                self._handed.append(self.shard.state())
                self._check_is_told()
                yield batch
            if running is not self._running:
                raise IterationError(ENDED)
            if not self._handed:
                self._is_begun = True  # also without a batch: begun again, it would have none again
            self._is_whole = True
        finally:
            if running is self._running:
                self._end()

    def _check_is_told(self) -> None:
        if len(self._handed) > MAX_UNTRAINED:
            raise IterationError(
                f"{MAX_UNTRAINED} batches were handed out and none was told to be trained, so no checkpoint would move on; "
                f"{HOW_TO_TELL}"
            )

    def _begin(self) -> Any:
        """Begin the next epoch, or the one before again where the framework has only looked at it.

        Raises:
            IterationError: all of it was handed out, which is no look.
        """
        self._end()
        behind = self.state()
        if self._start is not None and not self._is_begun and not self._is_moved:
            self._check_is_look(self._start[1])
            self._go_back(*self._start)
        self._handed.clear()
        self._is_begun = self._is_whole = False
        self._behind = behind
        self._start = (self.shard.state(), self.shard.epoch)
        self._moves = self.shard._moves
        self._running = super().__iter__()
        self._moves = None
        return self._running

    def _check_is_look(self, epoch: int) -> None:
        name, handed = self.shard.name, len(self._handed)
        if self._is_whole:
            raise IterationError(
                f"all batches of epoch {epoch} of stream {name!r} were handed out and none was told to be trained, so the next "
                f"epoch would be the same one: {HOW_TO_TELL}, or call their trained() behind each step of the optimizer; a "
                "loop of your own takes shard.iter_torch_batches(...) without them. If the epoch was only looked at, "
                f"shard.set_epoch({epoch}) begins it again"
            )
        if handed > MAX_LOOK:
            logger.warning(
                "stream %r: an iterator was given up after %d batches and none was told to be trained, so epoch %d begins "
                "again; if they were trained, %s",
                name,
                handed,
                epoch,
                HOW_TO_TELL,
            )

    def _end(self) -> None:
        """End the running pass, so that nothing is read or held for a loop that has gone."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
            if self._moves is None:  # it has failed before its first batch
                self._moves = self.shard._moves

    @property
    def _is_moved(self) -> bool:
        """Whether the shard was set to another place since the pass, or has run one of its own."""
        return self._moves is not None and self._moves != self.shard._moves

    def _go_back(self, state: StreamState, epoch: int) -> None:
        if state.epoch == epoch:
            self.shard.load_state_dict(state.to_dict())
        else:  # the loop had left the epoch of that state
            self.shard.set_epoch(epoch)
