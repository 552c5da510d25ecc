"""PyTorch Lightning: a callback in place of `ray.train.lightning.RayTrainReportCallback`."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

from ray.train import Checkpoint

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.integrations.tracked import TrackedBatches, check_reports
from ray_lance_stream.train import report

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = "checkpoint.ckpt"

__all__ = ["CHECKPOINT_NAME", "StreamReportCallback", "TrackedBatches"]


class StreamReportCallback(Callback):
    """Reports metrics, Lightning's checkpoint and the position of the stream to Ray Train.

    At the end of each epoch, and within epochs every few steps. A checkpoint holds what Ray's own callback saves, the file
    checkpoint.ckpt, and beside it the position behind the last batch that is in the weights: Lightning has fetched one more.

    Args:
        batches: what `trainer.fit(train_dataloaders=...)` is given.
        every_n_steps: report also whenever so many optimizer steps more were taken; None: at the ends of epochs only.
        reports: False beside another callback that reports, such as Ray's own, which comes after this one in the list: this
            one then only counts what is trained.
        report_options: arguments for `ray.train.report`, such as checkpoint_upload_mode.

    Raises:
        ConfigError: every_n_steps is no positive int, or how to report is given with reports=False.
    """

    def __init__(
        self, batches: TrackedBatches, *, every_n_steps: int | None = None, reports: bool = True, **report_options: Any
    ) -> None:
        super().__init__()
        check_reports(reports, {"every_n_steps": every_n_steps, **report_options})
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise ConfigError(f"every_n_steps must be a positive int or None, got {every_n_steps!r}")
        self._batches = batches
        self._every_n_steps = every_n_steps
        self._reports = reports
        self._report_options = report_options
        self._steps = 0  # of the optimizer, when the batch before was trained
        self._is_begun = False  # whether this epoch has had a batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say so if Lightning and the stream are at different epochs: a checkpoint was not loaded into both."""
        self._steps = trainer.global_step
        self._is_begun = False  # a fit before may have failed within an epoch
        epoch = self._batches.state().epoch
        counts_epochs = trainer.max_epochs is not None and trainer.max_epochs >= 0
        if counts_epochs and trainer.current_epoch != epoch:
            logger.warning(
                "stream %r goes on in epoch %d, but Lightning in epoch %d of %d: after a resume, load Lightning's state too, "
                "with trainer.fit(..., ckpt_path=<directory of ray.train.get_checkpoint()>/%s)",
                self._batches.shard.name,
                epoch,
                trainer.current_epoch,
                trainer.max_epochs,
                CHECKPOINT_NAME,
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The epoch has a batch."""
        self._is_begun = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch, and report where it is time to; behind the last batch of an epoch that is done at its end."""
        before, self._steps = self._steps, trainer.global_step
        self._batches.trained(stepped=self._steps > before or trainer.is_last_batch)
        size = self._every_n_steps
        if size is not None and self._steps // size > before // size and not trainer.is_last_batch:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report. An epoch that Lightning cuts short, by limit_train_batches for example, is over."""
        if self._is_begun and trainer.is_last_batch:
            self._batches.leave()
        self._is_begun = False
        self._report(trainer)

    def _report(self, trainer: Any) -> None:
        if not self._reports:
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        directory = tempfile.mkdtemp(prefix="lightning-")
        trainer.save_checkpoint(os.path.join(directory, CHECKPOINT_NAME), weights_only=False)
        options = {"delete_local_checkpoint_after_upload": True, **self._report_options}
        report(metrics, checkpoint=Checkpoint.from_directory(directory), **options)
