"""Plan, walk and cursor: exact rows for every size, world, batch and stop (B04, B06, B08, B11, B20), no I/O."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream.cursor import ChunkSpan, Cursor, EpochWalk, Position, without
from ray_lance_stream.errors import ConfigError, IterationError
from ray_lance_stream.order import Order
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.splits import SplitBlock, SplitGrid, split_block


def make_plan(num_rows, num_splits, *, drop=True, shuffle=True, seed=0, clump=None):
    order = Order(num_rows, shuffle=shuffle, seed=seed, clump_size=clump)
    return StreamPlan(order, SplitGrid(num_rows, num_splits, drop))


def spans(walk: EpochWalk, cycles: int) -> list[ChunkSpan]:
    found: list[ChunkSpan] = []
    while (span := walk.next_span(found[-1] if found else None, cycles)) is not None:
        found.append(span)
    return found


def delivered(plan: StreamPlan, walk: EpochWalk, cycles_per_chunk: int = 3) -> np.ndarray:
    """The rows of a walk, chunk by chunk, as a reader computes them."""
    parts = []
    for span in spans(walk, cycles_per_chunk):
        rows = plan.rows(walk.start.epoch, walk.block, span.start, span.stop)
        parts.append(rows[span.skip_rows : span.skip_rows + span.num_rows])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def whole(plan: StreamPlan, epoch: int = 0) -> np.ndarray:
    block = SplitBlock(0, plan.grid.num_splits)
    return plan.rows(epoch, block, 0, plan.grid.num_cycles)


def test_sweep_of_sizes_worlds_batches_and_stops():
    """B08: every combination gives the exact tail, on any other world, at every cycle boundary."""
    worlds = (1, 2, 3, 4, 6)
    for num_rows, num_splits in itertools.product(
        (1, 2, 5, 6, 7, 11, 12, 13, 47, 48, 49, 95, 97, 120, 200), (1, 2, 6, 12, 48)
    ):
        if num_rows < num_splits:
            continue
        plan = make_plan(num_rows, num_splits)
        oracle = whole(plan).reshape(plan.grid.num_cycles, num_splits)
        for world, stop in itertools.product(worlds, range(plan.grid.num_cycles + 1)):
            if world > num_splits:
                continue
            parts = []
            for rank in range(world):
                block = split_block(num_splits, world, rank)
                walk = EpochWalk(plan.grid, block, Position(0, stop))
                rows = delivered(plan, walk)
                assert len(rows) == walk.num_rows
                parts.append(rows.reshape(-1, block.size))
            assert np.array_equal(np.concatenate(parts, axis=1), oracle[stop:])


@pytest.mark.parametrize("drop_last", [False, True])
def test_sweep_of_batches_and_every_stop_step(drop_last):
    """B08, same world: stopping after any batch of any size and going on gives the unbroken run."""
    for num_rows, num_splits, world in itertools.product((6, 13, 48, 61), (1, 2, 6, 12), (1, 2, 3, 6)):
        if num_rows < num_splits or world > num_splits or num_splits % world:
            continue
        plan = make_plan(num_rows, num_splits)
        block = split_block(num_splits, world, world - 1)
        for batch in range(1, 10):
            walk = EpochWalk(plan.grid, block, Position(0), (), batch, drop_last)
            oracle = delivered(plan, walk)
            for stop in range(0, len(oracle) + 1, batch):
                position = walk.position_after(stop)
                if stop == len(oracle):
                    assert position == Position(1)
                    continue
                rest = EpochWalk(plan.grid, block, position, (), batch, drop_last)
                assert np.array_equal(delivered(plan, rest), oracle[stop:])


@settings(max_examples=200)
@given(st.data())
def test_each_row_once_per_epoch_and_left_out_rows_rotate(data):
    num_splits = data.draw(st.integers(1, 24))
    num_rows = data.draw(st.integers(num_splits, 400))
    drop = data.draw(st.booleans())
    clump = data.draw(st.sampled_from([None, 1, 2, 5, 16]))
    plan = make_plan(num_rows, num_splits, drop=drop, clump=clump, seed=data.draw(st.integers(-5, 5)))
    for epoch in range(2):
        rows = whole(plan, epoch)
        assert len(rows) == len(set(rows.tolist())) == plan.grid.epoch_rows
        assert rows.min() >= 0
        assert rows.max() < num_rows


def test_left_out_rows_differ_between_epochs():
    """B20: nobody is left out for ever."""
    plan = make_plan(480 + 47, 48)
    left = [set(range(527)) - set(whole(plan, epoch).tolist()) for epoch in range(48)]
    assert all(len(rows) == 47 for rows in left)
    assert len(set().union(*left)) > 480
    assert not set.intersection(*left)


def test_tail_rows_go_to_the_first_splits():
    plan = make_plan(10, 4, drop=False, shuffle=False)
    assert plan.rows(0, SplitBlock(0, 4), 0, 3).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    assert plan.rows(0, SplitBlock(0, 1), 2, 3).tolist() == [8]
    assert plan.rows(0, SplitBlock(2, 4), 2, 3).tolist() == []


def test_matched_rows_are_looked_up():
    plan = StreamPlan(Order(4, shuffle=False), SplitGrid(4, 2), np.array([3, 5, 8, 13]))
    assert plan.rows(0, SplitBlock(0, 2), 0, 2).tolist() == [3, 8, 5, 13]
    with pytest.raises(ConfigError, match="same number of rows"):
        StreamPlan(Order(5), SplitGrid(4, 2))


def test_fingerprint_tells_orders_apart():
    plan = make_plan(480, 48)
    assert plan.fingerprint() == make_plan(480, 48).fingerprint()
    others = [make_plan(480, 48, seed=1), make_plan(481, 48), make_plan(480, 24), make_plan(480, 48, shuffle=False)]
    assert len({plan.fingerprint(), *(p.fingerprint() for p in others)}) == 5


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=4).map(
    lambda items: sorted({(lo, lo + size) for lo, size in items})
)


@given(RANGES)
def test_without(cut):
    from ray_lance_stream.state import union

    kept = without([(3, 25)], union(cut))
    covered = {c for lo, hi in cut for c in range(lo, hi)}
    assert [c for lo, hi in kept for c in range(lo, hi)] == [c for c in range(3, 25) if c not in covered]


@settings(max_examples=300)
@given(st.data())
def test_walk_with_skips_and_partial_cycles_against_a_list(data):
    """A walk is the list of rows from its start, less skipped cycles; positions cut that list exactly."""
    from ray_lance_stream.state import union

    num_splits = data.draw(st.integers(1, 6))
    num_rows = data.draw(st.integers(num_splits, 80))
    grid = SplitGrid(num_rows, num_splits, data.draw(st.booleans()))
    world = data.draw(st.integers(1, num_splits))
    block = split_block(num_splits, world, data.draw(st.integers(0, world - 1)))
    skipped = union(data.draw(RANGES))
    batch = data.draw(st.sampled_from([None, 1, 3, 4, 7]))
    drop_last = batch is not None and data.draw(st.booleans())
    walk = EpochWalk(grid, block, Position(2), skipped, batch, drop_last)

    cells = [
        (c, i) for lo, hi in without([(0, grid.num_cycles)], skipped) for c in range(lo, hi)
        for i in range(grid.block_rows(block, c, c + 1))
    ]  # fmt: skip
    if drop_last:
        cells = cells[: len(cells) // batch * batch]
    got: list[tuple[int, int]] = []
    for span in spans(walk, data.draw(st.integers(1, 5))):
        rows = [(c, i) for c in range(span.start, span.stop) for i in range(grid.block_rows(block, c, c + 1))]
        got += rows[span.skip_rows : span.skip_rows + span.num_rows]
        assert span.end_row == len(got)
    assert got == cells
    assert walk.num_rows == len(cells)

    stop = data.draw(st.integers(0, len(cells)))
    position = walk.position_after(stop)
    if stop == len(cells):
        assert position == Position(3)
    elif stop:
        rest = EpochWalk(grid, block, position, skipped)
        first = next(iter(spans(rest, 100)))
        assert (first.start, first.skip_rows) == cells[stop] or first.start > position.cycle
        assert rest.num_rows >= len(cells) - stop


def test_cursor_follows_what_was_received():
    grid, block = SplitGrid(96, 48), SplitBlock(0, 24)
    cursor = Cursor(Position(0))
    walk = EpochWalk(grid, block, cursor.next_start)
    cursor.begin(walk)
    assert cursor.live
    cursor.received(24)
    assert cursor.position == Position(0, 1)
    cursor.received(10)
    assert cursor.position == Position(0, 1, 10)
    cursor.received(14)
    assert (cursor.position, cursor.live, cursor.next_start) == (Position(1), False, Position(1))
    cursor.leave()
    assert cursor.next_start == Position(1)


def test_cursor_after_a_break_goes_to_the_next_epoch_but_keeps_its_state():
    walk = EpochWalk(SplitGrid(96, 48), SplitBlock(0, 48), Position(4))
    cursor = Cursor(Position(4))
    cursor.begin(walk)
    cursor.received(48)
    cursor.leave()
    assert cursor.position == Position(4, 1)
    assert cursor.next_start == Position(5)
    cursor.set_epoch(4)
    assert cursor.next_start == Position(4)


def test_cursor_after_a_pass_that_delivered_no_row_is_where_the_pass_began():
    """Whatever ended it: workers that did not start, a read that failed, another `iter()` before the first batch."""
    grid, block = SplitGrid(96, 48), SplitBlock(0, 48)
    cursor = Cursor(Position(4, 1), "old")
    cursor.begin(EpochWalk(grid, block, Position(4, 1)), "new")
    assert (cursor.live, cursor.next_start) == (True, Position(4, 1))
    cursor.leave()
    assert (cursor.where, cursor.live, cursor.next_start) == ((Position(4, 1), "old"), False, Position(4, 1))
    cursor.set_epoch(4)
    assert cursor.next_start == Position(4, 1)  # a place like any that is open
    cursor.begin(EpochWalk(grid, block, Position(4, 1)), "new")
    cursor.received(1)
    cursor.leave()
    assert (cursor.where, cursor.next_start) == ((Position(4, 1, 1), "new"), Position(5))
    cursor.begin(EpochWalk(grid, block, Position(5)))
    cursor.leave()
    assert cursor.next_start == Position(5)
    cursor.load(Position(4, 2))
    nothing = EpochWalk(grid, block, Position(4, 2))
    assert nothing.num_rows == 0
    cursor.begin(nothing)
    cursor.leave()
    assert cursor.next_start == Position(5)  # it has ended, and has no row to wait for


def test_cursor_set_epoch_keeps_a_resumed_position():
    cursor = Cursor(Position(3, 7))
    cursor.set_epoch(3)
    assert cursor.next_start == Position(3, 7)
    cursor.set_epoch(5)
    assert cursor.next_start == Position(5)


def test_cursor_restarts_an_epoch_also_where_a_position_inside_of_it_is_open():
    cursor = Cursor(Position(3, 7), "v1")
    cursor.set_epoch(3, restart=True)
    assert (cursor.next_start, cursor.where) == (Position(3), (Position(3), "v1"))


def test_cursor_stays_in_the_epoch_that_the_loop_has_left():
    grid, block = SplitGrid(96, 48), SplitBlock(0, 24)
    cursor = Cursor(Position(4))
    with pytest.raises(IterationError, match=r"no epoch was left: the next pass begins at epoch 4, .* 0; use set"):
        cursor.resume()
    cursor.begin(EpochWalk(grid, block, Position(4)))
    cursor.received(30)
    with pytest.raises(IterationError, match=r"an iterator of this shard is live; close\(\) it first"):
        cursor.resume()
    cursor.leave()
    moves = cursor.moves
    cursor.resume()
    assert (cursor.position, cursor.next_start, cursor.moves) == (Position(4, 1, 6), Position(4, 1, 6), moves + 1)
    walk = EpochWalk(grid, block, cursor.next_start)
    cursor.begin(walk)
    cursor.received(walk.num_rows)
    cursor.leave()
    with pytest.raises(IterationError, match="no epoch was left: the next pass begins at epoch 5"):
        cursor.resume()


def test_cursor_refuses_a_load_while_live():
    cursor = Cursor(Position(0))
    cursor.begin(EpochWalk(SplitGrid(96, 48), SplitBlock(0, 48), Position(0)))
    with pytest.raises(IterationError, match="before iteration starts"):
        cursor.load(Position(1))
    cursor.leave()
    cursor.load(Position(1, 1))
    assert cursor.next_start == Position(1, 1)


def test_drop_last_ends_the_epoch_after_the_last_whole_batch():
    """B04: a save after the last batch that the loop gets never leaves an empty epoch behind."""
    walk = EpochWalk(SplitGrid(50, 1), SplitBlock(0, 1), Position(0), (), 8, True)
    assert (walk.num_rows, walk.num_batches) == (48, 6)
    assert walk.position_after(48) == Position(1)
    short = EpochWalk(SplitGrid(50, 1), SplitBlock(0, 1), Position(0), (), 8, False)
    assert (short.num_rows, short.num_batches) == (50, 7)
    assert short.position_after(48) == Position(0, 48)
