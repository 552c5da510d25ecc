"""Reads through the disk cache of the node. What is not in it, or not yet, is read from the object store.

The rows of a shuffled chunk lie all over the table, so nothing waits for downloads: a thread fills the cache with whole
data files, in the order of the table, and a read takes from it the rows whose fragments are there. No failure of the
cache is one of the read.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa

from ray_lance_stream.cache_files import TableFiles, newest_ns
from ray_lance_stream.cache_filling import Filling
from ray_lance_stream.cache_held import HeldRows
from ray_lance_stream.cache_locks import Lead, filling
from ray_lance_stream.cache_parts import CachedFile, CachedParts, cached_parts
from ray_lance_stream.cache_spec import CacheSpec
from ray_lance_stream.cache_stored import StoredFiles, make_view
from ray_lance_stream.errors import ReadError
from ray_lance_stream.failures import attempt
from ray_lance_stream.manifest import is_same_version, manifest_bytes
from ray_lance_stream.table import TableRef

logger = logging.getLogger(__name__)

KEPT_TABLES = 2  # the version of the running epoch, and that of the next
IDLE_S = 120.0  # after which a table gives its files up
_LOOK_S = 1.0  # how often a reader looks what another one has downloaded, and tells what it has itself
_LOOK_SHARE = 0.05  # of the time at most
_SETTLED_S = 2.0  # no clock of a file system ticks less often
_RETRY_S = 60.0  # there may be room by then
_MAX_RETRY_S = 960.0
_EXIT_S = 5.0


class CachedTable:
    """A table version that is read through a cache. Begins to fill it at once, in a thread.

    The thread ends, and lets the files go, when nothing has been read for a while: a process that reads once, as a
    worker that stands in for another one, shall not download the table.

    Args:
        ref: in its object store.
        columns: which columns are read.
        spec: the cache.
    """

    def __init__(self, ref: TableRef, columns: list[str], spec: CacheSpec) -> None:
        self._ref = ref
        self._columns = columns
        self._files = TableFiles(spec, ref.identity)
        self._rows = HeldRows(ref, columns, self._files)
        self._good: set[str] = set()
        self._local: TableRef | None = None
        self._shown = -1  # how many were good then
        self._seen_ns = -1
        self._told = False
        self.used_s = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache", daemon=True)
        self._thread.start()

    def take(self, rows: np.ndarray) -> pa.Table:
        """See TableRef.take."""
        return self._rows.take(rows)

    @property
    def share(self) -> float:
        """Which part of the fragments is read from the cache, from 0 to 1."""
        held = self._rows.held
        return float(held.fragments.mean()) if held is not None else 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the files are let go, or will be at once."""
        return self._closed.is_set()

    def close(self) -> None:
        """Stop filling, and let the files go."""
        self._closed.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        _, failure = attempt(self._keep)
        self._tell(failure)

    def _tell(self, failure: BaseException | None) -> None:
        if failure is None or self._told or self._closed.is_set():
            return
        self._told = True
        logger.warning(
            "the cache in %s cannot be used, or not further, so the object store is read: %s",
            self._files.folder.parent,
            failure,
        )

    def _keep(self) -> None:
        """Fill the cache, or look what another process of the node fills it with."""
        dataset = self._ref.open()
        parts = cached_parts(dataset, self._columns)
        wanted = parts.files
        if not wanted:
            return  # of which the driver has told
        self._files.prepare()
        view = self._files.view(manifest_bytes(dataset), wanted)
        stored = StoredFiles(self._ref)
        downloads = Filling(self._files, stored, wanted, self._ref.identity, self._closed)
        folders = self._files.folders(wanted)
        next_s, wait_s = 0.0, _RETRY_S
        with self._files.used(wanted, view), closing(Lead(view)) as lead:
            while not self._is_left():
                if len(self._good) < len(wanted) and time.monotonic() >= next_s:
                    has_tried, failure = attempt(lambda: self._fill(downloads, stored, view, parts, lead))
                    self._tell(failure)
                    is_bad = failure is not None or downloads.has_given_up
                    wait_s = min(2 * wait_s, _MAX_RETRY_S) if is_bad else _RETRY_S
                    if isinstance(failure, OSError):
                        # Trying again might fill what others write to. They need not try either, and warn of it too.
                        next_s = float("inf")
                    elif has_tried or is_bad:
                        next_s = time.monotonic() + wait_s
                begun_s = time.monotonic()
                self._look(view, parts, wanted, folders)
                look_s = (time.monotonic() - begun_s) / _LOOK_SHARE
                self._rows.verify()
                self._closed.wait(max(_LOOK_S, look_s))

    def _is_left(self) -> bool:
        """Whether nobody reads from it any more."""
        if time.monotonic() - self.used_s > IDLE_S:
            self.close()
        return self._closed.is_set()

    def _fill(self, downloads: Filling, stored: StoredFiles, view: Path, parts: CachedParts, lead: Lead) -> bool:
        """Make the view, which each process may, and download, if no other one does. Whether it was this one."""
        if not view.exists():
            make_view(view, self._ref.version, parts, stored)
        if not lead.take():
            return False
        shown_s = time.monotonic()

        def on_good(file: CachedFile) -> None:
            nonlocal shown_s
            self._good.add(file.name)
            if not self._is_left() and time.monotonic() - shown_s > _LOOK_S:
                self._show(view, parts)
                self._rows.verify()
                shown_s = time.monotonic()

        with filling(self._files.folder) as is_filling:  # else another version is being downloaded
            if is_filling:
                downloads.run(frozenset(self._good), on_good)
            return is_filling

    def _look(self, view: Path, parts: CachedParts, wanted: Collection[CachedFile], folders: Collection[Path]) -> None:
        """Take notice of the files that are there now, if there are others than before."""
        if len(self._good) < len(wanted):
            newest = newest_ns(folders)
            if newest != self._seen_ns:
                # What comes within the same tick of the clock would not be noticed: then look once more.
                self._seen_ns = newest if time.time_ns() - newest > _SETTLED_S * 1e9 else -1
                there = self._files.names()
                for file in wanted:
                    if file.name not in self._good and file.name in there and self._files.is_good(file):
                        self._good.add(file.name)
        if len(self._good) != self._shown and view.exists():
            self._show(view, parts)

    def _show(self, view: Path, parts: CachedParts) -> None:
        """Let reads take rows from the files that are good."""
        if self._local is None:
            self._local = self._opened(view)
        self._shown = len(self._good)
        self._rows.show(self._local, parts, self._good)

    def _opened(self, view: Path) -> TableRef:
        table = TableRef(str(view), self._ref.version)
        if not is_same_version(table.open(), self._ref.open()):
            raise ReadError(f"the version that is cached in {view} is another one")
        return table


