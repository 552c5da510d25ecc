"""Which rows an epoch holds, and in which batches: table sizes, filters, deletions, and every rule about batch sizes.

B10, B12, B13, B19, B20, B25, B40, B41.
"""

from __future__ import annotations

import logging

import lance
import numpy as np
import pytest

from ray_lance_stream import ConfigError, lance_stream
from tests.integration.conftest import Shards, flat, ids_of
from tests.support import Oracle, make_table, scan_ids

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("rows") / "t", 480)


def cycles_of(parts: list[list[int]], sizes: list[int]) -> list[int]:
    """The ranks' rows of a pass in the order of one worker."""
    offsets = [0] * len(parts)
    rows: list[int] = []
    while any(offset < len(part) for offset, part in zip(offsets, parts, strict=True)):
        for rank, size in enumerate(sizes):
            rows += parts[rank][offsets[rank] : offsets[rank] + size]
            offsets[rank] += size
    return rows


def group_rows(shards: Shards, stream, world: int) -> list[int]:
    """One epoch of all ranks of a world, in the order of one worker."""
    group = shards.group(stream, world)
    sizes = [hi - lo for lo, hi in (shard.split_block for shard in group)]
    parts = [flat(shard.iter_batches(batch_size=size)) for shard, size in zip(group, sizes, strict=True)]
    assert [len(part) for part in parts] == [shard.num_rows for shard in group]
    return cycles_of(parts, sizes)


# ---- tables


@pytest.mark.parametrize(("num_rows", "num_splits"), [(48, 48), (49, 48), (95, 48), (97, 48), (1, 1), (7, 3)])
def test_corner_sizes(shards: Shards, tmp_path, num_rows, num_splits):
    path = make_table(tmp_path / "t", num_rows)
    stream = shards.stream(path, num_splits=num_splits)
    expected = np.concatenate(Oracle(scan_ids(path), num_splits, 1).epoch(0)).tolist()
    assert len(expected) == num_rows // num_splits * num_splits
    for world in {1, min(3, num_splits)}:
        assert group_rows(shards, stream, world) == expected


@pytest.mark.parametrize("options", [{"shuffle_clump_size": 8}, {"shuffle": False}, {"shuffle_seed": 7}], ids=str)
def test_orders(shards: Shards, table, options):
    oracle = Oracle(
        scan_ids(table),
        48,
        1,
        options.get("shuffle_seed", 0),
        options.get("shuffle", True),
        options.get("shuffle_clump_size"),
    )
    shard = shards(table, **options)
    for epoch in range(2):
        assert flat(shard.iter_batches(batch_size=48)) == np.concatenate(oracle.epoch(epoch)).tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_row_once_where_the_remainder_is_kept(shards: Shards, tmp_path, world):
    """B20: drop_remainder=False is for evaluation; ranks may then differ by a row per split."""
    path = make_table(tmp_path / "t", 480 + 29)
    stream = shards.stream(path, drop_remainder=False)
    oracle = Oracle(scan_ids(path), 48, 1, drop_remainder=False)
    rows = group_rows(shards, stream, world)
    assert sorted(rows) == list(range(509))
    assert rows[:480] == np.concatenate(oracle.epoch(0)).tolist()[:480]
    assert sorted(rows[480:]) == sorted(np.concatenate(oracle.epoch(0)).tolist()[480:])


def test_left_out_rows_are_told(shards: Shards, tmp_path, caplog):
    path = make_table(tmp_path / "t", 95)
    with caplog.at_level(logging.WARNING):
        shards.stream(path)
    assert "47 of 95 rows are left out of each epoch" in caplog.text


