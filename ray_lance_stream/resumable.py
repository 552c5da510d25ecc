"""What a shard is as something that stops and goes on: its epoch, its state, and the digest of what it has delivered."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_lance_stream import train
from ray_lance_stream.config import StreamConfig, at_least
from ray_lance_stream.cursor import Cursor
from ray_lance_stream.restore import StreamPosition
from ray_lance_stream.state import StreamState

if TYPE_CHECKING:
    from ray_lance_stream.attempts import Attempt
    from ray_lance_stream.epoch_pass import EpochPass
    from ray_lance_stream.loader import LoaderPass
    from ray_lance_stream.splits import RankShare


class Resumable:
    """A shard's position, as users see it."""

    name: str
    world_rank: int
    _attempt: Attempt
    _config: StreamConfig
    _position: StreamPosition
    _pass: EpochPass | LoaderPass | None

    @property
    @abstractmethod
    def _share(self) -> RankShare: ...

    @abstractmethod
    def _end_pass(self, ended: EpochPass | LoaderPass) -> None: ...

    @property
    def epoch(self) -> int:
        """The epoch that the next pass, or the running one, belongs to."""
        cursor = self._restore()
        return cursor.position.epoch if cursor.live else cursor.next_start.epoch

    def set_epoch(self, epoch: int, *, restart: bool = False) -> None:
        """Make the next pass epoch `epoch`; ends a running pass. Call it on every rank alike.

        Args:
            epoch: from 0.
            restart: begin the epoch at its start, even where the open position lies in it, as after a resume: without it
                that position stays.

        Raises:
            ConfigError: no such epoch.
        """
        at_least("epoch", epoch, 0)
        self._restore()
        if self._pass is not None:
            self._end_pass(self._pass)
        self._position.set_epoch(epoch, restart=restart)
        self._config = self._config.begun_at(epoch, restart=restart)

    def resume_epoch(self) -> None:
        """After a `break`, stay in this epoch: the next pass resumes where the loop has left it. Call it on every rank alike.

        Raises:
            IterationError: a pass runs, or none was left before its last row.
            StateError: a stream with evaluation=True, whose passes are whole.
        """
        self._restore()
        self._position.resume_epoch()
        self._config = self._config.resumed_from(self.state())

    def digest(self) -> int:
        """A number in [0, 2**64) for the rows that the newest pass has delivered to this rank, in whole cycles.

        The sum over ranks, modulo 2**64, does not depend on how many there are; it equals the sum of
        `LanceStream.step_digest` over the steps of the pass. Computed from the order when asked for: costs nothing otherwise.
        """
        self._restore()
        return self._position.digest(self._share.block)

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
        """Write the state into a directory, to resume from it without Ray Train, or to report it later in a checkpoint.

        `ray.train.report` saves where the loop is when it is called, and keeps a state that this has put there before.
        """
        train.save_state_file(directory, self.name, self.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; comes before everything that Ray Train or `resume_from` would restore.

        Also from the merged state of a `lancedb.streaming.StreamingDataset`, where the order is "lancedb".

        Raises:
            StateError: malformed, or this is an evaluation stream.
            StateMismatchError: the state belongs to another row order.
            IterationError: an iterator of this shard is live.
        """
        saved = self._position.read(state)
        self._position.load(saved)
        self._config = self._config.resumed_from(saved)

    @property
    def _moves(self) -> int:
        """How often a pass began or a place was set, also the same one again."""
        return self._restore().moves

    def _restore(self) -> Cursor:
        """The cursor; on first use set to where this shard starts."""
        train.check_worker_group(self._attempt, self.world_rank)
        return self._position.cursor()
