"""Ints beside nulls on their way through numpy, which makes floats of them: exact, or an error that names the column."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_lance_stream._ray import concat_tables, from_batch
from ray_lance_stream.columns import is_tensor, to_batch
from ray_lance_stream.errors import ReadError
from ray_lance_stream.failures import attempt

MAX_EXACT = 2**53  # floats hold every int up to it


def exact_parts(table: pa.Table) -> list[np.ndarray]:
    """The rows of a table in parts that numpy can hold exactly: in each, a column of large ints has nulls only, or none.

    Returns:
        int64 [rows of the part] indices, for each part; one part as a rule.
    """
    nulls = [column.is_null().to_numpy() for column in table.columns if _largest_beside_null(column) is not None]
    if not nulls:
        return [np.arange(len(table))]
    part_of = np.unique(np.stack(nulls, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return [np.flatnonzero(part_of == part) for part in range(part_of.max() + 1)]


def with_unchanged_columns(output: pa.Table, rows: pa.Table) -> pa.Table:
    """What a function made of numpy arrays, with the columns that it has left as they were given back their type and nulls.

    Args:
        output: as Arrow.
        rows: what it was given, as Arrow.
    """
    for index, field in enumerate(output.schema):
        if field.name not in rows.schema.names or rows.schema.names.count(field.name) > 1:
            continue
        given, column = rows.schema.field(field.name), output.column(index)
        has_kept_all = field.equals(given, check_metadata=True) and column.null_count == rows[field.name].null_count
        if not has_kept_all and not is_tensor(given.type) and _is_unchanged(column, rows.select([field.name])):
            output = output.set_column(index, given, rows[field.name])
    return output


def _is_unchanged(column: pa.ChunkedArray, rows: pa.Table) -> bool:
    """Whether a column that was made of a numpy array holds what numpy was given of `rows`, a table of one column."""
    given = rows.column(0)
    kind = given.type
    is_changed_by_numpy = pa.types.is_nested(kind) or pa.types.is_primitive(kind) or pa.types.is_null(kind)
    if not is_changed_by_numpy and not isinstance(kind, pa.BaseExtensionType):
        cast, _ = attempt(partial(column.cast, kind))  # strings and decimals, which numpy holds as they are
        return cast is not None and bool(cast.equals(given))
    as_given = from_batch(to_batch(rows, "numpy"), copy=False).column(0)
    return bool(as_given.type == column.type and _bytes(as_given).equals(_bytes(column)))


def join_rows(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables one after the other; floats that stand for nulls and whole numbers become the ints of other rows.

    Raises:
        ValueError: a column has ints in some rows and in others floats, which cannot hold them.
    """
    types: dict[str, pa.DataType] = {}
    for field in (field for table in tables for field in table.schema if pa.types.is_integer(field.type)):
        types.setdefault(field.name, field.type)
    return concat_tables([with_types(table, types) for table in tables])


def with_types(table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    """A table with floats as the ints of other rows, and ints as their floats. Errors as `join_rows`.

    Args:
        table: some rows.
        types: of the columns of the others.
    """
    for index, field in enumerate(table.schema):
        wanted = types.get(field.name, field.type)
        kinds = {pa.types.is_integer(kind): kind for kind in (wanted, field.type)}
        if len(kinds) < 2 or not pa.types.is_floating(kinds[False]):
            continue
        column = table.column(index)
        if pa.types.is_floating(field.type):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, field.type), column)
        try:
            table = table.set_column(index, field.name, column.cast(wanted))
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"column {field.name!r} is {kinds[True]} in some rows and {kinds[False]} in others, as numpy makes floats of "
                f"ints where there are nulls, and not every value is both ({error}): cast it to one type"
            ) from None
    return table


def refuse_inexact(table: pa.Table) -> None:
    """Check a batch that becomes numpy arrays.

    Raises:
        ReadError: it has a null beside ints that would be rounded.
    """
    for field, column in zip(table.schema, table.columns, strict=True):
        largest = _largest_beside_null(column)
        if largest is not None:
            raise ReadError(
                f"column {field.name!r} of type {field.type} holds a null beside {largest}: nulls make floats of ints in "
                "numpy, which hold no such int exactly; use batch_format='pandas' or 'pyarrow', fill nulls with "
                "map_batches(..., batch_format='pyarrow'), or leave them out with filter='... IS NOT NULL'"
            )


def _largest_beside_null(column: pa.ChunkedArray) -> int | None:
    """The int of the largest size in a column with nulls, where floats cannot hold it."""
    if not pa.types.is_integer(column.type) or column.type.bit_width < 64 or not column.null_count:
        return None
    bounds = pc.min_max(column).as_py()
    largest = max((each for each in bounds.values() if each is not None), key=abs, default=0)
    return largest if abs(largest) > MAX_EXACT else None


def _bytes(column: pa.ChunkedArray) -> pa.Buffer:
    """The values of a column, in which NaN is NaN."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("", column.type)])) as writer:
        writer.write_table(pa.table([column.combine_chunks()], names=[""]))
    return sink.getvalue()
