"""Little of everything: files, object store, CPUs; and much of it in one row, in splits or in epochs."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import lance_stream
from ray_lance_stream.config import ReadPlan
from ray_lance_stream.cursor import ChunkSpan
from ray_lance_stream.order import Order
from ray_lance_stream.planner import plan_table
from ray_lance_stream.reader import ReadRequest, read_chunk
from ray_lance_stream.source import table_ref
from ray_lance_stream.splits import SplitBlock
from tests.integration.conftest import Shards, flat
from tests.support import Oracle, effective_history, fixed_size, log_loop, make_table, read_logs, scan_ids

pytestmark = [pytest.mark.timeout(240), pytest.mark.faults, pytest.mark.slow]

MIB = 2**20
STORE_BYTES = 100 * MIB


@pytest.fixture(scope="module")
def cluster(no_cluster) -> Iterator[None]:
    """Three CPUs in all: two for workers, and one."""
    ray.init(address="local", num_cpus=3, object_store_memory=STORE_BYTES, include_dashboard=False)
    return


def large_rows(path: Path, sizes: list[int]) -> str:
    """A table with a binary column of rows of some sizes, each of which begins with its id."""
    payload = [number.to_bytes(4, "little") + bytes(size) for number, size in enumerate(sizes)]
    ids = np.arange(len(sizes))
    columns = {"id": ids, "value": 3 * ids + 1, "vec": fixed_size(ids)}
    table = pa.table({**columns, "payload": pa.array(payload, pa.binary())})
    lance.write_dataset(table, str(path), max_rows_per_file=8)
    return str(path)


def whole_epoch(path: str, columns: tuple[str, ...], num_splits: int, num_rows: int) -> pa.Table:
    """Epoch 0 in one read."""
    plan = plan_table(ReadPlan(table_ref(path), columns, None, Order(1), num_splits, drop_remainder=True))
    span = ChunkSpan(0, num_rows // num_splits, 0, num_rows, num_rows)
    return read_chunk(ReadRequest(plan, 0, SplitBlock(0, num_splits), span), plan.resolve())[0]


def test_strings_beyond_2_gib_arrive_in_parts(tmp_path):
    size, rows = MIB, 2200
    batch = pa.record_batch({"id": pa.array(range(100)), "text": pa.array(["x" * size] * 100)})
    batches = pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in range(rows // 100)))
    lance.write_dataset(batches, str(tmp_path / "t"))  # 23 MB, since all are equal
    table = whole_epoch(str(tmp_path / "t"), ("id", "text"), 20, rows)
    assert table["text"].type == pa.string()
    assert table["text"].num_chunks > 1
    assert pc.sum(pc.binary_length(table["text"])).as_py() == rows * size > 2**31
    assert sorted(table["id"].to_pylist()) == sorted([*range(100)] * (rows // 100))


FEW_FILES = """
import resource, sys
from tests.faults.test_pressure import whole_epoch
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
assert sorted(whole_epoch(sys.argv[1], ("id", "vec"), 12, 1200)["id"].to_pylist()) == list(range(1200))
"""


def test_a_process_may_open_fewer_files_than_the_table_has(tmp_path):
    path = make_table(tmp_path / "t", 1200, max_rows_per_file=4)
    assert len(lance.dataset(path).get_fragments()) > 300
    subprocess.run([sys.executable, "-c", FEW_FILES, path], check=True, timeout=100)


def test_512_splits_on_two_workers(shards: Shards, tmp_path):
    path = make_table(tmp_path / "t", 2048)
    stream = shards.stream(path, num_splits=512, global_batch_size=1024)
    ranks = [[batch["id"].tolist() for batch in shard.iter_batches()] for shard in shards.group(stream, 2)]
    steps = [first + second for first, second in zip(*ranks, strict=True)]
    expected = Oracle(scan_ids(path), 512, 2).epoch(0)
    assert [sorted(step) for step in steps] == [sorted(step.tolist()) for step in expected]


def test_1000_epochs_of_a_tiny_table_leave_nothing_behind(shards: Shards, tmp_path):
    path = make_table(tmp_path / "t", 6)
    shard = shards(path, num_splits=3)
    oracle = Oracle(scan_ids(path), 3, 2)
    batches = shard.iter_batches(batch_size=6)
    used: list[tuple[int, int]] = []
    for epoch in range(1000):
        assert flat(batches) == oracle.epoch(epoch)[0].tolist()
        if epoch in (100, 999):
            used.append((threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    assert shard.state_dict()["epoch"] == 1000
    (threads, kib), (threads_after, kib_after) = used
    assert threads_after <= threads + 1
    assert kib_after - kib < 50 * 1024


def test_rows_of_20_mib_beside_rows_of_one_byte(shards: Shards, tmp_path):
    sizes = [1, 1, 1, 20 * MIB, 1, 1] * 4
    path = large_rows(tmp_path / "t", sizes)
    shard = shards(path, num_splits=6, prefetch_bytes=32 * MIB)
    found = [
        (int(i), len(row) - 4, int.from_bytes(row[:4], "little"))
        for batch in shard.iter_batches(batch_size=6, batch_format="numpy")
        for i, row in zip(batch["id"], batch["payload"], strict=True)
    ]
    order = np.concatenate(Oracle(np.arange(len(sizes)), 6, 1).epoch(0)).tolist()
    assert found == [(i, sizes[i], i) for i in order]


def test_three_cpus_and_a_small_object_store_train_on_large_rows(cluster, tmp_path):
    """48 rows of 4 MiB are twice the object store, and each of two workers may hold more than all of it."""
    path = large_rows(tmp_path / "t", [4 * MIB] * 48)
    DataParallelTrainer(
        log_loop,
        train_loop_config={"dir": str(tmp_path), "tag": "a", "global_batch": 8, "epochs": 1},
        datasets={"train": lance_stream(path, num_splits=4, shuffle_seed=5)},  # type: ignore[dict-item]
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="pressed", storage_path=str(tmp_path / "runs")),
    ).fit()
    expected = Oracle(scan_ids(path), 4, 2, seed=5).steps(range(1))
    assert effective_history(read_logs(tmp_path), 2) == expected
