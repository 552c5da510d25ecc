"""Blob columns: their bytes, whatever is read with them."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.blob import blob_array, blob_field

from ray_lance_stream.blobs import unreadable_blobs
from ray_lance_stream.source import projected_schema, sample_row_bytes, table_ref
from ray_lance_stream.take import take_rows

NUM_ROWS = 12
DELETED = (1, 6)
LEGACY = {"lance-encoding:blob": "true"}


def payload(i: int) -> bytes | None:
    """Some are empty, one is null."""
    return None if i == 3 else bytes([i]) * (i % 4)


@pytest.fixture(scope="module", params=[("legacy", "2.0"), ("legacy", "2.2"), ("v2", "2.2")], ids=" ".join)
def blobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    """A table with a blob column, one inside of structs, and others; in 3 fragments, with rows deleted."""
    kind, version = request.param
    payloads = [payload(i) for i in range(NUM_ROWS)]
    blob = blob_array(payloads) if kind == "v2" else pa.array(payloads, pa.large_binary())
    field = blob_field("blob") if kind == "v2" else pa.field("blob", blob.type, metadata=LEGACY)
    ids = pa.array(range(NUM_ROWS))
    inner = pa.StructArray.from_arrays([blob, ids], fields=[field, pa.field("id", pa.int64())])
    outer = pa.StructArray.from_arrays([inner, ids], ["inner", "id"])
    schema = pa.schema([pa.field("id", pa.int64()), field, pa.field("s", outer.type)])
    table = pa.Table.from_arrays([ids, blob, outer], schema=schema)
    path = str(tmp_path_factory.mktemp("blobs") / "t.lance")
    dataset = lance.write_dataset(table, path, data_storage_version=version, max_rows_per_file=5)
    dataset.delete(f"id in {DELETED}")
    return dataset


@pytest.mark.parametrize(
    "columns",
    [["blob"], ["id", "blob"], ["blob", "id", "_rowid"], ["s"], ["s.inner", "id"], ["s.id", "blob", "s.inner.blob"]],
    ids=str,
)
@pytest.mark.parametrize("rows", [[], [9, 0, 2, 2, 5], [0, 1, 2, 2, 9]], ids=str)
def test_blobs_are_their_bytes(blobs: lance.LanceDataset, columns: list[str], rows: list[int]) -> None:
    got = take_rows(blobs, np.array(rows, np.int64), columns)

    live = [i for i in range(NUM_ROWS) if i not in DELETED]
    payloads = [payload(live[row]) for row in rows]
    inner = [{"blob": data, "id": live[row]} for data, row in zip(payloads, rows, strict=True)]
    numbers = [live[row] for row in rows]
    expected = {
        "id": numbers,
        "blob": payloads,
        "s": [{"inner": one, "id": one["id"]} for one in inner],
        "s.inner": inner,
        "s.id": numbers,
        "s.inner.blob": payloads,
    }
    assert got.column_names == columns
    for name in set(columns) - {"_rowid"}:
        assert got[name].to_pylist() == expected[name]
    assert got.schema == projected_schema(table_ref(blobs.uri), columns)


def test_long_runs_of_rows_with_blobs(tmp_path: Path) -> None:
    data = [bytes([i % 256]) for i in range(5000)]
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("blob", pa.large_binary(), metadata=LEGACY)])
    dataset = lance.write_dataset(pa.table([range(5000), data], schema=schema), str(tmp_path / "t.lance"))
    rows = np.arange(100, 4900)
    got = take_rows(dataset, rows, ["id", "blob"])
    assert got["id"].to_pylist() == rows.tolist()
    assert got["blob"].to_pylist() == data[100:4900]


def test_blobs_that_are_written_again_are_blobs(blobs: lance.LanceDataset, tmp_path: Path) -> None:
    got = take_rows(blobs, np.arange(5), ["blob"])
    again = lance.write_dataset(got, str(tmp_path / "again.lance"), data_storage_version="2.2")
    assert again.schema.field("blob").type.extension_name == "lance.blob.v2"
    assert again.scanner(blob_handling="all_binary").to_table()["blob"].to_pylist() == got["blob"].to_pylist()


def test_blobs_inside_of_lists_are_refused(tmp_path: Path) -> None:
    blob = pa.field("img", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    in_lists = pa.list_(pa.struct([blob]))
    fields = {"s": pa.struct([blob]), "l": in_lists, "d": pa.struct([("x", in_lists)])}
    schema = pa.schema([blob, *fields.items()])
    names = ["img", "s", "s.img", "l", "d", "d.x"]
    assert unreadable_blobs(schema, names) == ["l", "d", "d.x"]


def test_sizes_of_rows_count_blobs(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("blob", pa.large_binary(), metadata=LEGACY)])
    dataset = lance.write_dataset(pa.table([[bytes(10_000)] * 20], schema=schema), str(tmp_path / "t.lance"))
    assert sample_row_bytes(table_ref(dataset.uri), ["blob"], 20) >= 10_000
