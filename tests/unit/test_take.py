"""Rows by offset: order, repeats, deletions, nulls, ranges, failures."""

from __future__ import annotations

import math
import pickle
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_lance_stream import selection
from ray_lance_stream import take as take_module
from ray_lance_stream.errors import ConfigError, ReadError, TableError, VersionNotFoundError
from ray_lance_stream.failures import attempt, guarded, is_passing, is_refusal, redact, secrets_of
from ray_lance_stream.filters import check_filter
from ray_lance_stream.selection import scan_offsets
from ray_lance_stream.take import take_rows

FILE_VERSIONS = ["2.0", "2.1", "2.2"]
UNEVEN_ROWS = [1, 40, 3, 97, 10, 60, 89]  # 300 rows in 7 fragments


def write(path: Path, table: pa.Table, sizes: list[int], **options: Any) -> lance.LanceDataset:
    """A dataset with one fragment per size."""
    start = 0
    for size in sizes:
        lance.write_dataset(table.slice(start, size), str(path), mode="append" if start else "create", **options)
        start += size
    return lance.dataset(str(path))


def ids(num_rows: int) -> pa.Table:
    return pa.table({"id": np.arange(num_rows), "name": [f"n{i}" for i in range(num_rows)]})


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    """300 rows in 7 fragments, without the first row, the last, a whole fragment and some more."""
    dataset = write(tmp_path_factory.mktemp("t") / "uneven.lance", ids(300), UNEVEN_ROWS)
    dataset.delete("id in (0, 1, 50, 140, 299) or (id >= 41 and id < 44)")
    return dataset


# Order and repeats


@given(rows=st.lists(st.integers(0, 290), max_size=50))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_come_in_the_order_asked_for_with_repeats(uneven: lance.LanceDataset, rows: list[int]) -> None:
    live = uneven.to_table()["id"].to_pylist()

    got = take_rows(uneven, np.array(rows, dtype=np.int64), ["name", "id"])

    assert got.column_names == ["name", "id"]
    assert got["id"].to_pylist() == [live[row] for row in rows]
    assert got["name"].to_pylist() == [f"n{live[row]}" for row in rows]
    assert all(column.num_chunks <= 1 for column in got.columns)


def test_order_across_500_fragments(tmp_path: Path) -> None:
    dataset = lance.write_dataset(ids(1500), str(tmp_path / "t.lance"), max_rows_per_file=3)
    assert len(dataset.get_fragments()) == 500
    rows = np.random.default_rng(0).integers(0, 1500, 3000)

    assert take_rows(dataset, rows, ["id"])["id"].to_numpy().tolist() == rows.tolist()


def test_no_rows_keep_the_schema(uneven: lance.LanceDataset) -> None:
    assert take_rows(uneven, np.empty(0, np.int64), ["name"]).schema == pa.schema({"name": pa.string()})


# Ranges


# The second reader, for scattered rows


class Reader:
    """A second reader that counts its reads and answers, or fails, as told."""

    def __init__(self, take: Any) -> None:
        self.take = lambda rows, columns: self.reads.append(len(rows)) or take(rows, columns=columns)
        self.reads: list[int] = []


@pytest.mark.parametrize(
    ("rows", "reads"),
    [
        (np.arange(0, 290, 2), [145]),
        (np.arange(289, 0, -3), [97]),
        (np.arange(take_module.MAX_URING_RUN_ROWS), []),
        (np.empty(0, np.int64), []),
    ],
)
def test_scattered_rows_are_read_by_the_second_reader(
    uneven: lance.LanceDataset, rows: np.ndarray, reads: list[int]
) -> None:
    second = Reader(uneven.take)

    got = take_rows(uneven, rows, ["name"], lambda: second)

    assert second.reads == reads
    assert got == take_rows(uneven, rows, ["name"])


