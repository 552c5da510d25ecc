"""Trains a small language model on bytes of Python's own sources, with rows of all lengths, and goes on after a failure.

    python examples/ray_train/bytes_lm.py

1. Lines of the standard library's sources, joined to texts of 40 bytes or a little more, are written to a Lance table. They
   are on every machine that has Python.
2. A TorchTrainer trains a GRU on 2 workers to predict the next byte. The collate function pads the texts of a batch to the
   longest one. In the middle of the second epoch every worker raises an error; Ray starts new workers, which go on from the
   last checkpoint.
3. The rows that were trained are compared, step by step, with those of an unbroken run. The exit code is 1 if any step
   differs, or if the loss has not fallen.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import _common
import lance
import numpy as np
import pyarrow as pa
import ray
import ray.train
import torch
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional

from ray_lance_stream import lance_stream

# Workers on other machines have no copy of _common.py: its functions travel with the training loop.
cloudpickle.register_pickle_by_value(_common)

TEXTS = 2400
TEXT_BYTES = (40, 200)
GLOBAL_BATCH_SIZE = 48
NUM_SPLITS = 48
EPOCHS = 2
SAVE_EVERY = 20
FAIL_AT = (1, 30)
PADDING = 256  # no byte
IGNORED = -100


def texts() -> Iterator[bytes]:
    """Pieces of the standard library's sources; the same on every machine with this release of Python."""
    shortest, longest = TEXT_BYTES
    piece = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for line in path.read_bytes().splitlines(keepends=True):
            piece += line
            if len(piece) >= shortest:
                yield piece[:longest]
                piece = b""


def write_table(path: Path) -> str:
    """A Lance table with the columns id and text."""
    pieces = [piece for _, piece in zip(range(TEXTS), texts(), strict=False)]
    table = pa.table({"id": np.arange(len(pieces)), "text": pa.array(pieces, pa.binary())})
    lance.write_dataset(table, str(path), max_rows_per_file=1000)
    return str(path)


def pad(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The texts of a batch as one tensor, as wide as the longest of them."""
    width = max(len(text) for text in batch["text"])
    padded = np.full((len(batch["text"]), width), PADDING, np.int64)
    for row, text in zip(padded, batch["text"], strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return {"id": torch.as_tensor(batch["id"].copy()), "bytes": torch.as_tensor(padded)}


class NextByte(nn.Module):
    """Scores for each next byte."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, width, padding_idx=PADDING)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores(self.gru(self.embed(tokens))[0])


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    train: Any = ray.train.get_dataset_shard("train")
    torch.manual_seed(0)
    model = prepare_model(NextByte())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    is_second = ray.train.get_checkpoint() is not None
    _common.load(model, optimizer)

    workers = ray.train.get_context().get_world_size()
    log = _common.RowLog(config["log_dir"], run=2 if is_second else 1)
    first = train.state_dict()["samples_consumed_per_split"] * NUM_SPLITS // GLOBAL_BATCH_SIZE
    log.write("start", epoch=train.epoch, step=first)
    for epoch in range(train.epoch, EPOCHS):
        for step, batch in enumerate(train.iter_torch_batches(collate_fn=pad, drop_last=True), start=first):
            log.write("step", epoch=epoch, step=step, workers=workers, ids=batch["id"].tolist())
            if (epoch, step) == FAIL_AT and not is_second:
                raise RuntimeError(_common.PLANNED)
            inputs, targets = batch["bytes"][:, :-1], batch["bytes"][:, 1:]
            targets = targets.masked_fill(targets == PADDING, IGNORED)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write("loss", epoch=epoch, step=step, loss=loss.item(), width=batch["bytes"].shape[1])
            if (step + 1) % SAVE_EVERY == 0:
                _common.save(model, optimizer, {"epoch": epoch, "loss": loss.item()})
        first = 0


def has_learned(records: list[dict[str, Any]]) -> bool:
    """Prints losses of rank 0; returns whether the last ones are far below the first ones, over batches of several widths."""
    lines = [line for line in records if line["kind"] == "loss" and line["rank"] == 0]
    for line in lines[::15]:
        print(
            f"run {line['run']}, epoch {line['epoch']}, step {line['step']:>2}: loss {line['loss']:.2f} nats per byte"
        )
    losses = [line["loss"] for line in lines]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    widths = {line["width"] for line in lines}
    print(f"loss: {first:.2f} at first, {last:.2f} at last, over batches of {min(widths)} to {max(widths)} bytes")
    return last < 0.6 * first and len(widths) > 1


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        log_dir = storage / "rows"
        log_dir.mkdir()
        _common.start_ray(workers=2)
        stream = lance_stream(
            write_table(storage / "texts.lance"), num_splits=NUM_SPLITS, global_batch_size=GLOBAL_BATCH_SIZE
        )
        plan = _common.planned_rows(stream, EPOCHS, GLOBAL_BATCH_SIZE)
        TorchTrainer(
            train_loop,
            train_loop_config={"log_dir": str(log_dir)},
            datasets={"train": cast(Any, stream)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="bytes", storage_path=str(storage / "runs"), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
        learned = has_learned(_common.read_log(log_dir))
        same = _common.compare(plan, log_dir, EPOCHS)
        ray.shutdown()
    sys.exit(0 if learned and same else 1)


if __name__ == "__main__":
    main()
