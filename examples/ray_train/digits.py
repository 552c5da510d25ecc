"""Trains on handwritten digits with 4 workers, breaks on purpose, goes on with 2, and checks every global step.

    python examples/ray_train/digits.py

1. The digits of scikit-learn (1,797 images of 8 x 8) are written to a LanceDB table. One row in ten is kept for
   validation, by a filter.
2. A first TorchTrainer trains on 4 workers. In the middle of the second epoch, some steps after a checkpoint, every
   worker raises an error.
3. A second TorchTrainer of the same run name starts from that checkpoint, on 2 workers, and finishes.
4. The row ids that the workers logged are compared, step by step, with the rows of an unbroken run on one worker.
   The exit code is 1 if any step differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import _common
import lancedb
import pyarrow as pa
import ray
import ray.train
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from ray_lance_stream import lance_stream

# Workers on other machines have no copy of _common.py: its functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

FRAGMENT_ROWS = (700, 13, 400, 1, 500, 183)  # uneven on purpose


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    train: Any = ray.train.get_dataset_shard("train")
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    _common.load(model, optimizer)

    workers = ray.train.get_context().get_world_size()
    log = _common.RowLog(config["log_dir"], config["run"])
    first = train.state_dict()["samples_consumed_per_split"] // config["cycles_per_step"]
    log.write("start", epoch=train.epoch, step=first)
    for epoch in range(train.epoch, config["epochs"]):
        losses = []
        batch_size = train.local_batch_size(config["global_batch_size"])
        for step, batch in enumerate(train.iter_torch_batches(batch_size=batch_size, drop_last=True), start=first):
            log.write("step", epoch=epoch, step=step, workers=workers, ids=batch["id"].tolist())
            loss = functional.cross_entropy(model(batch["pixels"]), batch["label"])
            optimizer.zero_grad()
            (loss * train.loss_weight).backward()  # 1.0 where the workers divide num_splits
            optimizer.step()
            losses.append(loss.item())
            if step + 1 == config["save_after_steps"]:
                _common.save(model, optimizer, {"epoch": epoch})
            if (epoch, step) == config["fail_at"]:
                raise RuntimeError(f"{_common.PLANNED} in epoch {epoch} after step {step}")
        mean_loss, accuracy = sum(losses) / max(len(losses), 1), evaluate(model, config["global_batch_size"])
        log.write("epoch", epoch=epoch, loss=mean_loss, accuracy=accuracy)
        _common.save(model, optimizer, {"epoch": epoch, "loss": mean_loss, "accuracy": accuracy})
        first = 0


def evaluate(model: nn.Module, global_batch_size: int) -> float:
    """The share of validation rows that the model gets right, each row counted once over all workers."""
    val: Any = ray.train.get_dataset_shard("val")
    right_and_all = torch.zeros(2)
    with torch.no_grad():
        for batch in val.iter_torch_batches(batch_size=val.local_batch_size(global_batch_size)):
            right = _common.bare(model)(batch["pixels"]).argmax(dim=1) == batch["label"]
            right_and_all += torch.tensor([right.sum().item(), len(right)])
    dist.all_reduce(right_and_all)  # after the loop: ranks may have different numbers of validation batches
    return (right_and_all[0] / right_and_all[1]).item()


def write_digits(directory: Path) -> Any:
    """Returns a LanceDB table with the columns id, label and pixels."""
    pixels, labels = load_digits(return_X_y=True)
    flat = pa.array((pixels / 16).astype("float32").reshape(-1))
    data = pa.table(
        {
            "id": pa.array(range(len(labels)), pa.int64()),
            "label": pa.array(labels, pa.int64()),
            "pixels": pa.FixedSizeListArray.from_arrays(flat, 64),
        }
    )
    table = lancedb.connect(directory).create_table("digits", schema=data.schema)
    start = 0
    for rows in FRAGMENT_ROWS:
        table.add(data.slice(start, rows))
        start += rows
    return table


def make_streams(table: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The streams that every run is given: the number of workers is no part of them."""
    return {
        "train": lance_stream(
            table,
            num_splits=args.num_splits,
            global_batch_size=args.global_batch_size,
            filter="id % 10 != 0",
            shuffle_seed=7,
        ),
        "val": lance_stream(
            table, num_splits=args.num_splits, filter="id % 10 = 0", evaluation=True, drop_remainder=False
        ),
    }


