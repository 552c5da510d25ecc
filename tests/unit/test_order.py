"""Row orders: bijection, specification (docs/order.md), statistics, determinism, limits."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import subprocess
import sys
import tracemalloc
import warnings
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.order import NUM_ROUNDS, FeistelPermutation, Order, feistel_keys, mix64

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "order.md").read_text()
MASK64 = 2**64 - 1

any_seed = st.one_of(st.integers(-5, 5), st.integers(-(2**70), 2**70))
any_epoch = st.integers(0, 2**40)


# ---- slow reference: written from docs/order.md alone, one Python int at a time ------------------------------------


def ref_mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def ref_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"feistel-1:{seed}:{epoch}".encode(), digest_size=64).digest()
    return [sum(digest[8 * word + byte] << 8 * byte for byte in range(8)) for word in range(8)]


def ref_rounds(x: int, keys: list[int], bits: int, numbers: range) -> int:
    high_bits = bits // 2
    low_bits = bits - high_bits
    high, low = divmod(x, 2**low_bits)
    for number in numbers:
        if number % 2 == 0:
            high ^= ref_mix64(low ^ keys[number]) % 2**high_bits
        else:
            low ^= ref_mix64(high ^ keys[number]) % 2**low_bits
    return high * 2**low_bits + low


def ref_perm(x: int, keys: list[int], num_rows: int, inverse: bool = False) -> int:
    bits = max(6, (num_rows - 1).bit_length())
    numbers = range(7, -1, -1) if inverse else range(8)
    x = ref_rounds(x, keys, bits, numbers)
    while x >= num_rows:
        x = ref_rounds(x, keys, bits, numbers)
    return x


def ref_layout(num_rows: int, seed: int, epoch: int, clump_rows: int) -> list[int]:
    """The whole epoch, clump after clump: needs no inverse, so it checks the one that the library uses."""
    keys = ref_keys(seed, epoch)
    num_clumps = (num_rows + clump_rows - 1) // clump_rows
    clumps = [ref_perm(slot, keys, num_clumps) for slot in range(num_clumps)]
    return [row for k in clumps for row in range(k * clump_rows, min((k + 1) * clump_rows, num_rows))]


def whole(order: Order, epoch: int = 0) -> np.ndarray:
    return order.rows(epoch, np.arange(order.num_rows))  # [N]


# ---- bijection, inverse, clumps -------------------------------------------------------------------------------------


def test_every_small_epoch_is_a_permutation():
    for num_rows in range(1, 301):
        rows = whole(Order(num_rows, seed=num_rows), epoch=num_rows % 7)
        assert rows.dtype == np.int64
        assert np.array_equal(np.sort(rows), np.arange(num_rows)), num_rows


@settings(max_examples=60)
@given(st.integers(1, 20_000), any_seed, any_epoch, st.one_of(st.none(), st.integers(1, 25_000)))
def test_an_epoch_is_a_permutation(num_rows, seed, epoch, clump):
    rows = whole(Order(num_rows, seed=seed, clump_size=clump), epoch)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@settings(max_examples=200)
@given(st.one_of(st.integers(1, 5000), st.integers(1, 2**62)), any_seed, any_epoch, st.data())
def test_inverse_undoes_forward_and_forward_undoes_inverse(num_rows, seed, epoch, data):
    perm = FeistelPermutation(num_rows, feistel_keys(seed, epoch))
    index = np.array([*data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=50)), num_rows - 1])
    rows = perm.forward(index)
    assert rows.min() >= 0
    assert rows.max() < num_rows
    assert np.array_equal(perm.inverse(rows), index)
    assert np.array_equal(perm.forward(perm.inverse(index)), index)


@settings(max_examples=100)
@given(st.integers(1, 400), st.integers(1, 60), any_seed, any_epoch)
def test_clumps_stay_together_in_ascending_order(num_rows, clump, seed, epoch):
    rows = whole(Order(num_rows, seed=seed, clump_size=clump), epoch)
    at = 0
    while at < num_rows:
        assert rows[at] in range(0, num_rows, clump)  # a clump starts here, and all of it follows
        size = min(clump, num_rows - rows[at])
        assert np.array_equal(rows[at : at + size], np.arange(rows[at], rows[at] + size))
        at += size


def test_the_short_clump_takes_every_slot():
    slots = {whole(Order(23, seed=seed, clump_size=5)).tolist().index(20) for seed in range(200)}
    assert slots == {0, 5, 10, 15, 20}  # 20, 21, 22 is the short one


def test_a_clump_as_large_as_the_epoch_is_the_identity():
    for clump in (7, 8, 2**62, 2**80):
        assert whole(Order(7, clump_size=clump)).tolist() == list(range(7))


def test_clump_of_one_is_no_clump():
    assert np.array_equal(whole(Order(100, clump_size=1)), whole(Order(100)))


@pytest.mark.parametrize(("num_rows", "clump"), [(2**62, 3), (2**62, 2**62 - 1), (2**62 - 1, 2**61), (10**10, 4096)])
def test_clumps_of_huge_tables_do_not_overflow(num_rows, clump):
    index = np.unique(np.concatenate([np.arange(200), np.arange(num_rows - 200, num_rows), [num_rows // 2]]))
    rows = Order(num_rows, seed=3, clump_size=clump).rows(1, index)
    assert rows.min() >= 0
    assert rows.max() < num_rows
    assert np.unique(rows).size == index.size
    steps = np.diff(rows)[np.diff(index) == 1]
    assert np.mean(steps == 1) >= 1 - 2 / min(clump, 100)  # clumps of 3: at least every third step leaves one


@pytest.mark.parametrize("clump", [None, 3, 1000])
def test_without_shuffle_rows_are_their_places(clump):
    order = Order(2**62, shuffle=False, seed=9, clump_size=clump)
    index = np.array([5, 0, 2**62 - 1, 5])
    rows = order.rows(4, index)
    assert np.array_equal(rows, index)
    rows[0] = 1  # a new array: the caller's index is not touched
    assert index[0] == 5


@pytest.mark.parametrize("clump", [None, 4, 7])
def test_index_is_read_only_input_of_any_order_and_repetition(clump):
    order = Order(1000, seed=1, clump_size=clump)
    index = np.random.default_rng(0).integers(0, 1000, 5000)
    index.setflags(write=False)
    expected = whole(order, 2)[index]
    assert np.array_equal(order.rows(2, index), expected)
    assert np.array_equal(np.concatenate([order.rows(2, part) for part in np.split(index, 50)]), expected)
    assert np.array_equal(order.rows(2, index.astype(np.int32)), expected)
    empty = order.rows(2, index[:0])
    assert empty.shape == (0,)
    assert empty.dtype == np.int64


# ---- the specification ----------------------------------------------------------------------------------------------


def doc_table(name: str) -> list[list[str]]:
    """Cells of the table under `<!-- vectors: name -->` in docs/order.md, without the heading rows."""
    text = DOC.split(f"<!-- vectors: {name} -->", 1)[1].lstrip("\n").split("\n\n", 1)[0]
    return [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in text.splitlines()[2:]]


def numbers(cell: str) -> list[int]:
    return [int(word, 0) for word in re.findall(r"-?0x[0-9a-f]+|-?\d+", cell)]


def test_documented_keys():
    table = doc_table("keys")
    assert len(table) >= 4
    for seed, epoch, words in table:
        assert list(feistel_keys(int(seed), int(epoch))) == numbers(words)
        assert ref_keys(int(seed), int(epoch)) == numbers(words)


def test_documented_mixer():
    table = doc_table("mix64")
    assert len(table) >= 3
    for value, mixed in table:
        assert mix64(np.array([int(value, 0)], np.uint64)).tolist() == [int(mixed, 0)]
        assert ref_mix64(int(value, 0)) == int(mixed, 0)


def test_documented_trace():
    """Round by round, so that an implementer finds the round that differs."""
    keys = ref_keys(0, 0)
    table = doc_table("trace")
    assert len(table) == NUM_ROUNDS
    for number, high, low in table:
        x = ref_rounds(77, keys, 7, range(int(number) + 1))
        assert divmod(x, 2**4) == (int(high), int(low))
    assert FeistelPermutation(128, feistel_keys(0, 0)).forward(np.array([77])).tolist() == [x]


def test_documented_orders():
    table = doc_table("orders")
    for num_rows, clump, seed, epoch, index, rows in table:
        order = Order(int(num_rows), seed=int(seed), clump_size=None if clump == "-" else int(clump))
        assert order.rows(int(epoch), np.array(numbers(index))).tolist() == numbers(rows), (num_rows, clump, seed)
    sizes = {int(line[0]) for line in table}
    assert sizes >= {1, 2, 10, 48, 1000, 10**10, 2**62}
    assert {max(6, (size - 1).bit_length()) % 2 for size in sizes} == {0, 1}  # odd and even widths
    assert sum(line[1] != "-" for line in table) >= 4
    assert any(int(line[2]) < 0 for line in table)
    assert any(int(line[2]) > 2**64 for line in table)


@settings(max_examples=200)
@given(st.one_of(st.integers(1, 300), st.integers(1, 2**62)), any_seed, any_epoch, st.data())
def test_numpy_agrees_with_the_reference(num_rows, seed, epoch, data):
    index = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=20))
    keys = ref_keys(seed, epoch)
    perm = FeistelPermutation(num_rows, feistel_keys(seed, epoch))
    expected = [ref_perm(i, keys, num_rows) for i in index]
    assert perm.forward(np.array(index)).tolist() == expected
    assert Order(num_rows, seed=seed).rows(epoch, np.array(index)).tolist() == expected
    assert perm.inverse(np.array(index)).tolist() == [ref_perm(i, keys, num_rows, inverse=True) for i in index]


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(1, 60), any_seed, any_epoch)
def test_clumped_numpy_agrees_with_the_reference(num_rows, clump, seed, epoch):
    assert whole(Order(num_rows, seed=seed, clump_size=clump), epoch).tolist() == ref_layout(
        num_rows, seed, epoch, clump
    )


def test_no_two_pairs_share_keys():
    pairs = set(itertools.product(range(-15, 135), range(135)))  # holds (1, 12) and (11, 2), (1, 2) and (2, 1), ...
    pairs |= {(2**64 + 1, 0), (1 - 2**64, 0), (2**128 + 1, 0), (0, 2**64)}  # equal to (1, 0), (0, 0) modulo 2**64
    words = [key for pair in pairs for key in feistel_keys(*pair)]
    assert len(set(words)) == NUM_ROUNDS * len(pairs)  # not even one round key in common


# ---- statistics: seeds are fixed, so a limit holds for ever or never ------------------------------------------------


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-square of equally likely cells, as standard deviations above its mean (Wilson-Hilferty); 4.5 is p = 3e-6."""
    expected = counts.sum() / counts.size
    assert expected >= 5
    df = counts.size - 1
    chi2 = float(((counts - expected) ** 2).sum() / expected)
    z = ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / sqrt(2 / (9 * df))
    assert abs(z) < 4.5, f"chi2 {chi2:.1f} on {df} degrees of freedom, z {z:.2f}"


