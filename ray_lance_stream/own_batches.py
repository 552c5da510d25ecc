"""Which batches of a pass one DataLoader worker makes, and which rows they hold. Pure.

Worker i of n makes the batches i, i + n, i + 2n, ... of a pass, which is the order in which a DataLoader hands out what its
workers yield. The batches of a pass are therefore the same for any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_lance_stream.cursor import ChunkSpan, EpochWalk


@dataclass(frozen=True)
class OwnBatches:
    """The batches of one worker.

    Attributes:
        walk: the pass; has a batch size.
        worker: number of the worker, from 0.
        num_workers: how many there are.
    """

    walk: EpochWalk
    worker: int
    num_workers: int

    @property
    def numbers(self) -> range:
        """Which batches of the pass, from 0."""
        return range(self.worker, self.walk.num_batches, self.num_workers)

    def num_rows(self, number: int) -> int:
        """Rows of a batch of the pass; the last one may have fewer than the others."""
        size = self.walk.batch_size
        assert size is not None
        return min(size, self.walk.num_rows - number * size)

    def spans(self, number: int) -> tuple[ChunkSpan, ...]:
        """The rows of a batch of the pass."""
        size = self.walk.batch_size
        assert size is not None
        return spans_between(self.walk, number * size, number * size + self.num_rows(number))


def spans_between(walk: EpochWalk, first_row: int, end_row: int) -> tuple[ChunkSpan, ...]:
    """The rows [first_row, end_row) of a pass as runs of cycles: several of them around cycles that the epoch leaves out."""
    spans = []
    before = -walk.skip_rows  # rows of the pass before a range; the first range begins with rows of an earlier pass
    for lo, hi in walk.ranges:
        size = walk.grid.block_rows(walk.block, lo, hi)
        first, end = max(first_row - before, 0), min(end_row - before, size)
        if first < end:
            cycles, skip_rows = divmod(first, walk.block.size)
            stop = lo - (-end // walk.block.size)  # the cycle of the last row is the last one
            spans.append(ChunkSpan(lo + cycles, stop, skip_rows, end - first, before + end))
        before += size
    return tuple(spans)
