"""Which rows and columns of an open Lance dataset are meant: the check of columns, and the scan for matching rows."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ray_lance_stream.blobs import unreadable_blobs
from ray_lance_stream.errors import ConfigError

if TYPE_CHECKING:
    import lance

# The bar of a filter scan appears only after this time, so that quick scans leave no trace.
_PROGRESS_DELAY_S = 1.5
# Lance reads this far ahead of a filter scan; its default of 2 GiB costs memory and won no time.
_SCAN_BUFFER_BYTES = 128 * 2**20

# Meta columns that `take` can return; it fails on the others that a scan knows.
META_COLUMNS = ("_rowid", "_rowaddr", "_rowoffset")
_UNREADABLE_META_COLUMNS = ("_row_created_at_version", "_row_last_updated_at_version")


def field_paths(fields: Any, prefix: str = "") -> list[str]:
    """Names of the columns, and of the fields inside struct columns as `a.b`."""
    paths = []
    for item in fields:
        paths.append(prefix + item.name)
        if pa.types.is_struct(item.type):
            paths += field_paths(item.type, f"{prefix}{item.name}.")
    return paths


def check_columns(dataset: lance.LanceDataset, columns: Sequence[str] | None, where: str) -> list[str]:
    """See `resolve_columns`. Checked before any read, because `take` panics at unknown columns and drops repeats."""
    if columns is None:
        columns = list(dataset.schema.names)
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(isinstance(c, str) for c in columns):
        raise ConfigError(f"columns must be a list of names, got {columns!r}: pass columns=[...]")
    if not columns:
        raise ConfigError("columns must name at least one column, got []: pass None for all")
    repeated = sorted(name for name, number in Counter(columns).items() if number > 1)
    if repeated:
        raise ConfigError(f"columns must not repeat a name, got {repeated} more than once")
    unreadable = sorted(set(columns) & set(_UNREADABLE_META_COLUMNS))
    if unreadable:
        raise ConfigError(f"columns must be readable by row, got {unreadable}, which Lance returns from scans only")
    schema = dataset.schema
    known = [*field_paths(schema), *META_COLUMNS]
    is_known = set(known)
    unknown = [name for name in columns if name not in is_known]
    if unknown:
        by_lower = {name.lower(): name for name in reversed(known)}
        near = {by_lower[m] for name in unknown for m in difflib.get_close_matches(name.lower(), by_lower, n=1)}
        hint = f"did you mean {sorted(near)}? " if near else ""
        raise ConfigError(f"columns must exist in {where}, got unknown {unknown}: {hint}available are {known}")
    unreadable = unreadable_blobs(schema, columns)
    if unreadable:
        raise ConfigError(
            f"columns must have no blobs inside of lists or maps, whose bytes Lance does not read, got {unreadable} of "
            f"{where}: leave them out with columns=[...]"
        )
    return list(columns)


def scan_offsets(dataset: lance.LanceDataset, filter: str, progress: bool) -> np.ndarray:
    """int64[m] sorted offsets of the rows that match. Takes 16 bytes per match at its peak, besides Lance's buffers."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread that redraws bars, and that would stay

    parts: list[np.ndarray] = []
    # Only the columns of the filter are read besides. Batches copied to int64 set Arrow's buffers free.
    scanner = dataset.scanner(
        columns=["_rowoffset"], filter=filter, scan_in_order=True, io_buffer_size=_SCAN_BUFFER_BYTES
    )
    bar: Any = Bar(
        total=dataset.count_rows(),
        desc="finding rows that match the filter",
        unit="row",
        unit_scale=True,
        delay=_PROGRESS_DELAY_S,
        disable=not progress,
    )
    with bar:
        for batch in scanner.to_batches():
            if len(batch):
                parts.append(batch.column(0).to_numpy().astype(np.int64))
                # Offsets tell how far the scan is, where it goes in order.
                bar.update(max(0, int(parts[-1][-1]) + 1 - bar.n))
    rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
    # Scans come in order today; an index scan need not.
    if not np.all(rows[1:] > rows[:-1]):
        rows.sort()
    return rows
