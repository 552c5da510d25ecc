"""What compares or hashes manifests does not depend on the order of their maps, which differs from one opening to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.arrow import bfloat16_array
from lance.dataset import AutoCleanupConfig

from ray_lance_stream import lance_stream
from ray_lance_stream.lancedb_order import list_key
from ray_lance_stream.manifest import manifest_bytes
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.source import table_ref
from ray_lance_stream.table import TableRef, open_tables

OPENINGS = 40
IDS = pa.array(range(10))


def texts(num: int) -> dict[str, str]:
    return {f"k{i}": "v" for i in range(num)}


def with_field_metadata(path: str) -> None:
    fields = [pa.field("id", pa.int64(), metadata=texts(4)), pa.field("x", pa.int64(), metadata=texts(2))]
    lance.write_dataset(pa.Table.from_arrays([IDS, IDS], schema=pa.schema(fields)), path)


def with_schema_metadata(path: str) -> None:
    lance.write_dataset(pa.table({"id": IDS}).replace_schema_metadata(texts(5)), path)


def with_config(path: str) -> None:
    lance.write_dataset(pa.table({"id": IDS}), path).update_config(texts(3))


def with_clean_up(path: str) -> None:
    options = AutoCleanupConfig(interval=20, older_than_seconds=3600)
    lance.write_dataset(pa.table({"id": IDS}), path, auto_cleanup_options=options)


def with_tensors(path: str) -> None:
    storage = pa.FixedSizeListArray.from_arrays(np.zeros(40, np.float32), 4)
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [2, 2]), storage)
    lance.write_dataset(pa.table({"id": IDS, "t": tensors, "b": bfloat16_array([1.0] * 10)}), path)


TABLES = [with_field_metadata, with_schema_metadata, with_config, with_clean_up, with_tensors]


@pytest.fixture(params=TABLES, ids=lambda make: make.__name__)
def path(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    make: Callable[[str], None] = request.param
    make(str(tmp_path / "t.lance"))
    return str(tmp_path / "t.lance")


def test_the_order_of_maps_does_not_count(path: str) -> None:
    opened = [lance.dataset(path) for _ in range(OPENINGS)]
    assert len({dataset._ds.serialized_manifest() for dataset in opened}) > 1, "nothing to test"
    assert len({manifest_bytes(dataset) for dataset in opened}) == 1


def test_a_dataset_is_accepted_each_time(path: str) -> None:
    newest = lance.dataset(path).version
    assert {table_ref(lance.dataset(path)) for _ in range(OPENINGS)} == {TableRef(path, newest)}


def test_a_tag_names_the_version_each_time(path: str) -> None:
    ref = table_ref(path)
    for number in range(OPENINGS // 2):
        PinnedAs("run", f"owner {number}").begin(ref)
    assert list(lance.dataset(path).tags.list()) == ["run"]


def test_a_list_has_one_key(path: str) -> None:
    plan = lance_stream(path, num_splits=2, order="lancedb")._plan
    keys = set()
    for _ in range(OPENINGS):
        open_tables._tables.clear()
        keys.add(list_key(plan, 0))
    assert len(keys) == 1


def test_io_uring_is_used_each_time(path: str) -> None:
    if table_ref(path).open_uring() is None:
        plain = lance.write_dataset(pa.table({"id": IDS}), f"{path}-plain").uri
        assert table_ref(plain).open_uring() is None, "io_uring works for another table"
        pytest.skip("io_uring is forbidden here")
    for _ in range(OPENINGS):
        open_tables._tables.clear()
        assert table_ref(path).open_uring() is not None


def test_every_version_and_table_has_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "t.lance")
    with_schema_metadata(path)
    lance.write_dataset(pa.table({"id": IDS}), path, mode="append")
    lance.dataset(path).update_config({"k0": "v"})
    lance.dataset(path).update_config({"k0": "w"})
    lance.dataset(path).update_config({"k1": "w"})
    with_schema_metadata(str(tmp_path / "other.lance"))
    opened = [lance.dataset(path, version=version) for version in range(1, 6)]
    opened.append(lance.dataset(str(tmp_path / "other.lance")))
    assert len({manifest_bytes(dataset) for dataset in opened}) == len(opened)


@pytest.mark.parametrize("num_columns", [1, 300])
def test_without_metadata_it_is_as_lance_has_it(tmp_path: Path, num_columns: int) -> None:
    """So the names of lists that are on disk stay valid; lengths of several bytes too."""
    table = pa.table({f"{'c' * 200}{number}": IDS for number in range(num_columns)})
    dataset = lance.write_dataset(table, str(tmp_path / "t.lance"), max_rows_per_file=1)
    assert manifest_bytes(dataset) == dataset._ds.serialized_manifest()