def fit(table: Any, storage: Path, workers: int, config: dict[str, Any], args: argparse.Namespace) -> _common.Step:
    """One run of the trainer, from the latest checkpoint there is, and a summary; returns the step it started at."""
    print(f"\nrun {config['run']}: {workers} workers ...", flush=True)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=config,
        datasets=make_streams(table, args),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="digits", storage_path=str(storage / "runs")),
    )
    try:
        trainer.fit()
        if config["fail_at"]:
            sys.exit(f"  finished, but the {_common.PLANNED} should have stopped it")
        ending = "finished"
    except TrainingFailedError as error:
        if _common.PLANNED not in str(error):
            raise
        ending = f"stopped by the {_common.PLANNED} in epoch {config['fail_at'][0]} after step {config['fail_at'][1]}"
    of_run = [line for line in _common.read_log(Path(config["log_dir"])) if line["run"] == config["run"]]
    start = next(line for line in of_run if line["kind"] == "start")
    print(f"  started in epoch {start['epoch']} at step {start['step']}")
    for line in of_run:
        if line["kind"] == "epoch" and line["rank"] == 0:
            print(f"  epoch {line['epoch']}: loss {line['loss']:.3f}, validation accuracy {line['accuracy']:.3f}")
    print(f"  {ending}")
    return start["epoch"], start["step"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Breaks a training run and shows that resuming changes no step.")
    parser.add_argument("--storage", type=Path, help="an empty directory (default: a temporary one)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers-first", type=int, default=4)
    parser.add_argument("--workers-second", type=int, default=2)
    parser.add_argument("--num-splits", type=int, default=48)
    parser.add_argument("--global-batch-size", type=int, default=96, help="rows per step, a multiple of --num-splits")
    args = parser.parse_args()
    if args.storage and args.storage.exists() and any(args.storage.iterdir()):
        parser.error(f"--storage {args.storage} is not empty: an earlier run there would be taken up again")
    return args


def run(args: argparse.Namespace, storage: Path) -> bool:
    """The whole example; returns whether the broken run equals the unbroken one."""
    log_dir = storage / "rows"
    log_dir.mkdir(parents=True)
    table = write_digits(storage / "db")
    streams = make_streams(table, args)
    plan = _common.planned_rows(streams["train"], args.epochs, args.global_batch_size)
    steps = sum(epoch == 0 for epoch, _ in plan)
    if steps < 4:
        sys.exit(f"an epoch of {steps} steps is too short to break in the middle: choose a smaller global batch size")
    print(f"plan: {args.epochs} epochs of {steps} steps of {args.global_batch_size} rows")

    half = steps // 2
    config = {
        "log_dir": str(log_dir),
        "epochs": args.epochs,
        "global_batch_size": args.global_batch_size,
        "cycles_per_step": args.global_batch_size // args.num_splits,
        "save_after_steps": half,
    }
    fail_at = (min(1, args.epochs - 1), half + half // 2 - 1)
    fit(table, storage, args.workers_first, {**config, "run": 1, "fail_at": fail_at}, args)
    start = fit(table, storage, args.workers_second, {**config, "run": 2, "fail_at": None}, args)
    saved = (fail_at[0], half)
    if start != saved:
        print(f"\nrun 2 started at (epoch, step) {start}, but the checkpoint was saved at {saved}")
    return _common.compare(plan, log_dir, args.epochs) and start == saved


def main() -> None:
    args = parse_args()
    _common.start_ray(max(args.workers_first, args.workers_second))
    with tempfile.TemporaryDirectory() as temporary:
        same = run(args, (args.storage or Path(temporary)).resolve())
        ray.shutdown()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
