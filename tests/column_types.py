"""One column of each type of `docs/types.md`."""

from __future__ import annotations

import datetime as dt
import math
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.arrow import bfloat16_array
from lance.blob import blob_array, blob_field

NUM_ROWS = 12
FRAGMENT_ROWS = 5  # 3 fragments
LEGACY_BLOB = {"lance-encoding:blob": "true"}


def plain(kind: pa.DataType, value: Callable[[int], Any]) -> Callable[[set[int]], pa.Array]:
    """A column with null at the given rows."""
    return lambda null_at: pa.array([None if i in null_at else value(i) for i in range(NUM_ROWS)], kind)


def extension(kind: pa.DataType, value: Callable[[int], Any]) -> Callable[[set[int]], pa.Array]:
    return lambda null_at: pa.ExtensionArray.from_storage(kind, plain(kind.storage_type, value)(null_at))


def bfloat16(null_at: set[int]) -> pa.Array:
    return bfloat16_array([None if i in null_at else i / 2 for i in range(NUM_ROWS)])


def bfloat16_vector(null_at: set[int]) -> pa.Array:
    numbers = bfloat16_array([i / 2 for i in range(2 * NUM_ROWS)])
    return pa.FixedSizeListArray.from_arrays(numbers, 2, mask=pa.array([i in null_at for i in range(NUM_ROWS)]))


def bfloat16_list(null_at: set[int]) -> pa.Array:
    offsets = pa.array([2 * i for i in range(NUM_ROWS + 1)], pa.int32())
    numbers = bfloat16_array([i / 2 for i in range(2 * NUM_ROWS)])
    return pa.ListArray.from_arrays(offsets, numbers, mask=pa.array([i in null_at for i in range(NUM_ROWS)]))


def payload(i: int) -> bytes:
    return bytes([i]) * (i % 4)


