"""The coordinator as an actor: what it assigns, what it keeps over its own death, and what it gives back (B26)."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import lance_stream
from ray_lance_stream.cluster_store import ClusterStore
from ray_lance_stream.coordinator import RUNS
from tests.integration.conftest import flat
from tests.support import live_actors, make_table

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("coordinator") / "t", 480)


def eventually(what: Callable[[], Any], timeout_s: float = 60.0) -> bool:
    until_s = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True


def test_blocks_and_positions_outlive_the_coordinator(cluster, table, capfd):
    """Known from `streaming_split` on, after a kill as before, and gone with the stream, without a word of Ray's."""
    before = set(ClusterStore(RUNS).keys(""))  # of streams of other tests, which may go meanwhile
    node = ray.get_runtime_context().get_node_id()
    stream = lance_stream(table, num_splits=48)
    stream.set_name("train")
    stream.streaming_split(4)
    shards = stream.streaming_split(2, locality_hints=[node, node])
    assert [shard.split_block for shard in shards] == [(0, 24), (24, 48)]
    progress = stream.progress()
    assert {rank: (p["split_block"], p["node"], p["rows"]) for rank, p in progress.items()} == {
        0: ((0, 24), node, 0),
        1: ((24, 48), node, 0),
    }
    readers = [progress[rank]["reader"] for rank in (0, 1)]
    assert len(set(readers)) == 2
    assert None not in readers
    for shard in shards:
        for number, _ in enumerate(shard.iter_batches(batch_size=24, prefetch_batches=0)):
            if number == 3:
                break
    assert eventually(lambda: stream.state_dict()["samples_consumed_per_split"] == 4)
    assert [p["reader"] for p in stream.progress().values()] == readers
    time.sleep(1.5)  # it is kept about once a second
    ray.kill(stream._coordinator, no_restart=False)
    assert stream.state_dict()["samples_consumed_per_split"] == 4
    assert {r: (p["split_block"], p["samples_consumed_per_split"]) for r, p in stream.progress().items()} == {
        0: ((0, 24), 4),
        1: ((24, 48), 4),
    }
    kept = set(ClusterStore(RUNS).keys("")) - before
    assert kept
    assert "stream 'train': 48 splits: 4 workers -> 2" in "".join(capfd.readouterr())
    stream.close()
    assert eventually(lambda: kept.isdisjoint(ClusterStore(RUNS).keys("")), 30)
    time.sleep(1)
    assert "will be retried" not in "".join(capfd.readouterr())


class Slow:
    """Takes more than half of the cluster."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def test_a_stage_that_is_idle_makes_room_for_another_stream(cluster, table, caplog):
    """B26: validation that is stopped early and training, in turns, where there is room for one of their stages."""
    train, val = (
        lance_stream(table, num_splits=48, evaluation=is_val, stall_warn_s=2).map_batches(
            Slow, concurrency=1, num_cpus=9
        )
        for is_val in (False, True)
    )
    val.set_name("val")
    shards = train.shard(), val.shard()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for _ in shards[1].iter_batches(batch_size=48, prefetch_batches=0):
                break
            assert sorted(flat(shards[0].iter_batches(batch_size=48))) == list(range(480))
    assert "stream 'val' holds 1 x Slow (concurrency=1, num_cpus=9" in caplog.text
    assert "read lost" not in caplog.text
    train.close()
    val.close()


def test_the_next_shard_gets_the_readers_of_those_that_are_gone(cluster, table):
    stream = lance_stream(table, num_splits=48)
    found = []
    for is_closed in (True, False, False):
        shard = stream.shard()
        next(iter(shard.iter_batches(batch_size=48, prefetch_batches=0)))
        found.append(stream.progress()[0]["reader"])
        if is_closed:
            shard.close()
        del shard
        gc.collect()
    assert found[0] is not None
    assert len(set(found)) == 1
    stream.close()


def failing_loop(config: dict[str, Any]) -> None:
    for _ in ray.train.get_dataset_shard("train").iter_batches(batch_size=48):
        raise RuntimeError("planned failure")


def failed_run(table: str, directory: Path) -> None:
    stream = lance_stream(table, num_splits=48)
    trainer = DataParallelTrainer(
        failing_loop,
        datasets={"train": stream},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="fails", storage_path=str(directory)),
    )
    with pytest.raises(ray.train.TrainingFailedError, match="planned failure"):
        trainer.fit()


def test_a_failed_run_leaves_no_coordinator(cluster, table, tmp_path):
    """Ray keeps the controller of the run, and what it was given."""
    gc.collect()
    before = live_actors("StreamCoordinator")
    failed_run(table, tmp_path)
    gc.collect()
    assert eventually(lambda: live_actors("StreamCoordinator") <= before)
