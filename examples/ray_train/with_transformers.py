"""Trains a tiny GPT-2 with Hugging Face's Trainer on 2 workers, breaks on purpose, goes on with 1, and checks every step.

    python examples/ray_train/with_transformers.py

The model learns to predict the pixels of handwritten digits, one after another. The Trainer takes all batches over which it
accumulates gradients at once; the callback counts one when it is in the weights. The exit code is 1 if any step differs from an
unbroken run.
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
import numpy as np
import ray
import ray.train
import torch
from ray import cloudpickle
from ray.train.huggingface.transformers import prepare_trainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ray_lance_stream import lance_stream

# --8<-- [start:import]
from ray_lance_stream.integrations.transformers import CHECKPOINT_NAME, StreamReportCallback, TrackedBatches

# --8<-- [end:import]

# Workers on other machines have no copy of these: their functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

EPOCHS = 2
GLOBAL_BATCH_SIZE = 96
ACCUMULATE = 2
FAIL_AT = (1, 9)


def as_tokens(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Grey values as tokens."""
    tokens = torch.as_tensor((batch["pixels"] * 16).round().astype(np.int64))
    return {"id": torch.as_tensor(batch["id"].copy()), "input_ids": tokens, "labels": tokens}


class LoggingTrainer(Trainer):
    """Logs the rows of each batch that it trains."""

    log_rows: _common.RowLog
    start: _common.Step
    fail_at: _common.Step | None
    steps_per_epoch: int
    trained = 0

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        count = self.start[0] * self.steps_per_epoch + self.start[1] + self.trained
        step = divmod(count, self.steps_per_epoch)
        ids = inputs.pop("id").tolist()
        self.log_rows.write("step", epoch=step[0], step=step[1], workers=self.args.world_size, ids=ids)
        if step == self.fail_at:
            raise RuntimeError(f"{_common.PLANNED} at {step}")
        self.trained += 1
        return super().training_step(model, inputs, *args, **kwargs)


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    steps_per_epoch = config["steps_per_epoch"]
    # --8<-- [start:loop]
    batches = TrackedBatches(ray.train.get_dataset_shard("train"), drop_last=True, collate_fn=as_tokens)
    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=EPOCHS * steps_per_epoch // ACCUMULATE,  # a stream has no length
        gradient_accumulation_steps=ACCUMULATE,
        ignore_data_skip=True,  # the stream goes on by itself
        save_strategy="steps",
        save_steps=6,
        logging_steps=6,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer: Any = LoggingTrainer(
        model=model, args=arguments, train_dataset=batches, callbacks=[StreamReportCallback(batches)]
    )
    trainer = prepare_trainer(trainer)
    # --8<-- [end:loop]
    start = batches.state_dict()
    first = start["samples_consumed_per_split"] * start["num_splits"] // GLOBAL_BATCH_SIZE
    trainer.log_rows = _common.RowLog(config["log_dir"], config["run"])
    trainer.log_rows.write("start", epoch=start["epoch"], step=first)
    trainer.start, trainer.steps_per_epoch = (start["epoch"], first), steps_per_epoch
    trainer.fail_at = config["fail_at"] and tuple(config["fail_at"])
    # --8<-- [start:fit]
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as directory:
            trainer.train(resume_from_checkpoint=f"{directory}/{CHECKPOINT_NAME}")
    # --8<-- [end:fit]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        _common.start_ray(workers=2)
        table = digits.write_digits(storage / "db")
        stream = lance_stream(table, num_splits=48, global_batch_size=GLOBAL_BATCH_SIZE)
        plan = _common.planned_rows(stream, EPOCHS, GLOBAL_BATCH_SIZE)
        assert stream.plan.epoch_rows is not None
        config = {"fail_at": FAIL_AT, "steps_per_epoch": stream.plan.epoch_rows // GLOBAL_BATCH_SIZE}
        _common.break_and_go_on(train_loop, stream, storage, (2, 1), config)
        same = _common.compare(plan, storage / "rows", EPOCHS)
        ray.shutdown()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
