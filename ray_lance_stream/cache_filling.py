"""Filling the disk cache: whole data files of a table version, read in pieces from the object store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as futures_wait
from functools import partial
from itertools import groupby
from typing import Any, cast

import ray

from ray_lance_stream.cache_files import TableFiles
from ray_lance_stream.cache_parts import CachedFile
from ray_lance_stream.cache_stored import StoredFiles
from ray_lance_stream.errors import ReadError
from ray_lance_stream.failures import attempt

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
PIECES_AT_A_TIME = 8
# Room is made for several files at once, since that looks at all files of the cache.
_RESERVED_FILES = 64
_RESERVED_BYTES = 2**30
_MAX_FAILURES = 3  # in a row
_PROGRESS_DELAY_S = 1.5
_CLOSED_LOOK_S = 0.5
_LAST_S = 4.0


class Filling:
    """Brings data files into a cache, by the one process that may.

    Args:
        files: the cache's.
        stored: where they come from.
        wanted: all of them that shall be there.
        name: of the table, for messages.
        closed: ends it.
    """

    def __init__(
        self, files: TableFiles, stored: StoredFiles, wanted: Sequence[CachedFile], name: str, closed: threading.Event
    ) -> None:
        self._files = files
        self._stored = stored
        self._wanted = wanted
        self._name = name
        self._closed = closed
        self._failures = 0  # of this run, in a row
        self._told_failures = 0  # since a file was downloaded
        self._told = False

    @property
    def has_given_up(self) -> bool:
        """Whether the last run ended because downloads failed."""
        return self._failures >= _MAX_FAILURES

    def run(self, done: Collection[str], on_good: Callable[[CachedFile], None]) -> None:
        """Check what is there, and download the rest, as far as there is room. May be tried again: there may be more then.

        Args:
            done: names of files that are good already.
            on_good: is told each other file that is good.

        Raises:
            OSError: the disk cannot be written to.
        """
        self._failures = 0
        missing: deque[CachedFile] = deque()
        for file in self._wanted:
            if file.name in done:
                continue
            if self._closed.is_set():
                return
            if self._files.is_good(file) or self._files.check(file):
                on_good(file)
            else:
                missing.append(file)
        with _Bar(f"caching {self._name}", sum(file.size for file in missing)) as bar:
            while missing and not self.has_given_up and not self._closed.is_set():
                batch = _next_batch(missing)
                count = self._files.reserve(batch)
                try:
                    self._download(batch[:count], on_good, bar)
                finally:
                    self._files.give_up(batch[:count])
                if count < len(batch):
                    self._tell_of_room(len(batch) - count + len(missing))
                    return

    def _tell_of_room(self, left: int) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "the cache in %s has no room for %d of %d data files of table %s: they are read from the object store",
            self._files.folder.parent,
            left,
            len(self._wanted),
            self._name,
        )

    def _download(self, batch: list[CachedFile], on_good: Callable[[CachedFile], None], bar: _Bar) -> None:
        asked: deque[tuple[CachedFile, Future[bytes]]] = deque()
        try:
            for file, pieces in groupby(self._ahead(batch, asked), key=lambda piece: piece[0]):
                try:
                    self._files.write(file, (bar.seen(self._awaited(future)) for _, future in pieces))
                except (ReadError, CancelledError) as error:
                    if self._closed.is_set():
                        return
                    self._failed(error)
                    if self.has_given_up:
                        return
                else:
                    self._failures = self._told_failures = 0
                    on_good(file)
        finally:
            # Lance must not run in a process that is taken down: what was asked for ends first, unless its store hangs.
            futures_wait([future for _, future in asked], _LAST_S)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._told_failures += 1
        if self._told_failures <= _MAX_FAILURES:
            logger.warning(
                "a data file is not cached, and read from the object store (%d of %d in a row): %s",
                self._failures,
                _MAX_FAILURES,
                error,
            )

    def _awaited(self, future: Future[bytes]) -> bytes:
        while not futures_wait([future], _CLOSED_LOOK_S).done:
            if self._closed.is_set():
                raise CancelledError
        return future.result()

    def _ahead(
        self, batch: list[CachedFile], asked: deque[tuple[CachedFile, Future[bytes]]]
    ) -> Iterator[tuple[CachedFile, Future[bytes]]]:
        """The pieces of the files one after the other, some of them asked for in advance."""
        for file in batch:
            for start in range(0, file.size, PIECE_BYTES):
                if self._closed.is_set():
                    return
                size = min(PIECE_BYTES, file.size - start)
                asked.append((file, _begun(partial(self._stored.read, f"data/{file.name}", start, size))))
                if len(asked) >= PIECES_AT_A_TIME:
                    yield asked[0]
                    asked.popleft()
        while asked:
            yield asked[0]
            asked.popleft()


def _begun(ask: Callable[[], bytes]) -> Future[bytes]:
    """What `ask` returns, from a thread of its own: a daemon, since a process that ends would wait for those of executors."""
    future: Future[bytes] = Future()

    def run() -> None:
        found, failure = attempt(ask)
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(cast(bytes, found))

    threading.Thread(target=run, name="fill cache", daemon=True).start()
    return future


def _next_batch(missing: deque[CachedFile]) -> list[CachedFile]:
    batch = [missing.popleft()]
    while missing and len(batch) < _RESERVED_FILES:
        if sum(file.size for file in batch) + missing[0].size > _RESERVED_BYTES:
            break
        batch.append(missing.popleft())
    return batch


class _Bar:
    """Ray's progress bar, which reaches the terminal of the driver; after a moment, so that little leaves no trace."""

    def __init__(self, text: str, total_bytes: int) -> None:
        self._text = text
        self._total_bytes = total_bytes
        self._seen_bytes = 0
        self._begun_s = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def seen(self, piece: bytes) -> bytes:
        """A piece has come."""
        self._seen_bytes += len(piece)
        if not ray.is_initialized():
            return piece
        if self._bar is None and time.monotonic() - self._begun_s > _PROGRESS_DELAY_S:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(desc=self._text, total=self._total_bytes >> 20, unit="MiB")
        if self._bar is not None:
            self._bar.update((self._seen_bytes >> 20) - self._bar.n)
        return piece
