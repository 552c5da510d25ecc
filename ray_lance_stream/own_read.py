"""OwnRead: a chunk that a DataLoader worker reads, and how it waits for it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from concurrent import futures

import pyarrow as pa

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.doing import Desk, Doing
from ray_lance_stream.errors import ReadError
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.reader import ChunkInfo, ReadRequest, read_chunk
from ray_lance_stream.watch import NoProgressError, ReadWatch

LOOK_S = 0.2
EXIT_S = 1.0

_running: weakref.WeakSet[OwnRead] = weakref.WeakSet()


class OwnRead:
    """Begins at once, in a thread of its own that does not keep the process: a read may hang.

    Args:
        request: which rows.
        plan: of the stream.
    """

    def __init__(self, request: ReadRequest, plan: StreamPlan) -> None:
        self._request = request
        self._desk = Desk()
        self._future: futures.Future[tuple[pa.Table, ChunkInfo]] = futures.Future()
        _running.add(self)
        threading.Thread(target=self._read, args=(plan,), name="read batches", daemon=True).start()

    def _read(self, plan: StreamPlan) -> None:
        try:
            with self._desk.at(self._request.send_id) as tell:
                found = read_chunk(self._request, plan, tell)
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(found)

    def wait(self, config: StreamConfig, is_ended: Callable[[], bool]) -> tuple[pa.Table, ChunkInfo] | None:
        """What `read_chunk` returns, and raises.

        Args:
            config: how long it may take, and when that is told.
            is_ended: whether nobody wants it any more; then the answer is None.

        Raises:
            ReadError: the read has made no progress for `read_timeout_s`. What users write takes as long as it takes.
        """
        watch = ReadWatch(self, config)
        while not self.ends_within(LOOK_S):
            if is_ended():
                return None
            try:
                watch.look()
            except NoProgressError as error:
                raise ReadError(f"{self._request.who}: {error}") from None
        return self._future.result()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the read ends in that time, well or not."""
        return bool(futures.wait([self._future], timeout_s).done)

    # ---- watched

    def alive(self) -> None:
        """Torch looks for its parent between batches only, so a worker that waits for a read must do it itself."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)  # nobody is left to be told

    def ask(self) -> futures.Future[Doing]:
        """What the thread is doing."""
        answer: futures.Future[Doing] = futures.Future()
        answer.set_result(self._desk.doing(self._request.send_id))
        return answer

    def has_limit(self) -> bool:
        """The thread always answers."""
        return True

    def text(self, doing: Doing | None) -> str:
        """What is waited for."""
        return f"a read, which {doing}: {self._request}"


@atexit.register
def _leave_reads() -> None:
    """Lance ends the process with an error if Python ends below it, and torch takes that for one of the loop."""
    if multiprocessing.parent_process() is not None and not all(read.ends_within(EXIT_S) for read in list(_running)):
        os._exit(0)
