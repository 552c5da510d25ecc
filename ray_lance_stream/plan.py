"""StreamPlan: (order, grid, matched or listed rows) -> the table rows of any chunk. Pure, O(chunk)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.order import Order, mix64
from ray_lance_stream.splits import SplitBlock, SplitGrid


def fingerprint_of(listed: np.ndarray, num_splits: int) -> str:
    """A short digest of the list of a listed order: int64 [S * R] -> 16 hexadecimal digits."""
    digest = hashlib.blake2b(f"{num_splits}:{len(listed)}:".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(listed, dtype="<i8").data)
    return digest.hexdigest()


@dataclass(frozen=True)
class StreamPlan:
    """Which table rows a split block delivers, in which order.

    Attributes:
        order: the row order over grid.num_rows rows.
        grid: the splits.
        matched: int64 [N], ascending offsets of the rows that match the filter; None without a filter.
        listed: int64 [S * R], the rows of a listed order at each index; None where the order is computed.
        listed_epoch: the epoch that `listed` is of; None: every epoch.
    """

    order: Order
    grid: SplitGrid
    matched: np.ndarray | None = None
    listed: np.ndarray | None = None
    listed_epoch: int | None = None

    def __post_init__(self) -> None:
        sizes = {self.order.num_rows, self.grid.num_rows}
        if self.matched is not None:
            sizes.add(len(self.matched))
        if len(sizes) != 1:
            raise ConfigError(f"order, grid and matched rows must have the same number of rows, got {sorted(sizes)}")
        if self.listed is not None and len(self.listed) != self.grid.epoch_rows:
            raise ConfigError(f"a list must have the {self.grid.epoch_rows} rows of an epoch, got {len(self.listed)}")

    def order_index(self, block: SplitBlock, start: int, stop: int) -> np.ndarray:
        """int64 [rows]: index in the order of each row of the cycles [start, stop) of a block, in cycle order."""
        per_split = self.grid.rows_per_split
        cycles = np.arange(start, min(stop, per_split), dtype=np.int64)
        first = np.arange(block.lo, block.hi, dtype=np.int64) * per_split
        index = (cycles[:, None] + first[None, :]).reshape(-1)
        if start <= per_split < stop:
            tail = np.arange(block.lo, block.lo + self.grid.tail_rows(block), dtype=np.int64)
            index = np.concatenate([index, per_split * self.grid.num_splits + tail])
        return index

    def rows(self, epoch: int, block: SplitBlock, start: int, stop: int) -> np.ndarray:
        """int64 [rows]: table row offsets of the cycles [start, stop) of a block, in the order of delivery."""
        index = self.order_index(block, start, stop)
        if self.listed is not None:
            if self.listed_epoch not in (None, epoch):
                raise ConfigError(f"the list of epoch {self.listed_epoch} must not be used for epoch {epoch}")
            return np.asarray(self.listed[index], dtype=np.int64)
        rows = self.order.rows(epoch, index)
        return rows if self.matched is None else np.asarray(self.matched[rows], dtype=np.int64)

    def digest(self, epoch: int, block: SplitBlock, start: int, stop: int) -> int:
        """A number in [0, 2**64) for the rows of the cycles [start, stop) of a block.

        The sum over rows of a hash of (epoch, cycle, row), modulo 2**64: digests of disjoint blocks or cycles add up, so
        the sum over ranks does not depend on how many there are, nor on the order of rows inside a cycle.
        """
        rows = self.rows(epoch, block, start, stop)
        whole = np.repeat(np.arange(start, min(stop, self.grid.rows_per_split), dtype=np.uint64), block.size)
        cycles = np.full(len(rows), self.grid.rows_per_split, dtype=np.uint64)
        cycles[: len(whole)] = whole
        salt = int.from_bytes(hashlib.blake2b(f"digest:{epoch}".encode(), digest_size=8).digest(), "little")
        return int(mix64(mix64(cycles ^ np.uint64(salt)) ^ rows.view(np.uint64)).sum(dtype=np.uint64))

    def fingerprint(self, epoch: int = 0) -> str:
        """A short digest of the plan: the same on every rank that reads the same rows in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.order, self.grid)).encode())
        whole = SplitBlock(0, self.grid.num_splits)
        cycles = self.grid.num_cycles
        for cycle in sorted({0, cycles // 3, cycles // 2, cycles - 1}):
            digest.update(self.rows(epoch, whole, cycle, cycle + 1).astype("<i8").tobytes())
        return digest.hexdigest()
