"""Columns of every type through shards: values, nulls, memory, and the arguments of `iter_torch_batches`.

B42, B43.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import torch
from ray.data.block import BlockAccessor
from ray.data.collate_fn import ArrowBatchCollateFn, NumpyBatchCollateFn, PandasBatchCollateFn

from ray_lance_stream import ConfigError, ReadError
from ray_lance_stream.columns import TensorCollateFn, with_tensor_columns
from ray_lance_stream.cursor import Position
from ray_lance_stream.own_reads import OwnReads
from ray_lance_stream.take import take_rows
from tests.column_types import NUM_ROWS, columns_of, slug, write
from tests.integration.conftest import Shards
from tests.support import Oracle

pytestmark = pytest.mark.timeout(120)

NUM_SPLITS = 4


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    """A column of each type, without nulls."""
    return write(tmp_path_factory.mktemp("types"), columns_of("2.2", set()), "2.2")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """int64 `id` = 0..959, bool `even`, vectors `vec` [768] and tensors `image` [2, 3] full of the id."""
    ids = np.arange(960)
    vectors = np.repeat(ids.astype(np.float32), 768)
    table = pa.table(
        {
            "id": ids,
            "even": ids % 2 == 0,
            "vec": pa.FixedSizeListArray.from_arrays(pa.array(vectors), 768),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(np.repeat(ids, 6).reshape(-1, 2, 3)),
        }
    )
    path = str(tmp_path_factory.mktemp("numbers") / "t.lance")
    lance.write_dataset(table, path, max_rows_per_file=400)
    return path


def rows_of(num_rows: int, epoch: int = 0) -> np.ndarray:
    """Offsets in the order of delivery."""
    return np.concatenate(Oracle(np.arange(num_rows), NUM_SPLITS, 1).epoch(epoch))


# ---- values


def same(batch: Any, expected: Any) -> None:
    """The same columns, types and values, where NaN equals NaN."""
    if isinstance(batch, dict):
        assert list(batch) == list(expected)
        for name, array in batch.items():
            assert array.dtype == expected[name].dtype
            assert repr(array) == repr(expected[name])
    elif isinstance(batch, pa.Table):
        assert batch.schema == expected.schema
        assert repr(batch.to_pylist()) == repr(expected.to_pylist())
    else:
        pd.testing.assert_frame_equal(batch, expected)


@pytest.mark.parametrize("batch_format", ["pyarrow", "numpy", "pandas"])
def test_every_type(shards: Shards, wide: lance.LanceDataset, batch_format: str) -> None:
    shard = shards(wide.uri, num_splits=NUM_SPLITS)
    expected = with_tensor_columns(take_rows(wide, rows_of(NUM_ROWS), wide.schema.names))
    assert shard.schema().base_schema == expected.schema
    batches = list(shard.iter_batches(batch_size=8, batch_format=batch_format))
    assert len(batches) == 2
    for batch, start in zip(batches, (0, 8), strict=True):
        same(batch, BlockAccessor.for_block(expected.slice(start, 8)).to_batch_format(batch_format))


def test_every_type_that_torch_can_hold(shards: Shards, wide: lance.LanceDataset) -> None:
    collate = TensorCollateFn()
    held = []
    for name in wide.schema.names:
        try:
            collate.prepare(take_rows(wide, np.empty(0, np.int64), [name]).schema)
            held.append(name)
        except ConfigError:
            shard = shards(wide.uri, num_splits=NUM_SPLITS, columns=[name])
            with pytest.raises(ConfigError, match=rf"'{name}' of type .*drop it with columns=\[...\], or .*collate_fn"):
                next(iter(shard.iter_torch_batches(batch_size=4)))
    shard = shards(wide.uri, num_splits=NUM_SPLITS, columns=held)
    table = take_rows(wide, rows_of(NUM_ROWS), held)
    collate.prepare(table.schema)
    expected = collate(with_tensor_columns(table))
    batches = list(shard.iter_torch_batches(batch_size=8))
    for name in held:
        got = torch.cat([batch[name] for batch in batches])
        torch.testing.assert_close(got, expected[name], rtol=0, atol=0, equal_nan=True)
    in_loader_worker = OwnReads(shard.to_torch_dataset(batch_size=8).spec(shard._plan), Position(0), 0, 1)
    for batch, (found, _) in zip(batches, in_loader_worker, strict=True):
        torch.testing.assert_close(found, batch, rtol=0, atol=0, equal_nan=True)


def test_a_process_that_has_not_imported_lance(shards: Shards, wide: lance.LanceDataset) -> None:
    """Extension types are known there too."""

    @ray.remote(runtime_env={"env_vars": {"A_PROCESS": "of its own"}})
    def dtypes(shard: Any) -> tuple[bool, dict[str, str]]:
        knew = "lance" in sys.modules
        batch = next(iter(shard.iter_batches(batch_size=8)))
        return knew, {name: str(array.dtype) for name, array in batch.items()}

    stream = shards.stream(wide.uri, num_splits=NUM_SPLITS)
    knew, found = ray.get(dtypes.remote(stream.shard()))
    assert not knew
    batch = next(iter(shards.of(stream).iter_batches(batch_size=8)))
    assert found == {name: str(array.dtype) for name, array in batch.items()}


# ---- nulls


@pytest.fixture(scope="module")
def with_nulls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Null in row 37 of `int`, `float` (which has NaN in row 5), `bool` and `vec`."""

    def column(kind: pa.DataType, value: Any) -> pa.Array:
        return pa.array([None if i == 37 else value(i) for i in range(96)], kind)

    table = pa.table(
        {
            "id": range(96),
            "int": column(pa.int64(), int),
            "float": column(pa.float32(), lambda i: math.nan if i == 5 else i),
            "bool": column(pa.bool_(), lambda i: i > 5),
            "vec": column(pa.list_(pa.float32(), 2), lambda i: [i, i]),
        }
    )
    path = str(tmp_path_factory.mktemp("nulls") / "t.lance")
    lance.write_dataset(table, path, max_rows_per_file=40)
    return path


