"""Reading rows of an open Lance dataset by offset.

A row offset counts the live rows of a table version in scan order: deleted rows have none. `take_rows` reads offsets in
the given order, `scan_offsets` finds those that match a filter.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from ray_lance_stream.blobs import blob_fields, read_blobs
from ray_lance_stream.decode import decoded
from ray_lance_stream.errors import ConfigError, ReadError, StreamError, VersionNotFoundError
from ray_lance_stream.failures import attempt, chained, guarded, redact, secrets_of

if TYPE_CHECKING:
    import lance

# From this mean length on, reading runs of consecutive rows as ranges is no slower than `take`. For 24,576 rows:
# int32 vectors of 512 gain at any length (4x at 512, 2x from 2048 on); two int64 columns take twice as long at 512, are
# even at 2048 and gain 2.5x in one run.
MIN_RANGE_RUN_ROWS = 2048
_MAX_CHUNK_BYTES = 2**31 - 1  # what the 32-bit offsets of Arrow's string, binary and list arrays can address
# The bar of a filter scan appears only after this time, so that quick scans leave no trace.
_PROGRESS_DELAY_S = 1.5
# Lance reads this far ahead of a filter scan; its default of 2 GiB costs memory and won no time.
_SCAN_BUFFER_BYTES = 128 * 2**20
KEEP_VERSION_REMEDY = (
    "Keep the version of a run: tag it (dataset.tags.create(name, version)), or do not clean up or optimize away "
    "versions that a run still reads"
)

# Meta columns that `take` can return; it fails on the others that a scan knows.
_META_COLUMNS = ("_rowid", "_rowaddr", "_rowoffset")
_UNREADABLE_META_COLUMNS = ("_row_created_at_version", "_row_last_updated_at_version")
# Functions whose value changes from scan to scan, looked for outside of quotes.
_SQL_QUOTED = re.compile(r"'(?:[^']|'')*'|`[^`]*`|\"[^\"]*\"|--[^\n]*")
_VOLATILE_SQL = re.compile(r"\b(?:(?:random|rand|uuid|now|today)\s*\(|current_(?:date|timestamp|time)\b)", re.I)


def _field_paths(fields: Any, prefix: str = "") -> list[str]:
    """Names of the columns, and of the fields inside struct columns as `a.b`."""
    paths = []
    for item in fields:
        paths.append(prefix + item.name)
        if pa.types.is_struct(item.type):
            paths += _field_paths(item.type, f"{prefix}{item.name}.")
    return paths


def check_columns(dataset: lance.LanceDataset, columns: Sequence[str] | None, where: str) -> list[str]:
    """See `resolve_columns`. Checked before any read, because `take` panics at unknown columns and drops repeats."""
    if columns is None:
        return list(dataset.schema.names)
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(isinstance(c, str) for c in columns):
        raise ConfigError(f"columns must be a list of names, got {columns!r}: pass columns=[...]")
    if not columns:
        raise ConfigError("columns must name at least one column, got []: pass None for all")
    repeated = sorted({name for name in columns if list(columns).count(name) > 1})
    if repeated:
        raise ConfigError(f"columns must not repeat a name, got {repeated} more than once")
    unreadable = sorted(set(columns) & set(_UNREADABLE_META_COLUMNS))
    if unreadable:
        raise ConfigError(f"columns must be readable by row, got {unreadable}, which Lance returns from scans only")
    known = [*_field_paths(dataset.schema), *_META_COLUMNS]
    unknown = [name for name in columns if name not in known]
    if unknown:
        by_lower = {name.lower(): name for name in reversed(known)}
        near = {by_lower[m] for name in unknown for m in difflib.get_close_matches(name.lower(), by_lower, n=1)}
        hint = f"did you mean {sorted(near)}? " if near else ""
        raise ConfigError(f"columns must exist in {where}, got unknown {unknown}: {hint}available are {known}")
    return list(columns)


def check_filter(dataset: lance.LanceDataset, filter: str, where: str) -> None:
    """See `validate_filter`."""
    if not isinstance(filter, str) or not filter.strip():
        raise ConfigError(f"filter must be an SQL condition such as 'id > 3', got {filter!r}: pass None for all rows")
    volatile = _VOLATILE_SQL.search(_SQL_QUOTED.sub("''", filter))
    if volatile:
        raise ConfigError(
            f"filter must match the same rows whenever it is scanned, got {filter!r} with {volatile[0]!r}: write the "
            "value as a literal, or select the rows into a column first"
        )
    guarded(
        dataset.scanner(columns=["_rowoffset"], filter=filter, limit=0).explain_plan,
        f"filter must be an SQL condition on columns of {where}, got {filter!r}",
        ConfigError,
        secrets_of(dataset.uri, dataset.initial_storage_options),
    )


def take_rows(dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str]) -> pa.Table:
    """The given rows, in the given order, repeats included.

    Args:
        dataset: an open table version.
        rows: int64[n] row offsets.
        columns: names, as checked by `resolve_columns`; `a.b` reads one field of a struct column, as a column `a.b`.

    Blob columns come as large_binary, with their bytes, dictionaries as their values, and bfloat16 as float32.

    Raises:
        ReadError: a row beyond the end, a result that 32-bit Arrow offsets cannot hold, or a failure of the storage.
        VersionNotFoundError: files of the version are gone.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    in_order = bool(np.all(rows[1:] >= rows[:-1]))
    restore = None
    if not in_order:
        # Lance reads sorted offsets faster, and Arrow restores the order at memory speed.
        by_offset = np.argsort(rows, kind="stable")
        restore = np.empty_like(by_offset)  # int64[n]: where the row of each place lies in the sorted result
        restore[by_offset] = np.arange(len(rows))
        rows = rows[by_offset]
    if len(rows) and rows[0] < 0:
        raise ReadError(f"row offsets must be >= 0, got {rows[0]}")

    result, failure = attempt(lambda: _read_arranged(dataset, rows, restore, columns))
    if failure is not None:
        _raise_read_error(failure, dataset, rows, columns)
    assert result is not None
    if len(result) != len(rows):
        raise ReadError(f"Lance returned {len(result)} rows for {len(rows)} offsets of {_where(dataset)}")
    return result


