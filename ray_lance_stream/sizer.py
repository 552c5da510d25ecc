"""ChunkSizer: how many cycles the next chunk of a rank has."""

from __future__ import annotations

from ray_lance_stream.config import MAX_CHUNK_ROWS, StreamConfig
from ray_lance_stream.reader import ChunkInfo


def largest_chunk_cycles(config: StreamConfig, block_size: int, cycle_bytes: int) -> int:
    """Cycles of the largest chunk of a rank with `block_size` splits."""
    most = min(config.chunk_bytes // cycle_bytes, MAX_CHUNK_ROWS // block_size)
    return config.read_batch_size or max(1, most)


class ChunkSizer:
    """Cycles of the next chunk: one batch at first, so that it comes soon, then more, up to a size in bytes.

    Chunks grow only once one has come: before that the bytes of a row are a guess.

    Args:
        config: wished sizes.
        block_size: k, rows of a full cycle.
        row_bytes: first estimate of the Arrow bytes of a row.
        first_rows: rows of the first batch.
    """

    def __init__(self, config: StreamConfig, block_size: int, row_bytes: int, first_rows: int) -> None:
        self._config = config
        self._block_size = block_size
        self._next_cycles = max(1, -(-first_rows // block_size))
        self._cycle_bytes = max(1, row_bytes * block_size)  # the largest seen so far
        self._measured = False

    def again(self, first_rows: int) -> ChunkSizer:
        """A sizer that begins with a small chunk once more, and knows the bytes of a row from the start."""
        sizer = ChunkSizer(self._config, self._block_size, 1, first_rows)
        sizer._cycle_bytes, sizer._measured = self._cycle_bytes, self._measured
        return sizer

    def next_cycles(self) -> int:
        """Cycles to ask for next."""
        most = largest_chunk_cycles(self._config, self._block_size, self._cycle_bytes)
        return most if self._config.read_batch_size else min(self._next_cycles, most)

    def sent(self, cycles: int) -> None:
        """A chunk of that many cycles was asked for."""
        if self._measured:
            self._next_cycles = cycles * 4

    def bytes_of(self, num_rows: int) -> int:
        """Estimated bytes of rows that have not come yet: an upper bound if no row is larger than those seen so far."""
        return -(-num_rows * self._cycle_bytes // self._block_size)

    def next_bytes(self, rows_left: int | None = None) -> int:
        """Estimated bytes of the next chunk, of a pass that has `rows_left` more rows."""
        size_bytes = self.next_cycles() * self._cycle_bytes
        return size_bytes if rows_left is None else min(size_bytes, self.bytes_of(rows_left))

    def seen(self, info: ChunkInfo) -> None:
        """Learn from a chunk that came."""
        if info.num_rows:
            seen = -(-info.largest_bytes * self._block_size // info.num_rows)
            self._cycle_bytes = max(self._cycle_bytes if self._measured else 1, seen)
            self._measured = True
