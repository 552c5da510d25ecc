"""Split, cycle, step and block arithmetic: how N ordered rows become the same global steps on any number of workers.

The order puts N rows in a line. Split s holds the indices [s * R, (s + 1) * R), R = N // S. Cycle c is position c of
split 0, 1, ..., S - 1, in that order. A rank owns a contiguous block of splits and delivers, cycle by cycle, one row of
each split of its block; the rows of a cycle are therefore the same however the splits are dealt out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from ray_lance_stream.errors import ConfigError

# Ray Data's default batch size, here of a global step: the least rows of one whose size nobody has named.
DEFAULT_STEP_ROWS = 256
# Larger divisors of a number are found from the smaller ones. Numbers above the square of this are searched in part.
MAX_TRIED_DIVISOR = 1_000_000


@dataclass(frozen=True, order=True)
class SplitBlock:
    """The contiguous range of splits [lo, hi) that one rank owns."""

    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo < self.hi:
            raise ConfigError(f"a split block needs 0 <= lo < hi, got [{self.lo}, {self.hi})")

    @property
    def size(self) -> int:
        """Number of splits, k."""
        return self.hi - self.lo


def split_block(num_splits: int, world_size: int, rank: int) -> SplitBlock:
    """The block of `rank` out of `world_size`: blocks are contiguous and as even as possible.

    Raises:
        ConfigError: more ranks than splits, or a rank outside the world.
    """
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, got {world_size}")
    if world_size > num_splits:
        raise ConfigError(
            f"each worker needs at least one split, got {world_size} workers for num_splits={num_splits}; "
            f"use at most {num_splits} workers or a larger num_splits (a new num_splits is a new row order)"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
    return SplitBlock(rank * num_splits // world_size, (rank + 1) * num_splits // world_size)


def data_rank(world_size: int, rank: int, replicas: int) -> tuple[int, int]:
    """(data rank, data world size) of a rank when `replicas` consecutive ranks share their rows.

    Raises:
        ConfigError: the world is no multiple of `replicas`.
    """
    if world_size % replicas:
        raise ConfigError(
            f"the number of workers must be a multiple of replicas, got {world_size} workers and replicas={replicas}"
        )
    return rank // replicas, world_size // replicas


@dataclass(frozen=True)
class SplitGrid:
    """N rows cut into S splits.

    Attributes:
        num_rows: N, rows that the order runs over.
        num_splits: S.
        drop_remainder: leave the N % S last rows of the order out; else they are one more, shorter cycle.
    """

    num_rows: int
    num_splits: int
    drop_remainder: bool = True

    def __post_init__(self) -> None:
        if self.num_splits < 1:
            raise ConfigError(f"num_splits must be at least 1, got {self.num_splits}")
        if self.num_rows < self.num_splits:
            raise ConfigError(
                f"each split needs at least one row, got {self.num_rows} rows for num_splits={self.num_splits}; "
                f"use num_splits <= {max(self.num_rows, 1)} or a filter that matches more rows"
            )

    @property
    def rows_per_split(self) -> int:
        """R, the number of cycles that hold a row of every split."""
        return self.num_rows // self.num_splits

    @property
    def remainder(self) -> int:
        """N % S."""
        return self.num_rows % self.num_splits

    @property
    def num_left_out(self) -> int:
        """Rows that one epoch does not deliver; fewer than num_splits."""
        return self.remainder if self.drop_remainder else 0

    @property
    def num_cycles(self) -> int:
        """Cycles of an epoch, the short last one of `drop_remainder=False` included."""
        return self.rows_per_split + (0 if self.drop_remainder or not self.remainder else 1)

    @property
    def epoch_rows(self) -> int:
        """Rows that one epoch delivers over all ranks."""
        return self.num_rows - self.num_left_out

    def block_rows(self, block: SplitBlock, start: int, stop: int) -> int:
        """Rows of `block` in the cycles [start, stop)."""
        full = max(min(stop, self.rows_per_split) - start, 0) * block.size
        return full + (self.tail_rows(block) if start <= self.rows_per_split < stop else 0)

    def tail_rows(self, block: SplitBlock) -> int:
        """Rows of `block` in the short last cycle of `drop_remainder=False`: split i has one if i < N % S."""
        if self.drop_remainder:
            return 0
        return max(min(self.remainder, block.hi) - block.lo, 0)

    def cycles_per_step(self, global_batch_size: int) -> int:
        """m = G / S.

        Raises:
            ConfigError: G is no positive multiple of S; names the nearest valid G and num_splits.
        """
        if global_batch_size < 1 or global_batch_size % self.num_splits:
            raise ConfigError(
                f"global_batch_size must be a positive multiple of num_splits, got global_batch_size="
                f"{global_batch_size} and num_splits={self.num_splits}; use "
                f"{valid_batch_sizes(global_batch_size, self.num_splits)}"
            )
        return global_batch_size // self.num_splits

    @property
    def default_global_batch_size(self) -> int:
        """Rows of a global step whose size nobody has named: the fewest whole cycles with 256 rows, or those of an epoch."""
        return min(-(-DEFAULT_STEP_ROWS // self.num_splits), self.rows_per_split) * self.num_splits

    def num_steps(self, global_batch_size: int) -> int:
        """Global steps of an epoch, a shorter last one included."""
        return -(-self.num_cycles // self.cycles_per_step(global_batch_size))


@dataclass(frozen=True)
class RankShare:
    """What one data rank has of the splits.

    Attributes:
        grid: the splits.
        block: those of this rank.
        world_size: data ranks.
    """

    grid: SplitGrid
    block: SplitBlock
    world_size: int

    @classmethod
    def of(cls, grid: SplitGrid, world_size: int, rank: int, replicas: int) -> RankShare:
        """The share of a rank of the world; `replicas` consecutive ranks have the same.

        Raises:
            ConfigError: more data ranks than splits, or ranks that are no multiple of replicas.
        """
        data, data_world = data_rank(world_size, rank, replicas)
        return cls(grid, split_block(grid.num_splits, data_world, data), data_world)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many splits."""
        return self.grid.num_splits % self.world_size == 0

    @property
    def loss_weight(self) -> float:
        """k_r * W / S, 1 where W divides S."""
        return self.block.size * self.world_size / self.grid.num_splits

    def local_batch_size(self, global_batch_size: int) -> int:
        """m * k, rows of this rank in a global step. Raises ConfigError if m is no whole number."""
        return self.grid.cycles_per_step(global_batch_size) * self.block.size


def nearest_multiples(value: int, factor: int) -> tuple[int, ...]:
    """The positive multiples of `factor` next to `value`, below and above."""
    below = value // factor * factor
    return (factor,) if below < 1 else (below, below + factor)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending: the worker counts with equal shares of so many splits.

    Of numbers above the square of MAX_TRIED_DIVISOR, those up to it and what these divide the number into.
    """
    low = [d for d in range(1, min(math.isqrt(number), MAX_TRIED_DIVISOR) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def valid_batch_sizes(global_batch_size: int, num_splits: int) -> str:
    """Words for an error: the nearest G that fits S, and the S near the wished one that fit G."""
    sizes = " or ".join(str(size) for size in nearest_multiples(global_batch_size, num_splits))
    text = f"global_batch_size={sizes}"
    if global_batch_size >= 1:
        near = sorted(sorted(divisors(global_batch_size), key=lambda n: abs(n - num_splits))[:2])
        text += f", or num_splits={' or '.join(map(str, near))}"
    return text


def cycles_per_batch(batch_size: int, block: SplitBlock) -> Fraction:
    """Cycles that a rank's batch of `batch_size` rows holds; must be the same on every rank for even steps."""
    return Fraction(batch_size, block.size)
