"""Columns whose type numpy, pandas or another process does not know, as one that they do."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BFLOAT16 = "lance.bfloat16"
_ELEMENT = {b"ray_lance_stream:element": b"bfloat16"}


def decoded(table: pa.Table) -> pa.Table:
    """Dictionaries as their values, bfloat16 as float32, which holds each of its values.

    Dictionaries of rows from several fragments repeat values, which pandas refuses, and numpy takes the last value of one for
    a null. Numpy has no bfloat16, and a process that has not imported Lance takes it for bytes.
    """
    found: dict[int, tuple[pa.Field, pa.ChunkedArray]] = {}
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            kind = field.type.value_type
            found[index] = field.with_type(kind), table.column(index).cast(kind)
        elif _has_bfloat16(field.type):
            kind = _widened(pa.nulls(0, field.type)).type
            widened = pa.chunked_array([_widened(chunk) for chunk in table.column(index).chunks], kind)
            found[index] = pa.field(field.name, kind, field.nullable, _ELEMENT), widened
    return with_columns(table, found)


def with_columns(table: pa.Table, changed: dict[int, tuple[pa.Field, pa.Array | pa.ChunkedArray]]) -> pa.Table:
    """The table with other columns at some places: at once, since each change alone copies the list of all columns."""
    if not changed:
        return table
    columns: list[pa.Array | pa.ChunkedArray] = table.columns
    fields = list(table.schema)
    for index, (field, column) in changed.items():
        fields[index], columns[index] = field, column
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, table.schema.metadata))


def was_bfloat16(field: pa.Field) -> bool:
    """Whether the table stores the numbers of a `decoded` column as bfloat16."""
    return _ELEMENT.items() <= (field.metadata or {}).items()


def _has_bfloat16(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_bfloat16(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_has_bfloat16(child.type) for child in kind)
    return getattr(kind, "extension_name", "") == _BFLOAT16


def _widened(array: pa.Array) -> pa.Array:
    """bfloat16 as float32, in lists and structs too."""
    kind = array.type
    mask = array.is_null() if array.null_count else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        stops = pc.cumulative_sum(pc.fill_null(pc.list_value_length(array), 0))
        offsets = pa.concat_arrays([pa.array([0], stops.type), stops])
        return type(array).from_arrays(offsets, _widened(array.flatten()), mask=mask)
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        values = array.values.slice(array.offset * width, len(array) * width)
        return pa.FixedSizeListArray.from_arrays(_widened(values), width, mask=mask)
    if pa.types.is_struct(kind):
        children = [_widened(array.field(i)) for i in range(kind.num_fields)]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    if not _has_bfloat16(kind):
        return array
    bits = np.frombuffer(array.storage.buffers()[1] or b"", np.uint16)[array.offset : array.offset + len(array)]
    numbers = (bits.astype(np.uint32) << 16).view(np.float32)  # bfloat16 is the upper half of a float32
    return pa.array(numbers, mask=None if mask is None else mask.to_numpy(zero_copy_only=False))
