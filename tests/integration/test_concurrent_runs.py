"""Runs side by side on one stream, Tune trials, replicas, and what one rank's error does to the others (B16, B18, B21, B22)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import ConfigError, LanceStream, lance_stream
from tests.support import Oracle, log_loop, make_table, no_readers_left, read_logs, scan_ids

pytestmark = pytest.mark.timeout(580)

NUM_SPLITS = 12
GLOBAL_BATCH = 24
M = GLOBAL_BATCH // NUM_SPLITS


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("runs") / "t", 300)


def fit(stream: LanceStream, directory: Path, name: str, world: int, loop: Any = log_loop, **config: Any) -> None:
    DataParallelTrainer(
        loop,
        train_loop_config={"dir": str(directory), "tag": name, "global_batch": GLOBAL_BATCH, "epochs": 1, **config},
        datasets={"train": stream},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(name=name, storage_path=str(directory / "runs")),
    ).fit()


def steps(directory: Path, name: str) -> dict[tuple[int, int], list[int]]:
    (attempt,) = read_logs(directory, name)
    return attempt.steps(M)


def trial(config: dict[str, Any]) -> None:
    """A Tune trial that starts a trainer of its own on the shared stream."""
    fit(config["stream"], Path(config["dir"]), config["name"], 2)


def test_runs_that_share_a_stream_do_not_meet(cluster, table, tmp_path):
    """Two trainers at once, then Tune with two trials; each exact and told apart on the driver."""
    oracle = Oracle(scan_ids(table), NUM_SPLITS, M).steps([0])
    stream = lance_stream(table, num_splits=NUM_SPLITS)
    assert stream.progress() == {}
    assert stream.state_dict()["samples_consumed_per_split"] == 0
    runs = [
        threading.Thread(target=fit, args=(stream, tmp_path, name, world), kwargs={"sleep_s": 0.1, "stop_after": stop})
        for name, world, stop in (("one", 1, 5), ("two", 3, 9))
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert steps(tmp_path, "one") == {key: oracle[key] for key in list(oracle)[:5]}
    assert steps(tmp_path, "two") == {key: oracle[key] for key in list(oracle)[:9]}
    with pytest.raises(ConfigError, match=r"several runs.*one.*two"):
        stream.state_dict()
    assert stream.state_dict("one")["samples_consumed_per_split"] == 10
    assert stream.state_dict("two")["samples_consumed_per_split"] == 18
    assert sorted(stream.progress("two")) == [0, 1, 2]
    with pytest.raises(ConfigError, match="no run 'three'"):
        stream.progress("three")

    tune.Tuner(
        trial,
        param_space={"stream": stream, "dir": str(tmp_path), "name": tune.grid_search(["trial-a", "trial-b"])},
        run_config=tune.RunConfig(name="tune", storage_path=str(tmp_path / "tune")),
    ).fit()
    assert steps(tmp_path, "trial-a") == steps(tmp_path, "trial-b") == oracle
    stream.close()
    no_readers_left()


def test_replicas_share_the_rows_of_their_data_rank(cluster, table, tmp_path):
    """B18: four workers as two data ranks of two copies; the sequence is that of two workers."""
    stream = lance_stream(table, num_splits=NUM_SPLITS, replicas=2)
    fit(stream, tmp_path, "copies", 4)
    (attempt,) = read_logs(tmp_path, "copies")
    ids = [[line["ids"] for line in attempt.ranks[rank] if "ids" in line] for rank in range(4)]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    oracle = Oracle(scan_ids(table), NUM_SPLITS, M).steps([0])
    assert [sorted(a + b) for a, b in zip(ids[0], ids[2], strict=True)] == [oracle[0, t] for t in range(len(ids[0]))]
    with pytest.raises(ray.train.TrainingFailedError, match=r"multiple of replicas, got 3 workers and replicas=2"):
        fit(stream, tmp_path, "odd", 3)
    stream.close()


def uneven_loop(config: dict[str, Any]) -> None:
    """Rank 1 asks for batches of another number of cycles."""
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    size = shard.local_batch_size(GLOBAL_BATCH * (1 + rank))
    if rank:
        time.sleep(2)
    for _ in shard.iter_batches(batch_size=size):
        time.sleep(0.2)


def pausing_loop(config: dict[str, Any]) -> None:
    """B21: ranks wait for nobody in the loader: one is slow, one pauses, epochs start apart. Times go to a file."""
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    times: list[float] = []
    rows: list[int] = []
    for _ in range(2):
        time.sleep(3 * rank)
        for step, batch in enumerate(shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH))):
            times.append(time.time())
            rows += batch["id"].tolist()
            time.sleep(0.05 * rank + (4 if (rank, step) == (0, 3) else 0))
    Path(config["dir"], f"pause-{rank}.json").write_text(json.dumps({"times": times, "rows": rows}))


def collate_loop(config: dict[str, Any]) -> None:
    """B22: rank 1 fails in step 3 of its own collate function; the others would go on for long."""
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    for step, _ in enumerate(shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH))):
        if (rank, step) == (1, 3):
            raise ValueError("bad row 17")
        time.sleep(0.5 if rank == 1 else 10)


def hanging_loop(config: dict[str, Any]) -> None:
    """B22: rank 1 fails while rank 0 waits for readers that have hung."""
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    hung = Path(config["dir"], "hung")
    for _ in shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH), prefetch_batches=0):
        if rank == 0 and not hung.exists():
            hung.write_text(json.dumps(reader_pids()))
            for pid in reader_pids():
                os.kill(pid, signal.SIGSTOP)
        elif rank == 1:
            while not hung.exists():
                time.sleep(0.05)
            time.sleep(1)
            raise ValueError("bad row 18")


def test_the_first_error_of_a_rank_ends_the_run_fast_and_says_why(cluster, table, tmp_path):
    """Guarantees 3 and 8: uneven steps are refused by the rank that finds them; nobody waits for anybody else."""
    stream = lance_stream(table, num_splits=NUM_SPLITS)
    with pytest.raises(
        ray.train.TrainingFailedError, match=r"(?s)rank 1 uses batch_size=24.*rank 0 uses batch_size=12"
    ):
        fit(stream, tmp_path, "uneven", 2, uneven_loop)
    started_s = time.monotonic()
    with pytest.raises(ray.train.TrainingFailedError, match=r"(?s)Rank 1.*bad row 17"):
        fit(stream, tmp_path, "collate", 2, collate_loop)
    assert time.monotonic() - started_s < 110  # rank 0 alone would take 130 s
    slow = lance_stream(table, num_splits=NUM_SPLITS, read_batch_size=1, prefetch_chunks=2)
    started_s = time.monotonic()
    with pytest.raises(ray.train.TrainingFailedError, match=r"(?s)Rank 1.*bad row 18"):
        fit(slow, tmp_path, "hanging", 2, hanging_loop)
    assert time.monotonic() - started_s < 120  # rank 0 alone would wait for 300 s
    for pid in json.loads((tmp_path / "hung").read_text()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    slow.close()
    fit(stream, tmp_path, "pause", 2, pausing_loop)
    told = [json.loads((tmp_path / f"pause-{rank}.json").read_text()) for rank in range(2)]
    assert sorted(told[0]["rows"] + told[1]["rows"]) == sorted([*range(300)] * 2)
    while_paused = [t for t in told[1]["times"] if told[0]["times"][3] < t < told[0]["times"][4]]
    assert len(while_paused) > 5
    stream.close()


def test_the_state_is_at_hand_while_reads_are_blocked(cluster, table):
    """B16: in a few milliseconds, from any thread, without waiting for a read; one rank's state is enough."""
    stream = lance_stream(table, num_splits=NUM_SPLITS, read_batch_size=2, prefetch_chunks=2)
    shards = [stream.shard(rank, 2) for rank in range(2)]
    passes = [iter(shard.iter_batches(batch_size=12, prefetch_batches=1)) for shard in shards]
    before = [[next(batches)["id"].tolist() for _ in range(3)] for batches in passes]
    pids = reader_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        states: list[dict[str, Any]] = []
        times_s: list[float] = []

        def ask() -> None:
            for _ in range(20):
                started_s = time.perf_counter()
                states.append(shards[0].state_dict())
                times_s.append(time.perf_counter() - started_s)
                time.sleep(0.02)

        other = threading.Thread(target=ask)
        other.start()
        ask()
        other.join()
        assert all(state == states[0] for state in states)
        assert len(json.dumps(states[0])) < 2048
        assert sorted(times_s)[len(times_s) // 2] < 0.01
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    resumed = stream.shard()
    resumed.load_state_dict(states[0])
    oracle = Oracle(scan_ids(table), NUM_SPLITS, M).steps([0])
    assert [sorted(a + b) for a, b in zip(*before, strict=True)] == [oracle[0, t] for t in range(3)]
    rest = [sorted(batch["id"].tolist()) for batch in resumed.iter_batches(batch_size=GLOBAL_BATCH)]
    assert rest == [oracle[0, t] for t in range(3, len(oracle))]
    for shard in shards:
        shard.close()
    stream.close()


def reader_pids() -> list[int]:
    """Process ids of the live readers."""
    from ray._private.state import actors

    return [a["Pid"] for a in actors().values() if a["ActorClassName"] == "SplitReader" and a["State"] == "ALIVE"]
