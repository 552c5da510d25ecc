"""The datasource of `to_dataset`: rows and order of its read tasks, and how many tasks and chunks there are. No cluster."""

from __future__ import annotations

import time
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.data import DataContext

from ray_lance_stream import LanceStream, lance_stream
from ray_lance_stream.config import MAX_CHUNK_ROWS, ReadPlan
from ray_lance_stream.cursor import cycles_in, part
from ray_lance_stream.dataset import (
    MAX_READ_TASKS,
    EpochPart,
    LanceStreamDatasource,
    cycles_per_chunk,
    epoch_source,
    wished_tasks,
)
from ray_lance_stream.order import Order
from ray_lance_stream.table import TableRef
from tests.support import Oracle, make_table, scan_ids

MIB = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_table(tmp_path_factory.mktemp("dataset") / "t", 1000)


def source_of(
    stream: LanceStream, epoch: int = 0, global_batch_size: int | None = None, target_bytes: int | None = 128 * MIB
) -> LanceStreamDatasource:
    context = DataContext.get_current().copy()
    context.target_max_block_size = target_bytes
    return epoch_source(stream._plan, stream._config, epoch, global_batch_size, context)


def ids_of(source: LanceStreamDatasource, parallelism: int) -> list[list[list[int]]]:
    """By read task and chunk; checks what the tasks say of themselves."""
    tasks = source.get_read_tasks(parallelism)
    chunks = [list(task()) for task in tasks]
    assert [task.metadata.num_rows for task in tasks] == [sum(map(len, found)) for found in chunks]
    assert sum(task.metadata.size_bytes for task in tasks) == source.estimate_inmemory_data_size()
    assert all(chunk.schema == task.schema for task, found in zip(tasks, chunks, strict=True) for chunk in found)
    return [[chunk["id"].to_pylist() for chunk in found] for found in chunks]


def flat(tasks: list[list[list[int]]]) -> list[int]:
    return [i for chunks in tasks for chunk in chunks for i in chunk]


# Parts of cycle ranges


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=6), st.integers(0, 32), st.integers(0, 32))
def test_a_part_of_ranges_is_a_slice_of_their_cycles(gaps_and_sizes, start, stop):
    ranges: list[tuple[int, int]] = []
    for gap, size in gaps_and_sizes:
        lo = (ranges[-1][1] if ranges else 0) + gap
        ranges.append((lo, lo + size))
    cycles = [cycle for lo, hi in ranges for cycle in range(lo, hi)]
    found = part(ranges, start, stop)
    assert [cycle for lo, hi in found for cycle in range(lo, hi)] == cycles[start:stop]
    assert all(lo < hi for lo, hi in found)
    assert cycles_in(ranges) == len(cycles)


# Rows


@pytest.mark.parametrize("parallelism", [1, 3, 100])
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": False}, {"shuffle_clump_size": 8}, {"shuffle_seed": 7, "drop_remainder": False}],
    ids=str,
)
def test_the_tasks_hold_the_rows_of_one_worker_in_its_order(path, options, parallelism):
    oracle = Oracle(
        scan_ids(path),
        48,
        2,
        options.get("shuffle_seed", 0),
        options.get("shuffle", True),
        options.get("shuffle_clump_size"),
        options.get("drop_remainder", True),
    )
    stream = lance_stream(path, num_splits=48, global_batch_size=96, **options)
    for epoch in (0, 3):
        found = ids_of(source_of(stream, epoch), parallelism)
        assert flat(found) == np.concatenate(oracle.epoch(epoch)).tolist()
        assert len(found) == min(parallelism, len(oracle.epoch(epoch)))


def test_only_rows_of_the_pinned_version_that_match_the_filter(tmp_path):
    path = make_table(tmp_path / "t", 300)
    stream = lance_stream(path, num_splits=4, filter="id % 3 = 1")
    expected = np.concatenate(Oracle(scan_ids(path, "id % 3 = 1"), 4, 1).epoch(0)).tolist()
    lance.dataset(path).delete("id < 100")
    assert flat(ids_of(source_of(stream), 5)) == expected


def test_without_num_splits_there_is_one_as_for_one_worker(path):
    stream = lance_stream(path)
    assert flat(ids_of(source_of(stream, 0, 7), 9)) == np.concatenate(Oracle(scan_ids(path), 1, 1).epoch(0)).tolist()


