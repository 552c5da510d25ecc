"""What a reader is doing with each of its reads, for a pass that waits for one of them. Pure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

QUEUED = "queued"
LOOKING_UP = "looking up which rows it holds"  # with a filter this may be a scan of the table
READING = "reading"
TRANSFORMING = "transforming"

Step = Callable[[str], None]


@dataclass(frozen=True)
class Doing:
    """What a reader is doing with one read.

    Attributes:
        step: one of the above.
        for_s: seconds since it does so; of a read that has not begun, since anything has moved in the reader.
        has_limit: whether that is Lance reading, and so has to get on. A scan and what users write take as long as they take.
    """

    step: str
    for_s: float
    has_limit: bool

    def __str__(self) -> str:
        if self.step == QUEUED:
            return f"has not begun it, and has got on with no other one for {self.for_s:.0f} s"
        return f"has been {self.step} for {self.for_s:.0f} s"


class Desk:
    """The reads that a reader has begun, each at its step; written by the threads of the reads, read by another one.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: dict[str, tuple[str, float]] = {}
        self._moved_s = clock()

    @contextmanager
    def at(self, send_id: str) -> Iterator[Step]:
        """While a read runs; yields a function that is told each step as it begins."""
        try:
            yield lambda step: self._move(send_id, step)
        finally:
            self._move(send_id, None)

    def doing(self, send_id: str) -> Doing:
        """What is done with a read; one that has not begun waits for those that run."""
        with self._lock:
            now_s = self._clock()
            if send_id in self._steps:
                step, since_s = self._steps[send_id]
                return Doing(step, now_s - since_s, step == READING)
            return Doing(QUEUED, now_s - self._moved_s, all(step == READING for step, _ in self._steps.values()))

    def _move(self, send_id: str, step: str | None) -> None:
        with self._lock:
            self._moved_s = self._clock()
            if step is None:
                self._steps.pop(send_id, None)
            else:
                self._steps[send_id] = (step, self._moved_s)
