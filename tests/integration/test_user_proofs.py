"""What users prove on their own table: elasticity, resume, digests, the rows of a step, skipped steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ray_lance_stream import ConfigError, StreamShard, lance_stream
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.testing import assert_elastic, assert_resume_exact
from tests.support import Oracle, make_table, scan_ids

pytestmark = pytest.mark.timeout(200)

NUM_SPLITS, GLOBAL_BATCH = 12, 24
M = GLOBAL_BATCH // NUM_SPLITS
STEPS = 13  # 25 cycles: the last step is one cycle


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("proofs") / "t", 305)


@pytest.fixture(scope="module")
def stream(cluster, table):
    stream = lance_stream(table, num_splits=NUM_SPLITS, global_batch_size=GLOBAL_BATCH)
    yield stream
    stream.close()


@pytest.fixture(scope="module")
def oracle(table) -> Oracle:
    return Oracle(scan_ids(table), NUM_SPLITS, M)


def test_proofs_hold_for_a_sound_stream(stream):
    assert_elastic(stream, world_sizes=(1, 2, 3, 5), max_steps=4)
    assert_elastic(stream, world_sizes=(2, 4), epoch=3, max_steps=2)
    assert_resume_exact(stream, world_sizes=(2, 5, 1), steps_between=7, max_steps=STEPS + 2)


def test_proofs_fail_for_blocks_that_overlap(stream, monkeypatch):
    """The second of two ranks gets the first one's splits."""
    share = StreamShard._share.fget

    def broken(shard: StreamShard):
        right = share(shard)
        return replace(right, block=SplitBlock(0, right.block.size)) if right.world_size == 2 else right

    monkeypatch.setattr(StreamShard, "_share", property(broken))
    with pytest.raises(AssertionError, match=r"1 and 2 workers: step 0 holds other rows"):
        assert_elastic(stream, world_sizes=(1, 2), max_steps=2)


def test_proofs_fail_for_a_state_that_is_behind(stream, monkeypatch):
    """A state that does not count the newest batch replays a step."""
    state_dict = StreamShard.state_dict

    def behind(shard: StreamShard):
        state = state_dict(shard)
        return {**state, "samples_consumed_per_split": max(state["samples_consumed_per_split"] - M, 0)}

    monkeypatch.setattr(StreamShard, "state_dict", behind)
    with pytest.raises(AssertionError, match=r"step 2 holds other rows"):
        assert_resume_exact(stream, world_sizes=(1,), steps_between=2, max_steps=4)


def test_rows_of_a_step(stream, oracle, table):
    for epoch, step in ((0, 0), (0, STEPS - 1), (2, 5)):
        ids = oracle.epoch(epoch)[step].tolist()
        assert stream.row_ids(epoch, step).tolist() == ids  # ids are row offsets in this table
        assert stream.row_ids(epoch, step, column="value") == [3 * i + 1 for i in ids]
    filtered = lance_stream(table, num_splits=NUM_SPLITS, filter="id % 2 = 1")
    ids = Oracle(scan_ids(table, "id % 2 = 1"), NUM_SPLITS, 1).epoch(0)[4].tolist()
    assert filtered.row_ids(0, 4, column="id", global_batch_size=NUM_SPLITS) == ids
    assert len(filtered.row_ids(0, 0)) == 144  # by default, where an epoch has fewer than 256 rows
    with pytest.raises(ConfigError, match=r"step must be an int in \[0, 1\)"):
        filtered.row_ids(0, 4)


@pytest.mark.parametrize(
    ("epoch", "step", "says"),
    [(0, STEPS, rf"\[0, {STEPS}\).*{STEPS}"), (0, -1, "-1"), (0, True, "True"), (-1, 0, "-1")],
)
def test_steps_that_do_not_exist(stream, epoch, step, says):
    for ask in (stream.row_ids, stream.step_digest):
        with pytest.raises(ConfigError, match=says):
            ask(epoch, step)
    with pytest.raises(ConfigError, match="column must be one of"):
        stream.row_ids(0, 0, column="nope")
    with pytest.raises(ConfigError, match="range"):
        stream.skip(0, range(0))


