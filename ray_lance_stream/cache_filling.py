"""Filling the disk cache: whole data files of a table version, read in pieces from the object store."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from ray_lance_stream.cache_files import TableFiles
from ray_lance_stream.cache_parts import CachedFile, CachedParts, manifest_names
from ray_lance_stream.errors import ReadError
from ray_lance_stream.failures import guarded, is_refusal, secrets_of
from ray_lance_stream.storage_options import current_options, renewal_time_s, with_retries
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from lance.file import LanceFileSession

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
PIECES_AT_A_TIME = 8
# Room is made for several files at once, since that looks at all files of the cache.
_RESERVED_FILES = 64
_RESERVED_BYTES = 2**30
_MAX_FAILURES = 3  # in a row
_PROGRESS_DELAY_S = 1.5


class StoredFiles:
    """The files of a table in its object store, read by Lance, with the storage options of the table.

    Args:
        ref: the table.
    """

    def __init__(self, ref: TableRef) -> None:
        self._ref = ref
        self._lock = threading.Lock()
        self._session: LanceFileSession | None = None
        self._renew_at_s = 0.0
        self._secrets: set[str] = set()

    def read(self, path: str, start: int, size: int) -> bytes:
        """Bytes of a file.

        Raises:
            ReadError: they cannot be read.
        """
        return self._tried(lambda session: session.read_range(path, start, size), path)

    def download(self, path: str, to: Path) -> None:
        """A small file.

        Raises:
            ReadError: it cannot be read.
        """
        self._tried(lambda session: session.download_file(path, str(to)), path)

    def _tried(self, ask: Callable[[LanceFileSession], Any], path: str) -> Any:
        session = self._opened()
        action = f"{path} of table {self._ref.identity} cannot be read"
        try:
            return guarded(lambda: ask(session), action, ReadError, self._secrets)
        except ReadError as error:
            if not callable(self._ref.storage_options) or not is_refusal(str(error)):
                raise
        again = self._opened(instead_of=session)
        return guarded(lambda: ask(again), action, ReadError, self._secrets)

    def _opened(self, instead_of: LanceFileSession | None = None) -> LanceFileSession:
        """The session, made anew before its options expire or where they were refused."""
        from lance.file import LanceFileSession

        with self._lock:
            if self._session is None or self._session is instead_of or time.time() >= self._renew_at_s:
                uri, options = self._ref.uri, current_options(self._ref.storage_options)
                self._secrets = secrets_of(uri, options)
                self._renew_at_s = renewal_time_s(options)
                with_all = with_retries(uri, options) or None
                action = f"table {self._ref.identity} cannot be opened"
                self._session = guarded(lambda: LanceFileSession(uri, with_all), action, ReadError, self._secrets)
            return self._session


def make_view(view: Path, version: int, parts: CachedParts, stored: StoredFiles) -> None:
    """Bring the manifest and the deletion files of a version into the folder that Lance opens.

    Raises:
        ReadError: they cannot be read.
        OSError: they cannot be written.
    """
    part = view.with_name(f"{view.name}.{uuid.uuid4().hex}")
    try:
        for name in ("_versions", "_deletions"):
            (part / name).mkdir(parents=True)
        newer, older = (f"_versions/{name}" for name in manifest_names(version))
        try:
            stored.download(newer, part / newer)
        except ReadError:
            (part / newer).unlink(missing_ok=True)
            stored.download(older, part / older)
        for path in parts.deletions:
            stored.download(path, part / path)
        (part / "data").symlink_to(Path("..", "..", "data"))
        os.replace(part, view)
    finally:
        shutil.rmtree(part, ignore_errors=True)


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
        self.stored = stored
        self._wanted = wanted
        self._name = name
        self._closed = closed
        self._failures = 0
        self._told = False

    def run(self, on_good: Callable[[CachedFile], None]) -> None:
        """Check what is there, and download the rest, as far as there is room. May be tried again: there may be more then.

        Args:
            on_good: is told each file that is good.

        Raises:
            OSError: the disk cannot be written to.
        """
        missing: deque[CachedFile] = deque()
        for file in self._wanted:
            if self._closed.is_set():
                return
            if self._files.is_good(file) or self._files.check(file):
                on_good(file)
            else:
                missing.append(file)
        with _Bar(f"caching {self._name}", sum(file.size for file in missing)) as bar:
            while missing and self._failures < _MAX_FAILURES and not self._closed.is_set():
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
        pool = ThreadPoolExecutor(PIECES_AT_A_TIME, thread_name_prefix="fill cache")
        try:
            for file, pieces in groupby(self._ahead(batch, pool), key=lambda piece: piece[0]):
                try:
                    self._files.write(file, (bar.seen(future.result()) for _, future in pieces))
                except ReadError as error:
                    self._failures += 1
                    logger.warning(
                        "a data file is not cached, and read from the object store (%d of %d in a row): %s",
                        self._failures,
                        _MAX_FAILURES,
                        error,
                    )
                    if self._failures >= _MAX_FAILURES:
                        return
                else:
                    self._failures = 0
                    on_good(file)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ahead(self, batch: list[CachedFile], pool: ThreadPoolExecutor) -> Iterator[tuple[CachedFile, Future[bytes]]]:
        """The pieces of the files one after the other, some of them asked for in advance."""
        asked: deque[tuple[CachedFile, Future[bytes]]] = deque()
        for file in batch:
            for start in range(0, file.size, PIECE_BYTES):
                if self._closed.is_set():
                    return
                size = min(PIECE_BYTES, file.size - start)
                try:
                    piece = pool.submit(self.stored.read, f"data/{file.name}", start, size)
                except RuntimeError as error:
                    if "shutdown" not in str(error):
                        raise
                    self._closed.set()  # Python ends, and its pools before the cache is told
                    return
                asked.append((file, piece))
                if len(asked) > PIECES_AT_A_TIME:
                    yield asked.popleft()
        yield from asked


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
