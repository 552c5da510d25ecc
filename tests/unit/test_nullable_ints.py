"""Nullable ints through numpy: the same values and types for any number of workers and any limits of chunks."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_lance_stream import LanceStream, ReadError, TransformError, lance_stream
from ray_lance_stream.nullable_ints import exact_parts, join_rows, with_types
from tests.fake_ray import Cluster

NUM_ROWS, LARGE = 48, 2**53 + 1
WORLDS = (1, 2, 6)


def identity(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def copied(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(values) for name, values in batch.items()}


def plus_one(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "h": batch["h"] + 1}


def half_for_null(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "h": np.nan_to_num(batch["h"], nan=0.5)}


@pytest.fixture
def stream_of(tmp_path, monkeypatch) -> Any:
    """(values of `h`, options) -> a stream on readers in this process."""
    Cluster(monkeypatch)

    def make(values: list[int | None], kind: str = "int64", **options: Any) -> LanceStream:
        table = pa.table({"id": range(len(values)), "h": pa.array(values, kind)})
        lance.write_dataset(table, str(tmp_path / "t"), mode="overwrite")
        return lance_stream(str(tmp_path / "t"), num_splits=12, global_batch_size=24, shuffle=False, **options)

    return make


def delivered(stream: LanceStream, world: int, batch_format: str = "pyarrow") -> list[Any]:
    batches = []
    for rank in range(world):
        shard = stream.shard(rank, world)
        batches += list(shard.iter_batches(batch_format=batch_format))
        shard.close()
    return batches


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9)), min_size=NUM_ROWS, max_size=NUM_ROWS
    ),
    read_batch_size=st.sampled_from([None, 1, 3]),
    world=st.sampled_from(WORLDS),
    batch_size=st.sampled_from([None, 1, 5]),
    fn=st.sampled_from([identity, copied]),
    batch_format=st.sampled_from(["numpy", "pandas"]),
)
def test_columns_that_are_left_alone_keep_type_and_nulls(
    stream_of, values, read_batch_size, world, batch_size, fn, batch_format
):
    fn = identity if batch_format == "pandas" else fn
    stream = stream_of(values, read_batch_size=read_batch_size)
    mapped = stream.map_batches(fn, batch_size=batch_size, batch_format=batch_format)
    found: dict[int, int | None] = {}
    for batch in delivered(mapped, world):
        assert batch.schema.field("h").type == pa.int64()
        found |= dict(zip(batch["id"].to_pylist(), batch["h"].to_pylist(), strict=True))
    assert found == dict(enumerate(values))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("read_batch_size", [None, 1])
@pytest.mark.parametrize("base", [LARGE, 10])
def test_what_is_made_of_them_is_exact_or_an_error(stream_of, world, read_batch_size, base):
    values = [None if i in (5, 30) else base + 2 * i for i in range(NUM_ROWS)]
    stream = stream_of(values, read_batch_size=read_batch_size)
    found = {}
    for batch in delivered(stream.map_batches(plus_one), world):
        plus = [None if value != value else value for value in batch["h"].to_pylist()]  # NaN in a chunk of floats
        found |= dict(zip(batch["id"].to_pylist(), plus, strict=True))
    assert found == {i: None if value is None else value + 1 for i, value in enumerate(values)}
    if base == LARGE:
        with pytest.raises(TransformError, match=r"column 'h' is int64 in some rows and double in others.*one type"):
            delivered(stream.map_batches(half_for_null), world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_a_numpy_batch_that_would_be_rounded_is_an_error(stream_of, world, kind):
    stream = stream_of([None if i == 5 else LARGE + 2 * i for i in range(NUM_ROWS)], kind)
    text = rf"column 'h' of type {kind} holds a null beside 90071992547\d+: .*use batch_format='pandas'"
    for each in (stream, stream.map_batches(identity)):
        with pytest.raises(ReadError, match=text):
            delivered(each, world, "numpy")
        assert len(delivered(each, world, "pandas")) == 2 * world


def test_every_type_that_numpy_holds_otherwise_is_given_back(stream_of, tmp_path):
    types = {
        "uint8": pa.array([1, None, 3, 4], pa.uint8()),
        "bool": pa.array([True, None, False, True]),
        "date": pa.array([datetime.date(2020, 1, 1), None] * 2),
        "time": pa.array([1, None, 3, 4], pa.time32("s")),
        "zoned": pa.array([1, None, 3, 4], pa.timestamp("us", tz="UTC")),
        "float": pa.array([1.5, None, 3.0, 4.0], pa.float32()),
        "decimal": pa.array([Decimal("1.10"), None] * 2, pa.decimal128(10, 2)),
        "list": pa.array([[LARGE, None], None, [3], []], pa.list_(pa.int64())),
        "struct": pa.array([{"a": LARGE}, None, {"a": None}, {"a": 1}], pa.struct({"a": pa.int64()})),
        "text": pa.array(["a", None, "c", "d"], pa.large_string()),
    }
    lance.write_dataset(pa.table(types), str(tmp_path / "types"))
    stream = lance_stream(str(tmp_path / "types"), num_splits=1, shuffle=False, global_batch_size=4, read_batch_size=1)
    for each in (stream, stream.map_batches(identity)):
        (batch,) = delivered(each, 1)
        assert batch.equals(pa.table(types, schema=batch.schema))
        assert batch.schema.types == [column.type for column in types.values()]


def test_what_changes_inside_of_a_value_is_no_longer_as_given(stream_of, tmp_path):
    """A function may write into the dicts and lists that it was given."""

    def renamed(batch: dict[str, Any]) -> dict[str, Any]:
        for each in batch["struct"]:
            each["a"] = 7.5
        return batch

    values = [{"a": i} for i in range(4)]
    lance.write_dataset(pa.table({"struct": values}), str(tmp_path / "structs"))
    stream = lance_stream(str(tmp_path / "structs"), num_splits=2, shuffle=False, global_batch_size=4)
    (batch,) = delivered(stream.map_batches(renamed), 1)
    assert batch["struct"].to_pylist() == [{"a": 7.5}] * 4


def test_rows_are_parted_only_where_floats_are_not_exact():
    small = pa.table({"a": pa.array([1, None, 3]), "b": [LARGE, 1, 2]})
    assert [part.tolist() for part in exact_parts(small)] == [[0, 1, 2]]
    large = small.append_column("c", pa.array([None, LARGE, 1]))
    assert sorted(part.tolist() for part in exact_parts(large)) == [[0], [1, 2]]
    assert len(exact_parts(large.append_column("d", pa.array([LARGE, None, None])))) == 2
    assert len(exact_parts(large.append_column("d", pa.array([LARGE, LARGE, None])))) == 3


def test_floats_join_ints_where_they_are_nulls_or_whole():
    ints, floats = pa.table({"a": [LARGE]}), pa.table({"a": [float("nan"), 3.0]})
    assert join_rows([floats, ints])["a"].to_pylist() == [None, 3, LARGE]
    assert with_types(pa.table({"a": [3]}), {"a": pa.float64()})["a"].to_pylist() == [3.0]
    for tables in ([ints, pa.table({"a": [0.5]})], [pa.table({"a": [0.5]}), ints]):
        with pytest.raises(ValueError, match="column 'a' is int64 in some rows and double in others"):
            join_rows(tables)
