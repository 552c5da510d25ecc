"""The batches of DataLoader workers: together those of the pass, in its order, for any number of workers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream.cursor import ChunkSpan, EpochWalk, Position
from ray_lance_stream.order import Order
from ray_lance_stream.own_batches import OwnBatches, spans_between
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.splits import RankShare, SplitBlock, SplitGrid
from ray_lance_stream.state import union


@st.composite
def walks(draw):
    """A pass of any rank, from any position, around any cycles that are left out."""
    num_splits = draw(st.integers(1, 12))
    grid = SplitGrid(draw(st.integers(num_splits, 150)), num_splits, draw(st.booleans()))
    world = draw(st.integers(1, num_splits))
    block = RankShare.of(grid, world, draw(st.integers(0, world - 1)), 1).block
    partial = draw(st.integers(0, block.size - 1))
    start = Position(draw(st.integers(0, 3)), draw(st.integers(0, grid.num_cycles - 1)), partial)
    cycles = st.integers(0, grid.num_cycles)
    skipped = union((min(pair), max(pair)) for pair in draw(st.lists(st.tuples(cycles, cycles), max_size=3)))
    skipped = tuple(pair for pair in skipped if pair[0] < pair[1])
    return EpochWalk(grid, block, start, skipped, draw(st.integers(1, 40)), draw(st.booleans()))


def plan_of(walk: EpochWalk) -> StreamPlan:
    return StreamPlan(Order(walk.grid.num_rows, seed=5), walk.grid)


def rows_of(walk: EpochWalk, spans) -> list[int]:
    """What a read of spans delivers."""
    plan, epoch = plan_of(walk), walk.start.epoch
    parts = []
    for span in spans:
        rows = plan.rows(epoch, walk.block, span.start, span.stop)
        assert 0 <= span.start < span.stop <= walk.grid.num_cycles
        parts.append(rows[span.skip_rows : span.skip_rows + span.num_rows])
        assert len(parts[-1]) == span.num_rows
    return np.concatenate([np.empty(0, np.int64), *parts]).tolist()


def rows_of_pass(walk: EpochWalk, cycles: int) -> list[int]:
    """The oracle: the chunks that a shard reads for this pass."""
    spans: list[ChunkSpan] = []
    while (span := walk.next_span(spans[-1] if spans else None, cycles)) is not None:
        spans.append(span)
    return rows_of(walk, spans)


@given(walks(), st.integers(1, 5), st.integers(1, 7))
def test_the_batches_of_all_workers_are_the_pass(walk, num_workers, cycles):
    expected = rows_of_pass(walk, cycles)
    workers = [OwnBatches(walk, worker, num_workers) for worker in range(num_workers)]
    found: list[int] = []
    for number in range(walk.num_batches):
        owners = [each for each in workers if number in each.numbers]
        assert owners == [workers[number % num_workers]]
        rows = rows_of(walk, owners[0].spans(number))
        assert len(rows) == owners[0].num_rows(number)
        assert len(rows) == walk.batch_size or number == walk.num_batches - 1
        found += rows
    assert found == expected
    assert sum(len(each.numbers) for each in workers) == walk.num_batches


@given(walks(), st.data())
def test_any_run_of_rows_is_found(walk, data):
    expected = rows_of_pass(walk, 3)
    first = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(first, len(expected)))
    assert rows_of(walk, spans_between(walk, first, end)) == expected[first:end]


def test_a_batch_around_cycles_that_are_left_out_has_two_spans():
    walk = EpochWalk(SplitGrid(40, 4), SplitBlock(0, 4), Position(0, 1, partial_rows=2), ((3, 5),), batch_size=10)
    assert spans_between(walk, 0, 10) == (
        ChunkSpan(1, 3, skip_rows=2, num_rows=6, end_row=6),
        ChunkSpan(5, 6, skip_rows=0, num_rows=4, end_row=10),
    )


def test_workers_beyond_the_batches_have_none():
    walk = EpochWalk(SplitGrid(40, 4), SplitBlock(0, 4), Position(0), batch_size=20)
    assert [list(OwnBatches(walk, worker, 3).numbers) for worker in range(3)] == [[0], [1], []]
