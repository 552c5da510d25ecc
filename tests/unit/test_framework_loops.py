"""The loops of Lightning and of Hugging Face's Trainer on a shard without Ray: stopped early, run again, finished already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_tracked import place, tracked

pl = pytest.importorskip("pytorch_lightning", reason="the extra `integrations` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `integrations` is not installed")

from ray.train.huggingface.transformers import prepare_trainer  # noqa: E402

from ray_lance_stream.integrations import lightning as with_lightning  # noqa: E402
from ray_lance_stream.integrations import transformers as with_transformers  # noqa: E402

BATCHES = 4  # of an epoch


# Lightning


class Module(pl.LightningModule):
    """Keeps the batches that it trains; may fail at one, or cut an epoch short."""

    def __init__(self, fail_at: Any = None, skip_at: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[tuple[int, int]] = []
        self._fail_at, self._skip_at = fail_at, skip_at

    def on_train_batch_start(self, batch: tuple[int, int], batch_idx: int) -> int | None:
        return -1 if tuple(batch) == self._skip_at else None

    def training_step(self, batch: tuple[int, int], batch_idx: int) -> torch.Tensor:
        if tuple(batch) == self._fail_at:
            raise RuntimeError("of the model")
        self.trained.append(tuple(batch))
        return -self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Lightning:
    """Runs `fit` on the same batches, with one callback; keeps the position with each report."""

    def __init__(self, monkeypatch: Any) -> None:
        self.batches = tracked(BATCHES)
        self.saved: list[tuple[int, int]] = []
        monkeypatch.setattr(with_lightning, "report", lambda *args, **kwargs: self.saved.append(place(self.batches)))
        self._callback = with_lightning.StreamReportCallback(self.batches, every_n_steps=1)

    def fit(self, module: Module | None = None, **options: Any) -> list[tuple[int, int]]:
        """The batches that were trained; what was saved is that of this fit."""
        self.saved.clear()
        module = module or Module()
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=[self._callback],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            **options,
        )
        trainer.fit(module, train_dataloaders=self.batches)
        return module.trained


def test_lightning_ends_the_pass_where_its_steps_end(monkeypatch) -> None:
    """It has fetched one batch more, and drops it."""
    run = Lightning(monkeypatch)
    assert run.fit(max_steps=2) == [(0, 0), (0, 1)]
    assert run.saved == [(0, 1), (0, 2), (0, 2)]
    assert not run.batches.shard.is_live
    assert place(run.batches) == (0, 2)
    # A second fit goes on in the next epoch, as after a break, or where it is told to.
    run.batches.shard.load_state_dict(run.batches.state_dict())
    assert run.fit(max_steps=3) == [(0, 2), (0, 3), (1, 0)]
    assert run.saved == [(0, 3), (1, 0), (1, 1), (1, 1)]
    assert run.fit(max_steps=1) == [(2, 0)]


def test_lightning_that_does_not_train_leaves_the_stream_alone(monkeypatch) -> None:
    run = Lightning(monkeypatch)
    assert run.fit(max_steps=0) == []
    assert not run.batches.shard.is_live
    assert place(run.batches) == (0, 0)
    assert run.fit(max_epochs=1) == [(0, number) for number in range(BATCHES)]


def test_a_fit_of_lightning_that_fails_ends_the_pass(monkeypatch) -> None:
    run = Lightning(monkeypatch)
    with pytest.raises(RuntimeError, match="of the model"):
        run.fit(Module(fail_at=(0, 2)), max_epochs=1)
    assert place(run.batches) == (0, 2)
    assert not run.batches.shard.is_live
    run.batches.shard.load_state_dict(run.batches.state_dict())
    assert run.fit(max_epochs=1) == [(0, 2), (0, 3)]


def test_an_epoch_that_the_module_of_lightning_cuts_short_is_over(monkeypatch) -> None:
    run = Lightning(monkeypatch)
    whole = [(1, number) for number in range(BATCHES)]
    assert run.fit(Module(skip_at=(0, 1)), max_epochs=2) == [(0, 0), *whole]
    assert run.saved == [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


def test_a_fit_begins_no_epoch_that_a_failed_one_has_begun(monkeypatch) -> None:
    """After a resume at the end of an epoch Lightning ends it again, without a batch: that is not the next one's end."""
    batches = tracked(BATCHES)
    monkeypatch.setattr(with_lightning.StreamReportCallback, "_report", lambda self, trainer: None)
    callback = with_lightning.StreamReportCallback(batches)
    trainer = SimpleNamespace(global_step=0, current_epoch=0, max_epochs=-1, is_last_batch=True)
    running = iter(batches)
    next(running)
    callback.on_train_batch_start(trainer, None, None, 0)  # and it fails
    callback.on_train_start(trainer, None)
    callback.on_train_epoch_end(trainer, None)
    assert place(batches) == (0, 0)
    assert next(iter(batches)) == (0, 0)