@pytest.mark.parametrize("name", ["int", "float", "bool", "vec"])
def test_a_null_for_torch_names_its_column_and_row(shards: Shards, with_nulls: str, name: str) -> None:
    shard = shards(with_nulls, num_splits=NUM_SPLITS, columns=["id", name])
    with pytest.raises(ReadError, match=rf"column '{name}' of type .* holds a null.* in row 37 of table .*columns="):
        list(shard.iter_torch_batches(batch_size=8))
    whole = shards(with_nulls, num_splits=NUM_SPLITS, columns=["id", name], filter=f"{name} IS NOT NULL")
    found = {i: row for batch in whole.iter_torch_batches(batch_size=8) for i, row in zip(*batch.values(), strict=True)}
    assert {int(i) for i in found} <= set(range(96)) - {37}
    assert len(found) == 92


def test_nulls_for_numpy_are_nans(shards: Shards, with_nulls: str) -> None:
    shard = shards(with_nulls, num_splits=NUM_SPLITS, columns=["id", "int", "float"])
    for batches in (shard.iter_batches(batch_size=8), shard.iter_torch_batches(batch_size=8, collate_fn=Untouched())):
        for batch in batches:
            expected = np.where(batch["id"] == 37, np.nan, batch["id"])
            np.testing.assert_array_equal(batch["int"], expected)
            np.testing.assert_array_equal(batch["float"], np.where(batch["id"] == 5, np.nan, expected))


class Untouched(NumpyBatchCollateFn):
    """The batch as it is."""

    def __call__(self, batch: dict[str, np.ndarray]) -> Any:
        return batch


# ---- memory


def test_vectors_are_plain_tensors(shards: Shards, numbers: str) -> None:
    shard = shards(numbers, num_splits=NUM_SPLITS)
    for batch in shard.iter_torch_batches(batch_size=240):
        assert {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in batch.items()} == {
            "id": (torch.int64, ()),
            "even": (torch.bool, ()),
            "vec": (torch.float32, (768,)),
            "image": (torch.int64, (2, 3)),
        }
        assert all(tensor.is_contiguous() for tensor in batch.values())


def test_maths_in_place_changes_nothing_else(shards: Shards, numbers: str) -> None:
    shard = shards(numbers, num_splits=NUM_SPLITS, read_batch_size=480)
    for epoch in range(3):
        kept = []
        for batch in shard.iter_torch_batches(batch_size=96, prefetch_batches=3):
            ids = batch["id"].clone()
            assert torch.equal(batch["vec"], ids[:, None].float().expand(-1, 768))
            assert torch.equal(batch["image"], ids[:, None, None].expand(-1, 2, 3))
            assert torch.equal(batch["even"], ids % 2 == 0)
            batch["id"].add_(1)
            batch["vec"].add_(ids[:, None])
            batch["image"].mul_(-1)
            batch["even"].logical_not_()
            kept.append((ids, batch))
        assert [int(i) for ids, _ in kept for i in ids] == rows_of(960, epoch).tolist()
        for ids, batch in kept:
            assert torch.equal(batch["id"], ids + 1)
            assert torch.equal(batch["vec"][:, 5], 2 * ids.float())


# ---- the arguments of iter_torch_batches


