"""`stream.plan` and `stream.explain()`: what a stream is going to do, told before it does it. Ray is not started."""

from __future__ import annotations

import dataclasses
import inspect
import re

import lance
import pytest
import ray

from ray_lance_stream import ConfigError, lance_stream
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.splits import SplitGrid, split_block
from ray_lance_stream.summary import PlanSummary, names, size_text, worker_share
from tests.support import make_table

ROWS = 305
ROW_BYTES = 8 + 8 + 4 * 4  # id, value and vec


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("summary") / "t", ROWS)


@pytest.fixture(autouse=True)
def no_ray():
    yield
    assert not ray.is_initialized()


def test_every_field_is_described():
    described = re.findall(r"^ {4}(\w+): ", inspect.getdoc(PlanSummary) or "", re.M)
    assert described == [field.name for field in dataclasses.fields(PlanSummary)]


def test_the_numbers_of_a_plan(table):
    stream = lance_stream(table, num_splits=12, global_batch_size=36, filter="id < 250", shuffle_seed=7, epoch=3)
    plan = stream.plan
    grid = SplitGrid(250, 12)
    assert (plan.table, plan.version) == (table, lance.dataset(table).version)
    assert (plan.table_rows, plan.matched_rows, plan.filter) == (ROWS, 250, "id < 250")
    assert (plan.left_out_rows, plan.epoch_rows) == (10, 240)
    assert (plan.num_splits, plan.cycles_per_epoch) == (12, grid.num_cycles)
    assert (plan.global_batch_size, plan.cycles_per_step, plan.steps_per_epoch) == (36, 3, 7)
    assert plan.worker_counts == (1, 2, 3, 4, 6, 12)
    assert plan.max_workers == 12
    assert (plan.order, plan.shuffle, plan.shuffle_seed, plan.shuffle_clump_size) == ("feistel-1", True, 7, None)
    assert plan.columns == ("id", "value", "vec")
    assert plan.row_bytes == ROW_BYTES
    assert (plan.epoch, plan.samples_consumed_per_split) == (3, 0)
    steps = [stream.row_ids(0, step) for step in range(plan.steps_per_epoch)]
    assert sum(map(len, steps)) == plan.epoch_rows
    with pytest.raises(ConfigError):
        stream.row_ids(0, plan.steps_per_epoch)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.version = 1


def test_counts_are_those_of_the_pinned_version(table, tmp_path):
    path = make_table(tmp_path / "t", ROWS)
    stream = lance_stream(path, num_splits=5, filter="id >= 0")
    lance.dataset(path).delete("id < 100")
    assert (stream.plan.table_rows, stream.plan.matched_rows) == (ROWS, ROWS)
    assert lance_stream(path, num_splits=5).plan.table_rows == ROWS - 100


def test_memory_is_that_of_the_largest_chunk(table):
    """Bounded by bytes, by the rows of the epoch, and by what `read_batch_size` asks for."""
    by_bytes = lance_stream(table, num_splits=5, prefetch_bytes=12 * 5 * ROW_BYTES, prefetch_chunks=4).plan
    assert by_bytes.chunk_bytes == 2 * 5 * ROW_BYTES  # a sixth of prefetch_bytes, in whole cycles
    assert by_bytes.in_flight_bytes == 14 * 5 * ROW_BYTES
    assert lance_stream(table, num_splits=5).plan.chunk_bytes == ROWS * ROW_BYTES
    assert lance_stream(table, num_splits=5, read_batch_size=7).plan.chunk_bytes == 7 * 5 * ROW_BYTES


def test_without_splits_what_depends_on_them_is_not_known(table):
    plan = lance_stream(table, global_batch_size=10).plan
    assert plan.num_splits is plan.cycles_per_epoch is plan.steps_per_epoch is plan.worker_counts is None
    assert plan.left_out_rows is plan.epoch_rows is None
    assert plan.max_workers == ROWS
    assert "as many as workers" in str(plan)


