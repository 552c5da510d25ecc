"""Struct columns that a table stores packed: all fields of a row together.

Lance reads a packed struct as a whole. Asked for one of its fields it gives the values of another one, or none that were
ever stored, so a field is taken out of the whole struct here, and no filter may have Lance read one.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_MARKS = (b"lance-encoding:packed", b"packed")


def packed_paths(fields: Any, prefix: str = "") -> list[str]:
    """The outermost packed structs of a schema, by path: `a.b` is the field b of the struct column a."""
    paths: list[str] = []
    for field in fields:
        if pa.types.is_struct(field.type):
            path = prefix + field.name
            paths += [path] if _is_packed(field) else packed_paths(field.type, f"{path}.")
    return paths


def holder_of(column: str, packed: list[str]) -> str:
    """What is read for a column: the packed struct that it is a field of, else the column itself."""
    return next((path for path in packed if column.startswith(f"{path}.")), column)


def _is_packed(field: pa.Field) -> bool:
    metadata = field.metadata or {}
    return any(metadata.get(mark, b"").lower() == b"true" for mark in _MARKS)
