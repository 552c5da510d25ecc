"""Reading rows of an open Lance dataset by offset.

A row offset counts the live rows of a table version in scan order: deleted rows have none. `take_rows` reads offsets in
the given order, in the way that is fastest for how they lie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pyarrow as pa

from ray_lance_stream.blobs import blob_fields, read_blobs
from ray_lance_stream.damage import unreadable_files
from ray_lance_stream.decode import decoded
from ray_lance_stream.errors import ReadError, StreamError, VersionNotFoundError
from ray_lance_stream.failures import (
    attempt,
    chained,
    is_limit,
    is_overflow,
    is_passing,
    is_refusal,
    redact,
    secrets_of,
)
from ray_lance_stream.packed_structs import holder_of, packed_paths
from ray_lance_stream.read_parts import in_parts

if TYPE_CHECKING:
    import lance

logger = logging.getLogger(__name__)

# From this mean length on, reading runs of consecutive rows as ranges is no slower than `take`. For 24,576 rows:
# int32 vectors of 512 gain at any length (4x at 512, 2x from 2048 on); two int64 columns take twice as long at 512, are
# even at 2048 and gain 2.5x in one run.
MIN_RANGE_RUN_ROWS = 2048
# Up to this mean length of runs, io_uring is faster, or as fast: 2x for rows of 2 kB that lie alone.
MAX_URING_RUN_ROWS = 256
# Rows are read with all that lies between them while that is at most so many bytes a row. 262,144 of a million rows of 16
# bytes: a fifth of the time of `take`.
MAX_DENSE_BYTES = 128
_MAX_CHUNK_BYTES = 2**31 - 1  # what the 32-bit offsets of Arrow's string, binary and list arrays can address
KEEP_VERSION_REMEDY = (
    "Keep the version of a run: tag it (stream.pin(tag=...), or dataset.tags.create(name, version)), or do not clean up "
    "or optimize away versions that a run still reads"
)


def take_rows(
    dataset: lance.LanceDataset,
    rows: np.ndarray,
    columns: list[str],
    open_uring: Callable[[], lance.LanceDataset | None] = lambda: None,
) -> pa.Table:
    """The given rows, in the given order, repeats included.

    Args:
        dataset: an open table version.
        rows: int64[n] row offsets.
        columns: names, as checked by `resolve_columns`; `a.b` reads one field of a struct column, as a column `a.b`.
        open_uring: the same version through a reader that is faster for scattered rows, if there is one.

    Blob columns come as large_binary, with their bytes, dictionaries as their values, and bfloat16 as float32. What is too
    large for one Arrow array comes in several chunks.

    Raises:
        ReadError: a row beyond the end, one that 32-bit Arrow offsets cannot hold, or a failure of the storage.
        VersionNotFoundError: files of the version are gone.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if len(rows) and rows.min() < 0:
        raise ReadError(f"row offsets must be >= 0, got {rows.min()}")

    def read(part: np.ndarray) -> pa.Table:
        result, failure = attempt(lambda: _read(dataset, part, columns, open_uring))
        if failure is not None:
            _raise_read_error(failure, dataset, part, columns)
        assert result is not None
        if len(result) != len(part):
            raise ReadError(f"Lance returned {len(result)} rows for {len(part)} offsets of {_where(dataset)}")
        return result

    return in_parts(read, rows, (dataset.uri, dataset.version, tuple(columns)))


def _read(
    dataset: lance.LanceDataset,
    rows: np.ndarray,
    columns: list[str],
    open_uring: Callable[[], lance.LanceDataset | None],
) -> pa.Table:
    """The rows with blobs as their bytes."""
    import lance.arrow  # noqa: F401 - makes bfloat16 known to Arrow

    schema = dataset.schema  # converted at each call
    blobs = blob_fields(schema, columns)
    plain = [name for name in columns if name not in blobs]
    table = _read_plain(dataset, schema, rows, plain, open_uring) if plain else pa.table({})
    if not blobs:
        return table
    rows, restore = _sorted(rows)
    arrays = [read_blobs(dataset, rows, name) for name in blobs]
    if restore is not None:
        arrays = [array.take(pa.array(restore)) for array in arrays]
    fields = [*table.schema, *blobs.values()]
    return decoded(pa.Table.from_arrays([*table.columns, *arrays], schema=pa.schema(fields)).select(columns))


def _read_plain(
    dataset: lance.LanceDataset,
    schema: pa.Schema,
    rows: np.ndarray,
    columns: list[str],
    open_uring: Callable[[], lance.LanceDataset | None],
) -> pa.Table:
    """Columns without blobs, in the way that is fastest for how the rows lie."""
    packed = packed_paths(schema)
    wanted, columns = columns, list(dict.fromkeys(holder_of(name, packed) for name in columns)) if packed else columns
    if len(rows) and _is_dense(schema, rows, columns):
        first, stop = int(rows.min()), int(rows.max()) + 1
        table = dataset.scanner(columns=columns, offset=first, limit=stop - first, scan_in_order=True).to_table()
        if len(table) == stop - first:  # else there are no such rows, which `take` says
            return arranged(table, rows - first, wanted)
    rows, restore = _sorted(rows)
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)  # where each run of consecutive offsets begins
    is_nested = any("." in name for name in columns)
    # Not for fields of structs: `take_scan` mixes them up where they are not in the order of the schema.
    ranges: pa.Table | None = None
    if len(rows) and not is_nested and len(rows) >= MIN_RANGE_RUN_ROWS * len(starts):
        ranges, _ = attempt(lambda: _read_ranges(dataset, rows, starts, columns))  # `take` says better why it fails
    if ranges is None:
        is_scattered = len(rows) < MAX_URING_RUN_ROWS * len(starts)
        ranges = _take_sorted(dataset, rows, columns, open_uring() if is_scattered else None)
    return arranged(ranges, restore, wanted)


