"""Blob columns: their bytes, in place of the descriptors that Lance reads them as.

Lance keeps the bytes of a blob column apart from the other columns, in two encodings: large_binary with the metadata
`lance-encoding:blob`, and the extension type `lance.blob.v2`. Both are delivered as large_binary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import lance

_ENCODING = b"lance-encoding:blob"
_EXTENSION = "lance.blob.v2"
# Kept on what is delivered, so that rows which are written to another table become blobs there.
_METADATA = {_ENCODING: b"true"}


def blob_fields(schema: pa.Schema, columns: list[str]) -> dict[str, pa.Field]:
    """Those of the columns that are blobs or structs with blobs in them, as they are delivered."""
    fields = _fields(schema, columns)
    return {column: _delivered(field).with_name(column) for column, field in fields.items() if _has_blob(field)}


def has_blob_files(schema: pa.Schema, columns: Sequence[str]) -> bool:
    """Whether one of the columns has blobs that may lie in files of their own, beside the data files."""
    roots = {column.partition(".")[0] for column in columns}
    return any(_has_extension(field) for field in schema if field.name in roots)


def unreadable_blobs(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Those of the columns that have blobs inside of lists or maps: Lance reads no bytes from there."""
    fields = _fields(schema, columns)
    return [column for column, field in fields.items() if _has_nested_blob(field, is_inside=False)]


def read_blobs(dataset: lance.LanceDataset, rows: np.ndarray, column: str) -> pa.Array:
    """The values of one column of `blob_fields`.

    Args:
        dataset: an open table version.
        rows: int64[n] sorted row offsets; repeats are allowed.
        column: its name; `a.b` is a field of a struct.
    """
    field = _fields(dataset.schema, [column])[column]
    indices = rows.tolist()
    if _is_blob(field):
        return _payloads(dataset, indices, column)
    root, *path = column.split(".")
    values = dataset.take(indices, columns=[root]).column(0).combine_chunks()
    for name in path:
        values = pc.struct_field(values, name)
    return _filled(values, field, column, dataset, indices)


def _filled(
    values: pa.StructArray, field: pa.Field, path: str, dataset: lance.LanceDataset, indices: list[int]
) -> pa.StructArray:
    """A struct with the bytes of its blobs in place of their descriptors."""
    fields, children = [], []
    for child in field.type:
        below = f"{path}.{child.name}"
        if _is_blob(child):
            children.append(_payloads(dataset, indices, below))
        elif _has_blob(child):
            children.append(_filled(values.field(child.name), child, below, dataset, indices))
        else:
            children.append(values.field(child.name))
        fields.append(_delivered(child))
    return pa.StructArray.from_arrays(children, fields=fields, mask=values.is_null())


def _payloads(dataset: lance.LanceDataset, indices: list[int], column: str) -> pa.LargeBinaryArray:
    found = dataset.read_blobs(column, indices=indices, preserve_order=True)
    return pa.array([payload for _, payload in found], pa.large_binary())


def _fields(schema: pa.Schema, columns: Sequence[str]) -> dict[str, pa.Field]:
    """The fields of columns, and of fields of structs, by name; without those of meta columns."""
    roots = {field.name: field for field in schema}
    fields = {}
    for column in columns:
        root, *path = column.split(".")
        field = roots.get(root)
        if field is not None:
            for name in path:
                field = field.type.field(name)
            fields[column] = field
    return fields


def _is_blob(field: pa.Field) -> bool:
    return (field.metadata or {}).get(_ENCODING) == b"true" or getattr(field.type, "extension_name", "") == _EXTENSION


def _has_blob(field: pa.Field) -> bool:
    return _is_blob(field) or (pa.types.is_struct(field.type) and any(_has_blob(child) for child in field.type))


def _has_extension(field: pa.Field) -> bool:
    if getattr(field.type, "extension_name", "") == _EXTENSION:
        return True
    return pa.types.is_struct(field.type) and any(_has_extension(child) for child in field.type)


def _has_nested_blob(field: pa.Field, *, is_inside: bool) -> bool:
    kind = field.type
    if is_inside and _has_blob(field):
        return True
    is_inside = is_inside or not pa.types.is_struct(kind)
    inner = [kind.field(i) for i in range(kind.num_fields)] if not isinstance(kind, pa.BaseExtensionType) else []
    return any(_has_nested_blob(child, is_inside=is_inside) for child in inner)


def _delivered(field: pa.Field) -> pa.Field:
    if _is_blob(field):
        return pa.field(field.name, pa.large_binary(), field.nullable, _METADATA)
    if pa.types.is_struct(field.type):
        return field.with_type(pa.struct([_delivered(child) for child in field.type]))
    return field
