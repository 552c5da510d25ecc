"""In-run elasticity on several Ray nodes: the group grows with a node and shrinks when one is preempted (B11, B13, B16)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import lance_stream
from tests.support import (
    Oracle,
    after,
    effective_history,
    make_table,
    no_readers_left,
    read_logs,
    save,
    scan_ids,
    write,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NUM_SPLITS = 12
GLOBAL_BATCH = 24
M = GLOBAL_BATCH // NUM_SPLITS
SAVE_EVERY = 3


@contextmanager
def nodes() -> Iterator[Cluster]:
    """A head without CPUs and one node of two CPUs, on one machine."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray Train still counts the CPUs of a killed node for a while, and waits this long for workers there.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 200 << 20})
        ray.init(address=cluster.address)
        cluster.add_node(num_cpus=2, object_store_memory=200 << 20)
        cluster.wait_for_nodes()
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def elastic_loop(config: dict[str, Any]) -> None:
    """Logs and saves until rank 0 finds the file `finish`; `local_batch_size` serves whatever world it is given.

    At the notice that a node is to be preempted it saves at once, whatever the step.
    """
    shard = ray.train.get_dataset_shard("train")
    context = ray.train.get_context()
    rank, world, directory = context.get_world_rank(), context.get_world_size(), Path(config["dir"])
    node = ray.get_runtime_context().get_node_id()
    with (directory / f"elastic-{time.time_ns()}-{rank}.jsonl").open("w") as log:
        state = shard.state_dict()
        start = [state["epoch"], state["samples_consumed_per_split"]]
        write(log, {"tag": "elastic", "rank": rank, "world": world, "start": start, "node": node})
        steps, noticed = 0, False
        while True:
            epoch = shard.epoch
            for batch in shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH)):
                write(log, {"epoch": epoch, "after": after(shard.state_dict(), epoch), "ids": batch["id"].tolist()})
                time.sleep(0.4)
                steps += 1
                if not noticed and ray.train.get_preemption_info() is not None:
                    noticed = True
                    save(shard, rank, config)
                    state = shard.state_dict()
                    write(log, {"noticed": [state["epoch"], state["samples_consumed_per_split"]]})
                elif steps % SAVE_EVERY == 0 and not noticed:
                    save(shard, rank, config)
                    if broadcast_from_rank_zero((directory / "finish").exists()):
                        return


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain for {what}"
        time.sleep(0.5)


def newest(directory: Path, world: int, steps: int) -> bool:
    """Whether the newest attempt has this world size, all its ranks, and so many steps on each."""
    attempts = read_logs(directory)
    if not attempts or attempts[-1].world != world or len(attempts[-1].ranks) != world:
        return False
    return all(sum("ids" in line for line in lines) >= steps for lines in attempts[-1].ranks.values())


def node_ids() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def preempt(address: str, node_id: str) -> None:
    """Tell the cluster that a node will be taken away, as a cloud does."""
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", address, "--node-id", node_id]
    reason = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "test",
        "--deadline-remaining-seconds",
        "60",
    ]
    subprocess.run([*command, *reason], check=True, timeout=60, capture_output=True)


def notices(directory: Path) -> list[tuple[int, int]]:
    """Where each rank saved at the notice."""
    lines = [line for attempt in read_logs(directory) for rank in attempt.ranks.values() for line in rank]
    return [tuple(line["noticed"]) for line in lines if "noticed" in line]


def test_the_group_grows_and_shrinks_and_every_step_keeps_its_rows(no_cluster, tmp_path):
    """In a process of its own, whose driver belongs to this cluster alone."""
    script = "import sys; from tests.integration.test_elastic_resize import scenario; scenario(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def scenario(directory: str) -> None:
    """Two workers, four when a node comes, two when it is preempted."""
    with nodes() as cluster:
        grow_and_shrink(cluster, Path(directory))


def grow_and_shrink(nodes: Cluster, tmp_path: Path) -> None:
    table = make_table(tmp_path / "t", 600)
    stream = lance_stream(table, num_splits=NUM_SPLITS)
    trainer = DataParallelTrainer(
        elastic_loop,
        train_loop_config={"dir": str(tmp_path)},
        datasets={"train": stream},
        scaling_config=ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=3),
        run_config=RunConfig(
            name="elastic", storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=-1)
        ),
    )
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    wait_for(lambda: bool(failed) or newest(tmp_path, 2, SAVE_EVERY + 1), "two workers")
    before = node_ids()
    added = nodes.add_node(num_cpus=2, object_store_memory=200 << 20)
    wait_for(lambda: bool(failed) or newest(tmp_path, 4, SAVE_EVERY + 1), "four workers")
    preempt(nodes.address, (node_ids() - before).pop())
    wait_for(lambda: bool(failed) or len(notices(tmp_path)) == 4, "the notice of preemption on every rank")
    saved_at = notices(tmp_path)
    time.sleep(8)  # Ray Train's controller takes a checkpoint in some seconds after `report` has returned
    nodes.remove_node(added, allow_graceful=False)
    wait_for(lambda: bool(failed) or newest(tmp_path, 2, SAVE_EVERY + 1), "two workers again")
    (tmp_path / "finish").touch()
    thread.join(timeout=120)
    assert not failed, failed
    assert not thread.is_alive()

    attempts = read_logs(tmp_path)
    assert saved_at == [saved_at[0]] * 4
    assert attempts[-1].start == saved_at[0]
    worlds = [attempt.world for attempt in attempts]
    assert worlds[0] == 2
    assert 4 in worlds
    assert worlds[-1] == 2
    history = effective_history(attempts, M)
    oracle = Oracle(scan_ids(table), NUM_SPLITS, M).steps(range(1 + max(epoch for epoch, _ in history)))
    order = sorted(oracle)
    assert history == {key: oracle[key] for key in order[: len(history)]}
    assert stream.progress("elastic").keys() == {0, 1}
    assert len(json.dumps(stream.state_dict())) < 2048
    no_readers_left()
