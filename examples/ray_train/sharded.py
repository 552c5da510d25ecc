"""Trains a model that is sharded over 2 workers (FSDP), breaks on purpose, goes on with 1, and checks every step.

    python examples/ray_train/sharded.py

Each worker saves its part of model and optimizer with torch.distributed.checkpoint, and Ray puts the parts into one
checkpoint, in which the position of the stream lies too. It is loaded by another number of workers. The exit code is 1 if any
step differs from an unbroken run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import _common
import digits
import ray
import ray.train
import torch
import torch.distributed as dist
from ray import cloudpickle
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import ray_lance_stream
from ray_lance_stream import lance_stream

# Workers on other machines have no copy of these: their functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

EPOCHS = 2
GLOBAL_BATCH_SIZE = 96
SAVE_EVERY = 7
FAIL_AT = (1, 9)


# --8<-- [start:checkpoint]
def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Model and optimizer come from the checkpoint, if there is one, whatever number of workers saved it."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return
    with checkpoint.as_directory() as directory:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        load_parts(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(model: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any]) -> None:
    """Reports a checkpoint: every rank calls it at the same step, and brings its part."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    directory = tempfile.mkdtemp()
    save_parts({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    checkpoint = ray.train.Checkpoint.from_directory(directory)
    ray_lance_stream.report(metrics, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)


# --8<-- [end:checkpoint]


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    train: Any = ray.train.get_dataset_shard("train")
    world = ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    load(model, optimizer)

    log = _common.RowLog(config["log_dir"], config["run"])
    first = train.state_dict()["samples_consumed_per_split"] * 48 // GLOBAL_BATCH_SIZE
    log.write("start", epoch=train.epoch, step=first)
    for epoch in range(train.epoch, EPOCHS):
        losses = []
        for step, batch in enumerate(train.iter_torch_batches(drop_last=True), start=first):
            log.write("step", epoch=epoch, step=step, workers=world, ids=batch["id"].tolist())
            if (epoch, step) == (config["fail_at"] and tuple(config["fail_at"])):
                raise RuntimeError(f"{_common.PLANNED} at {(epoch, step)}")
            loss = functional.cross_entropy(model(batch["pixels"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if (step + 1) % SAVE_EVERY == 0:
                save(model, optimizer, {"epoch": epoch, "loss": losses[-1]})
        log.write("epoch", epoch=epoch, loss=sum(losses) / len(losses))
        first = 0
    dist.barrier()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        _common.start_ray(workers=2)
        table = digits.write_digits(storage / "db")
        stream = lance_stream(table, num_splits=48, global_batch_size=GLOBAL_BATCH_SIZE)
        plan = _common.planned_rows(stream, EPOCHS, GLOBAL_BATCH_SIZE)
        _common.break_and_go_on(train_loop, stream, storage, (2, 1), {"fail_at": FAIL_AT})
        for line in _common.read_log(storage / "rows"):
            if line["kind"] == "epoch" and line["rank"] == 0:
                print(f"run {line['run']}, epoch {line['epoch']}: loss {line['loss']:.3f}")
        same = _common.compare(plan, storage / "rows", EPOCHS)
        ray.shutdown()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