STRUCT = pa.struct({"a": pa.int64(), "b": pa.string()})
# By first cell of the table.
COLUMNS: dict[str, Callable[[set[int]], pa.Array]] = {
    **{
        str(kind): plain(kind, int)
        for kind in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("us", "UTC")),
            *(pa.date32(), pa.time32("s"), pa.time64("us"), pa.duration("us")),
        )
    },
    "date64[ms]": plain(pa.date64(), lambda i: dt.date(2020, 1, 1 + i)),
    "halffloat": plain(pa.float16(), lambda i: np.float16(i / 2)),
    "float": plain(pa.float32(), lambda i: math.nan if i % 6 == 1 else i / 2),
    "double": plain(pa.float64(), lambda i: i / 2),
    "lance.bfloat16": bfloat16,
    "bool": plain(pa.bool_(), lambda i: i % 2 == 0),
    "arrow.bool8": extension(pa.bool8(), lambda i: i % 2),
    "decimal128(10, 2)": plain(pa.decimal128(10, 2), Decimal),
    "decimal256(50, 2)": plain(pa.decimal256(50, 2), Decimal),
    "string": plain(pa.string(), lambda i: "s" * (i % 3)),
    "large_string": plain(pa.large_string(), str),
    "string_view": plain(pa.string_view(), str),
    "binary": plain(pa.binary(), payload),
    "large_binary": plain(pa.large_binary(), payload),
    "binary_view": plain(pa.binary_view(), payload),
    "fixed_size_binary[2]": plain(pa.binary(2), lambda i: bytes([i, 0])),
    "blob (large_binary)": plain(pa.large_binary(), payload),
    "blob (lance.blob.v2)": lambda null_at: blob_array([None if i in null_at else payload(i) for i in range(NUM_ROWS)]),
    "fixed_size_list<float>[3]": plain(pa.list_(pa.float32(), 3), lambda i: [i, i + 1, i + 2]),
    "fixed_size_list<halffloat>[3]": plain(pa.list_(pa.float16(), 3), lambda i: [np.float16(i)] * 3),
    "fixed_size_list<lance.bfloat16>[2]": bfloat16_vector,
    "fixed_size_list<bool>[2]": plain(pa.list_(pa.bool_(), 2), lambda i: [i % 2 == 0, i % 3 == 0]),
    "fixed_size_list<fixed_size_list<float>[3]>[2]": plain(
        pa.list_(pa.list_(pa.float32(), 3), 2), lambda i: [[i, 1, 2], [3, 4, 5]]
    ),
    "arrow.fixed_shape_tensor (float, 2 x 3)": extension(
        pa.fixed_shape_tensor(pa.float32(), [2, 3]), lambda i: [i, 1, 2, 3, 4, 5]
    ),
    "arrow.fixed_shape_tensor (int32, 2 x 3, transposed)": extension(
        pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0]), lambda i: [i, 1, 2, 3, 4, 5]
    ),
    "arrow.fixed_shape_tensor (bool, 2 x 1)": extension(
        pa.fixed_shape_tensor(pa.bool_(), [2, 1]), lambda i: [i % 2 == 0, i % 3 == 0]
    ),
    "fixed_size_list<timestamp[us]>[2]": plain(pa.list_(pa.timestamp("us"), 2), lambda i: [i, i]),
    "list<float>": plain(pa.list_(pa.float32()), lambda i: [float(i)] * (i % 4)),
    "list<lance.bfloat16>": bfloat16_list,
    "large_list<int64>": plain(pa.large_list(pa.int64()), lambda i: [i] * (i % 4)),
    "list<string>": plain(pa.list_(pa.string()), lambda i: ["s"] * (i % 4)),
    "list<list<int32>>": plain(pa.list_(pa.list_(pa.int32())), lambda i: [[i], []] * (i % 3)),
    "list<struct>": plain(pa.list_(STRUCT), lambda i: [{"a": i, "b": "s"}] * (i % 3)),
    "struct": plain(STRUCT, lambda i: {"a": i, "b": "s"}),
    "map<string, int64>": plain(pa.map_(pa.string(), pa.int64()), lambda i: [("a", i)]),
    "dictionary<int64>": lambda null_at: plain(pa.int64(), lambda i: i % 3)(null_at).dictionary_encode(),
    "dictionary<string>": lambda null_at: plain(pa.string(), lambda i: "xyz"[i % 3])(null_at).dictionary_encode(),
    "arrow.uuid": extension(pa.uuid(), lambda i: uuid.UUID(int=i).bytes),
    "arrow.json": extension(pa.json_(), lambda i: f'{{"a":{i}}}'),
    "null": lambda null_at: pa.nulls(NUM_ROWS),
}
SINCE = {"map<string, int64>": "2.2", "blob (lance.blob.v2)": "2.2"}
NO_NULLS_IN_2_0 = {"struct"}


def slug(key: str) -> str:
    """A name for a column of a type."""
    return re.sub(r"\W+", "_", key)


def write(path: Path, columns: dict[str, pa.Array], version: str) -> lance.LanceDataset:
    """A table with 3 fragments, from columns by type."""
    fields = []
    for key, array in columns.items():
        metadata = LEGACY_BLOB if key == "blob (large_binary)" else None
        field = pa.field(slug(key), array.type, metadata=metadata)
        fields.append(blob_field(slug(key)) if key == "blob (lance.blob.v2)" else field)
    table = pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))
    options = {"data_storage_version": version, "max_rows_per_file": FRAGMENT_ROWS}
    return lance.write_dataset(table, str(path / "t.lance"), **options)


def columns_of(version: str, null_at: set[int]) -> dict[str, pa.Array]:
    """All columns that a file version can hold."""
    return {
        name: make(null_at)
        for name, make in COLUMNS.items()
        if SINCE.get(name, "2.0") <= version and not (version == "2.0" and null_at and name in NO_NULLS_IN_2_0)
    }
