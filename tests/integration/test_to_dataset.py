"""`stream.to_dataset()`: Ray Data's own operators see the rows of training, in its order."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.data import DataContext, Dataset
from ray.data._internal.metadata_exporter import sanitize_for_struct

from ray_lance_stream import ConfigError, StreamShard, VersionNotFoundError, lance_stream
from tests.integration.conftest import Shards, flat
from tests.support import make_table, scan_ids

pytestmark = pytest.mark.timeout(120)

NUM_ROWS = 1000
STEP = 96
SECRET = "s3cr3t-v4lue"


@pytest.fixture(scope="module")
def cluster(no_cluster) -> None:
    """With a few logical CPUs only: Ray Data starts a process for each of them."""
    ray.init(address="local", num_cpus=4, object_store_memory=1 << 29, include_dashboard=False)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("dataset") / "t", NUM_ROWS)


def rows_of(source: Dataset | StreamShard) -> list[tuple[int, int, list[float]]]:
    """Every value of every row."""
    return [(row["id"], row["value"], list(row["vec"])) for row in source.iter_rows()]


def block_rows(dataset: Dataset) -> list[int]:
    return [len(block) for ref in dataset.iter_internal_ref_bundles() for block in ray.get(list(ref.block_refs))]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"shuffle_clump_size": 8, "global_batch_size": STEP},
        {"filter": "id % 3 != 0", "drop_remainder": False, "shuffle_seed": 7},
        {"replicas": 2},
    ],
    ids=str,
)
def test_rows_and_order_are_those_of_the_only_worker(shards: Shards, table, options):
    stream = shards.stream(table, **options)
    shard = shards.of(stream, 0, options.get("replicas", 1))
    for epoch in range(2):
        dataset = stream.to_dataset(epoch)
        expected = rows_of(shard)
        assert dataset.count() == len(expected)
        assert rows_of(dataset) == expected


def test_skipped_steps_are_left_out_of_their_epoch(shards: Shards, table):
    stream = shards.stream(table, global_batch_size=STEP).skip(0, range(2, 4)).skip(0, range(9, 10))
    shard = shards.of(stream)
    assert rows_of(stream.to_dataset()) == rows_of(shard)
    assert stream.to_dataset().count() == 7 * STEP
    assert stream.to_dataset(1).count() == 10 * STEP
    resumed = shards.stream(table, global_batch_size=STEP, resume_from=shard.state_dict())
    assert resumed.to_dataset().count() == 7 * STEP
    nothing = stream.skip(0, range(10)).to_dataset()
    assert (nothing.count(), nothing.take_all()) == (0, [])


class FirstIsSlow:
    """Ids of batches; the one of `first` comes only when another one has come."""

    def __init__(self, first: int, directory: Path) -> None:
        self.first = first
        self.directory = directory

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.first in batch["id"]:
            until_s = time.monotonic() + 60
            while not list(self.directory.iterdir()):
                assert time.monotonic() < until_s, "no other batch came"
                time.sleep(0.02)
        else:
            (self.directory / str(batch["id"][0])).touch()
        return {"id": batch["id"]}


def doubled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"id": batch["id"], "value": 2 * batch["value"]}


class Shifted:
    def __init__(self, by: int) -> None:
        self._by = by

    def __call__(self, batch: pa.Table) -> pa.Table:
        return batch.set_column(1, "value", pa.array(batch["value"].to_numpy() + self._by))


def test_transforms_are_applied_in_the_read_tasks(shards: Shards, table):
    stream = shards.stream(table, global_batch_size=STEP)
    mapped = stream.map_batches(doubled).map_batches(
        Shifted, batch_format="pyarrow", fn_constructor_args=[5], concurrency=2
    )
    expected = [(row, 2 * value + 5) for row, value, _ in rows_of(stream.to_dataset(1))]
    assert [(row["id"], row["value"]) for row in mapped.to_dataset(1).iter_rows()] == expected
    with pytest.raises(ConfigError, match=r"plain read tasks, but doubled asks for num_gpus"):
        stream.map_batches(doubled, num_gpus=1, batch_size=8).to_dataset()


def test_operators_keep_the_order_though_the_first_task_is_slow(shards: Shards, table, tmp_path):
    stream = shards.stream(table, global_batch_size=STEP)
    expected = flat(shards.of(stream).iter_batches())
    slow = FirstIsSlow(expected[0], tmp_path).__call__
    dataset = stream.to_dataset().map_batches(slow, batch_size=STEP)
    assert [row["id"] for row in dataset.take_all()] == expected


@pytest.mark.parametrize("target_bytes", [None, 20_000])
def test_blocks_and_batches_are_whole_steps(shards: Shards, table, monkeypatch, target_bytes):
    """Ray Data would cut them into as many as it wishes for, and into some of its target size (7680 bytes a step)."""
    if target_bytes:
        monkeypatch.setattr(DataContext.get_current(), "target_max_block_size", target_bytes)
        monkeypatch.setattr("ray_lance_stream.dataset.MAX_READ_TASKS", 1)
    stream = shards.stream(table)
    dataset = stream.to_dataset(global_batch_size=240)
    assert block_rows(dataset) == ([720, 240] if target_bytes else [240] * 4)
    sums = [row["sum"] for row in dataset.map_batches(lambda b: {"sum": [b["id"].sum()]}, batch_size=240).take_all()]
    assert sums == [sum(stream.row_ids(0, step, global_batch_size=240).tolist()) for step in range(4)]


def test_columns_and_first_rows(shards: Shards, table):
    stream = shards.stream(table)
    dataset = stream.to_dataset()
    assert dataset.schema().base_schema == lance.dataset(table).schema
    assert dataset.take(3) == [{**row, "vec": list(row["vec"])} for row in shards.of(stream).iter_rows()][:3]


def test_what_is_written_to_a_table_is_the_epoch_in_its_order(shards: Shards, table, tmp_path):
    stream = shards.stream(table, columns=["id", "vec"])
    dataset = stream.to_dataset(2)
    blocks = dataset.iter_batches(batch_size=None, batch_format="pyarrow")
    batches = (batch for block in blocks for batch in block.to_batches())
    lance.write_dataset(pa.RecordBatchReader.from_batches(dataset.schema().base_schema, batches), str(tmp_path / "w"))
    shard = shards.of(stream)
    shard.set_epoch(2)
    assert scan_ids(str(tmp_path / "w")).tolist() == flat(shard.iter_batches(batch_size=48))
    assert lance.dataset(tmp_path / "w").schema.field("vec").type == lance.dataset(table).schema.field("vec").type


@pytest.mark.xfail(reason="Ray 2.60 hands Lance an argument that Lance has no more", raises=TypeError)
def test_write_lance(shards: Shards, table, tmp_path):
    stream = shards.stream(table)
    stream.to_dataset().write_lance(str(tmp_path / "w"))
    assert scan_ids(str(tmp_path / "w")).tolist() == flat(shards.of(stream).iter_batches(batch_size=48))


def test_a_table_that_changes_does_not_change_the_dataset(shards: Shards, tmp_path):
    path = make_table(tmp_path / "t", 480)
    stream = shards.stream(path)
    dataset = stream.to_dataset()
    expected = dataset.take_all()
    lance.dataset(path).delete("id < 100")
    assert dataset.take_all() == expected
    assert stream.to_dataset().take_all() == expected


def test_a_version_that_is_gone_is_an_error_that_says_so(shards: Shards, tmp_path):
    path = make_table(tmp_path / "t", 480)
    stream = shards.stream(path)
    before = stream.to_dataset()
    lance.dataset(path).delete("id < 100")
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    gone = r"version \d+ of table .* no longer exists.*tag it"
    with pytest.raises(VersionNotFoundError, match=gone):
        stream.to_dataset()
    with pytest.raises(VersionNotFoundError, match=gone):
        before.take_all()
    assert before.count() == 480  # which needs no read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epoch": -1}, "epoch must be an int >= 0, got -1"),
        ({"epoch": True}, "epoch must be an int >= 0, got True"),
        ({"global_batch_size": 0}, "global_batch_size must be an int >= 1, got 0"),
        ({"global_batch_size": 100}, "global_batch_size=96 or 144"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_at_once(shards: Shards, table, arguments, message):
    with pytest.raises(ConfigError, match=message):
        shards.stream(table).to_dataset(**arguments)


def test_storage_options_show_nowhere(table, caplog, capfd):
    """Nor in what Ray Data exports of its operators."""
    caplog.set_level(logging.DEBUG)
    dataset = lance_stream(table, num_splits=48, storage_options={"secret_access_key": SECRET}).to_dataset()
    dataset.take(1)
    dataset.explain()
    exported = str(sanitize_for_struct(dataset._logical_plan.dag._get_args()))
    assert "LanceStream" in exported
    for text in (repr(dataset), dataset.stats(), caplog.text, *capfd.readouterr(), exported):
        assert SECRET not in text
