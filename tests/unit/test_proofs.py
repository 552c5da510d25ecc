"""The proofs for users, on shards that are made up: what they say where ranks do not have the same number of batches."""

from __future__ import annotations

from types import SimpleNamespace

import lance
import pyarrow as pa
import pytest

from ray_lance_stream import lance_stream, testing
from ray_lance_stream.testing import _steps, assert_elastic, assert_resume_exact
from tests.fake_ray import without_coordinator


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


@pytest.mark.parametrize("proof", [assert_elastic, assert_resume_exact])
def test_a_stream_that_takes_up_new_versions_is_proven_on_its_pinned_one(tmp_path, monkeypatch, proof):
    """Without Ray: that its shards can be made one by one, on all worker counts."""
    without_coordinator(monkeypatch)
    made = []

    def steps(shards, global_batch_size):
        made.append((len(shards), {shard._config.on_new_version for shard in shards}))
        yield from [[b""]] * 3

    monkeypatch.setattr(testing, "_steps", steps)
    path = lance.write_dataset(pa.table({"id": range(48)}), str(tmp_path / "t.lance")).uri
    stream = lance_stream(path, num_splits=4, global_batch_size=4, on_new_version="next_epoch")
    proof(stream, world_sizes=(2, 4), max_steps=3)
    assert {world for world, _ in made} >= {2, 4}
    assert all(words == {"stay"} for _, words in made)
    assert stream._config.on_new_version == "next_epoch"
