"""Numbers of splits for a set of worker counts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.splits import split_block
from ray_lance_stream.suggest import MOST_SPLITS, divisors, split_choice, suggest_num_splits

COUNTS = st.sets(st.integers(1, 40), min_size=1, max_size=6)
BATCHES = st.integers(1, 5000) | st.sampled_from([480, 512, 720, 5040])


@given(st.integers(1, 20_000))
def test_divisors(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@given(COUNTS, BATCHES | st.none(), st.integers(1, 3000) | st.none())
def test_a_suggestion_serves_the_counts_the_batch_and_the_rows(counts, size, num_rows):
    choices = suggest_num_splits(counts, global_batch_size=size, num_rows=num_rows)
    assert [choice.num_splits for choice in choices] == sorted({choice.num_splits for choice in choices})
    assert len(choices) <= 4
    for choice in choices:
        splits = choice.num_splits
        assert max(counts) <= splits <= (num_rows or 10**9)
        assert size is None or size % splits == 0
        assert set(choice.even_workers) == {w for w in counts if splits % w == 0}
        assert set(choice.uneven_workers) == counts - set(choice.even_workers)


@given(COUNTS, BATCHES | st.none(), st.integers(1, 3000) | st.none())
def test_no_number_of_splits_is_even_for_more_of_the_counts(counts, size, num_rows):
    choices = suggest_num_splits(counts, global_batch_size=size, num_rows=num_rows)
    most = min(num_rows or 10**9, MOST_SPLITS if size is None else size)
    possible = [s for s in range(max(counts), most + 1) if size is None or size % s == 0]
    if not possible:
        assert choices == ()
        return
    fewest = min(sum(s % w != 0 for w in counts) for s in possible)
    assert {len(choice.uneven_workers) for choice in choices} == {fewest}
    # The smallest one comes first, and where all counts can be even it is their least common multiple.
    assert choices[0].num_splits == next(s for s in possible if sum(s % w != 0 for w in counts) == fewest)
    common = math.lcm(*counts)
    if common in possible:
        assert choices[0].num_splits == common
        assert all(choice.num_splits % common == 0 for choice in choices)


@given(st.integers(1, 500).flatmap(lambda s: st.tuples(st.just(s), st.sets(st.integers(1, s), min_size=1, max_size=4))))
def test_the_largest_share_is_that_of_the_blocks(case):
    num_splits, counts = case
    choice = split_choice(num_splits, counts)
    worst = max(
        Fraction(max(split_block(num_splits, w, rank).size for rank in range(w)) * w, num_splits) for w in counts
    )
    assert choice.largest_share == pytest.approx(float(worst))
    assert (choice.largest_share == 1.0) == (not choice.uneven_workers)


def test_examples():
    assert [c.num_splits for c in suggest_num_splits([2, 4, 8], global_batch_size=480)] == [8, 16, 48, 96]
    assert [c.num_splits for c in suggest_num_splits([4, 8, 16])] == [16, 32, 96, 192]
    of_all_counts = suggest_num_splits(range(2, 9), global_batch_size=480)
    assert [c.num_splits for c in of_all_counts] == [120, 240, 480]
    assert {c.uneven_workers for c in of_all_counts} == {(7,)}
    assert suggest_num_splits([8], global_batch_size=4) == ()


@pytest.mark.parametrize(
    ("counts", "size", "says"),
    [([], None, r"got \[\]"), ([0, 2], None, "0, 2"), ([2], 0, "got 0"), ([2], -4, "got -4")],
)
def test_bad_numbers(counts, size, says):
    with pytest.raises(ConfigError, match=says):
        suggest_num_splits(counts, global_batch_size=size)