class FromArrow(ArrowBatchCollateFn):
    def __call__(self, batch: pa.Table) -> Any:
        assert isinstance(batch, pa.Table)
        return torch.tensor(batch["id"].to_numpy())


class FromPandas(PandasBatchCollateFn):
    def __call__(self, batch: pd.DataFrame) -> Any:
        assert isinstance(batch, pd.DataFrame)
        return [torch.tensor(batch["id"].to_numpy(np.int64))]


def from_numpy(batch: dict[str, np.ndarray]) -> Any:
    """Neither a tensor nor of the batch's length."""
    return {"sum": int(batch["id"].sum())}


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({}, lambda batch: batch["vec"].dtype == torch.float32),
        ({"dtypes": torch.float64}, lambda batch: {t.dtype for t in batch.values()} == {torch.float64}),
        ({"dtypes": {"vec": torch.float16}}, lambda batch: batch["vec"].dtype == torch.float16),
        ({"device": "cpu"}, lambda batch: batch["id"].device.type == "cpu"),
        ({"device": torch.device("meta")}, lambda batch: batch["id"].device.type == "meta"),
        ({"drop_last": True}, lambda batch: len(batch["id"]) == 100),
        ({"prefetch_batches": 0}, lambda batch: len(batch["id"]) == 60),
        ({"collate_fn": Untouched()}, lambda batch: isinstance(batch["id"], np.ndarray)),
        ({"collate_fn": FromArrow()}, lambda batch: batch.dtype == torch.int64),
        ({"collate_fn": FromArrow(), "device": "meta"}, lambda batch: batch.device.type == "meta"),
        ({"collate_fn": FromPandas()}, lambda batch: batch[0].dtype == torch.int64),
        ({"collate_fn": from_numpy}, lambda batch: batch["sum"] > 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",  # the same in each process that collects
)
@pytest.mark.filterwarnings("ignore::ray.util.annotations.RayDeprecationWarning")
def test_received_rows_are_counted(shards: Shards, numbers: str, options: dict[str, Any], last: Any) -> None:
    shard = shards(numbers, num_splits=NUM_SPLITS)
    received: list[Any] = []
    for batch in shard.iter_torch_batches(batch_size=100, **options):
        received.append(batch)
        state = shard.state_dict()
        if len(received) < 9:
            assert (state["epoch"], state["samples_consumed_per_split"]) == (0, 25 * len(received))
    assert (
        len(received)
        == shard.num_batches(100, options.get("drop_last", False))
        == (9 if "drop_last" in options else 10)
    )
    assert last(received[-1])
    assert (shard.state_dict()["epoch"], shard.state_dict()["samples_consumed_per_split"]) == (1, 0)


def test_arguments_that_make_no_sense(shards: Shards, numbers: str) -> None:
    shard = shards(numbers, num_splits=NUM_SPLITS)
    with pytest.raises(ValueError, match="collate_fn cannot be used with dtypes"):
        shard.iter_torch_batches(batch_size=100, collate_fn=FromArrow(), dtypes=torch.int8)
    with pytest.raises(ConfigError, match=r"dtypes must name columns of the stream, got \['x'\]"):
        next(iter(shard.iter_torch_batches(batch_size=100, dtypes={"x": torch.int8})))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without an accelerator")
def test_pinned_memory_without_an_accelerator_is_torchs_error(shards: Shards, numbers: str) -> None:
    shard = shards(numbers, num_splits=NUM_SPLITS)
    with pytest.raises(Exception, match="accelerator"):
        next(iter(shard.iter_torch_batches(batch_size=100, pin_memory=True)))


# ---- blobs


@pytest.mark.parametrize("key", ["blob (large_binary)", "blob (lance.blob.v2)"])
def test_blobs_end_to_end(shards: Shards, tmp_path: Path, key: str) -> None:
    columns = {"id": pa.array(range(NUM_ROWS)), key: columns_of("2.2", {3})[key]}
    dataset = write(tmp_path, columns, "2.2")
    payloads = columns_of("2.2", {3})["large_binary"].to_pylist()
    shard = shards(dataset.uri, num_splits=NUM_SPLITS)
    assert shard.schema().types == [pa.int64(), pa.large_binary()]
    rows = rows_of(NUM_ROWS)
    assert [row[slug(key)] for row in shard.iter_rows()] == [payloads[i] for i in rows]
    batch = next(iter(shards(dataset.uri, num_splits=NUM_SPLITS).iter_batches(batch_size=NUM_ROWS)))
    assert batch[slug(key)].tolist() == [payloads[i] for i in rows]
    with pytest.raises(ConfigError, match="of type large_binary"):
        next(iter(shard.iter_torch_batches(batch_size=4)))
