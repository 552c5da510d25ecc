"""The proofs for users, on shards that are made up: what they say where ranks do not have the same number of batches."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

from ray_lance_stream.testing import _steps


def shard(block: tuple[int, int], batches: list[list[int]], drop_remainder: bool):
    """A shard that delivers these ids."""
    return SimpleNamespace(
        split_block=block,
        local_batch_size=lambda size: size,
        iter_batches=lambda **_: iter([pa.table({"id": ids}) for ids in batches]),
        _plan=SimpleNamespace(drop_remainder=drop_remainder),
    )


def test_a_rank_with_fewer_batches_fails_the_proof():
    shards = [shard((0, 2), [[0, 1], [4, 5]], True), shard((2, 4), [[2, 3]], True)]
    steps = _steps(shards, 4)
    assert len(next(steps)) == 4
    with pytest.raises(AssertionError, match="on 2 workers some have fewer batches"):
        next(steps)


def test_where_the_remainder_is_delivered_ranks_may_differ_by_a_batch():
    one = list(_steps([shard((0, 4), [[0, 1, 2, 3], [4]], False)], 4))
    two = list(_steps([shard((0, 2), [[0, 1], [4]], False), shard((2, 4), [[2, 3]], False)], 4))
    assert one == two
    assert [len(step) for step in two] == [4, 1]
