"""What each column type becomes in batches: `docs/types.md`, against a scan of the table."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from lance.arrow import bfloat16_array
from ray.data.block import BlockAccessor

from ray_lance_stream.blobs import blob_fields, unreadable_blobs
from ray_lance_stream.columns import (
    NullInTensorError,
    TensorCollateFn,
    batch_schema,
    refuse_nulls,
    with_tensor_columns,
)
from ray_lance_stream.decode import decoded
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.selection import check_columns
from ray_lance_stream.take import take_rows
from tests.column_types import COLUMNS, NUM_ROWS, columns_of, slug, write

DOCS = Path(__file__).parents[2] / "docs" / "types.md"
NULLS_AT = {"none": set(), "first": {0}, "middle": {5, 6}, "last": {NUM_ROWS - 1}, "all": set(range(NUM_ROWS))}


def scan(dataset: lance.LanceDataset) -> pa.Table:
    return dataset.scanner(blob_handling="all_binary").to_table()


def to_numpy(table: pa.Table) -> dict[str, np.ndarray]:
    """As `iter_batches` gives them."""
    return BlockAccessor.for_block(table).to_batch_format("numpy")


def to_torch(table: pa.Table, dtypes: Any = None) -> dict[str, torch.Tensor]:
    """As `iter_torch_batches` gives them, from a chunk."""
    collate = TensorCollateFn(dtypes)
    collate.prepare(table.schema)
    tensors = with_tensor_columns(table)
    refuse_nulls(tensors)
    return collate(tensors)


# The table in the docs


def numpy_cell(array: np.ndarray) -> str:
    cell = f"{array.dtype} [{', '.join(['B', *map(str, array.shape[1:])])}]"
    return f"{cell} of {type(array[5]).__name__}" if array.dtype == object else cell


def nulls_cell(table: pa.Table) -> str:
    try:
        array = to_numpy(with_tensor_columns(table))["c"]
    except NullInTensorError:
        return "error"
    value = array[5]
    name = "None" if value is None else "NaT" if np.issubdtype(array.dtype, np.datetime64) else str(value)
    return f"{array.dtype}, {name.replace('nan', 'NaN')}"


def pandas_cell(table: pa.Table) -> str:
    series = BlockAccessor.for_block(table).to_pandas()["c"]
    if isinstance(series.dtype, pd.ArrowDtype):
        assert series.dtype.pyarrow_dtype == table.schema.field("c").type
        return "ArrowDtype"
    return f"object of {type(series[5]).__name__}" if series.dtype == object else str(series.dtype)


def arrow_cell(kind: pa.DataType) -> str:
    if "ArrowTensorType" in str(kind):
        return f"tensor {list(kind.shape)} of {kind.value_type}"
    return str(kind)


def torch_cell(table: pa.Table) -> str:
    try:
        tensor = to_torch(table)["c"]
    except (ConfigError, NullInTensorError):
        return "error"
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(['B', *map(str, tensor.shape[1:])])}]"


def chunk(directory: Path, key: str, null_at: set[int]) -> pa.Table:
    """What is read of a table with one column of a type."""
    dataset = write(directory / str(len(null_at)), {key: COLUMNS[key](null_at)}, "2.2")
    return take_rows(dataset, np.arange(NUM_ROWS), [slug(key)]).rename_columns(["c"])


def row_of(key: str, directory: Path) -> list[str]:
    """A row of the table, from what a read gives."""
    table = chunk(directory, key, set())
    tensors = with_tensor_columns(table)
    return [
        key,
        numpy_cell(to_numpy(tensors)["c"]),
        nulls_cell(chunk(directory, key, {5})),
        pandas_cell(tensors),
        arrow_cell(tensors.schema.field("c").type),
        torch_cell(table),
    ]


def documented() -> dict[str, list[str]]:
    """The rows of the table by type."""
    section = DOCS.read_text().partition("\n## By type\n")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "`" in line]
    return {row[0]: row for row in rows if len(row) == 6}


def test_the_table_in_the_docs(tmp_path: Path) -> None:
    rows = documented()
    assert list(rows) == list(COLUMNS)
    for number, (key, row) in enumerate(rows.items()):
        assert row_of(key, tmp_path / str(number)) == row


# list[Any], against a scan of the table


def values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Python values that compare; NaN by its name, since it is not equal to itself."""

    def value(found: Any) -> Any:
        if isinstance(found, np.ndarray):
            return value(found.tolist())
        if isinstance(found, list):
            return [value(one) for one in found]
        if isinstance(found, float | np.floating) or type(found).__name__ == "BFloat16":
            number = float(str(found))
            return "NaN" if math.isnan(number) else number
        return found

    return [value(found) for found in column.to_pylist()]


