"""Real Ray Train runs that stop and go on: other worker counts, epoch edges, a new process, a dead worker (guarantee 2).

B02, B04, B06, B11, B15, B38, B39. Each attempt is cut at the checkpoint that the next one started from; what is left must
be the unbroken run of one worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import lance_stream
from tests.support import Oracle, effective_history, log_loop, make_table, read_logs, scan_ids, write

pytestmark = pytest.mark.timeout(580)

NUM_SPLITS = 12
GLOBAL_BATCH = 24
M = GLOBAL_BATCH // NUM_SPLITS
ROWS = 300  # 25 cycles, 13 steps an epoch: the last one is short
STEPS = 13


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("resume") / "t", ROWS)


def run(table: str, directory: Path, world: int, tag: str, *, stream: dict[str, Any] | None = None, **config: Any):
    """One `fit()`; run name and storage path stay the same in a directory."""
    failures = config.pop("max_failures", 0)
    name = config.pop("run_name", "run")
    made = lance_stream(table, **{"num_splits": NUM_SPLITS, "shuffle_seed": 5, **(stream or {})})
    trainer = DataParallelTrainer(
        log_loop,
        train_loop_config={"dir": str(directory), "tag": tag, "global_batch": GLOBAL_BATCH, "epochs": 3, **config},
        datasets={"train": made},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(
            name=name, storage_path=str(directory / "runs"), failure_config=FailureConfig(max_failures=failures)
        ),
    )
    return trainer.fit()


def oracle(table: str, epochs: int = 3) -> dict[tuple[int, int], list[int]]:
    return Oracle(scan_ids(table), NUM_SPLITS, M, seed=5).steps(range(epochs))


def test_a_chain_of_worker_counts_through_epoch_edges_and_another_process(cluster, table, tmp_path):
    """2 -> 3 (new process) -> 1 -> 4: saved inside an epoch, after its last step, and after its end."""
    run(table, tmp_path, 2, "a", save_every=4, stop_after=6, plain_report=True)
    script = (
        "import ray, sys; from pathlib import Path; from tests.integration.test_train_resume import run;"
        "ray.init(address=sys.argv[1], log_to_driver=False);"
        "run(sys.argv[2], Path(sys.argv[3]), 3, 'b', save_every=3, stop_after=9)"
    )
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    subprocess.run(
        [sys.executable, "-c", script, address, table, str(tmp_path)], check=True, timeout=150, env=environment
    )
    run(table, tmp_path, 1, "c", save_every=5, stop_after=5, plain_report=True)
    run(table, tmp_path, 4, "d", save_end=True)
    attempts = read_logs(tmp_path)
    assert [(a.tag, a.world, a.start) for a in attempts] == [
        ("a", 2, (0, 0)),
        ("b", 3, (0, 8)),  # 4 steps
        ("c", 1, (1, 0)),  # 9 steps more: the last step of epoch 0 is done, and its state says epoch 1
        ("d", 4, (1, 10)),
    ]
    assert effective_history(attempts, M) == oracle(table)
    run(table, tmp_path, 2, "e")
    *_, last = read_logs(tmp_path)
    assert last.start == (3, 0)
    assert last.steps(M) == {}
    with pytest.raises(ray.train.TrainingFailedError, match=r"num_splits: saved 12, current 24"):  # B39
        run(table, tmp_path, 2, "f", stream={"num_splits": 24})


def test_a_worker_that_dies_takes_the_run_back_to_its_checkpoint(cluster, table, tmp_path):
    """B15: rank 1 dies with prefetched chunks; nothing that it held is lost."""
    run(
        table,
        tmp_path,
        2,
        "a",
        max_failures=1,
        plain_report=True,
        save_every=5,
        stop_after=9,  # the second attempt has 8 steps left
        stop="exit",
        stop_rank=1,
        epochs=1,
        sleep_s=0.8,  # the controller needs a while to take the checkpoint in
        prefetch_batches=4,
    )
    first, second = read_logs(tmp_path)
    assert (first.start, second.start) == ((0, 0), (0, 10))
    assert len([line for line in first.ranks[1] if "ids" in line]) == 9
    assert effective_history([first, second], M) == oracle(table, epochs=1)


def start_loop(config: dict[str, Any]) -> None:
    """Where each stream starts."""
    for name in ("checkpoint", "path", "state"):
        assert ray.train.get_dataset_shard(name).state_dict()["samples_consumed_per_split"] == config["cycle"], name


def test_resume_from_names_a_checkpoint_a_path_or_a_state(cluster, table, tmp_path):
    """A new run name goes on from elsewhere; the run's own checkpoint comes first on its next start."""
    result = run(table, tmp_path, 2, "a", save_every=4, stop_after=4)
    state = json.loads(Path(result.checkpoint.path, "ray_lance_stream.json").read_text())["streams"]["train"]
    sources = {"checkpoint": result.checkpoint, "path": result.checkpoint.path, "state": state}
    streams = {
        kind: lance_stream(table, num_splits=NUM_SPLITS, shuffle_seed=5, resume_from=source)
        for kind, source in sources.items()
    }
    DataParallelTrainer(
        start_loop,
        train_loop_config={"cycle": 8},
        datasets=streams,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="kinds", storage_path=str(tmp_path / "runs")),
    ).fit()
    going_on = {"stream": {"resume_from": result.checkpoint}, "run_name": "new", "epochs": 1}
    run(table, tmp_path, 3, "b", save_every=3, stop_after=3, **going_on)
    run(table, tmp_path, 1, "c", **going_on)
    attempts = [read_logs(tmp_path, tag)[0] for tag in "abc"]
    assert [a.start for a in attempts] == [(0, 0), (0, 8), (0, 14)]
    assert effective_history(attempts, M) == oracle(table, epochs=1)


