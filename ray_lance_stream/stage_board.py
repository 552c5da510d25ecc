"""StageBoard: which streams of a cluster hold processes of stages, and which wait for resources to start theirs.

Streams know nothing of each other. Each coordinator posts what it holds in the cluster's key-value store, so that one with
idle processes learns that another stream waits, and a rank that waits can say who holds the resources.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from ray_lance_stream.cluster_store import ClusterStore

BOARD = "ray_lance_stream.stages"
FRESH_S = 30.0  # a coordinator that was killed leaves its last note behind


class Store(Protocol):
    """See ClusterStore."""

    def get(self, key: str) -> str | None: ...
    def put(self, key: str, value: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...
    def delete(self, prefix: str) -> None: ...


@dataclass(frozen=True)
class Note:
    """What one stream posts.

    Attributes:
        stream: its name.
        holds: the processes that it holds, as text.
        waits: whether some of its processes have no resources yet.
        at_s: time of the note, in seconds of time.time().
    """

    stream: str
    holds: tuple[str, ...]
    waits: bool
    at_s: float


class StageBoard:
    """The notes of all streams, of which one writes its own.

    Args:
        stream_id: of the stream that writes.
        store: where notes are kept.
        clock: seconds of time.time(), which nodes agree on.
    """

    def __init__(self, stream_id: str, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._stream_id = stream_id
        self._store = store
        self._clock = clock
        self._has_note = False

    def post(self, stream: str, holds: Sequence[str], *, waits: bool) -> None:
        """Write what this stream holds, and whether it waits; nothing where it has no processes."""
        if holds:
            note = Note(stream, tuple(holds), waits, self._clock())
            self._store.put(self._stream_id, json.dumps(asdict(note)))
        elif self._has_note:
            self._store.delete(self._stream_id)
        self._has_note = bool(holds)

    def others(self) -> list[Note]:
        """The notes of the other streams."""
        found = (self._store.get(key) for key in self._store.keys("") if key != self._stream_id)
        notes = [Note(**json.loads(text)) for text in found if text is not None]
        return [note for note in notes if self._clock() - note.at_s < FRESH_S]


def holders() -> str:
    """Which streams hold processes of stages, for a message; empty where none does, or that is not known."""
    try:
        notes = StageBoard("", ClusterStore(BOARD)).others()
    except Exception:  # of many kinds, and no reason to fail: this is for a message
        return ""
    return "; ".join(f"stream {note.stream!r} holds {', '.join(note.holds)}" for note in notes)