def reshaped(key: str, lists: list[Any]) -> list[Any]:
    """The values of a scan in the shape of a tensor, of which Arrow's Python values know nothing."""
    shape, axes = {
        "arrow.fixed_shape_tensor (float, 2 x 3)": ((2, 3), (0, 1)),
        "arrow.fixed_shape_tensor (int32, 2 x 3, transposed)": ((2, 3), (1, 0)),
        "arrow.fixed_shape_tensor (bool, 2 x 1)": ((2, 1), (0, 1)),
    }.get(key, (None, None))
    return lists if shape is None else [np.reshape(one, shape).transpose(axes).tolist() for one in lists]


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
@pytest.mark.parametrize("nulls", NULLS_AT)
def test_values_are_those_of_a_scan(tmp_path: Path, version: str, nulls: str) -> None:
    columns = columns_of(version, NULLS_AT[nulls])
    dataset = write(tmp_path, columns, version)
    assert len(dataset.get_fragments()) == 3
    rows = np.array([11, 0, 5, 5, 3, 6, 1, 10, 7])
    names = dataset.schema.names

    table = take_rows(dataset, rows, names)

    scanned = scan(dataset)
    for key in columns:
        name = slug(key)
        in_order = values(scanned[name])
        expected = [in_order[row] for row in rows]
        column = table.select([name])
        if documented()[key][2] == "error" and nulls != "none":
            with pytest.raises(NullInTensorError, match=f"column '{name}' of type .* holds a null") as info:
                with_tensor_columns(column)
            assert expected[info.value.row] is None
            continue
        got = with_tensor_columns(column)
        assert got.schema == batch_schema(column.schema)
        assert got[name].null_count == (len(rows) if key == "null" else sum(row in NULLS_AT[nulls] for row in rows))
        assert values(got[name]) == reshaped(key, expected), key
        check_numpy(to_numpy(got)[name], got[name], key)
        check_torch(got, column.schema, key)


def check_numpy(array: np.ndarray, column: pa.ChunkedArray, key: str) -> None:
    """The same values, with NaN, NaT or None for null."""
    assert len(array) == len(column)
    if "ArrowTensorType" in str(column.type):
        assert array.tolist() == values(column)
        assert array.dtype != object
    elif array.dtype.kind == "f":
        found = [math.nan if one is None else one for one in column.to_pylist()]
        np.testing.assert_array_equal(array, np.array(found, array.dtype))
    elif key == "arrow.bool8":
        assert array.tolist() == column.to_pylist()
    else:
        storage = column.combine_chunks().storage if isinstance(column.type, pa.BaseExtensionType) else column
        assert pa.array(array, storage.type, from_pandas=True).to_pylist() == storage.to_pylist(), key


def check_torch(table: pa.Table, schema: pa.Schema, key: str) -> None:
    """Numpy's values, or an error that names the column."""
    collate, name = TensorCollateFn(), slug(key)
    if documented()[key][5] == "error":
        with pytest.raises(ConfigError, match=rf"'{name}' of type .*drop it with columns=.*collate_fn"):
            collate.prepare(schema)
        return
    collate.prepare(schema)
    if table[name].null_count:
        with pytest.raises(NullInTensorError, match=f"column '{name}' of type .* holds a null.*collate_fn") as info:
            refuse_nulls(table)
        assert table[name][info.value.row].as_py() is None
        return
    refuse_nulls(table)
    tensor = collate(table)[name]
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.float().numpy(), to_numpy(table)[name].astype(np.float32))


@pytest.mark.parametrize("row", [0, 5, 11])
@pytest.mark.parametrize("kind", [pa.list_(pa.float32(), 3), pa.list_(pa.list_(pa.float32(), 3), 2)], ids=str)
def test_a_null_inside_a_tensor_names_its_row(tmp_path: Path, kind: pa.DataType, row: int) -> None:
    vectors = [[0.0, None if i == row else 1.0, 2.0] for i in range(NUM_ROWS)]
    nested = pa.types.is_fixed_size_list(kind.value_type)
    dataset = write(tmp_path, {"v": pa.array([[v, v] if nested else v for v in vectors], kind)}, "2.1")
    with pytest.raises(NullInTensorError, match=r"column 'v' of type fixed_size_list.* holds a null") as info:
        with_tensor_columns(take_rows(dataset, np.arange(NUM_ROWS), ["v"]))
    assert info.value.row == row


def test_a_null_in_a_slice_names_its_row() -> None:
    vectors = pa.array([None, [1.0], [2.0], None], pa.list_(pa.float32(), 1))
    with pytest.raises(NullInTensorError) as info:
        with_tensor_columns(pa.table({"v": vectors}).slice(1))
    assert info.value.row == 2


@pytest.mark.parametrize("kind", ["list", "struct"])
def test_bfloat16_inside_of_others_is_float32(kind: str) -> None:
    numbers = bfloat16_array([1.5, None, 3.0, 4.0, 5.0])
    if kind == "list":
        column = pa.ListArray.from_arrays(pa.array([0, 2, None, 3, 5], pa.int32()), numbers)
        expected = [[1.5, None], [3.0], None, [4.0, 5.0]]
    else:
        column = pa.StructArray.from_arrays([numbers], ["x"], mask=pa.array([False, False, True, False, False]))
        expected = [{"x": 1.5}, {"x": None}, None, {"x": 4.0}, {"x": 5.0}]
    for start in (0, 1):
        table = pa.table({"c": column}).slice(start)
        assert decoded(table)["c"].to_pylist() == expected[start:]


