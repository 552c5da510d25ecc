"""EpochVersions: which table version each epoch of an attempt reads, where epochs take up new versions.

One choice for all ranks, made when the first of them needs it. Ranks may come to an epoch at any time, and a restarted
coordinator must not tell a late rank of a newer version than it has told the first: the choice is kept outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ray_lance_stream.errors import TableError
from ray_lance_stream.table import TableRef


class Kept(Protocol):
    """Keeps values by key, beyond the life of the process that puts them."""

    def get(self, key: str) -> str | None:
        """The value, if there is one."""

    def put_if_absent(self, key: str, value: str) -> str:
        """Keep a value unless there is one already; returns the one that is kept."""


class EpochVersions:
    """The versions of the epochs of all attempts.

    Args:
        kept: where choices are kept.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._lock = threading.Lock()

    def of(self, attempt_id: str, epoch: int, choose: Callable[[], int]) -> int:
        """The version that an epoch of an attempt reads; chosen once."""
        key = f"{attempt_id}/{epoch}"
        with self._lock:
            kept = self._kept.get(key)
            return int(kept if kept is not None else self._kept.put_if_absent(key, str(choose())))


def newest_version(table: TableRef) -> int:
    """The newest version of a table.

    Raises:
        TableError: there is no table any more, or it was made anew.
    """
    newest = table.newest_version()
    if newest < table.version:
        raise TableError(
            f"table {table.identity} was made anew: its newest version is {newest}, below the version {table.version} that "
            "this stream has read; make a new stream, for a run of a new name"
        )
    return newest
