"""Batch sizes: what a rank's `iter_*` call may use so that all ranks step alike."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ray.data import DataIterator

from ray_lance_stream.columns import TensorCollateFn
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.splits import DEFAULT_STEP_ROWS, RankShare, SplitGrid, nearest_multiples

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.torch_dataset import StreamDataset

logger = logging.getLogger(__name__)


class _BatchSizeOfStream:
    """The `batch_size` of a call that names none."""

    def __repr__(self) -> str:
        return "the stream's"

    def __reduce__(self) -> str:
        return "BATCH_SIZE_OF_STREAM"  # the same one in each process


BATCH_SIZE_OF_STREAM = _BatchSizeOfStream()


@dataclass
class BatchSizeRule:
    """Which batch sizes one rank may use.

    Attributes:
        share: the splits of this rank.
        global_batch_size: G of the stream, if it has one.
        is_elastic: whether num_splits is given; else it is the number of workers.
        says: whether this rank is the one that logs what holds for all of them.
        says_default: whether it logs the default size, too: not where the run has done so before.
    """

    share: RankShare
    global_batch_size: int | None
    is_elastic: bool = True
    says: bool = True
    says_default: bool = True
    _warned: bool = field(default=False, init=False)

    def resolve(self, batch_size: Any, grid: SplitGrid | None = None) -> int:
        """The rows per batch that a call means.

        Args:
            batch_size: of the call; BATCH_SIZE_OF_STREAM where it names none.
            grid: the splits of the epoch that is read, where another table version has other ones.

        Raises:
            ConfigError: no positive int; disagrees with global_batch_size; None without num_splits and global_batch_size; or
                not whole cycles where the blocks of the ranks differ in size.
        """
        size = self._asked(batch_size, grid or self.share.grid)
        if size % self.share.block.size == 0:
            return size
        fitting = " or ".join(str(n) for n in nearest_multiples(size, self.share.block.size))
        if self.share.grid.num_splits % self.share.world_size:
            raise ConfigError(
                f"{self.share.world_size} workers do not divide num_splits={self.share.grid.num_splits}, so batches must be "
                f"whole cycles: batch_size must be a multiple of this rank's {self.share.block.size} splits, got {size}; use "
                f"shard.local_batch_size(global_batch_size), here for example {fitting}"
            )
        if self.says and not self._warned:
            self._warned = True
            logger.warning(
                "batch_size=%d is no multiple of this rank's %d splits: steps are not the same on another number of "
                "workers, and a checkpoint between cycles resumes exactly on the same number of workers only; valid batch "
                "sizes are the multiples of %d, for example %s",
                size,
                self.share.block.size,
                self.share.block.size,
                fitting,
            )
        return size

    def refuse_empty_epoch(self, rows: int, batch_size: int) -> None:
        """Raises ConfigError for an epoch that has rows, but with `drop_last` no batch."""
        if rows:
            raise ConfigError(
                f"an epoch must have at least one batch, but this rank has {rows} rows in it, fewer than batch_size="
                f"{batch_size}, and drop_last=True drops them; use a smaller batch size, fewer workers or drop_last=False"
            )

    def _asked(self, batch_size: Any, grid: SplitGrid) -> int:
        own = None
        if self.global_batch_size is not None:
            own = self.share.local_batch_size(self.global_batch_size)
        if batch_size is BATCH_SIZE_OF_STREAM or batch_size is None:
            return own or self._default(batch_size, grid)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be a positive int, got {batch_size!r}")
        if own is not None and batch_size != own:
            raise ConfigError(
                f"batch_size must be this rank's share of global_batch_size={self.global_batch_size}, which is {own} rows "
                f"({self.share.block.size} of {self.share.grid.num_splits} splits), got {batch_size}; leave batch_size out"
            )
        return batch_size

    def _default(self, batch_size: Any, grid: SplitGrid) -> int:
        """The rows per batch where neither the stream nor the call names a size."""
        if self.is_elastic:
            rows = grid.default_global_batch_size
            self._say_default(rows)
            return self.share.local_batch_size(rows)
        if batch_size is None:
            raise ConfigError(
                "batch_size=None means one global step, but the stream has neither num_splits nor global_batch_size; pass "
                "lance_stream(..., num_splits=S), global_batch_size=G or a batch size"
            )
        return DEFAULT_STEP_ROWS

    def _say_default(self, rows: int) -> None:
        if not self.says_default:
            return
        self.says_default = False
        logger.warning(
            "neither global_batch_size nor a batch size is given: global steps have %d rows, %d of each of the %d splits, on "
            "any number of workers; pass lance_stream(..., global_batch_size=G) to choose another multiple of %d",
            rows,
            rows // self.share.grid.num_splits,
            self.share.grid.num_splits,
            self.share.grid.num_splits,
        )


def refuse_local_shuffle(kwargs: dict[str, Any]) -> None:
    """Take the arguments of a shuffle buffer out of an `iter_*` call.

    Raises:
        ConfigError: one of them is given.
    """
    for name in ("local_shuffle_buffer_size", "local_shuffle_seed"):
        if kwargs.pop(name, None) is not None:
            raise ConfigError(
                f"{name} must not be given: a shuffle buffer loses its rows when a run stops and makes steps depend on "
                "the number of workers; the stream is shuffled by its order (shuffle=True, shuffle_seed=...)"
            )


class StreamSizedIterator(DataIterator):
    """A `ray.data.DataIterator` whose batch size defaults to this rank's share of a global step."""

    _batch_rule: BatchSizeRule

    @abstractmethod
    def _batch_size_of_next(self, batch_size: Any) -> int:
        """The rows per batch that a call means for the next pass; errors as BatchSizeRule.resolve."""

    def iter_batches(self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, **kwargs: Any) -> Any:
        """`ray.data.DataIterator.iter_batches`; batch_size defaults to this rank's share of a global step."""
        return super().iter_batches(batch_size=batch_size, **kwargs)

    def iter_torch_batches(
        self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, dtypes: Any = None, collate_fn: Any = None, **kwargs: Any
    ) -> Any:
        """`ray.data.DataIterator.iter_torch_batches`; batch_size defaults to this rank's share of a global step.

        Without a `collate_fn` the batches are dicts of tensors by column, with memory of their own; see `docs/types.md`.

        Raises:
            ConfigError: by its first batch, for a column that torch cannot hold, unless there is a `collate_fn`.
            ReadError: for a null, unless there is a `collate_fn`.
        """
        if collate_fn is None:
            collate_fn, dtypes = TensorCollateFn(dtypes), None
        return super().iter_torch_batches(batch_size=batch_size, dtypes=dtypes, collate_fn=collate_fn, **kwargs)

    def iter_tf_batches(self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, **kwargs: Any) -> Any:
        """`ray.data.DataIterator.iter_tf_batches`; batch_size defaults to this rank's share of a global step."""
        return super().iter_tf_batches(batch_size=batch_size, **kwargs)

    def iter_jax_batches(self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, **kwargs: Any) -> Any:
        """`ray.data.DataIterator.iter_jax_batches`; batch_size defaults to this rank's share of a global step."""
        # Ray computes with the size before it iterates.
        return super().iter_jax_batches(batch_size=self._batch_size_of_next(batch_size), **kwargs)

    def to_torch(self, *, batch_size: Any = BATCH_SIZE_OF_STREAM, **kwargs: Any) -> Any:
        """`ray.data.DataIterator.to_torch`; batch_size defaults to this rank's share of a global step."""
        return super().to_torch(batch_size=batch_size, **kwargs)

    def to_tf(self, *columns: Any, batch_size: Any = BATCH_SIZE_OF_STREAM, **kwargs: Any) -> Any:
        """`ray.data.DataIterator.to_tf`; batch_size defaults to this rank's share of a global step."""
        return super().to_tf(*columns, batch_size=batch_size, **kwargs)

    def to_torch_dataset(
        self,
        *,
        rows: bool = False,
        batch_size: Any = BATCH_SIZE_OF_STREAM,
        drop_last: bool = False,
        dtypes: Any = None,
        collate_fn: Any = None,
        prefetch_batches: int = 1,
    ) -> StreamDataset:
        """The batches of this shard as a `torch.utils.data.IterableDataset`, for a `DataLoader(..., batch_size=None)` or a
        `StreamDataLoader`; see docs/pytorch.md.

        Args:
            rows: items are rows, as dicts of numpy values, for a `DataLoader(..., batch_size=b)` that makes the batches. Then
                `drop_last` and `collate_fn` are arguments of the loader, and there are no `dtypes`.
            batch_size: as of `iter_torch_batches`. With rows it is that of the loader, and needs to be given for a plain one
                with workers only.
            drop_last: leave out a last batch that is not whole.
            dtypes: as of `iter_torch_batches`.
            collate_fn: what makes something else of a batch than a dict of tensors: a function of a dict of arrays, or a
                `CollateFn` of Ray Data. With workers it is pickled.
            prefetch_batches: batches that are made ahead without workers; with some, `DataLoader(prefetch_factor=...)` says it.

        Raises:
            ConfigError: a batch size that cannot be served, no function, dtypes beside one, or what a loader of rows has.
        """
        from ray_lance_stream.torch_dataset import StreamDataset
        from ray_lance_stream.torch_rows import StreamRows

        return (StreamRows if rows else StreamDataset)(
            cast("StreamShard", self),
            batch_size,
            drop_last=drop_last,
            dtypes=dtypes,
            collate_fn=collate_fn,
            prefetch_batches=prefetch_batches,
        )