@pytest.mark.parametrize(
    "failure", [OSError("operation not permitted"), type("PanicException", (BaseException,), {})()]
)
def test_rows_that_the_second_reader_cannot_read_are_read_by_the_first(
    uneven: lance.LanceDataset, failure: BaseException
) -> None:
    def fail(rows: list[int], columns: list[str]) -> None:
        raise failure

    second, rows = Reader(fail), np.arange(0, 290, 2)

    assert take_rows(uneven, rows, ["name"], lambda: second) == take_rows(uneven, rows, ["name"])
    assert second.reads == [145]


# Dense rows, read with those between them


@pytest.mark.parametrize("stable_ids", [False, True])
@pytest.mark.parametrize("deleted", ["id % 3 = 1", "id >= 100 and id < 260", "id < 90"])
def test_dense_rows_are_those_of_take(tmp_path: Path, deleted: str, stable_ids: bool) -> None:
    values = [None if i % 7 == 0 else i / 2 for i in range(300)]
    table = (
        ids(300)
        .append_column("value", pa.array(values))
        .append_column("even", pa.array([i % 2 == 0 for i in range(300)]))
    )
    dataset = write(tmp_path / "t", table, UNEVEN_ROWS, enable_stable_row_ids=stable_ids)
    dataset.delete(deleted)
    rows = np.random.default_rng(0).permutation(dataset.count_rows())[:80]
    rows = np.append(rows, rows[:5])

    got = take_rows(dataset, rows, ["value", "even", "id"])

    assert take_module._is_dense(dataset.schema, rows, ["value", "even", "id"])
    assert got == dataset.take(rows.tolist(), columns=["value", "even", "id"])


