"""Streams in the orders of others, delivered: LanceDB's own, whose runs are continued in both directions, and permutations."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import ray
from lancedb.permutation import permutation_builder
from lancedb.streaming import StreamingDataset
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import ConfigError, StateMismatchError, lance_stream, to_lancedb_state
from ray_lance_stream.list_cache import FOLDER_VARIABLE
from ray_lance_stream.listed_plans import ListedPlans
from ray_lance_stream.testing import assert_elastic, assert_resume_exact
from ray_lance_stream.train import read_states
from tests.integration.conftest import flat, ids_of
from tests.lancedb_support import ids_from, make_lancedb_table, planned_ids, streaming
from tests.support import log_loop, read_logs

pytestmark = pytest.mark.timeout(200)

S, G, SEED = 12, 24, 3
OPTIONS = {"num_splits": S, "shuffle_seed": SEED}


def files(folder: Path) -> dict[str, int]:
    """Name -> inode, another one if the file is written again."""
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory, no_cluster):
    """Set before the cluster starts, whose processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    table = make_lancedb_table(tmp_path_factory.mktemp("db"), 305)
    table.delete("id in (0, 29, 30, 200)")
    return table  # 301 rows: 25 cycles, 13 steps, one row is left out


@pytest.fixture(scope="module")
def stream(cache, cluster, table):
    stream = lance_stream(table, order="lancedb", global_batch_size=G, **OPTIONS)
    yield stream
    stream.close()


def test_delivered_rows_are_those_of_streaming_dataset(shards, table, stream, cache):
    """Every rank of 1, 2 and 4, over two epochs; in one of them the second is read ahead, as in a loop that takes its time."""
    for world in (1, 2, 4):
        for rank, shard in enumerate(shards.group(stream, world)):
            for epoch in (0, 1):
                theirs = streaming(table, epoch=epoch, rank=rank, world_size=world, **OPTIONS)
                assert flat(shard.iter_batches()) == ids_from(theirs), f"epoch {epoch}, rank {rank} of {world}"
            assert shard.state_dict()["listed"]["epoch"] == 1
    shard = shards.of(stream)
    for _ in shard.iter_batches():
        time.sleep(0.03)
    assert shard._supply.ahead.window is not None
    assert flat(shard.iter_batches()) == ids_from(streaming(table, epoch=1, **OPTIONS))
    assert len(list(cache.iterdir())) == 3  # epochs 0, 1 and, in advance, 2: each made once, and nothing for each rank
    dataset = stream.to_dataset(epoch=1)
    assert [row["id"] for row in dataset.take_all()] == ids_from(streaming(table, epoch=1, **OPTIONS))


def test_the_next_epoch_is_listed_while_one_runs(shards, table, cache):
    """From the start of a pass on, long before its end."""
    before = set(files(cache))
    shard = shards(table, order="lancedb", num_splits=S, shuffle_seed=11, prefetch_chunks=1, read_batch_size=1)
    batches = iter(shard.iter_batches(batch_size=S))
    next(batches)
    end_s = time.monotonic() + 20
    while len({name for name in files(cache) if name.endswith(".ray-lance-stream-list")} - before) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert not shard._supply._newest.all_sent
    shard.close()


def test_proofs(stream):
    assert_elastic(stream, world_sizes=(1, 2, 5), epoch=1, max_steps=4)
    assert_resume_exact(stream, world_sizes=(2, 4, 1), steps_between=7, max_steps=15)