def test_bfloat16_keeps_special_values() -> None:
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-126, 3.3895e38, 1e-40]
    got = to_torch(decoded(pa.table({"x": bfloat16_array(numbers)})))["x"]
    assert got.dtype == torch.bfloat16
    expected = torch.tensor(numbers, dtype=torch.bfloat16)
    assert got[4].isnan()
    bits = [i for i in range(len(numbers)) if i != 4]
    assert torch.equal(got[bits].view(torch.int16), expected[bits].view(torch.int16))


# Memory


def address_of(column: pa.ChunkedArray) -> int:
    array = column.chunk(0)
    while array.type != pa.float32():
        array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array.values
    return array.buffers()[1].address


@pytest.mark.parametrize(
    "key",
    [
        "fixed_size_list<float>[3]",
        "fixed_size_list<fixed_size_list<float>[3]>[2]",
        "arrow.fixed_shape_tensor (float, 2 x 3)",
    ],
)
def test_tensors_are_no_copies(key: str) -> None:
    table = pa.table({"v": COLUMNS[key](set())})
    got = with_tensor_columns(table)
    assert address_of(got["v"]) == address_of(table["v"])
    array = to_numpy(got.slice(3, 4))["v"]
    assert array.__array_interface__["data"][0] == address_of(table["v"]) + 3 * array[0].nbytes


def read_only(table: pa.Table) -> pa.Table:
    """As it comes from the object store."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue().to_pybytes()).read_all()


def test_torch_has_memory_of_its_own() -> None:
    columns = {slug(key): make(set()) for key, make in COLUMNS.items() if documented()[key][5] != "error"}
    table = read_only(decoded(pa.table(columns)))
    before = {name: tensor.clone() for name, tensor in to_torch(table).items()}
    for tensor in to_torch(table).values():
        tensor.logical_not_() if tensor.dtype == torch.bool else tensor.view(torch.uint8).add_(1)
    for name, tensor in to_torch(table).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


# dtypes


def test_dtypes() -> None:
    table = decoded(pa.table({"i": [1, 2], "f": [1.5, 2.5], "b": bfloat16_array([1.0, 2.0])}))
    kinds = {"i": torch.int64, "f": torch.float64, "b": torch.bfloat16}
    for dtypes, expected in (
        (None, kinds),
        (torch.float32, dict.fromkeys(kinds, torch.float32)),
        ({"i": torch.int32, "f": torch.float16, "b": torch.float32}, None),
        ({"i": torch.uint8}, {**kinds, "i": torch.uint8}),
    ):
        got = to_torch(table, dtypes)
        assert {name: tensor.dtype for name, tensor in got.items()} == (expected or dtypes)
        assert got["i"].tolist() == [1, 2]
        assert got["b"].tolist() == [1.0, 2.0]


def test_a_dtype_for_no_column() -> None:
    with pytest.raises(ConfigError, match=r"dtypes must name columns of the stream, got \['x'\]: they are \['i'\]"):
        to_torch(pa.table({"i": [1]}), {"x": torch.int8})


# Tables of many columns


def wide(num_columns: int) -> pa.Table:
    vectors = pa.FixedSizeListArray.from_arrays(np.zeros(8, np.float32), 2)
    words = pa.array(["a", "b", "a", "b"]).dictionary_encode()
    columns = [vectors, words, pa.array([1, 2, 3, 4])]
    return pa.table({f"c{number}": columns[number % 3] for number in range(num_columns)})


def test_columns_are_changed_at_once() -> None:
    table = wide(6)
    got = with_tensor_columns(decoded(table))
    assert got.column_names == table.column_names
    assert got["c1"].type == pa.string()
    assert to_numpy(got)["c3"].shape == (4, 2)
    assert got["c5"].to_pylist() == [1, 2, 3, 4]


def test_time_grows_with_the_columns_and_not_with_their_square() -> None:
    few, many = 400, 3200  # squares would take 64 times as long

    def cpu_s(num_columns: int) -> float:
        dictionaries, schema = wide(num_columns), wide(num_columns).schema
        decoded(dictionaries)  # warm
        begun_s = time.process_time()
        batch_schema(decoded(dictionaries).schema)
        blob_fields(schema, schema.names)
        unreadable_blobs(schema, schema.names)
        check_columns(SimpleNamespace(schema=schema), schema.names, "t")  # type: ignore[arg-type]
        return time.process_time() - begun_s

    assert min(cpu_s(many) for _ in range(2)) < 32 * max(cpu_s(few) for _ in range(3))
