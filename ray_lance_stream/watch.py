"""ReadWatch: a pass that waits for a chunk: when it says what it waits for, and when it gives the read up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.doing import Doing

logger = logging.getLogger(__name__)

ALIVE_S = 5.0
ANSWER_S = 5.0  # a reader that runs says within this time what it is doing
TELL_AGAIN_S = 60.0


class NoProgressError(Exception):
    """A read has made no progress for `read_timeout_s`."""


class Awaited(Protocol):
    """What is waited for: a chunk on its way, see line.ChunkOnItsWay, or its block."""

    def alive(self) -> None:
        """Tell the coordinator that this rank waits."""

    def ask(self) -> Future[Doing] | None:
        """Ask the reader what it is doing with the read; None where the reader is done with it."""

    def has_limit(self) -> bool:
        """Whether waiting has an end, where there was nobody to ask."""

    def text(self, doing: Doing | None) -> str:
        """Who is waited for, and for what; `doing` as far as a reader has answered."""


class ReadWatch:
    """Looked at again and again by the thread that waits; has no thread of its own.

    Args:
        awaited: what is waited for.
        config: its bounds in seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, awaited: Awaited, config: StreamConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._awaited = awaited
        self._clock = clock
        self._since_s = self._alive_s = clock()
        self._timeout_s = math.inf if config.read_timeout_s is None else config.read_timeout_s
        self._tell_s = self._since_s + (math.inf if config.stall_warn_s is None else config.stall_warn_s)
        self._give_up_s = self._since_s + self._timeout_s
        self._asked: Future[Doing] | None = None
        self._asked_s: float | None = None

    def look(self) -> None:
        """What is due by now.

        Raises:
            NoProgressError: the read is to be given up.
        """
        now_s = self._clock()
        if now_s - self._alive_s > ALIVE_S:
            self._awaited.alive()
            self._alive_s = now_s
        if now_s < min(self._tell_s, self._give_up_s):
            return
        if self._asked_s is None:
            self._asked, self._asked_s = self._awaited.ask(), now_s
        if self._asked is not None and not self._asked.done() and now_s - self._asked_s < ANSWER_S:
            return
        doing = None
        if self._asked is not None and self._asked.done() and self._asked.exception() is None:
            doing = self._asked.result()
        self._decide(now_s, doing, has_limit=self._asked is not None or self._awaited.has_limit())
        self._asked = self._asked_s = None

    def _decide(self, now_s: float, doing: Doing | None, *, has_limit: bool) -> None:
        text = self._awaited.text(doing)
        if now_s >= self._tell_s:
            logger.warning("still waiting after %.0f s for %s", now_s - self._since_s, text)
            self._tell_s = now_s + TELL_AGAIN_S
        if now_s < self._give_up_s:
            return
        # A process that does not say what it is doing has hung as a whole.
        idle_s = now_s - self._since_s if doing is None else doing.for_s
        if not (has_limit if doing is None else doing.has_limit):
            self._give_up_s = now_s + self._timeout_s
        elif idle_s < self._timeout_s:
            self._give_up_s = now_s + self._timeout_s - idle_s
        else:
            raise NoProgressError(f"no progress for {idle_s:.0f} s of {text}")