def _is_dense(schema: pa.Schema, rows: np.ndarray, columns: list[str]) -> bool:
    """Whether the rows between those wanted may be read as well; for columns of fixed width only."""
    wanted = _types_of(schema, columns)
    if not all(pa.types.is_primitive(kind) for kind in wanted):
        return False
    bits = sum(kind.bit_width for kind in wanted)
    return bool((rows.max() - rows.min() + 1) * bits <= 8 * MAX_DENSE_BYTES * len(rows))


def _types_of(schema: pa.Schema, columns: list[str]) -> list[pa.DataType]:
    """The types of columns; null for a field of a struct."""
    types = {field.name: field.type for field in schema}
    return [types.get(name, pa.null()) for name in columns]


def _sorted(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(rows sorted, int64 [n] where each row of the given order lies among them; None if they were in order).

    Lance reads sorted offsets faster, and Arrow restores the order at memory speed.
    """
    if np.all(rows[1:] >= rows[:-1]):
        return rows, None
    num_bits = len(rows).bit_length()
    place = np.arange(len(rows))
    if rows.min() >= 0 and int(rows.max()).bit_length() + num_bits < 64:
        # Row and place in one number: numpy sorts numbers several times faster than it finds their order.
        packed = rows << num_bits | place
        packed.sort()
        by_offset = packed & ((1 << num_bits) - 1)
        rows = packed >> num_bits
    else:
        by_offset = np.argsort(rows, kind="stable")
        rows = rows[by_offset]
    restore = np.empty_like(by_offset)
    restore[by_offset] = place
    return rows, restore


def _read_ranges(dataset: lance.LanceDataset, rows: np.ndarray, starts: np.ndarray, columns: list[str]) -> pa.Table:
    """Sorted rows by the runs that begin at `starts`."""
    stops = np.append(starts[1:], len(rows))
    ranges = zip(rows[starts].tolist(), (rows[stops - 1] + 1).tolist(), strict=True)
    # What Lance's own samplers read ranges of live rows with; the public scanner takes one range at a time.
    return pa.Table.from_batches(list(dataset._ds.take_scan(ranges, columns)))


def _take_sorted(
    dataset: lance.LanceDataset, rows: np.ndarray, columns: list[str], uring: lance.LanceDataset | None
) -> pa.Table:
    """Rows at sorted offsets, as Lance projects them: a nested column comes inside its struct."""
    # A list, because Lance goes through an Arrow or NumPy array one Python object at a time, which is slower.
    offsets = rows.tolist()
    if uring is not None:
        table, failure = attempt(lambda: uring.take(offsets, columns=columns))
        if table is not None:
            return table
        logger.debug("read again without io_uring: %s", type(failure).__name__)
    return dataset.take(offsets, columns=columns)


def arranged(table: pa.Table, restore: np.ndarray | None, columns: list[str]) -> pa.Table:
    """The rows back in the order asked for, in one piece per column, and the columns as named."""
    return restored(decoded(_named(table, columns)), restore)


def restored(table: pa.Table, restore: np.ndarray | None) -> pa.Table:
    """The rows back in the order asked for, int64 [n] or None where they are in order, in one piece per column."""
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
    which = f"{len(rows)} rows of {_where(dataset)}" + (f", offsets {rows.min()} to {rows.max()}," if len(rows) else "")
    message = f"{which} could not be read: {text}"
    error: type[StreamError] = ReadError
    if "not found:" in text.lower():
        error, message = VersionNotFoundError, f"{message}. {KEEP_VERSION_REMEDY}"
    elif is_overflow(text):
        message += (
            f". One read may hold at most {_MAX_CHUNK_BYTES} bytes of a string column, or values of a list column"
        )
        kinds = zip(columns, _types_of(dataset.schema, columns), strict=True)
        narrow = [name for name, kind in kinds if not pa.types.is_primitive(kind)] or columns
        message += f" ({', '.join(narrow)}): store it as large_string, large_binary or large_list"
    elif "non-existent fragment" in text:
        message += f". Offsets must be below the {dataset.count_rows()} live rows, got up to {rows.max()}"
    elif not (is_limit(text) or is_refusal(text) or is_passing(text)) and (
        files := unreadable_files(dataset, rows, columns)
    ):
        message += f". Damaged or unreadable: {', '.join(files)}; restore the file, or pin a version without it"
    raise chained(error(message), failure, secrets)


def _where(dataset: lance.LanceDataset) -> str:
    uri = redact(dataset.uri, secrets_of(dataset.uri, dataset.initial_storage_options))
    return f"table {uri} version {dataset.version}"
