"""Reads that are too large for one: the 32-bit offsets of an Arrow array end at 2 GiB of strings, or 2**31 values of lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import numpy as np
import pyarrow as pa

from ray_lance_stream.failures import attempt, is_overflow, redact

logger = logging.getLogger(__name__)

_MAX_KEPT = 64
_fitting_rows: dict[Hashable, int] = {}


def in_parts(read: Callable[[np.ndarray], pa.Table], rows: np.ndarray, of: Hashable) -> pa.Table:
    """`read(rows)`, in as many parts as it takes: each part is a chunk of every column, which Arrow need not join.

    Args:
        read: the rows at some offsets, in their order.
        rows: int64[n] offsets.
        of: what is read. How many of its rows fit is remembered, so that only the first reads are made in vain.

    Raises:
        Whatever `read` raises, but that the result of more than one row is too large.
    """
    most = _fitting_rows.get(of, len(rows))
    if len(rows) > most:
        parts = np.array_split(rows, -(-len(rows) // most))
        return pa.concat_tables([in_parts(read, part, of) for part in parts])
    table, failure = attempt(lambda: read(rows))
    if table is not None:
        return table
    assert failure is not None
    if len(rows) < 2 or not is_overflow(str(failure)):
        raise failure
    if len(_fitting_rows) >= _MAX_KEPT:
        _fitting_rows.clear()
    _fitting_rows[of] = -(-len(rows) // 2)
    logger.info("rows are read %d at a time: %s", _fitting_rows[of], redact(str(failure), ()))
    return in_parts(read, rows, of)
