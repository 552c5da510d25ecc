"""Which data files a failed read could not take its rows from: what Lance says of a damaged file does not name it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ray_lance_stream.failures import attempt, is_limit

if TYPE_CHECKING:
    import lance

SEARCH_S = 10.0
_SAMPLED_ROWS = 16


def unreadable_files(dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str]) -> list[str]:
    """The data files of the first fragment whose rows cannot be read, below the table's folder.

    Reads the rows of one fragment after another, for some seconds at most; raises nothing.

    Args:
        dataset: an open table version.
        rows: int64[n] offsets that could not be read together.
        columns: what was read of them.

    Returns:
        Nothing where each fragment can be read by itself, or none was found in time.
    """
    until_s = time.monotonic() + SEARCH_S
    return attempt(lambda: _search(dataset, np.unique(rows), columns, until_s))[0] or []


def _search(dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str], until_s: float) -> list[str]:
    fragments = dataset.get_fragments()
    ends = np.cumsum([fragment.metadata.num_rows for fragment in fragments])
    rows = rows[rows < ends[-1]]
    holders = np.searchsorted(ends, rows, side="right")
    asked = {number: rows[holders == number] for number in np.unique(holders).tolist()}
    # Dense rows are read with those between them.
    between = {
        number: np.linspace(ends[number - 1], ends[number] - 1, _SAMPLED_ROWS).astype(np.int64)
        for number in range(min(asked) + 1, max(asked))
        if number not in asked
    }
    for number, offsets in [*asked.items(), *between.items()]:
        if time.monotonic() > until_s:
            break
        if _is_unreadable(dataset, np.unique(offsets), columns, until_s):
            return [f"data/{file.path}" for file in fragments[number].data_files()]
    return []


def _is_unreadable(dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str], until_s: float) -> bool:
    """Whether one of the rows cannot be read by itself: together they may only be too large."""
    _, failure = attempt(lambda: dataset.take(rows.tolist(), columns=columns))
    if failure is None or is_limit(str(failure)):
        return False
    if len(rows) == 1 or time.monotonic() > until_s:
        return True
    return any(_is_unreadable(dataset, half, columns, until_s) for half in np.array_split(rows, 2))