def test_the_recorded_version_is_read_though_the_table_has_moved_on(cluster, tmp_path):
    """B38: appended, deleted, updated and compacted between the two runs."""
    path = make_table(tmp_path / "t", ROWS)
    run(path, tmp_path, 2, "a", save_every=4, stop_after=5, stream={"filter": "id % 7 != 0"})
    ids = scan_ids(path, "id % 7 != 0")
    dataset = lance.dataset(path)
    version = dataset.version
    extra = dataset.to_table().slice(0, 50).set_column(0, "id", pa.array(range(1000, 1050)))
    dataset = lance.write_dataset(extra, path, mode="append")
    dataset.delete("id < 40")
    dataset.update({"value": "0"}, where="id > 200")
    dataset.optimize.compact_files()
    run(path, tmp_path, 3, "b", stream={"filter": "id % 7 != 0"}, save_every=6, stop_after=6)
    expected = Oracle(ids, NUM_SPLITS, M, seed=5).steps(range(3))
    history = effective_history(read_logs(tmp_path), M)
    assert history == {key: expected[key] for key in history}
    assert len(history) == 10
    _, second = read_logs(tmp_path)
    assert second.start == (0, 8)

    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    with pytest.raises(ray.train.TrainingFailedError, match=rf"version {version}.*{path}|{path}.*version {version}"):
        run(path, tmp_path, 2, "c", stream={"filter": "id % 7 != 0"})


def two_streams_loop(config: dict[str, Any]) -> None:
    """Trains three steps of each stream and reports; or reports before it asks for a shard, which saves no state."""
    names, rank = config["names"], ray.train.get_context().get_world_rank()
    directory = Path(config["dir"]) / f"saved-{config['tag']}-{rank}"
    directory.mkdir()
    (directory / "model.txt").write_text("weights")
    checkpoint = Checkpoint.from_directory(str(directory)) if rank == 0 else None
    if config.get("early"):
        ray.train.report({}, checkpoint=checkpoint)
        return
    shards = {name: ray.train.get_dataset_shard(name) for name in names}
    with (Path(config["dir"]) / f"{config['tag']}-{rank}.json").open("w") as log:
        write(log, {name: shard.state_dict() for name, shard in shards.items()})
    for shard in shards.values():
        for step, _ in enumerate(shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH))):
            if step == 2:
                break
    ray.train.report({}, checkpoint=checkpoint)