def test_digests_of_ranks_add_up_to_those_of_steps(stream):
    expected = sum(stream.step_digest(0, step) for step in range(5)) % 2**64
    for world in (1, 3, 5):
        total = 0
        for rank in range(world):
            shard = stream.shard(rank, world)
            assert shard.digest() == 0
            for step, _ in enumerate(shard.iter_batches()):
                if step == 4:
                    break
            total += shard.digest()
            shard.close()
        assert total % 2**64 == expected


def test_digests_tell_rows_steps_and_epochs_apart(stream, table):
    other = lance_stream(table, num_splits=NUM_SPLITS, global_batch_size=GLOBAL_BATCH, shuffle_seed=1)
    digests = [s.step_digest(epoch, step) for s in (stream, other) for epoch in range(3) for step in range(STEPS)]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**64 for digest in digests)


def test_the_digest_of_a_chunk_is_that_of_its_parts(stream):
    """Pure: any cut into blocks and cycles adds up, and one exchanged row between two cycles shows."""
    plan: StreamPlan = stream._plan.resolve()
    whole = plan.digest(1, SplitBlock(0, NUM_SPLITS), 3, 20)
    parts = [(lo, hi, start, stop) for lo, hi in ((0, 5), (5, 12)) for start, stop in ((3, 9), (9, 20))]
    assert sum(plan.digest(1, SplitBlock(lo, hi), start, stop) for lo, hi, start, stop in parts) % 2**64 == whole
    assert plan.digest(1, SplitBlock(0, NUM_SPLITS), 3, 4) != plan.digest(1, SplitBlock(0, NUM_SPLITS), 4, 5)
    assert plan.digest(0, SplitBlock(0, NUM_SPLITS), 3, 4) != plan.digest(1, SplitBlock(0, NUM_SPLITS), 3, 4)


def test_skipped_steps_are_left_out_on_every_rank_and_recorded(stream, oracle):
    skipping = stream.skip(0, range(2, 4)).skip(0, range(4, 5)).skip(1, range(STEPS - 1, STEPS))
    kept = [ids.tolist() for step, ids in enumerate(oracle.epoch(0)) if step not in (2, 3, 4)]
    shard = skipping.shard()
    assert shard.num_batches() == len(kept)
    assert [batch["id"].tolist() for batch in shard.iter_batches()] == kept
    assert shard.state_dict()["skipped"] == [[0, 4, 10], [1, 24, 25]]
    assert shard.digest() == sum(skipping.step_digest(0, step) for step in range(STEPS)) % 2**64
    assert skipping.step_digest(0, 3) == 0
    assert [batch["id"].tolist() for batch in shard.iter_batches()] == [ids.tolist() for ids in oracle.epoch(1)[:-1]]
    shard.close()
    assert_elastic(skipping, world_sizes=(1, 3, 5))
    assert_resume_exact(skipping, world_sizes=(2, 3), steps_between=1, max_steps=4)
    skipping.close()


def test_a_stream_takes_over_the_skips_of_a_state(stream, oracle):
    """A run that was made to skip goes on skipping, also where the new driver does not ask for it."""
    shard = stream.skip(0, range(2, 4)).shard()
    for step, _ in enumerate(shard.iter_batches()):
        if step == 0:
            break
    resumed = stream.shard()
    resumed.load_state_dict(shard.state_dict())
    ids = [batch["id"].tolist() for batch in resumed.iter_batches()]
    assert ids == [ids.tolist() for step, ids in enumerate(oracle.epoch(0)) if step in {1, *range(4, STEPS)}]
    assert np.concatenate(ids).size == 300 - 3 * GLOBAL_BATCH
    shard.close()
    resumed.close()


def test_an_epoch_that_is_skipped_whole_delivers_nothing_and_goes_on(stream, oracle):
    skipping = stream.skip(0, range(STEPS))
    shard = skipping.shard()
    assert list(shard.iter_batches()) == []
    assert shard.epoch == 1
    first = next(iter(shard.iter_batches()))
    assert first["id"].tolist() == oracle.epoch(1)[0].tolist()
    skipping.close()
