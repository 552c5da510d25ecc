"""Row ids of Lance as row offsets of an open version. LanceDB names rows by id, this library by offset.

An id is the address of a row, or with stable row ids a number that compaction keeps. An offset counts the live rows of
the version, so both are the same throughout only in tables that were written once and never changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ray_lance_stream.errors import TableError

if TYPE_CHECKING:
    import lance


def offsets_of(dataset: lance.LanceDataset, row_ids: np.ndarray, where: str) -> np.ndarray:
    """int64 [n]: offsets of the rows with these ids, in their order.

    Reads no column: Lance computes the ids. Takes some 32 bytes per row at its peak.

    Args:
        dataset: the version.
        row_ids: uint64 [n].
        where: the version, for messages.

    Raises:
        TableError: a row that the version does not have.
    """
    known = scan_row_ids(dataset)  # [N], by offset
    by_id = None if np.all(known[1:] > known[:-1]) else np.argsort(known)
    if by_id is not None:
        known = known[by_id]
    # Looked up in ascending order, which costs a fraction of jumps through a large array.
    ascending = np.argsort(row_ids)
    wanted = row_ids[ascending]
    places = np.searchsorted(known, wanted)
    missing = places >= len(known)
    places[missing] = 0
    missing |= known[places] != wanted if len(known) else True
    if missing.any():
        raise TableError(
            f"{int(missing.sum())} of {len(wanted)} rows are not in {where}, the first one has row id "
            f"{int(wanted[missing][0])}; build the permutation again, on this version of this table"
        )
    offsets = np.empty(len(wanted), np.int64)
    offsets[ascending] = places if by_id is None else by_id[places]
    return offsets


def scan_row_ids(dataset: lance.LanceDataset) -> np.ndarray:
    """uint64 [N]: the ids of the live rows in table order."""
    scanner = dataset.scanner(columns=[], with_row_id=True, scan_in_order=True)
    parts = [batch.column(0).to_numpy() for batch in scanner.to_batches()]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)
