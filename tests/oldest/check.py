"""What must work with the oldest versions that pyproject.toml allows: `make oldest` runs it where only the wheel is installed.

No test framework, so that the environment holds what a user's holds and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import numpy as np
import pyarrow as pa
import ray
import ray.train
import torch
from packaging.requirements import Requirement
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import ray_lance_stream
from ray_lance_stream import LanceStream, StateMismatchError, lance_stream

ROWS, SPLITS, STEP_ROWS = 480, 12, 48
MAX_IMPORT_S = 0.3

# The oldest torch has no small build, so this environment has the one of the other.
UNCHECKED = ("torch",)

IMPORT = """
import sys, time
start_s = time.perf_counter()
import ray_lance_stream
took_s = time.perf_counter() - start_s
assert not {"ray", "lance", "lancedb", "torch", "pyarrow"} & set(sys.modules), sorted(sys.modules)
print(took_s)
"""


def check_versions() -> None:
    """What is installed are the lower bounds."""
    for text in importlib.metadata.requires("ray_lance_stream") or []:
        requirement = Requirement(text)
        if requirement.marker or requirement.name in UNCHECKED:
            continue
        (bound,) = requirement.specifier
        installed = importlib.metadata.version(requirement.name)
        assert bound.operator == ">=", text
        assert Requirement(f"{requirement.name}=={bound.version}").specifier.contains(installed), (
            f"{text}, but {installed} is installed: constraints-oldest.txt and pyproject.toml must say the same"
        )


def check_package() -> None:
    """The wheel is what is imported, it is typed, and importing it is quick and imports nothing heavy."""
    folder = Path(ray_lance_stream.__file__).parent
    assert "site-packages" in folder.parts, folder
    assert (folder / "py.typed").exists()
    assert importlib.metadata.version("ray_lance_stream") == ray_lance_stream.__version__
    took_s = [
        float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(took_s) < MAX_IMPORT_S, took_s


def train_loop(config: dict[str, Any]) -> None:
    """Writes the ids of each step; reports a checkpoint after each, and stops where it is told to."""
    assert "site-packages" in ray_lance_stream.__file__
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    step = config["first"]
    for _ in range(shard.epoch, 1):
        for batch in shard.iter_torch_batches():
            assert torch.equal(batch["x"], (batch["id"] + 1.0)[:, None].expand(-1, 4))
            (Path(config["dir"]) / f"{step}-{rank}.txt").write_text(" ".join(map(str, batch["id"].tolist())))
            step += 1
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                ray_lance_stream.report({"step": step}, checkpoint=checkpoint)
            if step == config["stop"]:
                return


def stream_of(table: Any, **options: Any) -> LanceStream:
    """The stream of all runs."""
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=STEP_ROWS, **options)
    return stream.map_batches(plus_one)


def plus_one(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform."""
    return {**batch, "x": batch["x"] + 1}


def check_training(folder: Path) -> None:
    """A run on two workers that stops, and one that goes on with one, hold the planned rows of every step."""
    import lancedb  # warns of each process that is started after it

    ids = np.arange(ROWS)
    x = pa.FixedSizeListArray.from_arrays(pa.array(ids.repeat(4).astype("float32")), 4)
    columns = {"id": ids, "x": x}
    table = lancedb.connect(folder / "db").create_table("rows", data=pa.table(columns).slice(0, 100))
    table.add(pa.table(columns).slice(100))
    stream, steps = stream_of(table), ROWS // STEP_ROWS
    for workers, first, stop in ((2, 0, 4), (1, 4, steps)):
        trainer = DataParallelTrainer(
            train_loop,
            train_loop_config={"dir": str(folder), "first": first, "stop": stop},
            datasets={"train": stream},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name="run", storage_path=str(folder / "runs")),
        )
        result = trainer.fit()
        assert result.metrics == {"step": stop}
        assert len(list(folder.glob(f"{first}-*.txt"))) == workers
    plan = lance_stream(table, num_splits=SPLITS, global_batch_size=STEP_ROWS)
    for step in range(steps):
        found = [int(text) for path in folder.glob(f"{step}-*.txt") for text in path.read_text().split()]
        assert sorted(found) == sorted(plan.row_ids(0, step, column="id")), step
    refused: list[str] = []
    try:
        stream_of(table, shuffle_seed=1, resume_from=result.checkpoint)
    except StateMismatchError as error:
        refused = [name for name, *_ in error.differences]
    assert refused == ["shuffle_seed"]


if __name__ == "__main__":
    check_versions()
    check_package()
    with tempfile.TemporaryDirectory() as directory:
        ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=1 << 28, log_to_driver=False)
        check_training(Path(directory))
        ray.shutdown()
    print("works:", *(f"{name} {importlib.metadata.version(name)}" for name in ("ray", "lancedb", "pylance", "torch")))