@pytest.mark.parametrize("filter", [None, "id % 3 = 0"])
@pytest.mark.parametrize(
    "delete",
    ["id = 0 or id = 479", "id % 2 = 1", "id >= 48 and id < 177", "id = 29 or id = 30 or id = 39 or id = 40"],
    ids=["first and last row", "alternate rows", "a fragment", "fragment edges"],
)
def test_deletions_and_filters(shards: Shards, tmp_path, delete, filter):
    """B10, B40, B41: lengths are those of the live rows that match, and the order is the plan's."""
    path = make_table(tmp_path / "t", 480)
    lance.dataset(path).delete(delete)
    ids = scan_ids(path, filter)
    assert len(ids) == lance.dataset(path).count_rows(filter)
    stream = shards.stream(path, num_splits=12, filter=filter)
    expected = np.concatenate(Oracle(ids, 12, 1).epoch(0)).tolist()
    for world in (1, 3):
        group = shards.group(stream, world)
        assert sum(shard.num_rows for shard in group) == 12 * (len(ids) // 12)
        assert group_rows(shards, stream, world) == expected


# ---- batch sizes


def test_the_default_batch_is_a_global_step(shards: Shards, table):
    stream = shards.stream(table, global_batch_size=96)
    for shard, rows in zip(shards.group(stream, 3), (32, 32, 32), strict=True):
        for batches in (
            shard.iter_batches(),
            shard.iter_batches(batch_size=None),
            shard.iter_torch_batches(),
            shard.iter_batches(batch_size=shard.local_batch_size(96)),
        ):
            assert [len(ids_of(batch)) for batch in batches] == [rows] * 5
        assert (shard.num_batches(), shard.num_rows) == (5, 160)
    with pytest.raises(ConfigError, match=r"global_batch_size=96, which is 32 rows \(16 of 48 splits\), got 64"):
        iter(shards.of(stream, 0, 3).iter_batches(batch_size=64))


def test_without_sizes_batches_are_shares_of_the_default_step(shards: Shards, table):
    """Of 288 rows, with real readers; tests/unit/test_batching.py has all the rest."""
    stream = shards.stream(table)
    for options in ({}, {"batch_size": None}):
        group = shards.group(stream, 5)
        batches = [[len(ids_of(batch)) for batch in shard.iter_batches(**options)] for shard in group]
        assert [sum(sizes) for sizes in zip(*batches, strict=True)] == [288, 192]


@pytest.mark.parametrize("batch_size", [True, "48", 0, -48, 4.0])
def test_batch_sizes_that_are_none(shards: Shards, table, batch_size):
    with pytest.raises(ConfigError, match="batch_size must be a positive int, got"):
        iter(shards(table).iter_batches(batch_size=batch_size))


def test_one_warning_for_batches_that_are_no_whole_cycles(shards: Shards, table, caplog):
    """B12: named once, with sizes that fit."""
    shard = shards.of(shards.stream(table), 0, 2)
    with caplog.at_level(logging.WARNING):
        for size in (36, 36, 30):
            assert flat(shard.iter_batches(batch_size=size))
    told = [record.getMessage() for record in caplog.records if "no multiple" in record.getMessage()]
    assert len(told) == 1
    assert "batch_size=36 is no multiple of this rank's 24 splits" in told[0]
    assert "24 or 48" in told[0]


def test_workers_that_do_not_divide_the_splits(shards: Shards, table):
    """B13, B19: W=5 of 48 splits: every step holds the same rows, and weights make the mean exact."""
    oracle = Oracle(scan_ids(table), 48, 2)
    group = shards.group(shards.stream(table, global_batch_size=96), 5)
    assert sorted({shard.split_block[1] - shard.split_block[0] for shard in group}) == [9, 10]
    assert sum(shard.loss_weight for shard in group) == pytest.approx(5)
    per_rank = [[ids_of(batch) for batch in shard.iter_batches(drop_last=True)] for shard in group]
    assert [len(batches) for batches in per_rank] == [5] * 5
    for step, ids in enumerate(oracle.epoch(0)):
        sizes = [shard.split_block[1] - shard.split_block[0] for shard in group]
        assert cycles_of([batches[step] for batches in per_rank], sizes) == ids.tolist()


def test_hand_written_batch_sizes_on_workers_that_do_not_divide(shards: Shards, table):
    """B13: refused at once, in words that say what to use."""
    shard = shards.of(shards.stream(table), 0, 5)
    with pytest.raises(ConfigError, match=r"5 workers do not divide num_splits=48.*local_batch_size.*9 or 18"):
        iter(shard.iter_batches(batch_size=10))
    assert shard.num_batches(shard.local_batch_size(96)) == 5


def test_ranks_that_step_differently_are_told(shards: Shards, table):
    """B19: the second rank names both sizes; nobody waits for the other in a collective."""
    first, second = shards.stream(table).streaming_split(2)
    first._supply.readers = second._supply.readers = shards(table)._supply.readers
    next(iter(first.iter_batches(batch_size=24)))
    with pytest.raises(ConfigError, match=r"rank 1 uses batch_size=48 on 24 splits.*rank 0 uses batch_size=24"):
        next(iter(second.iter_batches(batch_size=48)))
    assert len(ids_of(next(iter(second.iter_batches(batch_size=24))))) == 24


def test_an_epoch_without_a_batch_is_an_error(shards: Shards, table):
    """B25: drop_last that leaves nothing must not pass for a trained epoch."""
    shard = shards.of(shards.stream(table), 0, 2)
    with pytest.raises(ConfigError, match=r"240 rows in it, fewer than batch_size=480.*drop_last=False"):
        iter(shard.iter_batches(batch_size=480, drop_last=True))
    assert [len(ids_of(batch)) for batch in shard.iter_batches(batch_size=480)] == [240]


@pytest.mark.parametrize("option", [{"local_shuffle_buffer_size": 100}, {"local_shuffle_seed": 1}], ids=str)
def test_a_shuffle_buffer_is_refused(shards: Shards, table, option):
    """B09: its rows would be lost at a stop."""
    with pytest.raises(ConfigError, match=f"{next(iter(option))} must not be given: .* shuffled by its order"):
        shards(table).iter_batches(batch_size=48, **option)


def test_more_workers_than_splits(table):
    with pytest.raises(ConfigError, match="49 workers for num_splits=48"):
        lance_stream(table, num_splits=48).shard(0, 49)
