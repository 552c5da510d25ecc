"""Lists of rows kept on disk, so that neither a restarted coordinator nor a new run makes them again.

One file per list, named by all that the list follows from, written beside its place and renamed into it. The folder is
RAY_LANCE_STREAM_CACHE, else ray_lance_stream in the user's cache folder, of the node where the coordinator runs. Nothing
depends on it: what is missing, damaged or cannot be written is made again. Who writes a file holds a lock on it, which goes
with the process: what a killed one has left is told by it, and removed by the next one that keeps a list.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ray_lance_stream.plan import fingerprint_of

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "RAY_LANCE_STREAM_CACHE"
MAX_BYTES = 4 * 2**30
ABANDONED_S = 3600.0  # nobody writes a file for that long, where files cannot be locked
# No other file has such a name: the folder may be one in which the user keeps files of his own.
_SUFFIX = ".ray-lance-stream-list"
_PART_SUFFIX = f"{_SUFFIX}.part"


def cache_folder() -> Path | None:
    """Where lists are kept; None: nowhere, since the variable is set to nothing."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "ray_lance_stream"


@dataclass(frozen=True)
class ListCache:
    """The lists in a folder, at most `max_bytes` of them: those that were not used for longest go first.

    Other files in the folder are let alone.

    Attributes:
        folder: None: nothing is kept.
        max_bytes: of all lists.
    """

    folder: Path | None
    max_bytes: int = MAX_BYTES

    def load(self, key: str) -> tuple[np.ndarray, str] | None:
        """(int64 [n], its fingerprint) as stored under `key`; None where it is not there whole."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
            metadata = table.schema.metadata or {}
            rows = table["row"].combine_chunks().to_numpy()
            fingerprint = fingerprint_of(rows, int(metadata[b"num_splits"]))
            if fingerprint.encode() != metadata[b"fingerprint"]:
                raise ValueError("its rows are not those that were written")
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            logger.warning("the kept list of rows %s is of no use and made again: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # used now
        return rows, fingerprint

    def store(self, key: str, rows: np.ndarray, num_splits: int) -> None:
        """Keep a list, and let others go where that takes too much room."""
        if self.folder is None or rows.nbytes > self.max_bytes:
            return
        metadata = {"num_splits": str(num_splits), "fingerprint": fingerprint_of(rows, num_splits)}
        table = pa.table({"row": rows}).replace_schema_metadata(metadata)
        part = self.folder / f"{key}.{uuid.uuid4().hex}{_PART_SUFFIX}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with part.open("xb") as sink:
                with suppress(OSError):
                    fcntl.flock(sink, fcntl.LOCK_EX)
                with pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
                sink.flush()
                os.replace(part, self.folder / f"{key}{_SUFFIX}")
            self._make_room(keep=key)
        except OSError as error:
            logger.warning(
                "a list of rows is not kept in %s: %s; set %s to another folder", self.folder, error, FOLDER_VARIABLE
            )
            with suppress(OSError):
                part.unlink()

    def _make_room(self, keep: str) -> None:
        """Other processes may do the same at the same time."""
        assert self.folder is not None
        for path, status in _files(self.folder, _PART_SUFFIX):
            if _is_abandoned(path, status):
                path.unlink(missing_ok=True)
        files = sorted(_files(self.folder, _SUFFIX), key=lambda file: file[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self.max_bytes:
                break
            if path.name.removesuffix(_SUFFIX) != keep:
                path.unlink(missing_ok=True)
                total -= status.st_size


def _is_abandoned(path: Path, status: os.stat_result) -> bool:
    """Whether nobody writes a part any more."""
    try:
        with path.open("r+b") as part:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is locked, or locks are not served here
        return time.time() - status.st_mtime > ABANDONED_S
    return True


def _files(folder: Path, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{suffix}"):
        with suppress(FileNotFoundError):
            yield path, path.stat()