def test_runs_are_continued_in_both_directions(shards, table, stream):
    """LanceDB on 2 ranks, then this library on 4, then LanceDB on 1: one epoch, each row once, in its place."""
    expected = ids_from(streaming(table, epoch=1, **OPTIONS))
    ranks = [streaming(table, epoch=1, rank=rank, world_size=2, **OPTIONS) for rank in range(2)]
    for rank in ranks:
        list(islice(rank, 4 * S // 2))
    state = StreamingDataset.merge_state_dicts([rank.state_dict() for rank in ranks])
    cycles = []
    group = shards.group(stream, 4, state)
    for shard in group:
        found = [ids_of(batch) for batch in islice(shard.iter_batches(), 5)]
        cycles.append(np.concatenate(found).reshape(10, S // 4))
    assert np.concatenate(cycles, axis=1).reshape(-1).tolist() == expected[4 * S : 14 * S]
    states = [shard.state_dict() for shard in group]
    assert states[0] == states[1] == states[2] == states[3]
    assert ids_from(streaming(table, to_lancedb_state(states[2]), **OPTIONS)) == expected[14 * S :]
    resumed = lance_stream(table, order="lancedb", global_batch_size=G, resume_from=state, **OPTIONS)
    resumed._coordinator = stream._coordinator_handle()
    assert flat(shards.of(resumed).iter_batches()) == expected[4 * S :]


def test_a_list_that_changed_is_an_error(shards, stream):
    """Another release of lancedb may order the rows in another way: never silently other rows."""
    (shard,) = shards.group(stream, 1)
    list(islice(shard.iter_batches(), 3))
    state = shard.state_dict()
    assert shards.of(stream, state=state).state_dict() == state
    changed = {**state, "listed": {**state["listed"], "fingerprint": "0123456789abcdef", "made_by": "lancedb 0.1"}}
    with pytest.raises(StateMismatchError, match=r"list of epoch 0: saved '0123456789abcdef by lancedb 0.1'.*install"):
        shards.of(stream, state=changed)


def test_in_ray_train_from_a_state_of_lancedb_to_a_checkpoint(shards, table, tmp_path):
    """Every global step on the way is LanceDB's, and what the checkpoint says goes on with it on another number of workers."""
    expected = ids_from(streaming(table, epoch=1, **OPTIONS))
    theirs = streaming(table, epoch=1, **OPTIONS)
    list(islice(theirs, 2 * G))
    stream = lance_stream(table, order="lancedb", global_batch_size=G, resume_from=theirs.state_dict(), **OPTIONS)
    result = DataParallelTrainer(
        log_loop,
        train_loop_config={
            "dir": str(tmp_path),
            "tag": "w2",
            "epochs": 2,
            "global_batch": G,
            "save_every": 3,
            "stop_after": 7,
        },
        datasets={"train": stream},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path / "storage")),
    ).fit()
    (attempt,) = read_logs(tmp_path)
    assert attempt.steps(G // S) == {(1, step): sorted(expected[step * G : (step + 1) * G]) for step in range(2, 9)}
    saved = read_states(result.checkpoint)["train"]
    assert (saved.epoch, saved.samples_consumed_per_split, saved.listed.epoch) == (1, 8 * G // S, 1)
    assert flat(shards.of(stream, state=saved.to_dict()).iter_batches()) == expected[8 * G :]
    stream.close()


def test_the_recorded_version_is_listed(shards, table, tmp_path):
    """A run that goes on after the table has moved on."""
    moving = make_lancedb_table(tmp_path, 100)
    first = shards.stream(moving, order="lancedb", **OPTIONS)
    (shard,) = shards.group(first, 1)
    found = flat(islice(shard.iter_batches(batch_size=S), 3))
    moving.delete("id < 30")
    moving.optimize()
    now = shards.stream(moving, order="lancedb", **OPTIONS)
    found += flat(shards.of(now, state=shard.state_dict()).iter_batches(batch_size=S))
    assert found == planned_ids(first, 0)
    assert set(found) & set(range(30))


def test_an_epoch_that_takes_up_a_version_is_listed_there(shards, tmp_path):
    """With on_new_version="next_epoch". A state at the edge names a list of the version before, which is no longer read."""
    moving = make_lancedb_table(tmp_path, 100)
    options = {"order": "lancedb", "on_new_version": "next_epoch", **OPTIONS}
    (shard,) = shards.group(shards.stream(moving, **options), 1)
    assert flat(shard.iter_batches(batch_size=S)) == ids_from(streaming(moving, **OPTIONS))
    moving.delete("id < 30")
    resumed = shards.of(shards.stream(moving, **options), state=shard.state_dict())
    for epoch in (1, 2):
        theirs = streaming(moving, epoch=epoch, **OPTIONS)
        assert flat(resumed.iter_batches(batch_size=S)) == ids_from(theirs)


def test_the_number_of_workers_is_the_number_of_splits(shards, table):
    """Where none is given, as with a StreamingDataset."""
    for rank, shard in enumerate(shards.group(shards.stream(table, num_splits=None, order="lancedb"), 3)):
        theirs = streaming(table, rank=rank, world_size=3)
        assert flat(shard.iter_batches(batch_size=50)) == ids_from(theirs)
        assert shard.state_dict()["num_splits"] == 3


def test_a_list_that_cannot_be_made_is_an_error_of_the_pass_that_needs_it(shards, table):
    """Also where it was tried in advance, in the coordinator."""
    shard = shards(table, order="lancedb", num_splits=S, shuffle_seed=2**64 - 1)
    assert len(flat(shard.iter_batches(batch_size=S))) == 25 * S
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"must be in \[0, 2\*\*64\), got .* and epoch=1"):
            next(iter(shard.iter_batches(batch_size=S)))
    assert shard.epoch == 1


def test_lists_survive_the_coordinator(table, cache, monkeypatch):
    """It is killed within a pass, with its readers: the pass goes on from the lists on disk, in its order."""
    again = []
    renew = ListedPlans.again
    monkeypatch.setattr(ListedPlans, "again", lambda self, *args: again.append(args) or renew(self, *args))
    stream = lance_stream(table, order="lancedb", shuffle_seed=9, num_splits=S, read_batch_size=1, prefetch_chunks=1)
    expected = planned_ids(stream, 0) + planned_ids(stream, 1)
    kept = files(cache)
    shard = stream.shard()
    found: list[int] = []
    for epoch in (0, 1):
        for number, batch in enumerate(shard.iter_batches(batch_size=S)):
            found += ids_of(batch)
            if epoch == 0 and number == 5:
                ray.kill(stream._coordinator_handle(), no_restart=False)
                time.sleep(0.5)
    assert found == expected
    assert again
    assert kept.items() <= files(cache).items()
    stream.close()


def test_a_permutation_is_delivered(shards, table):
    """The same in each epoch, on any number of ranks, with transforms whose failing rows are replaced alike."""
    permutation = permutation_builder(table).split_hash(["id"], [1] * 6, discard_weight=0).shuffle(seed=1).execute()
    stream = shards.stream(table, num_splits=None, permutation=permutation, global_batch_size=12)
    expected = planned_ids(stream, 0)
    shard = shards.of(stream)
    assert flat(shard.iter_batches()) == flat(shard.iter_batches()) == expected
    assert_elastic(stream, world_sizes=(1, 3), max_steps=3)
    assert_resume_exact(stream, world_sizes=(3, 2), steps_between=3, max_steps=6)

    def picky(batch):
        if 3 in batch["id"] % 40:
            raise ValueError("bad row")
        return batch

    stand_in = [flat(shards.of(stream.map_batches(picky, on_transform_error="replace"), 0, 1).iter_batches())]
    assert 3 not in {number % 40 for number in stand_in[0]}
    assert sum(mine != theirs for mine, theirs in zip(stand_in[0], expected, strict=True)) == sum(
        i % 40 == 3 for i in expected
    )
