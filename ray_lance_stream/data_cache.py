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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ray_lance_stream.cache_files import TableFiles
from ray_lance_stream.cache_filling import Filling, StoredFiles, make_view
from ray_lance_stream.cache_parts import CachedFile, CachedParts, cached_parts
from ray_lance_stream.cache_spec import CacheSpec
from ray_lance_stream.errors import ReadError
from ray_lance_stream.failures import attempt
from ray_lance_stream.table import TableRef
from ray_lance_stream.take import restored

logger = logging.getLogger(__name__)

KEPT_TABLES = 2  # the version of the running epoch, and that of the next
IDLE_S = 120.0  # after which a table gives its files up
LOCAL_READS_AT_A_TIME = 2  # keep Lance's threads busy; more slow down the one that the loop waits for
_LOOK_S = 1.0  # how often a reader looks what another one has downloaded, and tells what it has itself
_RETRY_S = 60.0  # there may be room by then
_EXIT_S = 5.0


@dataclass(frozen=True)
class _Held:
    """What can be read from the cache now.

    Attributes:
        table: the version, in the cache.
        ends: int64 [F], offset after the last row of each fragment.
        fragments: bool [F].
    """

    table: TableRef
    ends: np.ndarray
    fragments: np.ndarray


class CachedTable:
    """A table version that is read through a cache. Begins to fill it at once, in a thread.

    Args:
        ref: in its object store.
        columns: which columns are read.
        spec: the cache.
    """

    def __init__(self, ref: TableRef, columns: list[str], spec: CacheSpec) -> None:
        self._ref = ref
        self._columns = columns
        self._files = TableFiles(spec, ref.identity)
        self._good: set[str] = set()
        self._failed: np.ndarray | None = None  # bool [F]
        self._held: _Held | None = None
        self._lock = threading.Lock()  # of the two above
        self._turns = threading.BoundedSemaphore(LOCAL_READS_AT_A_TIME)
        self._told = False
        self.used_s = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache", daemon=True)
        self._thread.start()

    def take(self, rows: np.ndarray) -> pa.Table:
        """See TableRef.take."""
        held = self._held
        if held is None or not len(rows) or rows.min() < 0 or rows.max() >= held.ends[-1]:
            return self._ref.take(rows, self._columns)
        holders = np.searchsorted(held.ends, rows, side="right")
        here = held.fragments[holders]
        if not here.any():
            return self._ref.take(rows, self._columns)
        with self._turns:
            found, failure = attempt(lambda: held.table.take(rows[here], self._columns))
        if found is None:
            self._lost(held, holders[here], failure)
            return self._ref.take(rows, self._columns)
        if here.all():
            return found
        others = self._ref.take(rows[~here], self._columns)
        restore = np.empty(len(rows), np.int64)
        restore[here] = np.arange(len(found))
        restore[~here] = len(found) + np.arange(len(others))
        return restored(pa.concat_tables([found, others]), restore)

    @property
    def share(self) -> float:
        """Which part of the fragments is read from the cache, from 0 to 1."""
        held = self._held
        return float(held.fragments.mean()) if held is not None else 0.0

    def close(self) -> None:
        """Stop filling, and let the files go."""
        self._closed.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _lost(self, held: _Held, holders: np.ndarray, failure: BaseException | None) -> None:
        """Read these fragments from the object store from here on: their files are damaged, or somebody removed them."""
        with self._lock:
            is_first = self._failed is None
            failed = np.zeros(len(held.ends), bool) if self._failed is None else self._failed.copy()
            failed[holders] = True
            self._failed = failed
            self._held = _Held(held.table, held.ends, held.fragments & ~failed)
        if is_first:
            logger.warning(
                "cached files of table %s cannot be read, so they are read from the object store: %s",
                self._ref.identity,
                failure,
            )

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
        view = self._files.view(dataset._ds.serialized_manifest())
        filling = Filling(self._files, StoredFiles(self._ref), wanted, self._ref.identity, self._closed)
        with self._files.used(wanted, view):
            while not self._closed.is_set() and len(self._good) < len(wanted):
                with self._files.filling() as is_filling:
                    while is_filling and len(self._good) < len(wanted) and not self._closed.is_set():
                        _, failure = attempt(lambda: self._fill(filling, view, parts))
                        self._tell(failure)
                        self._look(view, parts)
                        if len(self._good) < len(wanted):
                            # The lock is kept: others of the node need not try, and warn of it too. Once the disk has
                            # failed, trying again might fill what others write to.
                            self._closed.wait(None if isinstance(failure, OSError) else _RETRY_S)
                self._look(view, parts)
                self._closed.wait(_LOOK_S if len(self._good) < len(wanted) else None)

    def _fill(self, filling: Filling, view: Path, parts: CachedParts) -> None:
        if not view.exists():
            make_view(view, self._ref.version, parts, filling.stored)
        shown_s = time.monotonic()

        def on_good(file: CachedFile) -> None:
            nonlocal shown_s
            self._good.add(file.name)
            if time.monotonic() - shown_s > _LOOK_S:
                self._show(view, parts)
                shown_s = time.monotonic()

        filling.run(on_good)

    def _look(self, view: Path, parts: CachedParts) -> None:
        """Take notice of the files that are there now."""
        there = self._files.names()
        for file in parts.files:
            if file.name in there and file.name not in self._good and self._files.is_good(file):
                self._good.add(file.name)
        if view.exists():
            self._show(view, parts)

    def _show(self, view: Path, parts: CachedParts) -> None:
        """Let reads take rows from the files that are good."""
        table = self._held.table if self._held is not None else self._opened(view)
        fragments = parts.held(self._good)
        with self._lock:
            if self._failed is not None:
                fragments &= ~self._failed
            self._held = _Held(table, parts.ends, fragments)

    def _opened(self, view: Path) -> TableRef:
        table = TableRef(str(view), self._ref.version)
        if table.open()._ds.serialized_manifest() != self._ref.open()._ds.serialized_manifest():
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
            if key not in self._tables:
                self._tables[key] = CachedTable(ref, columns, spec)
            found = self._tables[key]
            found.used_s = time.monotonic()
            self._tables.move_to_end(key)
            while len(self._tables) > KEPT_TABLES or found.used_s - self._oldest().used_s > IDLE_S:
                self._tables.popitem(last=False)[1].close()
            return found

    def _oldest(self) -> CachedTable:
        return next(iter(self._tables.values()))

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
