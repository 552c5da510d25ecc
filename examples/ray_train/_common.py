"""What the examples need: a log of the rows that each global step received, and its comparison with the plan."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer
from torch import nn

import ray_lance_stream
from ray_lance_stream import LanceStream

PLANNED = "planned failure"
Step = tuple[int, int]  # (epoch, step in that epoch), both from 0
Rows = dict[Step, list[int]]  # the row ids of each global step, sorted

# ---------------------------------------------------------------- in a worker


class RowLog:
    """Appends what one worker receives to a file of its own. Lines written before a failure stay."""

    def __init__(self, log_dir: str, run: int) -> None:
        self.rank = ray.train.get_context().get_world_rank()
        self.run = run
        self.path = Path(log_dir) / f"run-{run}-rank-{self.rank}.jsonl"

    def write(self, kind: str, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "run": self.run, "rank": self.rank, **fields}) + "\n")


def bare(model: nn.Module) -> nn.Module:
    """The model without the DistributedDataParallel around it: there is none on one worker."""
    return getattr(model, "module", model)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Model and optimizer come from the checkpoint, if there is one. The stream's position is in the shard already."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return
    with checkpoint.as_directory() as directory:
        saved = torch.load(Path(directory) / "model.pt")
    bare(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def save(model: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any]) -> None:
    """Reports a checkpoint. Every rank calls it at the same step; rank 0 brings the model."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"model": bare(model).state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(directory) / "model.pt")
            checkpoint = Checkpoint.from_directory(directory)
        ray_lance_stream.report(metrics, checkpoint=checkpoint)  # adds the stream's state


# ---------------------------------------------------------------- in the driver


def start_ray(workers: int) -> None:
    """Starts Ray on this machine, with as many logical CPUs as the workers ask for: real cores may be fewer."""
    # Ray forks only to execute another program at once, so nothing of Lance runs in the child.
    warnings.filterwarnings("ignore", message="lancedb fork support", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message="lance is not fork-safe", category=UserWarning)
    cpus = 2 * workers
    ray.init(
        address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING
    )


def break_and_go_on(
    train_loop: Callable[[dict[str, Any]], None],
    stream: LanceStream,
    storage: Path,
    workers: tuple[int, int],
    config: dict[str, Any],
) -> None:
    """Two runs of one name: the first stops at config["fail_at"], the second goes on with another number of workers."""
    (storage / "rows").mkdir(parents=True)
    for run, (count, fail_at) in enumerate(zip(workers, (config["fail_at"], None), strict=True), start=1):
        print(f"run {run}: {count} workers ...", flush=True)
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={**config, "log_dir": str(storage / "rows"), "run": run, "fail_at": fail_at},
            datasets={"train": cast(Any, stream)},
            scaling_config=ScalingConfig(num_workers=count),
            run_config=RunConfig(name="example", storage_path=str(storage / "runs")),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            if fail_at is None or PLANNED not in str(error):
                raise
            print(f"  stopped by the {PLANNED} in epoch {fail_at[0]} after step {fail_at[1]}")
        else:
            print("  finished")
            if fail_at is not None:
                sys.exit(f"the {PLANNED} should have stopped it")


def read_log(log_dir: Path) -> list[dict[str, Any]]:
    """Every line of every worker of every run."""
    return [json.loads(line) for path in sorted(log_dir.glob("*.jsonl")) for line in path.read_text().splitlines()]


def trained_rows(records: Iterable[dict[str, Any]]) -> tuple[Rows, dict[Step, int]]:
    """What the model has seen: a later run replaces what an earlier one did after the checkpoint it started from.

    Returns:
        the rows of each global step, and the number of workers that it ran on.
    """
    rows: Rows = {}
    workers: dict[Step, int] = {}
    by_run: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_run.setdefault(record["run"], []).append(record)
    for _, of_run in sorted(by_run.items()):
        start = min((record["epoch"], record["step"]) for record in of_run if record["kind"] == "start")
        rows = {step: ids for step, ids in rows.items() if step < start}
        for record in of_run:
            if record["kind"] == "step":
                step = (record["epoch"], record["step"])
                rows.setdefault(step, []).extend(record["ids"])
                workers[step] = record["workers"]
    return {step: sorted(ids) for step, ids in rows.items()}, workers


def planned_rows(stream: LanceStream, epochs: int, global_batch_size: int) -> Rows:
    """What an unbroken run on one worker receives, read here, without a trainer."""
    shard = stream.shard(rank=0, world_size=1)
    plan: Rows = {}
    for epoch in range(epochs):
        shard.set_epoch(epoch)
        batches = shard.iter_batches(batch_size=global_batch_size, batch_format="numpy", drop_last=True)
        plan.update({(epoch, step): sorted(batch["id"].tolist()) for step, batch in enumerate(batches)})
    return plan


def digest(ids: list[int] | None) -> str:
    """A short name for a list of row ids."""
    return "-" if ids is None else hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def print_table(header: tuple[str, ...], lines: list[tuple[Any, ...]]) -> None:
    """Prints lines in right-aligned columns."""
    cells = [header, *(tuple(str(cell) for cell in line) for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def compare(plan: Rows, log_dir: Path, epochs: int) -> bool:
    """Prints one line per epoch; returns whether every global step holds the planned rows, each once."""
    trained, workers = trained_rows(read_log(log_dir))
    lines = []
    for epoch in range(epochs):
        steps = sorted(step for step in plan.keys() | trained.keys() if step[0] == epoch)
        differing = sum(plan.get(step) != trained.get(step) for step in steps)
        rows = sum(len(trained.get(step, [])) for step in steps)
        counts = dict.fromkeys(workers[step] for step in steps if step in trained)
        verdict = "identical" if steps and not differing else "DIFFERENT"
        lines.append((epoch, " then ".join(map(str, counts)), len(steps), rows, differing, verdict))
    print("\nrow ids of each global step, compared with an unbroken run on one worker:")
    print_table(("epoch", "workers", "steps", "rows", "differing steps", "verdict"), lines)
    return all(line[-1] == "identical" for line in lines)
