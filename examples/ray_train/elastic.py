"""One script, run twice with different numbers of workers: the second run goes on at the step where the first stopped.

    python examples/ray_train/elastic.py --workers 8 --stop-at-step 20
    python examples/ray_train/elastic.py --workers 4

Both use the same --storage and --name, which is all that Ray Train needs to find the checkpoint. Each prints where it
starts, and for every global step a digest of the row ids that its workers received beside the digest of the plan.
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
import numpy as np
import pyarrow as pa
import ray
import ray.train
import torch
from ray import cloudpickle
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from ray_lance_stream import lance_stream

# Workers on other machines have no copy of _common.py: its functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

ROWS = 6000
FEATURES = 8


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    shard: Any = ray.train.get_dataset_shard("train")
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _common.load(model, optimizer)

    workers = ray.train.get_context().get_world_size()
    log = _common.RowLog(config["log_dir"], config["run"])
    state = shard.state_dict()
    first = state["samples_consumed_per_split"] // config["cycles_per_step"]
    log.write("start", epoch=shard.epoch, step=first, state=state, block=shard.split_block)
    for epoch in range(shard.epoch, config["epochs"]):
        batch_size = shard.local_batch_size(config["global_batch_size"])
        for step, batch in enumerate(shard.iter_torch_batches(batch_size=batch_size, drop_last=True), start=first):
            log.write("step", epoch=epoch, step=step, workers=workers, ids=batch["id"].tolist())
            loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
            optimizer.zero_grad()
            (loss * shard.loss_weight).backward()  # 1.0 where the workers divide num_splits
            optimizer.step()
            if (epoch, step) == config["stop_after"]:
                _common.save(model, optimizer, {"epoch": epoch, "loss": loss.item()})
                return
        first = 0
        _common.save(model, optimizer, {"epoch": epoch})


def open_table(directory: Path) -> Any:
    """The table of an earlier run, or a new one of made-up rows in uneven fragments."""
    db = lancedb.connect(directory)
    if (directory / "rows.lance").exists():
        return db.open_table("rows")
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype("float32")
    y = (x @ random.normal(size=FEATURES)).astype("float32")
    columns = {
        "id": pa.array(range(ROWS), pa.int64()),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), FEATURES),
        "y": pa.array(y),
    }
    data = pa.table(columns)
    table = db.create_table("rows", data=data.slice(0, 2500))
    table.add(data.slice(2500, 7))
    table.add(data.slice(2507))
    return table


def make_stream(table: Any, args: argparse.Namespace) -> Any:
    """The number of workers is no part of a stream."""
    return lance_stream(table, num_splits=args.num_splits, global_batch_size=args.global_batch_size, shuffle_seed=7)


def show(plan: _common.Rows, log_dir: Path, run: int, stop_after: _common.Step | None) -> bool:
    """Prints the steps of this run; returns whether all runs so far hold the planned rows, without a gap."""
    records = _common.read_log(log_dir)
    of_run = [record for record in records if record["run"] == run]
    starts = sorted((record for record in of_run if record["kind"] == "start"), key=lambda record: record["rank"])
    state = starts[0]["state"]
    print(f"starts in epoch {state['epoch']} with samples_consumed_per_split = {state['samples_consumed_per_split']}")
    print("split blocks:", " ".join("[{}, {})".format(*record["block"]) for record in starts))

    trained, workers = _common.trained_rows(records)
    lines = []
    for step in sorted({(record["epoch"], record["step"]) for record in of_run if record["kind"] == "step"}):
        seen, planned = trained[step], plan.get(step)
        verdict = "identical" if seen == planned else "DIFFERENT"
        lines.append((*step, workers[step], len(seen), _common.digest(seen), _common.digest(planned), verdict))
    if lines:
        _common.print_table(("epoch", "step", "workers", "rows", "digest", "digest of the plan", "verdict"), lines)
    else:
        print("no step left to train: choose more --epochs or another --name")

    start = (starts[0]["epoch"], starts[0]["step"])
    until = stop_after if stop_after is not None and stop_after >= start else max(plan)
    expected = {step: rows for step, rows in plan.items() if step <= until}
    same = trained == expected
    verdict = "identical with" if same else "DIFFERENT from"
    print(f"all runs together: {len(trained)} steps, {verdict} the first {len(expected)} of {len(plan)} in the plan")
    return same


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains until --stop-at-step, or on from there.")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--stop-at-step", type=int, help="global steps, counted over all epochs (default: to the end)")
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()) / "ray_lance_stream_elastic")
    parser.add_argument("--name", default="elastic", help="name of the run; a new name starts from the beginning")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-splits", type=int, default=48)
    parser.add_argument("--global-batch-size", type=int, default=480, help="rows per step, a multiple of --num-splits")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    storage = args.storage.resolve()
    log_dir = storage / "log" / args.name
    log_dir.mkdir(parents=True, exist_ok=True)
    run = 1 + max((record["run"] for record in _common.read_log(log_dir)), default=0)

    _common.start_ray(args.workers)
    table = open_table(storage / "db")
    plan = _common.planned_rows(make_stream(table, args), args.epochs, args.global_batch_size)
    steps = sorted(plan)
    if args.stop_at_step is not None and not 1 <= args.stop_at_step <= len(steps):
        sys.exit(
            f"--stop-at-step {args.stop_at_step} is not one of the steps 1 to {len(steps)} of {args.epochs} epochs"
        )
    stop_after = steps[args.stop_at_step - 1] if args.stop_at_step else None
    print(f"run {run} of {args.name!r} in {storage}: {args.workers} workers ...", flush=True)
    TorchTrainer(
        train_loop,
        train_loop_config={
            "log_dir": str(log_dir),
            "run": run,
            "epochs": args.epochs,
            "stop_after": stop_after,
            "global_batch_size": args.global_batch_size,
            "cycles_per_step": args.global_batch_size // args.num_splits,
        },
        datasets={"train": make_stream(table, args)},
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(name=args.name, storage_path=str(storage / "runs")),
    ).fit()
    same = show(plan, log_dir, run, stop_after)
    ray.shutdown()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
