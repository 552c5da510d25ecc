"""ReadWindow: the reads that one pass keeps in flight, within bounds of chunks and bytes, sent again when lost."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import ray

from ray_lance_stream.awaited import Block, ChunkOnItsWay
from ray_lance_stream.config import SharedLostError, StreamConfig
from ray_lance_stream.cursor import ChunkSpan, EpochWalk
from ray_lance_stream.error_transport import Failure, raise_original
from ray_lance_stream.errors import ReadError
from ray_lance_stream.line import DIED, ChunkLine, Sent
from ray_lance_stream.meter import Meter
from ray_lance_stream.reader import ChunkInfo, ReadRequest
from ray_lance_stream.replaced import ReplacedRows
from ray_lance_stream.sizer import ChunkSizer
from ray_lance_stream.watch import NoProgressError, ReadWatch

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
POLL_S = 0.1
LOST = (
    *DIED,
    NoProgressError,
    SharedLostError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
)


class ReadMaker(Protocol):
    """See supply.PassReads."""

    def __call__(self, span: ChunkSpan) -> ReadRequest: ...
    def again(self, span: ChunkSpan) -> ReadRequest: ...


@dataclass
class _Read:
    request: ReadRequest
    sent: Sent
    attempts: int = 1


class ReadWindow:
    """Chunks of a pass in order of delivery, with reads in flight.

    Holds at most `prefetch_bytes` and one chunk, counted from the sending of a read until the loop has received the
    last row of its chunk. A chunk that Ray's batching asks for is read in any case, or nothing would move: where the
    batches that it holds are larger than `prefetch_bytes`, reads go one at a time and a warning says so.

    Chunks are asked for by one thread at a time; `received`, `held_bytes` and `close` may be called by any other. A
    closed window ends without an error, since an error raised in Ray's threads would keep their blocks alive until the
    garbage collector comes by; who iterates tells a pass that was closed from a complete one.

    Args:
        walk: the pass.
        reads_of_pass: makes the read of a span, and that of one which was lost.
        line: reads and transforms.
        sizer: chunk sizes.
        config: bounds.
        replaced: counts the rows that were replaced in the chunks that came; more than allowed end the pass.
        meter: counts chunks and lost reads.
    """

    def __init__(
        self,
        walk: EpochWalk,
        reads_of_pass: ReadMaker,
        line: ChunkLine,
        sizer: ChunkSizer,
        config: StreamConfig,
        replaced: ReplacedRows,
        meter: Meter,
    ) -> None:
        self._walk = walk
        self._reads_of_pass = reads_of_pass
        self._line = line
        self.sizer = sizer
        self._config = config
        self.replaced = replaced
        self._meter = meter
        # Reentrant: the garbage collector may end an iterator, and with it close this window, wherever it likes.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._last_span: ChunkSpan | None = None
        self.all_sent = walk.next_span(None, 1) is None  # whether no read is left to be sent
        self._reads: deque[_Read] = deque()
        self._handed: deque[tuple[int, int]] = deque()  # (end_row, bytes) of chunks not yet received whole
        self._received_rows = 0
        self._given: dict[ray.ObjectRef, _Read] = {}
        self._beside_bytes = 0
        self._overshoot_told = False

    def __iter__(self) -> Iterator[tuple[ray.ObjectRef, ChunkInfo]]:
        return self

    def __next__(self) -> tuple[ray.ObjectRef, ChunkInfo]:
        self._beside_bytes = 0
        self._fill(needed=True)
        with self._lock:
            if not self._reads:
                raise StopIteration
            read = self._reads[0]
        info = self._wait(read)
        if info is not None:
            self._meter.came(info)
            self.replaced.add(info.replaced)
        with self._lock:
            if info is None or self._closed.is_set():
                raise StopIteration
            self._reads.popleft()
            self.sizer.seen(info)
            self._handed.append((read.request.span.end_row, info.size_bytes))
            self._given[read.sent.block_ref] = read
        self._fill(needed=False)
        self._tell_overshoot()
        return read.sent.block_ref, info

    def fill_beside(self, held_bytes: int) -> None:
        """Send reads before the pass has begun, while the one before it still holds some bytes."""
        self._beside_bytes = held_bytes
        self._fill(needed=False)

    def held_bytes(self) -> int:
        """Bytes in flight, and of chunks that the loop has not received whole; estimated where not yet known."""
        with self._lock:
            waiting = sum(self.sizer.bytes_of(read.request.span.num_rows) for read in self._reads)
            return waiting + sum(size for _, size in self._handed)

    def chunks_in_flight(self) -> int:
        """Chunks that are asked for and not received whole."""
        return len(self._reads) + len(self._handed)

    def received(self, rows: int) -> bool:
        """The loop has received `rows` more rows; returns whether these were the last ones of a chunk."""
        with self._lock:
            self._received_rows += rows
            held = len(self._handed)
            while self._handed and self._handed[0][0] <= self._received_rows:
                self._handed.popleft()
            return len(self._handed) < held

    def fetch(self, ref: ray.ObjectRef) -> tuple[pa.Table, ReadRequest] | None:
        """The block behind a reference that this window gave out, and its request; read again if the object is lost.

        None once the window is closed.
        """
        with self._lock:
            read = self._given.pop(ref, None)
        while read is not None:
            try:
                block = self._block_of(read)
                return None if block is None else (block, read.request)
            except LOST as error:
                self._again(read, error)
            if self._wait(read) is None:
                break
        return None

    def close(self) -> None:
        """Send no more reads, let results go and end whoever waits."""
        self._closed.set()
        with self._lock:
            self._reads.clear()
            self._handed.clear()
            self._given.clear()

    def _fill(self, needed: bool) -> None:
        """Send reads until a bound is reached; with `needed` one in any case."""
        while (found := self._next_span(needed)) is not None:
            span, cycles = found
            request = self._reads_of_pass(span)
            sent = self._line.send(request)  # may take as long as a reader takes to start, and may fail
            with self._lock:
                self._last_span = span
                self.all_sent = self._walk.next_span(span, 1) is None
                self.sizer.sent(cycles)
                if not self._closed.is_set():
                    self._reads.append(_Read(request, sent))

    def _next_span(self, needed: bool) -> tuple[ChunkSpan, int] | None:
        """The span to be sent next, and the cycles that were asked for; None where a bound is reached."""
        with self._lock:
            if self._closed.is_set() or len(self._reads) >= self._config.prefetch_chunks:
                return None
            cycles = self.sizer.next_cycles()
            span = self._walk.next_span(self._last_span, cycles)
            if span is None:
                return None
            is_needed = needed and not self._reads
            held_bytes = self._beside_bytes + self.held_bytes()
            if not is_needed and held_bytes + self.sizer.bytes_of(span.num_rows) > self._config.prefetch_bytes:
                return None
            return span, cycles

    def _tell_overshoot(self) -> None:
        held_bytes, chunk_bytes = self.held_bytes(), self.sizer.next_bytes()
        if held_bytes <= self._config.prefetch_bytes + chunk_bytes or self._overshoot_told:
            return
        self._overshoot_told = True
        logger.warning(
            "%d bytes are held in flight, more than prefetch_bytes=%d and a chunk of %d: the batches that prefetch_batches "
            "asks for are larger than that, or rows are larger than those before them; raise prefetch_bytes, or lower "
            "prefetch_batches or the batch size",
            held_bytes,
            self._config.prefetch_bytes,
            chunk_bytes,
        )

    def _wait(self, read: _Read) -> ChunkInfo | None:
        """What is known of a chunk once it is there; None if the window was closed before."""
        while not self._closed.is_set():
            try:
                answer: ChunkInfo | Failure | None = self._come(read, read.sent.info_ref, ChunkOnItsWay)
                if isinstance(answer, Failure):
                    raise answer.to_error()
                return answer
            except NoProgressError as error:
                logger.warning("reader ended: %s", str(error))  # a record that keeps the error keeps blocks
                self._line.abandon(read.sent)
                self._again(read, error)
            except LOST as error:
                self._again(read, error)
            except ray.exceptions.RayTaskError as error:
                raise_original(error)
        return None

    def _block_of(self, read: _Read) -> pa.Table | None:
        """The block of a chunk, which is on this node as a rule; None if the window was closed before it came."""
        try:
            return ray.get(read.sent.block_ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            return self._come(read, read.sent.block_ref, Block)

    def _come(self, read: _Read, ref: ray.ObjectRef, kind: type[ChunkOnItsWay | Block]) -> Any:
        """The value behind a reference once it is there; None if the window was closed before."""
        attempt = f"attempt {read.attempts} of {MAX_ATTEMPTS}"
        watch = ReadWatch(kind(self._line, read.sent, read.request, attempt), self._config)
        answer = ref.future()
        while not self._closed.is_set():
            # Not ray.wait: a thread that calls Ray after another one has shut it down takes the process along.
            done, _ = concurrent.futures.wait([answer], timeout=POLL_S)
            if not ray.is_initialized():
                break
            if done:
                return ray.get(ref)
            watch.look()
        return None

    def _again(self, read: _Read, error: Exception) -> None:
        """Send a lost read again from its start, to fresh processes if its own have died."""
        if self._closed.is_set():
            return
        if read.attempts >= MAX_ATTEMPTS:
            raise ReadError(
                f"cannot read {read.request}{self._line}: lost {read.attempts} times, at last to {type(error).__name__}: "
                f"{error}"
            ) from None
        logger.warning(
            "read lost (attempt %d of %d), sent again: %s (%s)",
            read.attempts,
            MAX_ATTEMPTS,
            read.request,
            type(error).__name__,
        )
        self._meter.retried()
        self._line.drop(read.sent, error)
        request = self._reads_of_pass.again(read.request.span)
        sent = self._line.send(request)
        with self._lock:
            read.attempts += 1
            read.request, read.sent = request, sent