@pytest.mark.parametrize(("num_rows", "num_splits"), [(96, 48), (480, 48), (1000, 8), (1024, 16), (10_007, 48)])
def test_rows_fall_into_splits_evenly(num_rows, num_splits):
    """Over epochs and seeds, a row is as often in one split as in another: the first, middle and last row are asked."""
    split_rows = num_rows // num_splits
    watched = np.array([0, 1, num_rows // 2, num_rows - 1])
    places = [
        FeistelPermutation(num_rows, feistel_keys(seed, epoch)).inverse(watched)
        for seed in range(40)
        for epoch in range(50)
    ]
    splits = np.array(places) // split_rows  # [2000, 4]; num_splits where the row is left out
    for column in splits.T:
        assert_uniform(np.bincount(column[column < num_splits], minlength=num_splits))


def test_neighbouring_rows_of_one_split_spread_over_the_table():
    """A split of consecutive places draws from every part of the table, and so do their differences."""
    num_rows, parts = 10_000, 50
    values, differences = np.zeros(parts, int), np.zeros(parts, int)
    for epoch in range(20):
        rows = Order(num_rows, seed=5).rows(epoch, np.arange(2500, 5000))
        values += np.bincount(rows * parts // num_rows, minlength=parts)
        differences += np.bincount(np.diff(rows)[::2] % num_rows * parts // num_rows, minlength=parts)
    assert_uniform(values)
    assert_uniform(differences)


@pytest.mark.parametrize("num_rows", [3, 5, 10, 48, 64, 100, 128])
def test_first_rows_of_small_tables_are_uniform(num_rows):
    """Over seeds: the row at place 0, and the difference between it and those at place 1 and N / 2."""
    index = np.array([0, 1, num_rows // 2])
    rows = np.array([Order(num_rows, seed=seed).rows(0, index) for seed in range(2000)])  # [2000, 3]
    assert_uniform(np.bincount(rows[:, 0], minlength=num_rows))
    for other in (1, 2):
        difference = (rows[:, other] - rows[:, 0]) % num_rows
        assert_uniform(np.bincount(difference, minlength=num_rows)[1:])


def test_all_permutations_of_four_rows_are_equally_frequent():
    counts: dict[tuple[int, ...], int] = dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(2400):
        counts[tuple(whole(Order(4, seed=1), epoch).tolist())] += 1
    assert_uniform(np.array(list(counts.values())))


@pytest.mark.parametrize("num_rows", [1000, 1024, 10_007])
def test_epochs_and_seeds_are_unrelated(num_rows):
    """Few rows keep their place (a random permutation has one fixed point on average), and ranks do not correlate."""
    epochs = [whole(Order(num_rows, seed=seed), epoch) for seed in (0, 1) for epoch in range(6)]
    for one, other in itertools.combinations(epochs, 2):
        assert np.count_nonzero(one == other) <= 8  # Poisson(1): more than 8 has p = 1e-6
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / sqrt(num_rows)
    for one in epochs:
        assert abs(np.corrcoef(one, np.arange(num_rows))[0, 1]) < 4.5 / sqrt(num_rows)
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 4.5 / sqrt(num_rows)


def test_clumped_epochs_differ():
    assert len({tuple(whole(Order(1000, clump_size=10), epoch).tolist()) for epoch in range(50)}) == 50


# ---- determinism, memory, errors ------------------------------------------------------------------------------------


def test_hash_seed_of_the_process_does_not_matter():
    code = (
        "import numpy as np; from ray_lance_stream.order import Order;"
        "print(Order(10**10, seed=-7, clump_size=3).rows(2, np.arange(0, 10**10, 10**8)).tolist())"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for hash_seed in ("0", "1", "4242")
    }
    expected = Order(10**10, seed=-7, clump_size=3).rows(2, np.arange(0, 10**10, 10**8))
    assert results == {str(expected.tolist())}


def test_global_random_state_is_neither_read_nor_changed():
    index = np.arange(1000)
    results = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        python_before, numpy_before = random.getstate(), np.random.get_state()
        results.append(Order(5000, clump_size=3).rows(1, index).tolist())
        assert random.getstate() == python_before
        numpy_after = np.random.get_state()
        assert all(np.array_equal(a, b) for a, b in zip(numpy_before, numpy_after, strict=True))
    assert results[0] == results[1]


@pytest.mark.parametrize("clump", [None, 7, 10**9])
def test_memory_does_not_grow_with_the_table(clump):
    index = np.random.default_rng(0).integers(0, 10**10, 24_576)
    order = Order(10**10, clump_size=clump)
    tracemalloc.start()
    try:
        order.rows(0, index)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index.nbytes < peak_bytes < 10_000_000  # the lower limit: numpy's allocations are seen


def test_no_overflow_warnings():
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for num_rows, clump in ((1, None), (2, None), (2**62, None), (2**62, 3), (1000, 7)):
            Order(num_rows, seed=2**80, clump_size=clump).rows(0, np.array([0, num_rows - 1]))


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"order_id": "feistel-0"}, "'feistel-0'"),
        ({"num_rows": 0}, "got 0"),
        ({"num_rows": -1}, "got -1"),
        ({"num_rows": 2**62 + 1}, str(2**62 + 1)),
        ({"num_rows": True}, "True"),
        ({"num_rows": 10.0}, "10.0"),
        ({"clump_size": 0}, "got 0"),
        ({"clump_size": -3}, "-3"),
        ({"clump_size": True}, "True"),
        ({"clump_size": 2.0}, "2.0"),
        ({"seed": 1.5}, "1.5"),
        ({"seed": "1"}, "'1'"),
        ({"seed": None}, "None"),
        ({"seed": False}, "False"),
        ({"seed": 2**5000}, "5001 bits"),
        ({"shuffle": 1}, "got 1"),
    ],
)
def test_arguments_are_checked_at_construction(arguments, value):
    with pytest.raises(ConfigError, match=re.escape(value)) as raised:
        Order(**{"num_rows": 10, **arguments})
    assert " must be " in str(raised.value) or " must have " in str(raised.value)  # the rule
    assert ";" in str(raised.value)  # the remedy


@pytest.mark.parametrize("order", [Order(10), Order(10, shuffle=False), Order(10, clump_size=3)])
@pytest.mark.parametrize(
    ("epoch", "index", "value"),
    [
        (-1, np.array([0]), "got -1"),
        (0.0, np.array([0]), "got 0.0"),
        (True, np.array([0]), "got True"),
        (0, np.array([3, 10]), "from 3 to 10"),
        (0, np.array([-1, 3]), "from -1 to 3"),
        (0, np.array([2**64 - 1], np.uint64), str(2**64 - 1)),
        (0, np.array([0.0]), "float64"),
        (0, np.array([True]), "bool"),
        (0, np.array([[0]]), "(1, 1)"),
        (0, np.array(0), "()"),
        (0, [0], "list"),
    ],
)
def test_epoch_and_index_are_checked(order, epoch, index, value):
    with pytest.raises(ConfigError, match=re.escape(value)):
        order.rows(epoch, index)


def test_permutation_checks_its_arguments():
    keys = feistel_keys(0, 0)
    for bad in (keys[:-1], (*keys, 1), (-1, *keys[1:]), (2**64, *keys[1:]), (1.0, *keys[1:])):
        with pytest.raises(ConfigError, match="feistel_keys"):
            FeistelPermutation(10, bad)
    with pytest.raises(ConfigError, match="got 0"):
        FeistelPermutation(0, keys)
    for method in (FeistelPermutation(10, keys).forward, FeistelPermutation(10, keys).inverse):
        with pytest.raises(ConfigError, match="from 10 to 10"):
            method(np.array([10]))


def test_order_is_a_frozen_value():
    order = Order(10, seed=3)
    assert order == Order(10, True, 3, None, "feistel-1")
    assert hash(order) == hash(Order(10, seed=3))
    with pytest.raises(AttributeError):
        order.seed = 4
