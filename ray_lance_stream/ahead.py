"""ReadAhead: the first chunks of the next pass, read while the loop consumes the last ones of the running pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ray_lance_stream.config import ReadPlan
from ray_lance_stream.cursor import EpochWalk
from ray_lance_stream.window import ReadWindow


@dataclass(frozen=True)
class _Next:
    plan: ReadPlan
    walk: EpochWalk
    window: ReadWindow


class ReadAhead:
    """The windows of a shard's passes, of which the next one may begin to read before the running one has ended.

    Both together keep to the bounds of one. What was read for a pass that does not come is let go when another one begins,
    or the shard is closed.
    """

    def __init__(self) -> None:
        self._next: _Next | None = None
        self._has_failed = False

    def go_on(self, running: ReadWindow, make: Callable[[], tuple[ReadPlan, EpochWalk, ReadWindow]]) -> None:
        """Send the reads for which there is room, once all of the running pass have been sent.

        Args:
            running: window of the running pass.
            make: (plan, walk, window) of the next pass.
        """
        if self._has_failed:
            return
        if self._next is None:
            self._next = _Next(*make())
        self._next.window.fill_beside(running.held_bytes())

    def take(self, plan: ReadPlan, walk: EpochWalk) -> ReadWindow | None:
        """The window of a pass that begins, if it is the one that was read ahead; lets go of any other."""
        found = self._next
        self._has_failed = False
        if found is not None and (found.plan, found.walk) == (plan, walk):
            self._next = None
            return found.window
        self.drop()
        return None

    def give_up(self) -> None:
        """Reading ahead has failed: no more of it before another pass begins."""
        self.drop()
        self._has_failed = True

    def drop(self) -> None:
        """Let go what was read ahead."""
        if self._next is not None:
            self._next.window.close()
            self._next = None

    @property
    def window(self) -> ReadWindow | None:
        """What is read ahead, if anything is."""
        return self._next.window if self._next is not None else None