@pytest.mark.parametrize("size", [48, 96, 144, 480])
def test_steps_are_whole_also_where_skipped_ones_had_another_size(path, size):
    """Training counts its steps over the rows that it gets: a step goes on behind a gap."""
    stream = lance_stream(path, num_splits=48).skip(1, range(1, 2), global_batch_size=48)
    stream = stream.skip(1, range(3, 4), global_batch_size=96)  # cycles 1, 6 and 7 of 20
    ids = np.concatenate(Oracle(scan_ids(path), 48, 1).epoch(1)).reshape(20, 48)
    expected = np.delete(ids, [1, 6, 7], axis=0).reshape(-1).tolist()
    source = source_of(stream, 1, size, target_bytes=2 * size * stream._plan.row_bytes)
    for parallelism in (1, 2, 7):
        found = ids_of(source, parallelism)
        assert flat(found) == expected
        lengths = [len(chunk) for chunks in found for chunk in chunks]
        assert all(length % size == 0 for length in lengths[:-1])
    assert len(flat(ids_of(source_of(stream, 0, size), 2))) == 960


def test_an_epoch_that_is_skipped_whole_has_no_task(path):
    stream = lance_stream(path, num_splits=48, global_batch_size=96)
    source = source_of(stream.skip(0, range(10)))
    assert source.get_read_tasks(8) == []
    assert (source.estimate_inmemory_data_size(), source.num_tasks(8)) == (0, 0)


# Sizes


def huge(num_rows: int, num_splits: int = 48, row_bytes: int = 1000) -> ReadPlan:
    """A plan over a table that does not exist."""
    return ReadPlan(TableRef("/nowhere", 1), ("id",), None, Order(num_rows), num_splits, True, row_bytes=row_bytes)


def test_a_huge_table_has_a_bounded_number_of_tasks_and_is_planned_at_once():
    plan = huge(10**10)
    cycles = plan.grid.num_cycles
    skipped = ((0, 480), (9600, cycles))
    source = LanceStreamDatasource(EpochPart(plan, 0, skipped, 20), 20, pa.schema([("id", pa.int64())]))
    begin_s = time.monotonic()
    tasks = source.get_read_tasks(100_000)
    assert time.monotonic() - begin_s < 2
    assert len(tasks) == source.num_tasks(100_000) == MAX_READ_TASKS
    rows = [task.metadata.num_rows for task in tasks]
    assert sum(rows) == source.estimate_inmemory_data_size() // 1000 == (480 + cycles - 9600) * 48
    assert max(rows) - min(rows) <= 20 * 48
    assert [len(source.get_read_tasks(n)) for n in (1, 7)] == [1, 7]


@pytest.mark.parametrize(
    ("row_bytes", "step_cycles", "expected"),
    [
        (1000, 1, 16 * MIB // 10_000),
        (1000, 300, 1500),  # whole steps
        (1000, 3000, 3000),  # one step is larger than wished
        (1000, 10_000, 16 * MIB // 10_000),  # and here than what Ray Data leaves whole
        (1, 1, MAX_CHUNK_ROWS // 10),
        (10**9, 1, 1),
    ],
)
def test_reads_have_the_wished_bytes_in_whole_steps(row_bytes, step_cycles, expected):
    plan = huge(10**6, 10, row_bytes)
    assert cycles_per_chunk(plan, step_cycles, 16 * MIB, 128 * MIB) == expected


@pytest.mark.parametrize("target_mib", [1, 4, 64])
@pytest.mark.parametrize("step_cycles", [1, 50, 5000])
def test_what_ray_data_joins_is_never_so_large_that_it_is_cut(target_mib, step_cycles):
    plan = huge(10**6, 10, 1000)
    chunk_bytes = cycles_per_chunk(plan, step_cycles, 16 * MIB, target_mib * MIB) * 10_000
    assert target_mib * MIB + chunk_bytes <= 1.5 * target_mib * MIB


def test_without_a_limit_of_ray_data_steps_are_whole_at_any_size():
    assert cycles_per_chunk(huge(10**6, 10), 10_000, 16 * MIB, None) == 10_000


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(1000, 8), (100 * MIB, 100), (1000 * MIB, 200), (256_000 * MIB, 2000)],
)
def test_as_many_tasks_as_ray_data_would_choose(monkeypatch, num_bytes, expected):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    context: Any = DataContext.get_current().copy()
    assert wished_tasks(num_bytes, context) == expected
    context.target_max_block_size = None
    assert wished_tasks(num_bytes, context) == min(expected, 200)
