"""Suggests num_splits for the worker counts that a run is to have. Arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.splits import divisors

# Without a global batch size. Every global step has a row of each split, so more splits make for very large steps.
MOST_SPLITS = 8192
# Times the smallest choice: numbers with many divisors, so that further worker counts divide the product.
_MULTIPLES = (1, 2, 6, 12)


@dataclass(frozen=True)
class SplitChoice:
    """A number of splits, and what it means for the worker counts asked for.

    Attributes:
        num_splits: S.
        even_workers: the counts that divide S: all workers have equal shares.
        uneven_workers: the others, which are served with shares as even as possible.
        largest_share: the largest share of a worker over the mean one, in the worst of the counts; 1.0 where all are even.
    """

    num_splits: int
    even_workers: tuple[int, ...]
    uneven_workers: tuple[int, ...]
    largest_share: float


def suggest_num_splits(
    worker_counts: Iterable[int], *, global_batch_size: int | None = None, num_rows: int | None = None
) -> tuple[SplitChoice, ...]:
    """Numbers of splits for a set of worker counts, the smallest first.

    Where it can be, they are the least common multiple of the counts and multiples of it with more divisors. Where it
    cannot (the multiple does not divide the global batch, or is too large), as many of the counts as possible divide them.

    Args:
        worker_counts: data-parallel workers of the runs to come, all ranks that share their rows counted once.
        global_batch_size: G, which the number of splits must divide; None: it is chosen later.
        num_rows: rows of the stream; there are not more splits than rows.

    Returns:
        At most four; none if no number of splits serves the largest count.

    Raises:
        ConfigError: no worker count, or one that is no positive int; a global batch size below 1.
    """
    counts = sorted(set(worker_counts))
    if not counts or counts[0] < 1:
        raise ConfigError(f"worker counts must be ints >= 1, at least one of them, got {counts}")
    if global_batch_size is not None and global_batch_size < 1:
        raise ConfigError(f"global_batch_size must be an int >= 1, got {global_batch_size!r}")
    most = MOST_SPLITS if num_rows is None else min(MOST_SPLITS, num_rows)
    if global_batch_size is None:
        candidates: Sequence[int] = range(counts[-1], most + 1)
    else:
        most = global_batch_size if num_rows is None else num_rows
        candidates = [s for s in divisors(global_batch_size) if counts[-1] <= s <= most]
    if not candidates:
        return ()
    fewest = min(_num_uneven(s, counts) for s in candidates)
    best = [s for s in candidates if _num_uneven(s, counts) == fewest]
    chosen = {min(best, key=lambda s: abs(s - wished * best[0])) for wished in _MULTIPLES}
    return tuple(split_choice(s, counts) for s in sorted(chosen))


def split_choice(num_splits: int, worker_counts: Iterable[int]) -> SplitChoice:
    """What a number of splits means for worker counts of at most as many."""
    counts = sorted(set(worker_counts))
    even = tuple(w for w in counts if num_splits % w == 0)
    uneven = tuple(w for w in counts if num_splits % w)
    share = max((math.ceil(num_splits / w) * w / num_splits for w in uneven), default=1.0)
    return SplitChoice(num_splits, even, uneven, share)


def _num_uneven(num_splits: int, counts: Sequence[int]) -> int:
    return sum(1 for w in counts if num_splits % w)