class _CachedTables:
    """Those of this process: the ones used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[str, int, tuple[str, ...], CacheSpec], CachedTable] = OrderedDict()
        atexit.register(self.close)

    def of(self, ref: TableRef, columns: list[str], spec: CacheSpec) -> CachedTable:
        key = (ref.uri, ref.version, tuple(columns), spec)
        with self._lock:
            for closed in [old for old, table in self._tables.items() if table.is_closed]:
                del self._tables[closed]
            if key not in self._tables:
                self._tables[key] = CachedTable(ref, columns, spec)
            found = self._tables[key]
            found.used_s = time.monotonic()
            self._tables.move_to_end(key)
            while len(self._tables) > KEPT_TABLES:
                self._tables.popitem(last=False)[1].close()
            return found

    def close(self) -> None:
        """Let all go, and wait for the end of what they do: Lance must not run in a process that is taken down."""
        with self._lock:
            tables = list(self._tables.values())
            self._tables.clear()
        for table in tables:
            table.close()
        for table in tables:
            table.join(_EXIT_S)


cached_tables = _CachedTables()


def take_through_cache(ref: TableRef, rows: np.ndarray, columns: list[str]) -> pa.Table:
    """See TableRef.take; through the cache of the node, if the table has one."""
    if ref.cache is None:
        return ref.take(rows, columns)
    return cached_tables.of(ref, columns, ref.cache).take(rows)