def two_streams(
    table: str, directory: Path, run_name: str, tag: str, names: str = "train aux", resume: str = "auto", **config: Any
) -> dict[str, Any]:
    made = {
        name: lance_stream(table, num_splits=NUM_SPLITS, shuffle_seed=seed, resume=resume)
        for seed, name in enumerate(names.split())
    }
    DataParallelTrainer(
        two_streams_loop,
        train_loop_config={"dir": str(directory), "tag": tag, "names": list(made), **config},
        datasets=made,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=run_name, storage_path=str(directory / "runs")),
    ).fit()
    log = directory / f"{tag}-0.json"
    states = json.loads(log.read_text()) if log.exists() else {}
    return {name: (state["epoch"], state["samples_consumed_per_split"]) for name, state in states.items()}


def test_streams_that_a_checkpoint_does_not_mention(cluster, table, tmp_path):
    """Another stream's state: starts fresh. No stream state at all: an error that says how to save it, unless manual."""
    assert two_streams(table, tmp_path, "one", "a", names="train") == {"train": (0, 0)}
    assert two_streams(table, tmp_path, "one", "b") == {"train": (0, 6), "aux": (0, 0)}
    assert two_streams(table, tmp_path, "one", "c", early=True) == {}
    with pytest.raises(
        ray.train.TrainingFailedError, match=r"no stream state.*ray\.train\.report in a worker that has"
    ):
        two_streams(table, tmp_path, "one", "d")
    assert two_streams(table, tmp_path, "one", "e", resume="manual") == {"train": (0, 0), "aux": (0, 0)}


def turns_loop(config: dict[str, Any]) -> None:
    """Trains `aux`, then `train`, and fails; then `train`, and `aux` once the checkpoint that it started from is deleted."""

    def step(shard: Any) -> None:
        next(iter(shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH))))

    def saved(folder: str) -> Checkpoint:
        path = Path(folder)
        path.mkdir(parents=True)
        (path / "model.txt").write_text("weights")
        return Checkpoint.from_directory(folder)

    directory, started_from = config["dir"], ray.train.get_checkpoint()
    if started_from is None:
        for number, name in enumerate(("aux", "train")):
            step(ray.train.get_dataset_shard(name))
            ray.train.report({"report": number}, checkpoint=saved(f"{directory}/first-{number}"))
        ray.train.get_all_reported_checkpoints()  # the controller has taken both in
        raise RuntimeError("planned")
    train = ray.train.get_dataset_shard("train")
    batches = iter(train.iter_batches(batch_size=train.local_batch_size(GLOBAL_BATCH)))
    next(batches)
    ray.train.report(
        {"report": 2}, checkpoint=saved(f"{directory}/async"), checkpoint_upload_mode=CheckpointUploadMode.ASYNC
    )
    next(batches)
    storage = ray.train.get_context().get_storage().experiment_fs_path
    ray.train.report(
        {"report": 3}, checkpoint=saved(f"{storage}/own"), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )
    next(batches)
    ray.train.report({"report": 4}, checkpoint=ray.train.get_checkpoint())
    until_s = time.monotonic() + 60
    while Path(started_from.path).exists():
        assert time.monotonic() < until_s
        time.sleep(0.1)
    step(ray.train.get_dataset_shard("aux"))
    ray.train.report({"report": 5}, checkpoint=saved(f"{directory}/last"))


def test_streams_in_turns_whose_checkpoints_are_deleted(cluster, table, tmp_path):
    """B53, B58, and each way to upload: the newest of all checkpoints has the position of both streams."""
    made = {name: lance_stream(table, num_splits=NUM_SPLITS, shuffle_seed=5) for name in ("train", "aux")}
    result = DataParallelTrainer(
        turns_loop,
        train_loop_config={"dir": str(tmp_path)},
        datasets=made,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="turns",
            storage_path=str(tmp_path / "runs"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    states = json.loads(Path(result.checkpoint.path, "ray_lance_stream.json").read_text())["streams"]
    assert {name: state["samples_consumed_per_split"] for name, state in states.items()} == {
        "train": 4 * M,
        "aux": 2 * M,
    }