def _read_arranged(
    dataset: lance.LanceDataset, rows: np.ndarray, restore: np.ndarray | None, columns: list[str]
) -> pa.Table:
    """Rows at sorted offsets, in the order asked for; blobs as their bytes."""
    import lance.arrow  # noqa: F401 - makes bfloat16 known to Arrow

    blobs = blob_fields(dataset.schema, columns)
    plain = [name for name in columns if name not in blobs]
    table = _arrange(_read_sorted(dataset, rows, plain), restore, plain) if plain else pa.table({})
    if not blobs:
        return table
    arrays = [read_blobs(dataset, rows, name) for name in blobs]
    if restore is not None:
        arrays = [array.take(pa.array(restore)) for array in arrays]
    fields = [*table.schema, *blobs.values()]
    return pa.Table.from_arrays([*table.columns, *arrays], schema=pa.schema(fields)).select(columns)


def _read_sorted(dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str]) -> pa.Table:
    """Rows at sorted offsets, as Lance projects them: a nested column comes inside its struct."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)  # where each run of consecutive offsets begins
    is_nested = any("." in name for name in columns)
    # Not for fields of structs: `take_scan` mixes them up where they are not in the order of the schema.
    if len(rows) and not is_nested and len(rows) >= MIN_RANGE_RUN_ROWS * len(starts):
        stops = np.append(starts[1:], len(rows))
        ranges = zip(rows[starts].tolist(), (rows[stops - 1] + 1).tolist(), strict=True)
        # What Lance's own samplers read ranges of live rows with; the public scanner takes one range at a time.
        return pa.Table.from_batches(list(dataset._ds.take_scan(ranges, columns)))
    # A list, because Lance goes through an Arrow or NumPy array one Python object at a time, which is slower.
    return dataset.take(rows.tolist(), columns=columns)


def _arrange(table: pa.Table, restore: np.ndarray | None, columns: list[str]) -> pa.Table:
    """The rows back in the order asked for, in one piece per column, and the columns as named."""
    table = decoded(_named(table, columns))
    if restore is not None:
        _refuse_overflow(table)
        table = table.take(pa.array(restore))
    return table.combine_chunks()


def _named(table: pa.Table, columns: list[str]) -> pa.Table:
    """The columns as named: a field of a struct is one of its own."""
    import pyarrow.compute as pc

    if not any("." in name for name in columns):
        return table.select(columns)
    arrays, fields = [], []
    for name in columns:
        root, *path = name.split(".")
        array = pc.struct_field(table.column(root), path) if path else table.column(root)
        arrays.append(array)
        fields.append(pa.field(name, array.type) if path else table.schema.field(root))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _refuse_overflow(table: pa.Table) -> None:
    """Arrow joins the chunks of a column to reorder it, which 32-bit offsets limit to 2 GiB."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_narrow = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
        if is_narrow and column.num_chunks > 1 and column.nbytes > _MAX_CHUNK_BYTES:
            raise ReadError(
                f"one read may hold at most {_MAX_CHUNK_BYTES} bytes of a {column.type} column, got {column.nbytes} "
                f"bytes of {name!r} in {len(table)} rows; read fewer rows at once or store it as large_{column.type}"
            )


def _raise_read_error(
    failure: BaseException, dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str]
) -> NoReturn:
    if isinstance(failure, StreamError):
        raise failure
    secrets = secrets_of(dataset.uri, dataset.initial_storage_options)
    text = redact(str(failure), secrets)
    message = f"{len(rows)} rows of {_where(dataset)} could not be read: {text}"
    error: type[StreamError] = ReadError
    if "not found:" in text.lower():
        error, message = VersionNotFoundError, f"{message}. {KEEP_VERSION_REMEDY}"
    elif "overflow" in text.lower():
        message += f". One read may hold at most {_MAX_CHUNK_BYTES} bytes of a string, binary or list column"
        message += f" ({', '.join(columns)}): read fewer rows at once, or store it as large_string or large_binary"
    elif "non-existent fragment" in text:
        message += f". Offsets must be below the {dataset.count_rows()} live rows, got up to {rows[-1]}"
    raise chained(error(message), failure, secrets)


def _where(dataset: lance.LanceDataset) -> str:
    uri = redact(dataset.uri, secrets_of(dataset.uri, dataset.initial_storage_options))
    return f"table {uri} version {dataset.version}"


def scan_offsets(dataset: lance.LanceDataset, filter: str, progress: bool) -> np.ndarray:
    """int64[m] sorted offsets of the rows that match. Takes 16 bytes per match at its peak, besides Lance's buffers."""
    from tqdm import tqdm

    parts: list[np.ndarray] = []
    # Only the columns of the filter are read besides. Batches copied to int64 set Arrow's buffers free.
    scanner = dataset.scanner(
        columns=["_rowoffset"], filter=filter, scan_in_order=True, io_buffer_size=_SCAN_BUFFER_BYTES
    )
    bar: Any = tqdm(
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
