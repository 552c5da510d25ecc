"""StreamRows: the rows of a shard as a dataset of PyTorch, for loaders that make the batches themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from ray.data.block import BlockAccessor
from ray.data.collate_fn import ArrowBatchCollateFn
from torch.utils.data import DataLoader, default_collate, get_worker_info

from ray_lance_stream.batching import BATCH_SIZE_OF_STREAM
from ray_lance_stream.calling_loader import calling_loader, fetches_lists
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.feed import Feed
from ray_lance_stream.torch_dataset import FORKED, StreamDataset

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard

ROWS_AT_A_TIME = 256


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table as dicts of numpy scalars and arrays, and of Python's values where numpy has none.

    Args:
        table: as `with_tensor_columns` makes it.
    """
    for first in range(0, len(table), ROWS_AT_A_TIME):
        part = table.slice(first, ROWS_AT_A_TIME)
        arrays = BlockAccessor.for_block(part).to_batch_format("numpy")
        columns = [_values(part.column(index), arrays[name]) for index, name in enumerate(part.column_names)]
        for row in zip(*columns, strict=True):
            yield dict(zip(part.column_names, row, strict=True))


def _values(column: pa.ChunkedArray, array: np.ndarray) -> list[Any]:
    """The values of a column, each with memory of its own, and None for a null: numpy has NaN for one in some batches."""
    kind = column.type
    if column.null_count and (pa.types.is_primitive(kind) or pa.types.is_boolean(kind)):
        filled = column.fill_null(pa.scalar(0, pa.int64()).cast(kind)).to_numpy()
        return [
            value if is_there else None for value, is_there in zip(filled, column.is_valid().to_pylist(), strict=True)
        ]
    return [value.copy() if isinstance(value, np.ndarray) else value for value in array]


class ListCollateFn(ArrowBatchCollateFn):
    """A batch as a list of rows, or as what a DataLoader's `collate_fn` makes of that list.

    Args:
        collate_fn: gets the list of rows; None: the list itself.
    """

    def __init__(self, collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None) -> None:
        self._collate_fn = collate_fn

    def __call__(self, batch: pa.Table) -> Any:
        """What becomes of a batch."""
        rows = list(rows_of(batch))
        return rows if self._collate_fn is None else self._collate_fn(rows)


class StreamRows(StreamDataset):
    """The rows of a shard as a dataset of PyTorch; made by `shard.to_torch_dataset(rows=True)`.

    Each item is a row, for a `DataLoader(dataset, batch_size=b)` whose batches are the steps of this rank: b is checked as
    that of an `iter_*` call. Position and epoch are the shard's: rows count one by one as a plain DataLoader takes them.

    Args:
        shard: whose rows.
        batch_size: of the loader; needed by a plain one with workers.
        prefetch_batches: as of `StreamShard.to_torch_dataset`.
        of_the_loader: `drop_last`, `dtypes` and `collate_fn`, which a loader of rows has.
    """

    def __init__(self, shard: StreamShard, batch_size: Any, *, prefetch_batches: int = 1, **of_the_loader: Any) -> None:
        if given := sorted(name for name, value in of_the_loader.items() if value not in (None, False)):
            raise ConfigError(
                f"with rows=True the loader makes the batches, so {', '.join(given)} must not be given to the dataset: pass "
                "drop_last and collate_fn to the DataLoader, and convert types in that collate_fn"
            )
        super().__init__(
            shard,
            batch_size,
            drop_last=False,
            dtypes=None,
            collate_fn=ListCollateFn(),
            prefetch_batches=prefetch_batches,
        )

    def __repr__(self) -> str:
        return f"StreamRows({self._shard or ''})"

    def _served(self, batch_size: Any) -> Any:
        return batch_size if batch_size is BATCH_SIZE_OF_STREAM else super()._served(batch_size)

    @property
    def _is_given(self) -> bool:
        return self._asked_batch_size is not BATCH_SIZE_OF_STREAM

    def __iter__(self) -> Iterator[Any]:
        is_batched = fetches_lists()
        if self._shard is None:
            assert self._feed is not None
            self._refuse_unbatched(is_batched)
            return self._feed.rows()
        if get_worker_info() is not None:
            raise ConfigError(FORKED)
        loader = calling_loader(self) if is_batched else None
        size = self._batch_size if self._is_given else None
        if loader is None:
            return self._shard._rows(size, False, rows_of, self._prefetch_batches)
        return self._shard._rows(self._size_of(loader), loader.drop_last, rows_of, self._prefetch_batches)

    def __len__(self) -> int:
        """Rows of the running pass, else of the next one: those left of an open epoch after a resume."""
        shard = self.shard
        running = shard._pass.walk if shard._pass is not None else None
        return (running or shard._next_walk()).num_rows

    def batched(self, batch_size: int | None, drop_last: bool | None, collate_fn: Any) -> StreamDataset:
        """The batches that a loader would make of the rows.

        Args:
            batch_size: None: that of this dataset, which is the stream's unless it was given.
            drop_last: leave out a last batch that is not whole.
            collate_fn: of lists of rows; None: torch's own.

        Raises:
            ConfigError: a batch size that is not the dataset's, or cannot be served; no function.
        """
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn must be a function of a list of rows, got {collate_fn!r}")
        return StreamDataset(
            self.shard,
            self._batch_size if batch_size is None else self._checked(batch_size),
            drop_last=bool(drop_last),
            dtypes=None,
            collate_fn=ListCollateFn(collate_fn or default_collate),
            prefetch_batches=self._prefetch_batches,
        )

    def _feed_of_plain_loader(self) -> Feed:
        if not self._is_given:
            raise ConfigError(
                "the workers of a plain DataLoader must know of which rows it makes a batch: use StreamDataLoader(dataset, "
                "batch_size=...), which also knows the position, or pass its batch size to the dataset too, as in "
                "to_torch_dataset(rows=True, batch_size=...)"
            )
        loader = calling_loader(self)
        if loader is not None:
            self._refuse_unbatched(loader.batch_size is not None)
            self._size_of(loader)
        return super()._feed_of_plain_loader()

    def _refuse_lists(self, loader: DataLoader[Any] | None) -> None:
        """Lists of rows are what a loader is to make."""

    def _refuse_unbatched(self, is_batched: bool | None) -> None:
        if is_batched is False:
            raise ConfigError(
                "a DataLoader with workers must make batches of rows, got batch_size=None, which would mix the rows of the "
                "workers: pass DataLoader(dataset, batch_size=b), or without workers batch_size=None"
            )

    def _size_of(self, loader: DataLoader[Any]) -> int:
        size = loader.batch_size
        assert size is not None
        return self._checked(size)

    def _checked(self, size: int) -> int:
        """The batch size of a loader.

        Raises:
            ConfigError: it is not the one of this dataset, or of this rank.
        """
        if self._is_given and size != self._batch_size:
            raise ConfigError(
                f"the batch_size of the loader must be that of its dataset, which is {self._batch_size}, got {size}: pass the "
                "same one to both, or to the loader alone"
            )
        G = self.shard._batch_rule.global_batch_size
        own = None if G is None else self.shard.local_batch_size(G)
        if own is not None and size != own:
            raise ConfigError(
                f"the batch_size of a loader of rows must be this rank's share of global_batch_size={G}, which is {own} "
                f"rows, got {size}: pass batch_size={own}, or use StreamDataLoader(dataset), which takes it by itself"
            )
        return self.shard._batch_rule.resolve(size)
