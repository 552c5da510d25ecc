"""Trains handwritten digits with PyTorch Lightning on 2 workers, breaks on purpose, goes on with 1, and checks every step.

    python examples/ray_train/with_lightning.py

Lightning fetches a batch before it trains the one before it. The callback saves the position behind the last batch that is
in the weights, so the second run trains what the first one had fetched and lost. The exit code is 1 if any step differs from
an unbroken run.
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
import pytorch_lightning as pl
import ray
import ray.train
import ray.train.lightning
import torch
from ray import cloudpickle
from torch import nn
from torch.nn import functional

from ray_lance_stream import lance_stream

# --8<-- [start:import]
from ray_lance_stream.integrations.lightning import CHECKPOINT_NAME, StreamReportCallback, TrackedBatches

# --8<-- [end:import]

# Workers on other machines have no copy of these: their functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

EPOCHS = 2
GLOBAL_BATCH_SIZE = 96
FAIL_AT = (1, 9)


class Classifier(pl.LightningModule):
    """Logs the rows of each step that it trains."""

    def __init__(self, log: _common.RowLog, fail_at: _common.Step | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.rows, self.fail_at = log, fail_at

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        step = (self.current_epoch, batch_idx)
        self.rows.write("step", epoch=step[0], step=step[1], workers=self.trainer.world_size, ids=batch["id"].tolist())
        if step == self.fail_at:
            raise RuntimeError(f"{_common.PLANNED} at {step}")
        loss = functional.cross_entropy(self.net(batch["pixels"]), batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    torch.manual_seed(0)
    log = _common.RowLog(config["log_dir"], config["run"])
    # --8<-- [start:loop]
    batches = TrackedBatches(ray.train.get_dataset_shard("train"), drop_last=True)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[StreamReportCallback(batches, every_n_steps=7)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    # --8<-- [end:loop]
    start = batches.state_dict()
    first = start["samples_consumed_per_split"] * start["num_splits"] // GLOBAL_BATCH_SIZE
    log.write("start", epoch=start["epoch"], step=first)
    model = Classifier(log, config["fail_at"] and tuple(config["fail_at"]))
    # --8<-- [start:fit]
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(model, train_dataloaders=batches)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(
                model, train_dataloaders=batches, ckpt_path=f"{directory}/{CHECKPOINT_NAME}", weights_only=False
            )
    # --8<-- [end:fit]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        _common.start_ray(workers=2)
        table = digits.write_digits(storage / "db")
        stream = lance_stream(table, num_splits=48, global_batch_size=GLOBAL_BATCH_SIZE)
        plan = _common.planned_rows(stream, EPOCHS, GLOBAL_BATCH_SIZE)
        _common.break_and_go_on(train_loop, stream, storage, (2, 1), {"fail_at": FAIL_AT})
        same = _common.compare(plan, storage / "rows", EPOCHS)
        ray.shutdown()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
