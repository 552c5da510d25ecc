"""ReadWindow: the reads that one pass keeps in flight, within bounds of chunks and bytes, sent again when lost."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import ray

from ray_lance_stream.config import MAX_CHUNK_ROWS, StreamConfig
from ray_lance_stream.cursor import ChunkSpan, EpochWalk
from ray_lance_stream.errors import IterationError, ReadError
from ray_lance_stream.reader import ChunkInfo, ReadRequest

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
POLL_S = 0.5
ENDED = "this iterator has ended: its shard has begun another pass, or was closed"
LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
)


class ChunkSizer:
    """Cycles of the next chunk: small at first, so that the first batch comes soon, then by bytes.

    Args:
        config: wished sizes.
        block_size: k, rows of a full cycle.
        row_bytes: first estimate of the Arrow bytes of a row.
        first_rows: rows of the first batch.
    """

    def __init__(self, config: StreamConfig, block_size: int, row_bytes: int, first_rows: int) -> None:
        self._config = config
        self._block_size = block_size
        self._next_cycles = max(1, -(-first_rows // block_size))
        self.cycle_bytes = max(1, row_bytes * block_size)  # the largest seen so far
        self.measured = False

    def next_cycles(self) -> int:
        """Cycles to ask for next."""
        if self._config.read_batch_size:
            return self._config.read_batch_size
        most = min(self._config.chunk_bytes // self.cycle_bytes, MAX_CHUNK_ROWS // self._block_size)
        cycles = max(1, min(self._next_cycles, most))
        self._next_cycles = cycles * 4
        return cycles

    def seen(self, info: ChunkInfo) -> None:
        """Learn from a chunk that came."""
        if info.num_rows:
            seen = -(-info.size_bytes * self._block_size // info.num_rows)
            self.cycle_bytes = max(self.cycle_bytes if self.measured else 1, seen)
            self.measured = True


class ReaderPool:
    """The readers of one shard, made by the coordinator on first use and replaced when they die."""

    def __init__(self, size: int, new_reader: Callable[[], ray.actor.ActorHandle]) -> None:
        self._new_reader = new_reader
        self._readers: list[ray.actor.ActorHandle | None] = [None] * size
        self._next = 0

    def warm(self) -> None:
        """Start the readers that are missing."""
        self._readers = [reader or self._new_reader() for reader in self._readers]

    def send(self, request: ReadRequest) -> tuple[ray.actor.ActorHandle, ray.ObjectRef, ray.ObjectRef]:
        """Start a read; returns (reader, block reference, info reference)."""
        slot = self._next
        self._next = (slot + 1) % len(self._readers)
        reader = self._readers[slot] or self._new_reader()
        self._readers[slot] = reader
        refs: list[ray.ObjectRef] = reader.read.remote(request)
        return reader, refs[0], refs[1]

    def drop(self, lost: ray.actor.ActorHandle) -> None:
        """Forget a reader that died; the next read of its slot gets a new one."""
        self._readers = [None if reader is lost else reader for reader in self._readers]

    def clear(self) -> None:
        """Let all readers go: without a holder they end."""
        self._readers = [None] * len(self._readers)


@dataclass
class _Read:
    request: ReadRequest
    reader: ray.actor.ActorHandle
    block_ref: ray.ObjectRef
    info_ref: ray.ObjectRef
    est_bytes: int
    attempts: int = 1


class ReadWindow:
    """Chunks of a pass in order of delivery, with reads in flight.

    Holds at most `prefetch_bytes` and one chunk, counted from the sending of a read until the loop has received the
    last row of its chunk. One read is always allowed, or nothing would move.

    Args:
        walk: the pass.
        make_request: the read of a span.
        pool: readers.
        sizer: chunk sizes.
        config: bounds.
    """

    def __init__(
        self,
        walk: EpochWalk,
        make_request: Callable[[ChunkSpan], ReadRequest],
        pool: ReaderPool,
        sizer: ChunkSizer,
        config: StreamConfig,
    ) -> None:
        self._walk = walk
        self._make_request = make_request
        self._pool = pool
        self._sizer = sizer
        self._config = config
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._last_span: ChunkSpan | None = None
        self._reads: deque[_Read] = deque()
        self._handed: deque[tuple[int, int]] = deque()  # (end_row, bytes) of chunks not yet received whole
        self._received_rows = 0
        self._given: dict[ray.ObjectRef, _Read] = {}
        self.read_s = 0.0
        self.retries = 0

    def __iter__(self) -> Iterator[tuple[ray.ObjectRef, ChunkInfo]]:
        return self

    def __next__(self) -> tuple[ray.ObjectRef, ChunkInfo]:
        self.fill()
        if not self._reads:
            raise StopIteration
        read = self._reads[0]
        info = self._wait(read)
        with self._lock:
            self._reads.popleft()
            self._sizer.seen(info)
            self._handed.append((read.request.span.end_row, info.size_bytes))
            self._given[read.block_ref] = read
        self.read_s += info.read_s
        self.fill()
        return read.block_ref, info

    def fill(self) -> None:
        """Send reads until a bound is reached."""
        with self._lock:
            while not self._closed.is_set() and len(self._reads) < self._config.prefetch_chunks:
                cycles = self._sizer.next_cycles()
                bytes_ahead = cycles * self._sizer.cycle_bytes
                if self._reads and self.held_bytes() + bytes_ahead > self._config.prefetch_bytes:
                    return
                span = self._walk.next_span(self._last_span, cycles)
                if span is None:
                    return
                self._last_span = span
                request = self._make_request(span)
                self._reads.append(_Read(request, *self._pool.send(request), bytes_ahead))

    def held_bytes(self) -> int:
        """Bytes in flight, and of chunks that the loop has not received whole; estimated where not yet known."""
        return sum(read.est_bytes for read in self._reads) + sum(size for _, size in self._handed)

    def received(self, rows: int) -> None:
        """The loop has received `rows` more rows."""
        with self._lock:
            self._received_rows += rows
            while self._handed and self._handed[0][0] <= self._received_rows:
                self._handed.popleft()

    def fetch(self, ref: ray.ObjectRef) -> pa.Table:
        """The block behind a reference that this window gave out; read again if the object is lost."""
        with self._lock:
            read = self._given.pop(ref, None)
        if read is None:
            raise IterationError(ENDED)
        while True:
            try:
                return ray.get(read.block_ref)
            except LOST as error:
                self._again(read, error)
                self._wait(read)

    def close(self) -> None:
        """Send no more reads, let results go and end whoever waits."""
        self._closed.set()
        with self._lock:
            self._reads.clear()
            self._handed.clear()
            self._given.clear()

    def _wait(self, read: _Read) -> ChunkInfo:
        while True:
            self._check_open()
            done, _ = ray.wait([read.info_ref], timeout=POLL_S)
            if not done:
                continue
            try:
                return ray.get(read.info_ref)
            except LOST as error:
                self._again(read, error)
            except ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None

    def _again(self, read: _Read, error: Exception) -> None:
        """Send a lost read again, to a fresh reader if its own has died."""
        self._check_open()
        if read.attempts >= MAX_ATTEMPTS:
            raise ReadError(
                f"cannot read {read.request}: lost {read.attempts} times, at last to {type(error).__name__}: {error}"
            ) from None
        logger.warning(
            "read lost (attempt %d of %d), sent again: %s (%s)",
            read.attempts,
            MAX_ATTEMPTS,
            read.request,
            type(error).__name__,
        )
        if isinstance(error, ray.exceptions.RayActorError):
            self._pool.drop(read.reader)
        with self._lock:
            read.attempts += 1
            self.retries += 1
            read.reader, read.block_ref, read.info_ref = self._pool.send(read.request)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise IterationError(ENDED)
