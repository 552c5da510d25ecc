"""The loops of Lightning and of Hugging Face's Trainer, in this process: saved wherever they save, they resume exactly."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from ray_lance_stream import ConfigError
from ray_lance_stream.train import read_states, register, save_state_file
from tests.support import Oracle, make_table, scan_ids

pl = pytest.importorskip("pytorch_lightning", reason="the extra `integrations` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `integrations` is not installed")

from ray.train.huggingface.transformers import RayTrainReportCallback as TrainerReportCallback  # noqa: E402
from ray.train.huggingface.transformers import prepare_trainer  # noqa: E402
from ray.train.lightning import RayTrainReportCallback  # noqa: E402

from ray_lance_stream.integrations import TrackedBatches  # noqa: E402
from ray_lance_stream.integrations import lightning as with_lightning  # noqa: E402
from ray_lance_stream.integrations import transformers as with_transformers  # noqa: E402

EPOCHS = 3
STEPS = 5  # of an epoch


class Reports:
    """Stands for `report` outside of a run: keeps each checkpoint, with the position as it is then."""

    def __init__(self, folder: Path, batches: TrackedBatches) -> None:
        self.folder, self.batches = folder, batches
        self.saved: list[Path] = []
        self.metrics: list[dict[str, Any]] = []

    def __call__(self, metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
        assert options == {"delete_local_checkpoint_after_upload": True}
        path = self.folder / f"checkpoint-{len(self.saved)}"
        shutil.move(checkpoint.path, path)
        save_state_file(path, "train", self.batches.state())
        self.saved.append(path)
        self.metrics.append(metrics)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("tables") / "t", STEPS * 24)


@pytest.fixture(scope="module")
def epochs(table) -> list[list[int]]:
    """The ids of each step of an unbroken run, one after another."""
    oracle = Oracle(scan_ids(table), 12, 2)
    return [ids.tolist() for epoch in range(EPOCHS) for ids in oracle.epoch(epoch)]


def batches_of(shards: Any, table: str, checkpoint: Path | None, **options: Any) -> TrackedBatches:
    stream = shards.stream(table, num_splits=12, global_batch_size=24)
    stream.name = "train"
    return TrackedBatches(shards.of(stream, state=state_in(checkpoint)), **options)


def state_in(checkpoint: Path | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    states = read_states(with_lightning.Checkpoint.from_directory(str(checkpoint)))
    assert states is not None
    return states["train"].to_dict()


def test_a_real_shard_is_where_it_was_set_and_lets_go(shards, table, epochs) -> None:
    """What tests/unit/test_tracked.py does with a shard without Ray."""

    def first() -> list[int]:
        return next(iter(batches))["id"].tolist()

    batches = batches_of(shards, table, None)
    assert first() == first() == epochs[0]
    assert batches.shard._pass is None
    batches.shard.set_epoch(2)
    assert first() == epochs[2 * STEPS]
    for _ in batches:
        batches.trained()
        break
    assert batches.shard._pass is None
    state = batches.state_dict()
    assert (state["epoch"], state["samples_consumed_per_split"]) == (2, 2)
    batches.shard.load_state_dict({**state, "epoch": 1})
    assert batches.state_dict() == batches.shard.state_dict() == {**state, "epoch": 1}
    assert first() == epochs[STEPS + 1]
    running = iter(batches)
    next(running)
    batches.trained()
    batches.leave()
    assert batches.shard._pass is None
    assert first() == epochs[2 * STEPS]


# Lightning


class Module(pl.LightningModule):
    """Its weight counts the batches; keeps their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[list[int]] = []
        self.validated: list[int] = []

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated += batch["id"].tolist()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.trained.append(batch["id"].tolist())
        self.log("loss", 1.0)
        return -self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(
    monkeypatch: Any,
    shards: Any,
    table: str,
    folder: Path,
    checkpoint: Path | None = None,
    ckpt: bool = True,
    validation: Any = None,
    **options: Any,
) -> tuple[Module, Reports]:
    """One run of Lightning, from a checkpoint or the beginning."""
    folder.mkdir()
    batches = batches_of(shards, table, checkpoint)
    reports = Reports(folder, batches)
    monkeypatch.setattr(with_lightning, "report", reports)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[with_lightning.StreamReportCallback(batches, every_n_steps=1)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    module = Module()
    path = f"{checkpoint}/{with_lightning.CHECKPOINT_NAME}" if checkpoint and ckpt else None
    trainer.fit(module, train_dataloaders=batches, val_dataloaders=validation, ckpt_path=path, weights_only=False)
    return module, reports


LOOPS = {
    "epochs": {"max_epochs": EPOCHS},
    "steps": {"max_steps": EPOCHS * STEPS},
    "accumulation": {"max_epochs": EPOCHS, "accumulate_grad_batches": 2},
    "new loaders": {"max_epochs": EPOCHS, "reload_dataloaders_every_n_epochs": 1},
    "cut epochs": {"max_epochs": EPOCHS, "limit_train_batches": 3},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_lightning_resumes_exactly_from_each_of_its_checkpoints(
    loop, monkeypatch, shards, table, epochs, tmp_path
) -> None:
    options = LOOPS[loop]
    unbroken, reports = fit(monkeypatch, shards, table, tmp_path / "unbroken", **options)
    limit = options.get("limit_train_batches", STEPS)
    assert unbroken.trained == [ids for at, ids in enumerate(epochs) if at % STEPS < limit]
    accumulate = options.get("accumulate_grad_batches", 1)
    per_epoch = -(-limit // accumulate)
    assert reports.metrics[-1] == {"loss": 1.0, "epoch": EPOCHS - 1, "step": EPOCHS * per_epoch}
    assert len(reports.saved) == EPOCHS * per_epoch  # one for each step, that at the end of an epoch included
    for number, checkpoint in enumerate(reports.saved[:-1], start=1):
        resumed, _ = fit(monkeypatch, shards, table, tmp_path / f"from-{number}", checkpoint, **options)
        epoch, step = divmod(number, per_epoch)
        trained = epoch * limit + min(step * accumulate, limit)
        assert resumed.trained == unbroken.trained[trained:], (loop, number)
        assert torch.equal(resumed.weight, unbroken.weight)


def test_lightning_validates_on_all_rows(monkeypatch, shards, table, epochs, tmp_path) -> None:
    """After a look at two batches, with which it begins; in the middle of epochs and at their ends."""
    shard = shards.of(shards.stream(table, num_splits=7, evaluation=True, drop_remainder=False))
    validation = shard.iter_torch_batches(batch_size=35)
    options = {"max_epochs": EPOCHS, "val_check_interval": 3, "check_val_every_n_epoch": None}
    module, _ = fit(monkeypatch, shards, table, tmp_path / "one", validation=validation, **options)
    assert module.trained == epochs
    times = EPOCHS * STEPS // 3
    assert len(module.validated) == 2 * 35 + times * STEPS * 24
    assert sorted(module.validated[2 * 35 :]) == sorted(list(range(STEPS * 24)) * times)


def test_lightning_at_another_epoch_than_the_stream_is_told(monkeypatch, shards, table, tmp_path, caplog) -> None:
    _, reports = fit(monkeypatch, shards, table, tmp_path / "one", max_epochs=1)
    with caplog.at_level(logging.WARNING, "ray_lance_stream"):
        fit(monkeypatch, shards, table, tmp_path / "two", reports.saved[-1], ckpt=False, max_epochs=1)
    assert "stream 'train' goes on in epoch 1, but Lightning in epoch 0 of 1" in caplog.text


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_every_n_steps_is_a_positive_int(size) -> None:
    with pytest.raises(ConfigError, match="every_n_steps must be a positive int or None, got"):
        with_lightning.StreamReportCallback(None, every_n_steps=size)


class Run(LocalTrainFnUtils):
    """A local run, which keeps all reports and where the stream is in them."""

    def __init__(self) -> None:
        super().__init__("run")
        self.places: list[tuple[int, int]] = []

    def report(
        self,
        metrics: Any,
        checkpoint: Any = None,
        checkpoint_upload_mode: Any = None,
        checkpoint_upload_fn: Any = None,
        **_: Any,
    ) -> None:
        state = (read_states(checkpoint) or {})["train"]
        self.places.append((state.epoch, state.samples_consumed_per_split))


@pytest.fixture
def run(monkeypatch) -> Iterator[Run]:
    """This process runs the training function of a local run, as `ScalingConfig(num_workers=0)` makes one."""
    monkeypatch.setattr("ray_lance_stream.train._attempt", None)
    run = Run()
    set_train_fn_utils(run)
    yield run
    set_train_fn_utils(None)


def test_rays_own_callback_for_lightning_saves_what_was_trained(shards, table, run, caplog) -> None:
    """With our batches and our callback to count them; without them it is told."""

    def fit(batches: Any, *callbacks: Any) -> None:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[*callbacks, RayTrainReportCallback()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            limit_train_batches=4,
        )
        trainer.fit(Module(), train_dataloaders=batches)

    batches = batches_of(shards, table, None)
    register(batches.shard)
    fit(batches, with_lightning.StreamReportCallback(batches, reports=False))
    assert run.places == [(1, 0), (2, 0)]
    assert "fetches batches of stream" not in caplog.text
    shard = shards.of(shards.stream(table, num_splits=12, global_batch_size=24))
    shard.name = "train"
    register(shard)
    fit(shard.iter_torch_batches())
    assert "lightning fetches batches of stream 'train' before it trains them" in caplog.text
    with pytest.raises(ConfigError, match="with reports=False a callback reports nothing, so leave out every_n_steps"):
        with_lightning.StreamReportCallback(batches, reports=False, every_n_steps=2)


# Hugging Face's Trainer


class Counter(torch.nn.Module):
    """As Module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": -self.weight.sum() + 0 * x.float().sum()}


class Trainer(transformers.Trainer):
    """Keeps the ids of what it trains."""

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.trained.append(inputs["x"].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def train(
    monkeypatch: Any,
    shards: Any,
    table: str,
    folder: Path,
    checkpoint: Path | None = None,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> tuple[Trainer, Reports]:
    """One run of the Trainer."""
    folder.mkdir()
    batches = batches_of(shards, table, checkpoint, collate_fn=lambda batch: {"x": torch.as_tensor(batch["id"].copy())})
    reports = Reports(folder, batches)
    monkeypatch.setattr(with_transformers, "report", reports)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        lr_scheduler_type="constant",
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "ignore_data_skip": True, **options},
    )
    callback = with_transformers.StreamReportCallback(batches)
    trainer = Trainer(model=Counter(), args=arguments, train_dataset=batches, callbacks=[callback, *callbacks])
    trainer.trained = []
    prepare_trainer(trainer).train(
        resume_from_checkpoint=f"{checkpoint}/{with_transformers.CHECKPOINT_NAME}" if checkpoint else None
    )
    return trainer, reports


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_resumes_exactly_from_each_of_its_checkpoints(
    accumulate, monkeypatch, shards, table, epochs, tmp_path
) -> None:
    """With 5 batches an epoch and steps of 2, the gradients of the fifth go into the first step of the next epoch."""
    options = {"gradient_accumulation_steps": accumulate, "max_steps": EPOCHS * (STEPS // accumulate)}
    unbroken, reports = train(monkeypatch, shards, table, tmp_path / "unbroken", **options)
    last = STEPS % accumulate  # batches behind the last step
    assert unbroken.trained == epochs[: len(epochs) - last]
    assert reports.metrics[-1]["learning_rate"] == 1.0
    assert len(reports.saved) == options["max_steps"]
    for number, checkpoint in enumerate(reports.saved[:-1], start=1):
        resumed, _ = train(monkeypatch, shards, table, tmp_path / f"from-{number}", checkpoint, **options)
        epoch, step = divmod(number, STEPS // accumulate)
        trained = epoch * STEPS + step * accumulate - (last if step == 0 else 0)
        assert resumed.trained == unbroken.trained[trained:], number
        assert torch.equal(resumed.model.weight, unbroken.model.weight)


def test_rays_own_callback_for_the_trainer_saves_what_was_trained(monkeypatch, shards, table, tmp_path, run) -> None:
    """The Trainer fetches two batches for each of its steps."""
    make = with_transformers.StreamReportCallback
    monkeypatch.setattr(with_transformers, "StreamReportCallback", lambda batches: make(batches, reports=False))
    made = batches_of

    def registered(*args: Any, **options: Any) -> TrackedBatches:
        batches = made(*args, **options)
        register(batches.shard)
        return batches

    monkeypatch.setitem(globals(), "batches_of", registered)
    arguments = {"gradient_accumulation_steps": 2, "max_steps": 2}
    train(monkeypatch, shards, table, tmp_path / "out", callbacks=[TrainerReportCallback()], **arguments)
    assert run.places == [(0, 4), (0, 8)]
    with pytest.raises(ConfigError, match="so leave out checkpoint_upload_mode"):
        make(None, reports=False, checkpoint_upload_mode="ASYNC")


def test_a_trainer_that_would_leave_batches_out_is_refused(monkeypatch, shards, table, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"TrainingArguments\(ignore_data_skip=True\) must be set"):
        train(monkeypatch, shards, table, tmp_path / "out", max_steps=2, ignore_data_skip=False)
