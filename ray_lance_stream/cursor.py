"""Where the training loop is: the walk of one pass over an epoch, and the cursor that counts received rows.

Pure arithmetic. A pass delivers the rows of one split block, cycle by cycle. The cursor follows what the loop has
received, never what was prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from ray_lance_stream.errors import IterationError
from ray_lance_stream.splits import SplitBlock, SplitGrid


@dataclass(frozen=True)
class Position:
    """A place in the stream.

    Attributes:
        epoch: from 0.
        cycle: cycles of the epoch that are done, `samples_consumed_per_split`.
        partial_rows: rows of the next cycle that this rank has received already; 0 at a cycle boundary.
    """

    epoch: int
    cycle: int = 0
    partial_rows: int = 0

    def __str__(self) -> str:
        more = f" and {self.partial_rows} rows" if self.partial_rows else ""
        return f"epoch {self.epoch}, samples_consumed_per_split {self.cycle}{more}"


@dataclass(frozen=True)
class ChunkSpan:
    """A run of cycles [start, stop) of a block, less `skip_rows` rows at its start, cut to `num_rows` rows.

    `end_row` is the number of rows of the pass up to and including this span.
    """

    start: int
    stop: int
    skip_rows: int
    num_rows: int
    end_row: int


CycleRange = tuple[int, int]


def without(ranges: Sequence[CycleRange], cut: Sequence[CycleRange]) -> tuple[CycleRange, ...]:
    """The cycle ranges of `ranges` less those of `cut`; both ascending and disjoint."""
    kept: list[CycleRange] = []
    for start, stop in ranges:
        for lo, hi in cut:
            if hi <= start or lo >= stop:
                continue
            if lo > start:
                kept.append((start, lo))
            start = max(start, hi)
        if start < stop:
            kept.append((start, stop))
    return tuple(kept)


def cycles_in(ranges: Sequence[CycleRange]) -> int:
    """Number of cycles in disjoint ranges."""
    return sum(hi - lo for lo, hi in ranges)


def part(ranges: Sequence[CycleRange], start: int, stop: int) -> tuple[CycleRange, ...]:
    """The cycles of `ranges`, counted on from 0, whose numbers are in [start, stop); `ranges` ascending and disjoint."""
    found: list[CycleRange] = []
    before = 0
    for lo, hi in ranges:
        first, end = max(lo, lo + start - before), min(hi, lo + stop - before)
        if first < end:
            found.append((first, end))
        before += hi - lo
    return tuple(found)


@dataclass(frozen=True)
class EpochWalk:
    """The rows that one pass delivers to one rank.

    Attributes:
        grid, block: whose rows.
        start: the first row of the pass.
        skipped: cycle ranges that this epoch leaves out, ascending and disjoint.
        batch_size: with `drop_last`, the pass ends after the last whole batch of this many rows.
        drop_last: see batch_size.
    """

    grid: SplitGrid
    block: SplitBlock
    start: Position
    skipped: tuple[CycleRange, ...] = ()
    batch_size: int | None = None
    drop_last: bool = False

    @cached_property
    def ranges(self) -> tuple[CycleRange, ...]:
        """Cycle ranges of the pass, ascending."""
        first, rows = self.start.cycle, self.start.partial_rows
        # A state tells the rows of the open cycle for all ranks, of which one with a smaller block has had all of it.
        if rows and rows >= self.grid.block_rows(self.block, first, first + 1):
            first += 1
        return without([(first, self.grid.num_cycles)], self.skipped)

    @property
    def skip_rows(self) -> int:
        """Rows of the first cycle that were delivered before; none if that cycle is skipped."""
        ranges = self.ranges
        return self.start.partial_rows if ranges and ranges[0][0] == self.start.cycle else 0

    @cached_property
    def num_rows(self) -> int:
        """Rows that the pass delivers."""
        rows = sum(self.grid.block_rows(self.block, lo, hi) for lo, hi in self.ranges) - self.skip_rows
        rows = max(rows, 0)
        if self.drop_last and self.batch_size:
            rows -= rows % self.batch_size
        return rows

    @property
    def num_batches(self) -> int:
        """Batches that the pass delivers; needs batch_size."""
        assert self.batch_size
        return -(-self.num_rows // self.batch_size)

    def next_span(self, after: ChunkSpan | None, max_cycles: int) -> ChunkSpan | None:
        """The span that follows `after` (None: the first), of at most `max_cycles` cycles; None at the end."""
        left = self.num_rows - (after.end_row if after else 0)
        if left <= 0:
            return None
        at = after.stop if after else self.start.cycle
        for lo, hi in self.ranges:
            if at >= hi:
                continue
            start = max(at, lo)
            stop = min(start + max(max_cycles, 1), hi)
            skip = 0 if after else self.skip_rows
            rows = min(self.grid.block_rows(self.block, start, stop) - skip, left)
            return ChunkSpan(start, stop, skip, rows, (after.end_row if after else 0) + rows)
        return None

    def position_after(self, rows: int) -> Position:
        """Where the loop is after `rows` rows of the pass; a finished pass is the start of the next epoch."""
        if rows >= self.num_rows:
            return Position(self.start.epoch + 1)
        if rows == 0:
            return self.start
        return Position(self.start.epoch, *self._place(rows))

    def done_after(self, rows: int) -> tuple[CycleRange, ...]:
        """The whole cycles that the first `rows` rows of the pass hold, as ranges."""
        if not rows:
            return ()
        cycle, _ = self._place(rows)
        return tuple((lo, min(hi, cycle)) for lo, hi in self.ranges if lo < cycle)

    def _place(self, rows: int) -> tuple[int, int]:
        """(cycle, rows into it) of what follows the first `rows` rows; at the end of a range the end, 0."""
        rows += self.skip_rows
        for lo, hi in self.ranges:
            size = self.grid.block_rows(self.block, lo, hi)
            if rows < size:
                cycles, partial = divmod(rows, self.block.size)
                return lo + cycles, partial
            if rows == size:
                return hi, 0
            rows -= size
        raise AssertionError("unreachable: the pass has no more rows")


class _Pass(Enum):
    OPEN = "open"  # the next pass begins at the position
    LIVE = "live"  # a pass runs
    LEFT = "left"  # the loop broke out: the next pass is the next epoch


@dataclass(frozen=True)
class _Place:
    """All that a cursor knows, replaced as a whole: another thread may ask for the position at any time."""

    phase: _Pass
    start: Position
    source: Any
    walk: EpochWalk | None = None
    rows: int = 0
    walk_source: Any = None

    @property
    def position(self) -> Position:
        return self.walk.position_after(self.rows) if self.walk else self.start

    @property
    def received_source(self) -> Any:
        return self.walk_source if self.rows else self.source


class Cursor:
    """The position of one shard, moved by received rows.

    | now  | begin()          | received all | leave() | set_epoch(e) | resume() | load(p)  |
    | ---- | ---------------- | ------------ | ------- | ------------ | -------- | -------- |
    | OPEN | LIVE at position | -            | OPEN    | OPEN (e, 0)* | error    | OPEN (p) |
    | LIVE | LIVE, epoch + 1  | OPEN e + 1   | LEFT**  | OPEN (e, 0)  | error    | error    |
    | LEFT | LIVE, epoch + 1  | -            | LEFT    | OPEN (e, 0)  | OPEN     | OPEN (p) |

    * an open position inside epoch e stays: `set_epoch(shard.epoch)` after a resume must not undo the resume; with
      `restart` it does not stay.
    ** OPEN at its start if no row was received: a pass that delivered nothing takes no epoch.

    A *source* is what rows are of, a version of the table: kept here, so that it and the position can be asked for as one.

    Args:
        position: where the first pass begins.
        source: of the rows before it.
    """

    def __init__(self, position: Position, source: Any = None) -> None:
        self.moves = 0  # passes that began and places that were set: tells who looks again whether another did so
        self._place = _Place(_Pass.OPEN, position, source)

    @property
    def live(self) -> bool:
        """Whether a pass runs."""
        return self._place.phase is _Pass.LIVE

    @property
    def position(self) -> Position:
        """Where the loop is."""
        return self._place.position

    @property
    def where(self) -> tuple[Position, Any]:
        """(where the loop is, source of the last row that it has received)."""
        return (place := self._place).position, place.received_source

    @property
    def done(self) -> tuple[int, tuple[CycleRange, ...]]:
        """(epoch, whole cycles) that the newest pass has delivered."""
        place = self._place
        if place.walk is None:
            return place.start.epoch, ()
        return place.walk.start.epoch, place.walk.done_after(place.rows)

    @property
    def progress(self) -> tuple[int, Position, bool] | None:
        """(rows received, where the loop is, whether these are all rows) of the newest pass; None once a place was set."""
        place = self._place
        return None if place.walk is None else (place.rows, place.position, place.rows >= place.walk.num_rows)

    @property
    def next_start(self) -> Position:
        """Where the next pass begins."""
        place = self._place
        return place.position if place.phase is _Pass.OPEN or not place.rows else Position(place.position.epoch + 1)

    def begin(self, walk: EpochWalk, source: Any = None) -> None:
        """Start a pass over rows of `source`; `walk` starts at `next_start`."""
        self.moves += 1
        self._place = _Place(_Pass.LIVE, walk.start, self._place.received_source, walk, walk_source=source)

    def received(self, rows: int) -> None:
        """The loop has received `rows` more rows of the running pass."""
        place = self._place
        assert place.walk is not None
        phase = _Pass.OPEN if place.rows + rows >= place.walk.num_rows else place.phase
        self._place = replace(place, phase=phase, rows=place.rows + rows)

    def leave(self) -> bool:
        """The running pass has ended: before its last row the loop broke out, and before its first one it took nothing.

        Returns:
            Whether it took nothing, so that the next pass begins where this one did.
        """
        place = self._place
        if not self.live or place.walk is None:
            return False
        self._place = replace(place, phase=_Pass.LEFT if place.rows else _Pass.OPEN)
        return not place.rows and place.walk.num_rows > 0

    def set_epoch(self, epoch: int, *, restart: bool = False) -> None:
        """The next pass is epoch `epoch`; keeps an open position inside that epoch, unless it is to restart."""
        self.moves += 1
        place = self._place
        if place.phase is _Pass.OPEN and place.position.epoch == epoch and not restart:
            return
        self._place = _Place(_Pass.OPEN, Position(epoch), place.received_source)

    def resume(self) -> None:
        """The next pass resumes the epoch that the loop has left.

        Raises:
            IterationError: a pass is running, or none was left.
        """
        place = self._place
        if self.live:
            raise IterationError(
                "resume_epoch() comes after a break, but an iterator of this shard is live; close() it first"
            )
        if place.phase is not _Pass.LEFT:
            raise IterationError(
                f"resume_epoch() comes after a break, but no epoch was left: the next pass begins at {place.position}; use "
                "set_epoch(epoch) for another epoch, and set_epoch(epoch, restart=True) for its beginning"
            )
        self.moves += 1
        self._place = _Place(_Pass.OPEN, place.position, place.received_source)

    def load(self, position: Position, source: Any = None) -> None:
        """Continue from a saved position behind rows of `source`.

        Raises:
            IterationError: a pass is running.
        """
        self.check_not_live()
        self.moves += 1
        self._place = _Place(_Pass.OPEN, position, source)

    def check_not_live(self) -> None:
        """Raises IterationError if a pass is running."""
        if self.live:
            raise IterationError(
                "a saved position must be loaded before iteration starts, but an iterator of this shard is live; "
                "exhaust it or close() it first"
            )
