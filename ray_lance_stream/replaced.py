"""Rows that stand in for rows on which a transform fails: which one is taken, and the count of a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ray_lance_stream.errors import TransformError
from ray_lance_stream.transform import Stage

WINDOW_POSITIONS = 64  # a constant of the row order: another one would be other rows
SHOWN = 100


@dataclass(frozen=True)
class Replaced:
    """One row that another one stands in for.

    Attributes:
        key: of the transform that failed.
        row: its offset in the table.
        by: offset of the row that stands in.
    """

    key: str
    row: int
    by: int


def stand_ins(position: int, rows_per_split: int) -> Iterator[int]:
    """The positions whose rows may stand in for that of `position` in its split, best first.

    The nearest earlier one, then the nearest later one, inside a window of fixed positions: where a chunk begins and ends
    depends on the number of workers and on where a run was resumed, and must not matter. The row of the short last cycle
    belongs to the last window.
    """
    first = min(position, rows_per_split - 1) // WINDOW_POSITIONS * WINDOW_POSITIONS
    yield from range(position - 1, first - 1, -1)
    yield from range(position + 1, min(first + WINDOW_POSITIONS, rows_per_split))


class ReplacedRows:
    """The rows replaced in one pass of one rank, as its chunks come.

    Args:
        stages: the transforms.
        name: of the stream.
        rank: of the shard.
        count: told how many rows were replaced in a chunk; None: the rows do not count, and have no limit.
    """

    def __init__(self, stages: Sequence[Stage], name: str, rank: int, count: Callable[[int], None] | None) -> None:
        self._transforms = {each.key: each for stage in stages for each in stage.transforms}
        self._name = name
        self._rank = rank
        self._count = count
        self._total = 0
        self._counts: Counter[str] = Counter()
        self._first: list[Replaced] = []

    def add(self, replaced: Sequence[Replaced]) -> None:
        """Count those of a chunk.

        Raises:
            TransformError: more rows than a transform may replace.
        """
        if self._count is None or not replaced:
            return
        self._first += replaced[: SHOWN - len(self._first)]
        rows = len({each.row for each in replaced})  # a row may be replaced by one transform after the other
        self._total += rows
        self._count(rows)
        for key, count in Counter(each.key for each in replaced).items():
            self._counts[key] += count
            transform = self._transforms[key]
            if transform.max_replaced_rows is not None and self._counts[key] > transform.max_replaced_rows:
                raise TransformError(
                    f"stream {self._name!r}, rank {self._rank}: {transform.name} failed on {self._counts[key]} rows of this "
                    f"pass, more than max_replaced_rows={transform.max_replaced_rows}: "
                    f"{_shown([each for each in self._first if each.key == key])}"
                )

    def __str__(self) -> str:
        """A line for `stats()`; empty if there is nothing to tell."""
        if not self._total:
            return ""
        more = ", ..." if sum(self._counts.values()) > len(self._first) else ""
        return f"\nRows replaced in this pass: {self._total} (row -> stands in): {_shown(self._first)}{more}\n"


def _shown(replaced: Sequence[Replaced]) -> str:
    return ", ".join(f"{each.row} -> {each.by}" for each in replaced)
