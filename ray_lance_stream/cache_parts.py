"""Which data files of a table version the disk cache holds, and which fragments can be read from them. Reads the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_lance_stream.blobs import has_blob_files

if TYPE_CHECKING:
    import lance

_LAST_VERSION = 2**64 - 1
PART = ".part"  # how the name of a file ends that is being written


@dataclass(frozen=True)
class CachedFile:
    """A data file of a table.

    Attributes:
        name: below the `data` folder.
        size: bytes.
    """

    name: str
    size: int


@dataclass(frozen=True)
class CachedParts:
    """What the cache holds of a table version, for some columns.

    Attributes:
        ends: int64 [F], offset after the last row of each fragment.
        of_fragment: the files of each fragment; None: it cannot be read from a cache.
        deletions: paths of the deletion files of those that can.
        why_not: why none can, if so.
    """

    ends: np.ndarray
    of_fragment: list[list[CachedFile] | None]
    deletions: list[str]
    why_not: str

    @property
    def files(self) -> list[CachedFile]:
        """All files, in the order of the table."""
        return list(dict.fromkeys(file for files in self.of_fragment for file in files or ()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def held(self, names: set[str]) -> np.ndarray:
        """bool [F]: which fragments can be read where these files are there."""
        return np.array([files is not None and all(f.name in names for f in files) for files in self.of_fragment])


def cached_parts(dataset: lance.LanceDataset, columns: list[str]) -> CachedParts:
    """What a cache holds of an open version so that these columns can be read from it: whole files.

    Not what lies in the place of another table (branches, shallow clones), nor in overlays, nor files whose size the
    manifest does not tell, as those of old releases; nothing at all where a column has blobs in files of their own.
    """
    wanted = _field_ids(dataset, columns)
    has_blobs = has_blob_files(dataset.schema, columns)
    ends, of_fragment, deletions = [], [], []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        deleted = metadata.deletion_file
        ends.append(metadata.physical_rows - ((deleted.num_deleted_rows or 0) if deleted is not None else 0))
        files = None if has_blobs else _files(metadata, wanted)
        of_fragment.append(files)
        if files is not None and deleted is not None:
            deletions.append(deleted.path(metadata.id))
    if has_blobs:
        why_not = "blobs that lie in files of their own are not cached"
    elif not wanted:
        why_not = "no column is read from a data file"
    else:
        why_not = "its data files lie in the place of another table, or have no size in the manifest"
    return CachedParts(np.cumsum(ends, dtype=np.int64), of_fragment, deletions, why_not)


def manifest_names(version: int) -> tuple[str, str]:
    """How the file of a version may be called: newer tables count down, so that a listing begins with the newest one."""
    return f"{_LAST_VERSION - version:020d}.manifest", f"{version}.manifest"


def _files(metadata: Any, wanted: set[int]) -> list[CachedFile] | None:
    deleted = metadata.deletion_file
    if metadata.overlays or (deleted is not None and getattr(deleted, "base_id", None) is not None):
        return None
    files = []
    for file in metadata.files:
        if not wanted.intersection(file.fields):
            continue
        if file.base_id is not None or not file.file_size_bytes or not _is_plain(file.path):
            return None
        files.append(CachedFile(file.path, file.file_size_bytes))
    return files or None


def _is_plain(name: str) -> bool:
    """Whether a name leads to a place below the data folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and not name.endswith(PART)


def _field_ids(dataset: lance.LanceDataset, columns: list[str]) -> set[int]:
    """The ids of the columns and all that is in them; of a field of a struct, those of the struct."""
    roots = {name.partition(".")[0] for name in columns}
    found: set[int] = set()
    left: list[Any] = [field for field in dataset.lance_schema.fields() if field.name() in roots]
    while left:
        field = left.pop()
        found.add(field.id())
        left += field.children()
    return found
