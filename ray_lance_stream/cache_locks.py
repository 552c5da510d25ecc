"""Locks of the disk cache on a node: who downloads, and who uses which files. The kernel lets them go with the process."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_lance_stream.cache_parts import PART


class Lead:
    """Which process of the node downloads what a view shows, also while it waits to try again: the others need not try then.

    Args:
        view: its folder, which the lock is on.
    """

    def __init__(self, view: Path) -> None:
        self._view = view
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Whether it is this process, from here on till `close`. The view must be there."""
        if self._descriptor is None:
            descriptor = os.open(self._view, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Let another one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def filling(table: Path) -> Iterator[bool]:
    """Whether this process is the one that writes data files of a table; what one left that died is cleared away."""
    with (table / "fill.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        for path in files_below(table / "data"):
            if path.name.endswith(PART):
                path.unlink(missing_ok=True)
        yield True


def in_use(users: Path) -> tuple[set[str], set[str]]:
    """(views, names of data files) that living processes use; the marks of others are removed."""
    views: set[str] = set()
    names: set[str] = set()
    for path in users.glob("*"):
        with suppress(OSError, ValueError, KeyError), path.open() as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found = json.load(mark)
                views.add(found["view"])
                names.update(found["files"])
            else:
                path.unlink()
    return views, names


def files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder and those in it."""
    for root, _, names in os.walk(folder):
        for name in names:
            yield Path(root, name)
