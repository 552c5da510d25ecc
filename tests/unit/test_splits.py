"""Split, cycle, step and block arithmetic (B08, B12, B19, B20)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.splits import SplitBlock, SplitGrid, data_rank, divisors, nearest_multiples, split_block

WORLDS = st.integers(1, 64).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s)))


@given(WORLDS)
def test_blocks_are_contiguous_and_as_even_as_possible(case):
    num_splits, world = case
    blocks = [split_block(num_splits, world, rank) for rank in range(world)]
    assert blocks[0].lo == 0
    assert blocks[-1].hi == num_splits
    assert all(a.hi == b.lo for a, b in pairwise(blocks))
    sizes = {block.size for block in blocks}
    assert max(sizes) - min(sizes) <= 1
    if num_splits % world == 0:
        assert sizes == {num_splits // world}


def test_more_workers_than_splits_names_both_numbers():
    with pytest.raises(ConfigError, match=r"5 workers.*num_splits=4"):
        split_block(4, 5, 0)


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (-1, 0), (4, 4), (4, -1)])
def test_ranks_outside_the_world_are_refused(world, rank):
    with pytest.raises(ConfigError):
        split_block(8, world, rank)


@given(st.integers(1, 300), st.integers(1, 60), st.booleans(), st.data())
def test_rows_of_blocks_add_up_for_every_cycle_range(num_rows, num_splits, drop, data):
    if num_rows < num_splits:
        with pytest.raises(ConfigError, match=f"{num_rows} rows.*num_splits={num_splits}"):
            SplitGrid(num_rows, num_splits, drop)
        return
    grid = SplitGrid(num_rows, num_splits, drop)
    world = data.draw(st.integers(1, num_splits))
    start = data.draw(st.integers(0, grid.num_cycles))
    stop = data.draw(st.integers(start, grid.num_cycles))
    blocks = [split_block(num_splits, world, rank) for rank in range(world)]
    whole = SplitBlock(0, num_splits)
    assert sum(grid.block_rows(b, start, stop) for b in blocks) == grid.block_rows(whole, start, stop)
    assert grid.block_rows(whole, 0, grid.num_cycles) == grid.epoch_rows
    assert grid.block_rows(whole, 0, start) + grid.block_rows(whole, start, grid.num_cycles) == grid.epoch_rows


@pytest.mark.parametrize("extra", range(48))
def test_left_out_rows_are_fewer_than_splits_and_none_without_drop_remainder(extra):
    assert SplitGrid(480 + extra, 48).num_left_out == extra
    assert SplitGrid(480 + extra, 48).epoch_rows == 480
    assert SplitGrid(480 + extra, 48, drop_remainder=False).epoch_rows == 480 + extra
    assert SplitGrid(480 + extra, 48, drop_remainder=False).num_left_out == 0


def test_cycles_per_step():
    grid = SplitGrid(4800, 48)
    assert grid.cycles_per_step(480) == 10
    assert grid.num_steps(480) == 10
    assert SplitGrid(48 * 25, 48).num_steps(480) == 3


@pytest.mark.parametrize(
    ("size", "names"), [(24, ["48", "num_splits"]), (72, ["48 or 96", "24 or 36"]), (0, ["48"]), (-48, ["48"])]
)
def test_a_global_batch_that_is_no_multiple_names_the_valid_ones(size, names):
    with pytest.raises(ConfigError) as error:
        SplitGrid(4800, 48).cycles_per_step(size)
    assert all(name in str(error.value) for name in [*names, str(size)])


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (10**9 + 7, ["999999984 or 1000000032", "num_splits=1 or 1000000007"]),  # a prime
        (10**18, ["num_splits=40 or 50"]),
        (10**30 + 1, ["global_batch_size="]),
    ],
)
def test_the_error_of_a_very_large_global_batch_comes_at_once(size, names):
    """Trying all numbers up to it would take minutes to ages."""
    with pytest.raises(ConfigError, match="must be a positive multiple") as error:
        SplitGrid(4800, 48).cycles_per_step(size)
    assert all(name in str(error.value) for name in names)


def test_divisors_of_numbers_that_are_too_large_to_try_all_divide_them():
    found = divisors(7 * 10**20)
    assert {1, 7, 1_000_000, 7 * 10**20} <= set(found)
    assert all(7 * 10**20 % number == 0 for number in found)


def test_data_ranks_of_replicas():
    assert [data_rank(4, rank, 2) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    with pytest.raises(ConfigError, match=r"5 workers and replicas=2"):
        data_rank(5, 0, 2)


def test_nearest_multiples():
    assert nearest_multiples(100, 48) == (96, 144)
    assert nearest_multiples(3, 48) == (48,)


@pytest.mark.parametrize(("lo", "hi"), [(2, 2), (3, 1), (-1, 2)])
def test_an_empty_or_negative_block_is_refused(lo, hi):
    with pytest.raises(ConfigError):
        SplitBlock(lo, hi)