def test_a_resumed_stream_tells_where_it_starts_and_what_it_skips(table):
    first = lance_stream(table, num_splits=12, global_batch_size=24)
    state = {**first.skip(0, range(3, 5)).skip(1, range(1)).state_dict(), "epoch": 1, "samples_consumed_per_split": 4}
    assert state["skipped"] == []  # what is skipped enters the state of a shard
    state["skipped"] = [[0, 6, 10]]
    stream = lance_stream(table, num_splits=12, global_batch_size=24, resume_from=state).skip(1, range(1))
    assert (stream.plan.epoch, stream.plan.samples_consumed_per_split) == (1, 4)
    assert stream.plan.skipped == ((0, 6, 10), (1, 0, 2))
    assert re.search(r"^starts at +epoch 1, cycle 4$", stream.explain(), re.M)
    assert re.search(r"^skipped +cycles 6 to 9 of epoch 0$", stream.explain(), re.M)


def test_print_shows_the_explanation_and_repr_is_one_line(table):
    stream = lance_stream(table, num_splits=12, global_batch_size=36, drop_remainder=False, shuffle_clump_size=4)
    assert f"{stream}" == str(stream) == stream.explain() == str(stream.plan)
    assert "\n" not in repr(stream)
    assert repr(stream).startswith("LanceStream(")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in stream.explain().splitlines())
    assert lines["rows"] == "305"
    assert lines["left out"] == "none"
    assert lines["splits"] == "12 of 25 rows"
    assert lines["steps"].startswith("9 an epoch, of 36 rows, 3 cycles; the last one of 2 cycles; ")
    assert lines["workers"] == "equal shares with 1, 2, 3, 4, 6, 12; others up to 12 are served too"
    assert lines["order"] == "feistel-1, shuffled with seed 0, clumps of 4 rows"
    assert "matched" not in lines
    assert "shuffled" not in lance_stream(table, num_splits=5).explain().partition("left out")[2].partition("\n")[0]


def test_transforms_are_told_and_secrets_are_not(table):
    def centred(batch):
        return batch

    stream = lance_stream(table, num_splits=5, storage_options={"secret_access_key": "hush-hush"}).map_batches(centred)
    assert "centred" in stream.explain()
    assert stream.plan.transforms != ()
    assert "hush" not in stream.explain() + repr(stream.plan)


@pytest.mark.parametrize("workers", [1, 2, 5, 7, 12])
def test_shares_of_workers_are_those_of_their_blocks(table, workers):
    stream = lance_stream(table, num_splits=12, global_batch_size=36)
    share = worker_share(stream._plan, stream._config, workers)
    blocks = [split_block(12, workers, rank).size for rank in range(workers)]
    assert share.splits == (min(blocks), max(blocks))
    assert share.step_rows == (3 * min(blocks), 3 * max(blocks))
    assert share.chunk_bytes[1] == 25 * ROW_BYTES * max(blocks)


def test_shares_where_workers_share_their_rows(table):
    stream = lance_stream(table, num_splits=12, global_batch_size=36, replicas=2)
    assert stream.plan.worker_counts == (2, 4, 6, 8, 12, 24)
    assert stream.plan.max_workers == 24
    assert worker_share(stream._plan, stream._config, 8).splits == (3, 3)
    with pytest.raises(ConfigError, match="multiple of replicas"):
        worker_share(stream._plan, stream._config, 3)


def test_shares_where_the_number_of_workers_is_that_of_splits(table):
    share = worker_share(lance_stream(table)._plan, StreamConfig(), 4)
    assert (share.splits, share.step_rows) == ((1, 1), None)


def test_words_for_sizes_and_lists():
    assert [size_text(n) for n in (5, 2048, 3 * 2**20 // 2, 2**30)] == ["5 bytes", "2.0 KiB", "1.5 MiB", "1.0 GiB"]
    assert names((1, 2)) == "1, 2"
    assert names(tuple(range(20))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..., 19"
    assert size_text(0) == "0 bytes"
