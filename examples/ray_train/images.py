"""Trains on PNG images that are decoded on the way to the workers, a few of them corrupt.

    python examples/ray_train/images.py

1. The digits of scikit-learn (1,797 images of 8 x 8) are written to a LanceDB table as PNG files. Five files are cut short.
2. `map_batches` decodes them in two processes of their own. Where a file is corrupt, the nearest good row of the same split
   stands in for it, so that every worker still takes the same number of steps.
3. A TorchTrainer trains on 2 workers. The rows that its workers logged are compared, step by step, with those of one worker,
   and none may come from a corrupt file. The exit code is 1 if any does.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import _common
import lancedb
import numpy as np
import pyarrow as pa
import ray
import ray.train
import torch
from PIL import Image
from ray import cloudpickle
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from ray_lance_stream import LanceStream, lance_stream

# Workers on other machines have no copy of _common.py: its functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

CORRUPT_IDS = (17, 400, 401, 1000, 1796)
GLOBAL_BATCH_SIZE = 96
NUM_SPLITS = 48


class DecodePng:
    """Made once in each process; gets and returns a dict of arrays."""

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        images = [np.asarray(Image.open(io.BytesIO(png)), np.float32) for png in batch["png"]]
        return {"id": batch["id"], "label": batch["label"], "pixels": np.stack(images).reshape(-1, 64) / 255}


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    train: Any = ray.train.get_dataset_shard("train")
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    workers = ray.train.get_context().get_world_size()
    log = _common.RowLog(config["log_dir"], run=1)
    log.write("start", epoch=train.epoch, step=0)
    for epoch in range(train.epoch, config["epochs"]):
        correct, seen = 0, 0
        for step, batch in enumerate(train.iter_torch_batches(drop_last=True)):
            log.write("step", epoch=epoch, step=step, workers=workers, ids=batch["id"].tolist())
            scores = model(batch["pixels"])
            optimizer.zero_grad()
            functional.cross_entropy(scores, batch["label"]).backward()
            optimizer.step()
            correct += int((scores.argmax(1) == batch["label"]).sum())
            seen += len(scores)
        log.write("epoch", epoch=epoch, accuracy=correct / seen, stats=train.stats())
        _common.save(model, optimizer, {"epoch": epoch, "accuracy": correct / seen})


def write_table(directory: Path) -> Any:
    """A LanceDB table of PNG files."""
    digits = load_digits()
    files = []
    for number, pixels in enumerate(digits.images):
        file = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(file, "PNG")
        files.append(file.getvalue()[: 40 if number in CORRUPT_IDS else None])
    columns = {
        "id": pa.array(range(len(files)), pa.int64()),
        "png": pa.array(files, pa.binary()),
        "label": pa.array(digits.target, pa.int64()),
    }
    return lancedb.connect(directory).create_table("digits", data=pa.table(columns), mode="overwrite")


def make_stream(table: Any) -> LanceStream:
    """Files in, pixels out."""
    stream = lance_stream(table, num_splits=NUM_SPLITS, global_batch_size=GLOBAL_BATCH_SIZE)
    return stream.map_batches(DecodePng, concurrency=2, on_transform_error="replace", max_replaced_rows=20)


def show(records: list[dict[str, Any]], plan: _common.Rows) -> bool:
    """Prints each epoch; returns whether its steps are those of the plan, without a row of a corrupt file."""
    trained, _ = _common.trained_rows(records)
    lines = []
    for record in records:
        if record["kind"] == "epoch" and record["rank"] == 0:
            of_epoch = {step: ids for step, ids in trained.items() if step[0] == record["epoch"]}
            same = sum(plan.get(step) == ids for step, ids in of_epoch.items())
            lines.append((record["epoch"], len(of_epoch), same, f"{record['accuracy']:.3f}"))
    _common.print_table(("epoch", "steps", "as planned", "accuracy of rank 0"), lines)
    for record in records:
        if record["kind"] == "epoch":
            replaced = [line.strip() for line in record["stats"].splitlines() if "replaced" in line.lower()]
            print(f"rank {record['rank']}, epoch {record['epoch']}:", " ".join(replaced) or "no row was replaced")
    corrupt = [row for ids in trained.values() for row in ids if row in CORRUPT_IDS]
    print(f"rows of corrupt files that a worker received: {len(corrupt)}")
    return trained == plan and not corrupt


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on PNG images, some of them corrupt.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", type=Path, help="default: a temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        storage = (args.storage or Path(temporary)).resolve()
        log_dir = storage / "log"
        log_dir.mkdir(parents=True, exist_ok=True)
        _common.start_ray(workers=2)
        table = write_table(storage / "db")
        plan = _common.planned_rows(make_stream(table), args.epochs, GLOBAL_BATCH_SIZE)
        TorchTrainer(
            train_loop,
            train_loop_config={"log_dir": str(log_dir), "epochs": args.epochs},
            datasets={"train": cast(Any, make_stream(table))},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="images", storage_path=str(storage / "runs")),
        ).fit()
        is_right = show(_common.read_log(log_dir), plan)
        ray.shutdown()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
