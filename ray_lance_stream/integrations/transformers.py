"""Hugging Face's Trainer: a callback in place of `ray.train.huggingface.transformers.RayTrainReportCallback`."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from typing import Any

import torch.distributed as dist
from ray.train import Checkpoint
from transformers import TrainerCallback

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.integrations.tracked import TrackedBatches, check_reports
from ray_lance_stream.train import report

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = "checkpoint"

__all__ = ["CHECKPOINT_NAME", "StreamReportCallback", "TrackedBatches"]


class StreamReportCallback(TrainerCallback):
    """Reports metrics, the Trainer's checkpoint and the position of the stream to Ray Train, whenever the Trainer saves.

    A checkpoint holds what Ray's own callback saves, the folder checkpoint/, and beside it the position behind the last batch
    that is in the weights: the Trainer takes all batches over which it accumulates gradients at once.

    Args:
        batches: what the Trainer is given as train_dataset.
        reports: False beside another callback that reports, such as Ray's own, which comes after this one in the list: this
            one then only counts what is trained.
        report_options: arguments for `ray.train.report`, such as checkpoint_upload_mode.

    Raises:
        ConfigError: report_options are given with reports=False.
    """

    def __init__(self, batches: TrackedBatches, *, reports: bool = True, **report_options: Any) -> None:
        super().__init__()
        check_reports(reports, report_options)
        self._batches = batches
        self._reports = reports
        self._report_options = report_options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what would lose rows, and give no batch to a training that is over: the Trainer would take one step more.

        Raises:
            ConfigError: the Trainer would leave out the batches that it thinks come again after a resume.
        """
        if not args.ignore_data_skip:
            raise ConfigError(
                "TrainingArguments(ignore_data_skip=True) must be set: a stream goes on where its checkpoint was saved, and "
                "the Trainer would leave out as many batches again"
            )
        self._batches.withheld = state.global_step >= state.max_steps
        if self._batches.withheld:
            logger.info(
                "stream %r: the training is over at step %d of %d, so the Trainer gets no batch",
                self._batches.shard.name,
                state.global_step,
                state.max_steps,
            )

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch whose gradients wait for the optimizer."""
        self._batches.trained(stepped=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch with which the optimizer has stepped."""
        self._batches.trained()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch that another callback cuts short is over."""
        if control.should_epoch_stop:
            self._batches.leave()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what the Trainer has just saved; one rank of each node brings its files."""
        if control.should_epoch_stop:
            self._batches.leave()  # before this save, as a resume would go on in the epoch else
        if not self._reports:
            return
        if dist.is_initialized():
            dist.barrier()  # each rank writes its random state
        checkpoint = None
        if args.local_process_index == 0:
            directory = tempfile.mkdtemp(prefix="transformers-")
            saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            shutil.copytree(saved, os.path.join(directory, CHECKPOINT_NAME))
            checkpoint = Checkpoint.from_directory(directory)
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        report(metrics, checkpoint=checkpoint, **{"delete_local_checkpoint_after_upload": True, **self._report_options})