# Hugging Face's Trainer


class Counter(torch.nn.Module):
    """Its weight counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": -self.weight.sum() + 0 * x.sum()}


class Trainer(transformers.Trainer):
    """Keeps the batches that it trains."""

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.trained.append(tuple(inputs["x"].int().tolist()))
        return super().training_step(model, inputs, *args, **kwargs)


class CutsShort(transformers.TrainerCallback):
    """Ends each epoch after so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self._left = steps, 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._left = self._steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._left -= 1
        control.should_epoch_stop = self._left == 0


class HuggingFace:
    """Runs `train` on the same batches; keeps the position with each report."""

    def __init__(self, monkeypatch: Any, folder: Any) -> None:
        self.batches = tracked(BATCHES)
        make = self.batches.iterator_gen
        self.batches.iterator_gen = lambda: ({"x": torch.tensor(batch).float()} for batch in make())
        self.saved: list[tuple[int, int]] = []
        self.states: list[dict[str, Any]] = []  # of all runs
        self.folder = folder
        monkeypatch.setattr(with_transformers, "report", self._keep)

    def _keep(self, *args: Any, **kwargs: Any) -> None:
        self.saved.append(place(self.batches))
        self.states.append(self.batches.state_dict())

    def train(self, *others: Any, resume: str | None = None, **options: Any) -> Trainer:
        """One run; what was saved is that of this run."""
        self.saved.clear()
        arguments = transformers.TrainingArguments(
            output_dir=str(self.folder),
            max_grad_norm=0,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ignore_data_skip=True,
            **{"save_strategy": "steps", "save_steps": 1, **options},
        )
        callback = with_transformers.StreamReportCallback(self.batches)
        trainer = Trainer(model=Counter(), args=arguments, train_dataset=self.batches, callbacks=[*others, callback])
        trainer.trained = []
        prepare_trainer(trainer).train(resume_from_checkpoint=resume)
        return trainer


def test_a_trainer_that_is_resumed_at_its_end_takes_no_step_more(monkeypatch, tmp_path) -> None:
    run = HuggingFace(monkeypatch, tmp_path)
    assert run.train(max_steps=2).trained == [(0, 0), (0, 1)]
    assert run.saved == [(0, 1), (0, 2)]
    assert not run.batches.shard.is_live
    state = run.batches.state()
    resumed = run.train(max_steps=2, resume=f"{tmp_path}/checkpoint-2")
    assert (resumed.trained, run.saved) == ([], [])
    assert (resumed.state.global_step, resumed.model.weight.item()) == (2, 2.0)
    assert run.batches.state() == state
    run.batches.shard.load_state_dict(run.batches.state_dict())
    longer = run.train(max_steps=5, resume=f"{tmp_path}/checkpoint-2")  # gets batches again
    assert longer.trained == [(0, 2), (0, 3), (1, 0)]


@pytest.mark.parametrize("save_steps", [1, 2])
def test_an_epoch_of_the_trainer_that_is_cut_short_is_over(save_steps, monkeypatch, tmp_path) -> None:
    """In the checkpoint of its last step too: a resume goes on as the unbroken run does."""
    run = HuggingFace(monkeypatch, tmp_path)
    options = {"max_steps": 6, "save_steps": save_steps}
    whole = [(epoch, number) for epoch in range(3) for number in range(2)]
    assert run.train(CutsShort(2), **options).trained == whole
    assert run.saved == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)][save_steps - 1 :: save_steps]
    run.batches.shard.load_state_dict(run.states[2 // save_steps - 1])
    assert run.train(CutsShort(2), resume=f"{tmp_path}/checkpoint-2", **options).trained == whole[2:]


def test_an_epoch_that_is_cut_short_is_over_also_where_nothing_is_saved(monkeypatch, tmp_path) -> None:
    run = HuggingFace(monkeypatch, tmp_path)
    run.train(CutsShort(2), max_steps=2, save_strategy="no")
    assert run.saved == []
    assert place(run.batches) == (1, 0)
