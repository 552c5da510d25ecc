"""The rows of a table version that can be read from the cache of the node, and what becomes of those that can no more."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ray_lance_stream.cache_files import TableFiles
from ray_lance_stream.cache_parts import CachedFile, CachedParts
from ray_lance_stream.failures import attempt
from ray_lance_stream.read_parts import in_parts
from ray_lance_stream.table import TableRef
from ray_lance_stream.take import restored

logger = logging.getLogger(__name__)

LOCAL_READS_AT_A_TIME = 2  # keep Lance's threads busy; more slow down the one that the loop waits for


@dataclass(frozen=True)
class Held:
    """What can be read from the cache now.

    Attributes:
        table: the version, in the cache.
        parts: its fragments and files.
        fragments: bool [F].
    """

    table: TableRef
    parts: CachedParts
    fragments: np.ndarray


class HeldRows:
    """Rows from the cache where they are held, from the object store where not.

    Args:
        ref: in its object store.
        columns: which columns are read.
        files: the cache.
    """

    def __init__(self, ref: TableRef, columns: list[str], files: TableFiles) -> None:
        self._ref = ref
        self._columns = columns
        self._files = files
        self.held: Held | None = None
        self._shown = np.zeros(0, bool)  # bool [F]: all files are there
        self._failed: set[int] = set()  # fragments that are not read from the cache any more
        self._suspects: set[int] = set()  # those of them whose files have not been compared yet
        self._cleared: set[int] = set()  # those whose files were whole once after they had failed
        self._lock = threading.Lock()  # of the five above
        self._turns = threading.BoundedSemaphore(LOCAL_READS_AT_A_TIME)
        self._told = False

    def take(self, rows: np.ndarray) -> pa.Table:
        """See TableRef.take."""
        return in_parts(self._take, rows, (self._ref.identity, self._ref.version, tuple(self._columns)))

    def _take(self, rows: np.ndarray) -> pa.Table:
        held = self.held
        if held is None or not len(rows) or rows.min() < 0 or rows.max() >= held.parts.ends[-1]:
            return self._ref.take(rows, self._columns)
        holders = np.searchsorted(held.parts.ends, rows, side="right")
        here = held.fragments[holders]
        if not here.any():
            return self._ref.take(rows, self._columns)
        with self._turns:
            found, failure = attempt(lambda: held.table.take(rows[here], self._columns))
            if found is None:
                self._lost(held, rows[here], holders[here], failure)
        if found is None:
            return self._ref.take(rows, self._columns)
        if here.all():
            return found
        others = self._ref.take(rows[~here], self._columns)
        restore = np.empty(len(rows), np.int64)
        restore[here] = np.arange(len(found))
        restore[~here] = len(found) + np.arange(len(others))
        return restored(pa.concat_tables([found, others]), restore)

    def show(self, table: TableRef, parts: CachedParts, good: set[str]) -> None:
        """Let reads take rows from the files that are good."""
        with self._lock:
            self._shown = parts.held(good)
            self._hold(table, parts)

    def _hold(self, table: TableRef, parts: CachedParts) -> None:
        fragments = self._shown.copy()
        fragments[list(self._failed)] = False
        self.held = Held(table, parts, fragments)

    def _lost(self, held: Held, rows: np.ndarray, holders: np.ndarray, failure: BaseException | None) -> None:
        """Read from the object store from here on what is damaged, or was removed by somebody.

        Which of the fragments that is, their files show, or else reading each alone. A failure that has passed by then,
        as where there was no memory, costs this read only.
        """
        touched = np.unique(holders).tolist()
        lost = {fragment for fragment in touched if not self._looks_good(held, fragment)}
        if not lost:
            lost = {fragment for fragment in touched if self._fails(held, rows[holders == fragment])}
        with self._lock:
            self._failed |= lost
            self._suspects |= lost
            is_first, self._told = not self._told, True
            self._hold(held.table, held.parts)
        if is_first:
            logger.warning(
                "cached files of table %s cannot be read, so they are read from the object store: %s",
                self._ref.identity,
                failure,
            )

    def _looks_good(self, held: Held, fragment: int) -> bool:
        return all(self._files.is_good(file) for file in held.parts.of_fragment[fragment] or ())

    def _fails(self, held: Held, rows: np.ndarray) -> bool:
        return attempt(lambda: held.table.take(rows, self._columns))[1] is not None

    def verify(self) -> None:
        """Compare the checksums of what could not be read.

        The next process that fills the cache downloads anew what is damaged. What is whole is read from the cache
        again, unless it has failed before.
        """
        held = self.held
        with self._lock:
            suspects, self._suspects = self._suspects, set()
        for fragment in suspects:
            assert held is not None
            damaged = [file for file in held.parts.of_fragment[fragment] or () if not self._is_whole(file)]
            for file in damaged:
                self._files.forget(file)
            with self._lock:
                if not damaged and fragment not in self._cleared:
                    self._failed.discard(fragment)
                    self._cleared.add(fragment)
                    assert self.held is not None
                    self._hold(self.held.table, self.held.parts)

    def _is_whole(self, file: CachedFile) -> bool:
        return bool(attempt(lambda: self._files.is_whole(file))[0])
