"""ReaderPool: the readers of one shard, and which of them serves the next read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import ray

from ray_lance_stream.reader import ReadRequest
from ray_lance_stream.shelf import Reader


@dataclass
class _Slot:
    reader: Reader
    stand_in: Reader | None
    ready_ref: ray.ObjectRef | None  # of a reader that was just started; None once it has answered

    def serving(self) -> Reader:
        """The slot's own reader as soon as it runs, till then a stand-in."""
        if self.stand_in is None:
            return self.reader
        if self.ready_ref is not None and not ray.wait([self.ready_ref], timeout=0)[0]:
            return self.stand_in
        self.stand_in = self.ready_ref = None
        return self.reader


class ReaderPool:
    """The readers of one shard, got from the coordinator on first use and replaced when they die.

    The passes of a shard share it, each from a thread of its own; no lock is held while the coordinator is asked.

    Args:
        size: number of readers.
        claim: (slot, fresh) -> (reader, warm stand-in or None); fresh: the slot's reader has died.
    """

    def __init__(self, size: int, claim: Callable[[int, bool], tuple[Reader, Reader | None]]) -> None:
        self._claim = claim
        self._lock = threading.Lock()
        self._slots: list[_Slot | None] = [None] * size
        self._died = [False] * size
        self._next = 0

    def send(self, request: ReadRequest) -> tuple[Reader, ray.ObjectRef, ray.ObjectRef]:
        """Start a read; returns (reader, block reference, info reference)."""
        reader = self._reader()
        refs: list[ray.ObjectRef] = reader.read.remote(request)
        return reader, refs[0], refs[1]

    def drop(self, lost: Reader) -> None:
        """Forget a reader that died; the next read gets another one."""
        with self._lock:
            for number, slot in enumerate(self._slots):
                if slot is not None and slot.stand_in is lost:
                    slot.stand_in = None
                if slot is not None and slot.reader is lost:
                    self._slots[number] = None
                    self._died[number] = True

    def clear(self) -> None:
        """Let all readers go."""
        with self._lock:
            self._slots = [None] * len(self._slots)

    def _reader(self) -> Reader:
        """From the coordinator where a slot is empty, so that a read sent again does not meet another dead reader."""
        with self._lock:
            number = self._slots.index(None) if None in self._slots else self._next
            self._next = (number + 1) % len(self._slots)
            slots, slot, fresh = self._slots, self._slots[number], self._died[number]
        if slot is None:
            reader, stand_in = self._claim(number, fresh)
            ready_ref = reader.ready.remote() if stand_in is not None else None
            slot = _Slot(reader, stand_in, ready_ref)
            with self._lock:
                slots[number] = slot  # nobody's, if the pool was cleared in the meantime
                self._died[number] = False
        return slot.serving()