@pytest.mark.parametrize(
    ("columns", "step", "dense"),
    [
        (["id"], take_module.MAX_DENSE_BYTES // 8, True),
        (["id"], take_module.MAX_DENSE_BYTES // 8 + 1, False),
        (["id", "id2"], take_module.MAX_DENSE_BYTES // 16, True),
        (["id", "id2"], take_module.MAX_DENSE_BYTES // 8, False),
        (["name"], 1, False),
        (["_rowid"], 1, False),
    ],
)
def test_what_is_dense(columns: list[str], step: int, dense: bool) -> None:
    schema = ids(1).append_column("id2", pa.array([0])).schema
    rows = np.arange(1000) * step

    assert take_module._is_dense(schema, rows, columns) is dense


@given(rows=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40), shift=st.integers(0, 62))
def test_sorting_can_be_undone(rows: list[int], shift: int) -> None:
    given_rows = np.array(rows, dtype=np.int64) >> shift

    sorted_rows, restore = take_module._sorted(given_rows)

    assert sorted_rows.tolist() == sorted(given_rows.tolist())
    assert (sorted_rows if restore is None else sorted_rows[restore]).tolist() == given_rows.tolist()
    assert (restore is None) is (given_rows.tolist() == sorted(given_rows.tolist()))


@pytest.fixture(scope="module", params=["legacy", *FILE_VERSIONS])
def long_table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    path = tmp_path_factory.mktemp("t") / "long.lance"
    dataset = write(path, ids(6000), [700, 2300, 3000], data_storage_version=request.param)
    dataset.delete("id = 0 or id = 699 or id % 500 = 3")
    return dataset


@pytest.mark.parametrize(
    ("runs", "as_ranges"),
    [
        ([(0, 5000)], True),
        ([(10, 2100), (3000, 5200)], True),
        ([(3000, 5200), (0, 2100)], True),
        ([(3900, 5986)], True),  # up to the end
        ([(0, 3000), (2500, 5500)], False),  # repeats break the runs
        ([(0, 3000), (3700, 3710), (3720, 3730)], False),
    ],
)
def test_long_runs_are_read_as_ranges_with_the_same_result(
    long_table: lance.LanceDataset, runs: list[tuple[int, int]], as_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = long_table.to_table()["id"].to_numpy()
    assert len(live) == 5986
    rows = np.concatenate([np.arange(*run) for run in runs])
    takes = []
    take = lance.LanceDataset.take
    monkeypatch.setattr(lance.LanceDataset, "take", lambda *args, **kw: takes.append(1) or take(*args, **kw))

    got = take_rows(long_table, rows, ["name", "id"])

    assert got["id"].to_numpy().tolist() == live[rows].tolist()
    assert got["name"].to_pylist() == [f"n{i}" for i in live[rows]]
    assert all(column.num_chunks == 1 for column in got.columns)
    assert bool(takes) is not as_ranges


@pytest.mark.parametrize("column", ["id", "name"])
@pytest.mark.parametrize("rows", [np.arange(3500, 5987), np.arange(6000, 9000)])
def test_a_range_beyond_the_end_is_an_error(long_table: lance.LanceDataset, rows: np.ndarray, column: str) -> None:
    with pytest.raises(ReadError):
        take_rows(long_table, rows, [column])


def test_long_runs_of_struct_fields(tmp_path: Path) -> None:
    # Lance's range reader swaps fields that are not asked for in the order of the schema.
    data = pa.table({"s": [{"a": i, "b": -i} for i in range(6000)]})
    dataset = lance.write_dataset(data, str(tmp_path / "t.lance"))
    rows = np.concatenate([np.arange(2500, 5000), np.arange(0, 2100)])

    got = take_rows(dataset, rows, ["s.b", "s.a"])

    assert got.column_names == ["s.b", "s.a"]
    assert got["s.a"].to_numpy().tolist() == rows.tolist()
    assert got["s.b"].to_pylist() == [-row for row in rows]


# Deletions


@pytest.mark.parametrize("stable_ids", [False, True])
@pytest.mark.parametrize("file_version", ["legacy", *FILE_VERSIONS])
@pytest.mark.parametrize(
    "deleted",
    ["id = 0", "id = 299", "id in (0, 1, 40, 41, 43, 44, 140, 141, 299)", "id % 2 = 0", "id >= 44 and id < 141"],
)
def test_deletions_do_not_shift_rows(tmp_path: Path, deleted: str, file_version: str, stable_ids: bool) -> None:
    data = ids(300).append_column("v", pa.array([[float(i)] * (i % 3) for i in range(300)], pa.list_(pa.float32())))
    options = {"data_storage_version": file_version, "enable_stable_row_ids": stable_ids}
    dataset = write(tmp_path / "t.lance", data, UNEVEN_ROWS, **options)
    dataset.delete(deleted)
    live = dataset.to_table()
    assert 0 < len(live) < 300

    rows = np.random.default_rng(1).permutation(len(live))
    assert take_rows(dataset, rows, data.column_names).to_pylist() == live.take(pa.array(rows)).to_pylist()

    offsets = scan_offsets(dataset, "id % 3 = 1", progress=False)
    expected = dataset.to_table(filter="id % 3 = 1")["id"].to_pylist()
    assert take_rows(dataset, offsets, ["id"])["id"].to_pylist() == expected


# Values


def nullable_columns(num_rows: int, null_at: set[int]) -> pa.Table:
    """One column per type, null at the given rows; floats also have NaN."""

    def column(value: Any, type_: pa.DataType) -> pa.Array:
        return pa.array([None if i in null_at else value(i) for i in range(num_rows)], type_)

    struct = pa.struct({"a": pa.int64(), "b": pa.string()})
    return pa.table(
        {
            "int": column(lambda i: i, pa.int64()),
            "float": column(lambda i: math.nan if i % 4 == 1 else i / 2, pa.float32()),
            "list": column(lambda i: [float(i), None, 1.0][: i % 4], pa.list_(pa.float32())),
            "vector": column(lambda i: [float(i)] * 4, pa.list_(pa.float32(), 4)),
            "string": column(lambda i: f"s{i}" * (i % 3), pa.string()),
            "bool": column(lambda i: i % 2 == 0, pa.bool_()),
            "struct": column(lambda i: {"a": None if i % 5 == 2 else i, "b": f"b{i}"}, struct),
            "large_string": column(lambda i: f"l{i}", pa.large_string()),
            "dictionary": column(lambda i: "xyz"[i % 3], pa.string()).dictionary_encode(),
            "timestamp": column(lambda i: i * 10**6, pa.timestamp("us", tz="UTC")),
            "binary": column(lambda i: bytes([i % 256]), pa.binary()),
        }
    )


@pytest.mark.parametrize("file_version", FILE_VERSIONS)
@pytest.mark.parametrize(
    "null_at", [{0}, {11}, {5, 6, 7}, set(range(12)), set()], ids=["first", "last", "mid", "all", "no"]
)
def test_values_and_nulls_survive(tmp_path: Path, file_version: str, null_at: set[int]) -> None:
    data = nullable_columns(12, null_at)
    if file_version == "2.0":
        # This format has no nulls in struct columns.
        data = data.drop(["struct"])
    dataset = write(tmp_path / "t.lance", data, [5, 2, 5], data_storage_version=file_version)
    rows = np.array([11, 0, 5, 5, 3, 11, 1, 6, 7, 2, 4, 8, 9, 10])

    got = take_rows(dataset, rows, data.column_names)

    decoded = {kind: kind.value_type for kind in dataset.schema.types if pa.types.is_dictionary(kind)}
    assert got.schema.types == [decoded.get(kind, kind) for kind in dataset.schema.types]
    # repr, because NaN is not equal to itself but must not become null.
    assert repr(got.to_pylist()) == repr([data.to_pylist()[row] for row in rows])
    assert repr(got.to_pylist()) == repr([dataset.to_table().to_pylist()[row] for row in rows])


def test_dictionaries_that_differ_by_fragment(tmp_path: Path) -> None:
    words = [f"w{i // 1000}" for i in range(6000)]
    path = str(tmp_path / "t.lance")
    for start in (0, 3000):
        data = pa.table({"d": pa.array(words[start : start + 3000]).dictionary_encode()})
        lance.write_dataset(data, path, mode="append" if start else "create")
    for rows in (np.arange(1500, 4500), np.array([5999, 0, 3000, 1])):
        assert take_rows(lance.dataset(path), rows, ["d"])["d"].to_pylist() == [words[row] for row in rows]


def test_tensor_columns_stay_tensors(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    data = pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    dataset = lance.write_dataset(data, str(tmp_path / "t.lance"), max_rows_per_file=4)
    rows = np.array([9, 0, 4, 4])

    got = take_rows(dataset, rows, ["t"])

    assert got.schema.field("t").type == data.schema.field("t").type
    assert np.array_equal(got["t"].combine_chunks().to_numpy_ndarray(), values[rows])


def test_fields_of_null_structs_are_null(tmp_path: Path) -> None:
    deep = [None if i % 3 == 1 else {"a": i, "t": None if i % 4 == 2 else {"c": str(i)}} for i in range(20)]
    dataset = lance.write_dataset(pa.table({"id": range(20), "s": deep}), str(tmp_path / "t.lance"))
    rows = np.array([19, 1, 2, 2, 0])

    got = take_rows(dataset, rows, ["s.t.c", "id", "s.a", "s"])

    assert got.column_names == ["s.t.c", "id", "s.a", "s"]
    assert got["s.a"].to_pylist() == [None if deep[r] is None else deep[r]["a"] for r in rows]
    assert got["s.t.c"].to_pylist() == [deep[r] and deep[r]["t"] and deep[r]["t"]["c"] for r in rows]
    assert got["s"].to_pylist() == [deep[r] for r in rows]


def packed(path: Path, file_version: str, mark: str) -> lance.LanceDataset:
    """60 rows with a packed struct, and one in another struct."""
    rows = [{"x": i, "y": 2 * i, "f": i / 3} for i in range(60)]
    kind = pa.struct({"x": pa.uint32(), "y": pa.uint32(), "f": pa.float64()})
    outer = pa.struct([pa.field("n", pa.int64()), pa.field("p", kind, metadata={mark: "true"})])
    fields = [pa.field("id", pa.int64()), pa.field("c", kind, metadata={mark: "true"}), pa.field("o", outer)]
    arrays = [range(60), pa.array(rows, kind), pa.array([{"n": -i, "p": row} for i, row in enumerate(rows)], outer)]
    return lance.write_dataset(
        pa.Table.from_arrays(list(map(pa.array, arrays)), schema=pa.schema(fields)),
        str(path / "packed.lance"),
        data_storage_version=file_version,
    )


@pytest.mark.parametrize("mark", ["packed", "lance-encoding:packed"])
@pytest.mark.parametrize("file_version", FILE_VERSIONS)
def test_fields_of_packed_structs(tmp_path: Path, file_version: str, mark: str) -> None:
    """Lance itself gives other values under their names."""
    dataset = packed(tmp_path, file_version, mark)
    for rows in (np.array([5, 59, 16]), np.arange(60)):
        ids = rows.tolist()
        got = take_rows(dataset, rows, ["o.p.y", "id", "c.y", "o.n", "o.p.f", "c"])
        assert got.column_names == ["o.p.y", "id", "c.y", "o.n", "o.p.f", "c"]
        assert got["c.y"].to_pylist() == got["o.p.y"].to_pylist() == [2 * i for i in ids]
        assert got["o.p.f"].to_pylist() == [i / 3 for i in ids]
        assert got["o.n"].to_pylist() == [-i for i in ids]
        assert got["c"].to_pylist() == [{"x": i, "y": 2 * i, "f": i / 3} for i in ids]
        assert take_rows(dataset, rows, ["c.f"])["c.f"].to_pylist() == [i / 3 for i in ids]


@pytest.mark.parametrize("file_version", FILE_VERSIONS)
def test_filters_on_fields_of_packed_structs(tmp_path: Path, file_version: str) -> None:
    dataset = packed(tmp_path, file_version, "packed")
    for filter in ("c.y = 10", "C.y = 10", "c['y'] = 10", "id = 5 AND c.y = 10"):
        with pytest.raises(ConfigError, match=r"packed struct.*reads \['c.y'\].*c IS NOT NULL AND \(") as info:
            check_filter(dataset, filter, "table t")
        rewritten = str(info.value).rpartition("as in ")[2][1:-1].replace("\\'", "'")
        check_filter(dataset, rewritten, "table t")
        assert scan_offsets(dataset, rewritten, False).tolist() == [5]
    for filter in ("o.p.y = 10", "o.n = -5", "id = 5", "c IS NOT NULL AND id = 5"):
        check_filter(dataset, filter, "table t")
        assert scan_offsets(dataset, filter, False).tolist() == [5]


@pytest.mark.parametrize("stable_ids", [False, True])
def test_meta_columns(tmp_path: Path, stable_ids: bool) -> None:
    dataset = write(tmp_path / "t.lance", ids(300), UNEVEN_ROWS, enable_stable_row_ids=stable_ids)
    dataset.delete("id % 7 = 0")
    scan = dataset.to_table(columns=["id"], with_row_id=True, with_row_address=True)
    rows = np.array([200, 0, 17, 17])

    got = take_rows(dataset, rows, ["_rowid", "id", "_rowaddr", "_rowoffset"])

    assert got["_rowoffset"].to_pylist() == rows.tolist()
    for name in ("id", "_rowid", "_rowaddr"):
        assert got[name].to_pylist() == scan[name].take(pa.array(rows)).to_pylist()


# Failures


@pytest.mark.parametrize(("rows", "text"), [([0, 5000], "below the 292 live rows"), ([3, -1], "must be >= 0, got -1")])
def test_rows_outside_the_table(uneven: lance.LanceDataset, rows: list[int], text: str) -> None:
    with pytest.raises(ReadError, match=text):
        take_rows(uneven, np.array(rows), ["id"])


def test_a_panic_becomes_an_error(uneven: lance.LanceDataset) -> None:
    with pytest.raises(ReadError, match="FieldNotFound") as info:
        take_rows(uneven, np.array([1, 0]), ["no_such_column"])
    assert pickle.loads(pickle.dumps(info.value)).args == info.value.args


def test_a_short_result_is_an_error(uneven: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    full = uneven.take([0, 1], columns=["name"])
    monkeypatch.setattr(lance.LanceDataset, "take", lambda *a, **k: full)
    with pytest.raises(ReadError, match="returned 2 rows for 3 offsets"):
        take_rows(uneven, np.array([0, 1, 1]), ["name"])


def test_files_removed_under_an_open_dataset(tmp_path: Path) -> None:
    dataset = lance.write_dataset(ids(100), str(tmp_path / "t.lance"))
    shutil.rmtree(tmp_path / "t.lance" / "data")
    with pytest.raises(VersionNotFoundError, match=r"t\.lance version 1, offsets 3 to 3, could not be read.*tag it"):
        take_rows(dataset, np.array([3]), ["id"])


class PanicException(BaseException):
    """Named as PyO3 names its own."""


# As Lance 14 fails for lists, and Arrow where it joins them.
OVERFLOWS = [
    OSError(
        "Invalid user input: A single batch had more than i32::MAX values and so a large container type is required, "
        "/home/x/lance-encoding/src/repdef.rs:1783:28"
    ),
    PanicException("offset overflow"),
    pa.ArrowInvalid(
        "offset overflow while concatenating arrays, consider casting input from `list<item: bool>` first."
    ),
    OSError("LanceError(Arrow): Offset overflow error: 2187000000"),
]


@pytest.fixture
def lists(tmp_path: Path) -> lance.LanceDataset:
    """40 rows in 4 fragments."""
    numbers = pa.array([list(range(i)) for i in range(40)], pa.list_(pa.uint8()))
    return write(tmp_path / "lists.lance", pa.table({"id": np.arange(40), "v": numbers}), [10, 5, 20, 5])


def limit_takes(monkeypatch: pytest.MonkeyPatch, most: int, failure: BaseException) -> list[int]:
    """Have Lance fail for more rows than that; returns the numbers of rows that it is asked for."""
    asked: list[int] = []
    take = lance.LanceDataset.take

    def limited(self: lance.LanceDataset, indices: list[int], **options: Any) -> pa.Table:
        asked.append(len(indices))
        if len(indices) > most:
            raise failure
        return take(self, indices, **options)

    monkeypatch.setattr(lance.LanceDataset, "take", limited)
    monkeypatch.setattr(take_module, "unreadable_files", lambda *_: pytest.fail("searched for damage"))
    return asked


@pytest.mark.parametrize("failure", OVERFLOWS, ids=lambda failure: str(failure)[:30])
def test_what_is_too_large_for_one_read_is_read_in_parts(
    lists: lance.LanceDataset, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).permutation(40)
    asked = limit_takes(monkeypatch, 7, failure)

    got = take_rows(lists, rows, ["v", "id"])

    assert got["id"].to_pylist() == rows.tolist()
    assert [len(value) for value in got["v"].to_pylist()] == rows.tolist()
    assert got["v"].num_chunks > 1  # nothing joins what Arrow could not hold
    assert got.schema == pa.schema({"v": pa.list_(pa.uint8()), "id": pa.int64()})
    assert asked[:4] == [40, 20, 10, 5]
    asked.clear()
    assert take_rows(lists, rows[::-1], ["v", "id"])["id"].to_pylist() == rows[::-1].tolist()
    assert max(asked) <= 7, "what does not fit is tried once"


def test_a_range_that_fails_without_a_word_is_taken(lists: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lance's ranges of rows end without saying that an offset overflowed."""
    monkeypatch.setattr(take_module, "MIN_RANGE_RUN_ROWS", 2)

    def end(*_: Any) -> None:
        raise pa.ArrowInvalid("External error: Lance reader producer terminated before end of stream")

    monkeypatch.setattr(take_module, "_read_ranges", end)
    limit_takes(monkeypatch, 30, OVERFLOWS[1])
    assert take_rows(lists, np.arange(40), ["id", "v"])["id"].to_pylist() == list(range(40))


def test_chunks_that_cannot_be_joined_are_read_in_parts(
    lists: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = take_module.restored

    def limited(table: pa.Table, restore: np.ndarray | None) -> pa.Table:
        if len(table) > 16:
            raise OVERFLOWS[2]
        return restored(table, restore)

    monkeypatch.setattr(take_module, "restored", limited)
    assert take_rows(lists, np.arange(40)[::-1], ["id"])["id"].to_pylist() == list(range(40))[::-1]


@pytest.mark.parametrize(
    "text",
    [
        *[str(failure) for failure in OVERFLOWS],
        "Not supported: reading this type, /home/x/decoder.rs:1:2",
        "not yet implemented: nested maps",
        "LanceError(IO): Too many open files (os error 24)",
        "Cannot allocate memory (os error 12)",
    ],
)
def test_limits_are_no_damage(lists: lance.LanceDataset, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_takes(monkeypatch, 0, OSError(text))
    with pytest.raises(ReadError) as info:
        take_rows(lists, np.arange(40), ["id", "v"])
    assert "Damaged" not in str(info.value)


def test_rows_that_fail_only_together_are_no_damage(lists: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Lance's words for it are."""
    search = take_module.unreadable_files
    limit_takes(monkeypatch, 4, OSError("no such words"))
    monkeypatch.setattr(take_module, "unreadable_files", search)
    with pytest.raises(ReadError) as info:
        take_rows(lists, np.arange(40), ["id", "v"])
    assert "Damaged" not in str(info.value)


def test_joining_more_bytes_than_32_bit_offsets_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_module, "_MAX_CHUNK_BYTES", 10)
    table = pa.table({"s": pa.chunked_array([["abcdefgh"], ["ijklmnop"]])})
    with pytest.raises(ReadError, match=r"at most 10 bytes of a string column, got \d+ bytes of 's' in 2 rows"):
        take_module.arranged(table, np.array([1, 0]), ["s"])


def test_overflow_in_lance_names_the_remedy(uneven: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("LanceError(Arrow): Offset overflow error: 2187000000, /home/x/field.rs:922:21")

    monkeypatch.setattr(lance.LanceDataset, "take", fail)
    with pytest.raises(ReadError, match=r"overflow error: 2187000000\. One read.*\(name\).*large_string") as info:
        take_rows(uneven, np.array([3]), ["name"])
    assert ".rs:" not in str(info.value)


def test_overflow_in_lance_names_lists_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Offset overflow error: 2187000000")

    table = pa.table({"id": [1, 2], "text": ["a", "b"], "tokens": [[1], [2, 3]]})
    dataset = lance.write_dataset(table, tmp_path / "t")
    monkeypatch.setattr(lance.LanceDataset, "take", fail)
    with pytest.raises(ReadError, match=r"\(text, tokens\)"):
        take_rows(dataset, np.array([1]), ["id", "text", "tokens"])


@pytest.mark.parametrize("failure", [OSError("x"), PanicException("x")])
def test_guarded_turns_failures_into_errors(failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    with pytest.raises(TableError, match="cannot do it: x") as info:
        guarded(fail, "cannot do it", TableError, ())
    assert info.value.__cause__ is failure


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_guarded_lets_interrupts_pass(failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    with pytest.raises(type(failure)):
        guarded(fail, "x", TableError, ())
    with pytest.raises(type(failure)):
        attempt(fail)


def test_guarded_keeps_errors_of_the_library() -> None:
    def fail() -> None:
        raise ConfigError("mine")

    with pytest.raises(ConfigError, match=r"^mine$"):
        guarded(fail, "x", TableError, ())


def test_secrets_are_cut_out_and_not_chained() -> None:
    def fail() -> None:
        try:
            raise ValueError("inner s3cr3t-key")
        except ValueError as inner:
            raise OSError("403 for https://me:pass-w0rd@host/x?sig=abc%2Fdef&n=1") from inner

    uri = "https://me:pass-w0rd@host/x?sig=abc%2Fdef"
    secrets = secrets_of(uri, {"aws_secret_access_key": "s3cr3t-key", "aws_region": "us-east-1", "k": "1"})
    assert {"pass-w0rd", "s3cr3t-key", "abc%2Fdef", "abc/def"} <= secrets
    assert not secrets & {"us-east-1", "1"}

    with pytest.raises(ReadError) as info:
        guarded(fail, "failed", ReadError, secrets)
    assert info.value.__cause__ is None
    assert info.value.__context__ is None
    assert str(info.value) == "failed: 403 for https://***@host/x?sig=***&n=***"


def test_long_texts_are_cut() -> None:
    assert len(redact("x" * 5000, ())) < 1100


def test_read_errors_of_a_dataset_hide_its_options(tmp_path: Path) -> None:
    dataset = lance.write_dataset(ids(10), str(tmp_path / "t.lance"))
    fake = SimpleNamespace(
        uri="s3://u:hunter22@b/t.lance?token=tok-123",
        version=1,
        initial_storage_options={"key": "s3cr3t-key"},
        schema=dataset.schema,
        take=lambda *a, **k: dataset.take([99], columns=["s3cr3t-key"]),
    )
    with pytest.raises(ReadError) as info:
        take_rows(fake, np.array([1]), ["id"])  # type: ignore[arg-type]
    text = str(info.value) + repr(info.value.__cause__) + repr(info.value.__context__)
    assert not any(secret in text for secret in ("hunter22", "tok-123", "s3cr3t-key"))


# Filter scans


def test_offsets_come_sorted_whatever_the_order_of_the_scan() -> None:
    batches = [pa.record_batch({"_rowoffset": pa.array(part, pa.uint64())}) for part in ([7, 9], [], [1, 3], [5])]
    fake = SimpleNamespace(scanner=lambda **_: SimpleNamespace(to_batches=lambda: batches), count_rows=lambda: 10)

    got = scan_offsets(fake, "x", progress=False)  # type: ignore[arg-type]

    assert got.dtype == np.int64
    assert got.tolist() == [1, 3, 5, 7, 9]


def test_progress_shows_only_for_long_scans(
    uneven: lance.LanceDataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.enumerate()
    scan_offsets(uneven, "id > 3", progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(selection, "_PROGRESS_DELAY_S", 0)
    scan_offsets(uneven, "id > 3", progress=True)
    assert "finding rows" in capsys.readouterr().err
    scan_offsets(uneven, "id > 3", progress=False)
    assert capsys.readouterr().err == ""
    assert threading.enumerate() == before


@pytest.mark.parametrize(
    ("text", "refused", "passing"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: <Error>", True, False),
        ("Server returned non-2xx status code: 401 Unauthorized", True, False),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", True, False),
        ("The operation lacked the necessary privileges to complete for path t/data/x.lance", True, False),
        ("GET http://h/403/x after 20 retries, max_retries: 20, retry_timeout: 20s - status code: 503", False, True),
        ("Generic S3 error: HTTP error: request or response body error", False, True),
        ("Not found: t/data/401.lance", False, False),
        ("Generic LocalFileSystem error: failed to fill whole buffer", False, False),
    ],
)
def test_kinds_of_failures(text: str, refused: bool, passing: bool) -> None:
    assert (is_refusal(text), is_passing(text)) == (refused, passing)
