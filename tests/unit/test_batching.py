"""Batch sizes that nobody names: the same global steps on any number of workers. On `tests.fake_ray`, without a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream import ConfigError, LanceStream, StreamShard, lance_stream
from ray_lance_stream.splits import RankShare, SplitGrid
from tests.fake_ray import Cluster
from tests.support import Oracle, make_table, scan_ids

S, ROWS, G = 48, 1000, 288
STEPS = 4  # three of 6 cycles and one of 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A table, and no cluster."""
    with pytest.MonkeyPatch.context() as patch:
        Cluster(patch)
        patch.setattr(logging.root.manager, "disable", 0)
        yield make_table(tmp_path_factory.mktemp("batching") / "t", ROWS)


@pytest.fixture
def stream(path: str) -> LanceStream:
    return lance_stream(path, num_splits=S)


@pytest.fixture(scope="module")
def steps(path: str) -> list[list[int]]:
    """Sorted ids of each global step of epoch 0, by the oracle."""
    return [sorted(ids.tolist()) for ids in Oracle(scan_ids(path), S, G // S).epoch(0)]


def group(stream: LanceStream, world: int, state: Any = None) -> list[StreamShard]:
    shards = stream.streaming_split(world)
    for shard in shards:
        if state is not None:
            shard.load_state_dict(state)
    return shards


def global_steps(passes: list[Any], most: int | None = None) -> list[list[int]]:
    """Sorted ids of each global step, put together from the batches of all ranks."""
    found = []
    for parts in zip_longest(*passes):
        assert all(part is not None for part in parts), "some ranks have fewer batches"
        found.append(sorted(np.concatenate([np.asarray(part["id"]) for part in parts]).tolist()))
        if len(found) == most:
            break
    return found


@given(st.integers(1, 2000).flatmap(lambda s: st.tuples(st.just(s), st.integers(s, 5000))), st.booleans())
def test_the_default_is_the_smallest_multiple_of_splits_with_256_rows(case, drop):
    num_splits, rows = case
    grid = SplitGrid(rows, num_splits, drop)
    size, whole = grid.default_global_batch_size, rows // num_splits * num_splits
    assert size % num_splits == 0
    assert 0 < size <= whole
    assert size >= 256 or size == whole
    assert size - num_splits < 256
    for world in {1, num_splits // 2 or 1, num_splits}:
        shares = [RankShare.of(grid, world * 2, rank, replicas=2) for rank in range(world * 2)]
        assert sum(share.local_batch_size(size) for share in shares) == 2 * size


@pytest.mark.parametrize(
    ("world", "call"), [(1, "torch"), (2, "None"), (3, "dataset"), (5, "torch"), (5, "None"), (48, "dataset")]
)
def test_without_sizes_steps_are_the_same_on_any_number_of_workers(stream, steps, world, call):
    shards = group(stream, world)
    calls = {
        "torch": lambda shard: shard.iter_torch_batches(),
        "None": lambda shard: shard.iter_batches(batch_size=None),
        "dataset": lambda shard: shard.to_torch_dataset(),
    }
    assert [shard.num_batches() for shard in shards] == [STEPS] * world
    assert global_steps([calls[call](shard) for shard in shards]) == steps
    assert shards[0].state_dict()["global_batch_size"] is None


def test_a_resume_on_other_workers_goes_on_in_the_same_steps(stream, steps):
    found: list[list[int]] = []
    state = None
    for world in (3, 5, 1, 48):
        shards = group(stream, world, state)
        found += global_steps([iter(shard.iter_batches()) for shard in shards], most=1)
        state = shards[world // 2].state_dict()
    assert found == steps


def test_rows_digests_and_skips_of_a_step_have_the_default_size(stream, steps):
    assert (stream.plan.global_batch_size, stream.plan.default_global_batch_size) == (None, G)
    assert (stream.plan.steps_per_epoch, stream.plan.cycles_per_step) == (STEPS, G // S)
    assert [sorted(stream.row_ids(0, step).tolist()) for step in range(STEPS)] == steps
    assert stream.step_digest(0, 2) == stream.step_digest(0, 2, global_batch_size=G)
    skipping = stream.skip(0, range(1, 3))
    assert skipping.plan.skipped == ((0, 6, 18),)
    assert global_steps([shard.iter_batches() for shard in group(skipping, 2)]) == [steps[0], steps[3]]


def test_replicas_have_equal_batches_of_the_default(path, steps):
    shards = lance_stream(path, num_splits=S, replicas=2).streaming_split(6)
    batches = [[np.asarray(batch["id"]).tolist() for batch in shard.iter_batches()] for shard in shards]
    assert [batches[0], batches[2], batches[4]] == [batches[1], batches[3], batches[5]]
    assert [sorted(chain(*parts)) for parts in zip(*batches[::2], strict=True)] == steps


def test_a_table_of_few_rows_has_one_step(path):
    stream = lance_stream(path, num_splits=S, filter="id < 100")
    assert stream.plan.default_global_batch_size == 96
    for world in (1, 5):
        passes = [shard.iter_batches(drop_last=True) for shard in group(stream, world)]
        assert [len(ids) for ids in global_steps(passes)] == [96]


def test_a_size_that_is_given_stays(stream, path, caplog):
    with caplog.at_level(logging.WARNING):
        shards = group(stream, 2)
        sizes = [[len(batch["id"]) for batch in shard.iter_batches(batch_size=100)] for shard in shards]
    assert sizes == [[100] * 4 + [80]] * 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, "once, not by each rank"
    assert "batch_size=100 is no multiple of this rank's 24 splits" in told[0]
    with pytest.raises(ConfigError, match="5 workers do not divide num_splits=48"):
        iter(group(stream, 5)[0].iter_batches(batch_size=256))
    assert lance_stream(path, num_splits=S, global_batch_size=96).plan.default_global_batch_size is None


def test_without_splits_ranks_have_256_rows(path):
    shards = lance_stream(path).streaming_split(3)
    assert [len(batch["id"]) for batch in shards[0].iter_batches()] == [256, 77]
    with pytest.raises(ConfigError, match="neither num_splits nor global_batch_size"):
        iter(shards[0].iter_batches(batch_size=None))
    with pytest.raises(ConfigError, match="depend on num_splits"):
        lance_stream(path).row_ids(0, 0)


def test_the_default_is_said_once_where_it_is_used(path, caplog):
    with caplog.at_level(logging.INFO):
        stream = lance_stream(path, num_splits=S)
        assert "no global_batch_size is given: calls without a batch size have global steps of 288 rows" in caplog.text
        for _ in range(2):
            global_steps([shard.iter_batches(batch_size=48) for shard in group(stream, 4)])
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "left out" not in r.getMessage()]
        shards = group(stream, 4)
        for _ in range(2):
            global_steps([shard.iter_batches() for shard in shards])
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "left out" not in r.getMessage()]
    assert len(told) == 1
    assert "global steps have 288 rows, 6 of each of the 48 splits, on any number of workers" in told[0]
    assert "steps" in stream.explain()
    assert (
        "4 an epoch, of 288 rows, 6 cycles, where no batch size is given; the last one of 2 cycles" in stream.explain()
    )


# ---- digests of steps of which a part is skipped


@settings(max_examples=20)
@given(
    st.sampled_from([48, 96, 144, 288]),
    st.sampled_from([48, 96, 144, 288]),
    st.lists(st.integers(0, 2), min_size=1, max_size=2),
    st.sampled_from([1, 2, 5]),
)
def test_digests_add_up_where_a_part_of_a_step_is_skipped(path, skip_size, asked_size, skipped, world):
    stream = lance_stream(path, num_splits=S, read_batch_size=20)
    for step in skipped:
        stream = stream.skip(0, range(step, step + 1), global_batch_size=skip_size)
    shards = group(stream, world)
    for shard in shards:
        for _ in shard.iter_batches():
            pass
    found = sum(shard.digest() for shard in shards) % 2**64
    steps = -(-(ROWS // S) // (asked_size // S))
    assert found == sum(stream.step_digest(0, t, global_batch_size=asked_size) for t in range(steps)) % 2**64


def test_skips_of_a_state_to_resume_from_count_in_digests(path, stream):
    state = {**stream.state_dict(), "skipped": [[0, 6, 9]]}
    resumed = lance_stream(path, num_splits=S, resume_from=state)
    shard = resumed.shard()
    for _ in shard.iter_batches():
        pass
    assert shard.digest() == sum(resumed.step_digest(0, step) for step in range(STEPS)) % 2**64
    assert resumed.step_digest(0, 1) not in (0, stream.step_digest(0, 1))


def test_steps_of_a_range_are_skipped_as_one(stream):
    assert stream.skip(0, range(3, 0, -1)).plan.skipped == ((0, 6, 20),)
    assert stream.skip(0, range(0, 4, 2)).plan.skipped == ((0, 0, 6), (0, 12, 18))


# ---- one shard of several


def test_the_position_of_a_stream_is_that_of_all_shards_made_one_by_one(path, caplog):
    stream = lance_stream(path, num_splits=S)
    first, second = stream.shard(0, 2), stream.shard(1, 2)
    batches = [iter(first.iter_batches())]
    next(batches[0])
    first._position.tell()
    with caplog.at_level(logging.WARNING):
        stream.state_dict()
        stream.stats()
    told = [record.getMessage() for record in caplog.records if "coordinator so far" in record.getMessage()]
    assert len(told) == 1
    assert "of 2 ranks only 0 have reported their position" in told[0]
    batches.append(iter(second.iter_batches()))
    next(batches[0])
    next(batches[1])
    first._position.tell()
    second._position.tell()
    assert stream.state_dict() == second.state_dict()
    assert {rank: told["samples_consumed_per_split"] for rank, told in stream.progress().items()} == {0: 12, 1: 6}
    assert stream.stats().startswith("Ranks: 2\n")
    for each in batches:
        each.close()
    alone = stream.shard(0, 3)
    assert alone.state_dict()["samples_consumed_per_split"] == 0
    assert list(stream.progress()) == [0], "shards of another world size are another group"
