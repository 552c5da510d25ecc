"""The passes of the ranks of an attempt: how each reports its own, and how those that do not go together are found. Pure.

Passes meet by their number: ranks that run the same loop begin the same passes, at the same places, and leave them at the
same step. Nothing here assumes an order in which reports of different ranks arrive, or that all of them do.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from ray_lance_stream.cursor import Position

# A rank that looks at rows and then goes back to where it was has not left the pass: so long it may take.
SETTLES_S = 2.0
KEPT_LEFT = 16


@dataclass(frozen=True)
class PassProgress:
    """How far one rank is in one of its passes.

    Attributes:
        copy: which copy of its shard: each one counts its passes from the start.
        number: which pass of its shard, from 1. Passes without batches count by themselves, down from -1: a rank that
            looks at some rows does not fall out of step by it.
        again: how often it was begun again because the loop went back to its start.
        start: where it begins; None: it has not begun again yet.
        splits: k of this rank.
        steps: batches that the loop has received, or rows where it iterates rows; None: not to be compared.
        place: where the loop is.
        state: "left" by the loop before its last row, or "complete"; "running" also where an error has ended it.
    """

    copy: str
    number: int
    again: int
    start: Position | None
    splits: int
    steps: int | None
    place: Position
    state: Literal["running", "left", "complete"] = "running"

    def begins_with(self, other: PassProgress) -> bool:
        """Whether both begin at the same rows, as far as is known."""
        if self.start is None or other.start is None or self.start == other.start:
            return True
        return _is_behind(self.start, other.start, self, other) or _is_behind(other.start, self.start, self, other)

    def after(self, older: PassProgress) -> PassProgress:
        """What is known from two reports of the same pass, whichever came first."""
        if older.start is None or self.start is None:
            return self if older.start is None else older
        furthest = self if (self.steps or 0) >= (older.steps or 0) else older
        return replace(furthest, state=self.state if self.state != "running" else older.state)


def _is_behind(behind: Position, before: Position, a: PassProgress, b: PassProgress) -> bool:
    """Whether a place is the next cycle of another one, in whose open cycle a rank with a smaller block had all its rows."""
    had_all = before.partial_rows >= min(a.splits, b.splits)
    return had_all and behind == Position(before.epoch, before.cycle + 1)


@dataclass(frozen=True)
class PassConflict:
    """Two ranks that begin a pass at different places, or did not leave it together.

    Attributes:
        mine: of the rank that asks.
        rank: the other one.
        theirs: of the other one.
        settles_in_s: seconds for which the rank that left may still go back; 0: it has left.
    """

    mine: PassProgress
    rank: int
    theirs: PassProgress
    settles_in_s: float = 0.0

    @property
    def is_at_start(self) -> bool:
        """Whether it is about where the pass begins."""
        return not self.mine.begins_with(self.theirs)


class RanksOfPass:
    """What the ranks of an attempt have reported of one pass."""

    def __init__(self) -> None:
        self._ranks: dict[int, PassProgress] = {}
        self._left_s: dict[int, float] = {}
        self._ends: dict[
            int, tuple[int | None, int | None]
        ] = {}  # by `again`: the rank that left first, the furthest one

    def note(self, rank: int, progress: PassProgress, now_s: float) -> None:
        """What a rank reports at a time; reports may overtake each other."""
        older = self._ranks.get(rank)
        if older is not None:
            if progress.again < older.again:
                return
            if progress.again == older.again:
                progress = progress.after(older)
            else:
                self._left_s.pop(rank, None)
                self._ends.pop(older.again, None)
        self._ranks[rank] = progress
        if progress.state == "left":
            self._left_s.setdefault(rank, now_s)
        self._ends[progress.again] = self._with(*self._ends_of(progress.again), rank)

    def elsewhere(self, rank: int, begun: PassProgress) -> PassConflict | None:
        """Another rank that began this pass elsewhere."""
        for other, theirs in self._ranks.items():
            if other != rank and theirs.again == begun.again and theirs.start is not None:
                return None if begun.begins_with(theirs) else PassConflict(begun, other, theirs)
        return None

    def left_apart(self, rank: int, now_s: float) -> PassConflict | None:
        """Another rank that left this pass before a step that this rank has received, or the other way round."""
        mine = self._ranks.get(rank)
        if mine is None or mine.steps is None:
            return None
        first, furthest = self._ends_of(mine.again)
        if first is not None and first != rank and self._steps(first) < mine.steps:
            return PassConflict(mine, first, self._ranks[first], self._settles_in_s(first, now_s))
        if furthest is not None and mine.state == "left" and self._steps(furthest) > mine.steps:
            return PassConflict(mine, furthest, self._ranks[furthest], self._settles_in_s(rank, now_s))
        return None

    def _settles_in_s(self, rank: int, now_s: float) -> float:
        return max(self._left_s[rank] + SETTLES_S - now_s, 0.0)

    def _steps(self, rank: int) -> float:
        steps = self._ranks[rank].steps
        return math.nan if steps is None else steps  # which is neither less nor more

    def _ends_of(self, again: int) -> tuple[int | None, int | None]:
        if again not in self._ends:
            ends: tuple[int | None, int | None] = None, None
            for rank, progress in self._ranks.items():
                if progress.again == again:
                    ends = self._with(*ends, rank)
            self._ends[again] = ends
        return self._ends[again]

    def _with(self, first: int | None, furthest: int | None, rank: int) -> tuple[int | None, int | None]:
        """The ends with one rank more."""
        progress = self._ranks[rank]
        if progress.steps is not None:
            if progress.state == "left" and (first is None or self._steps(first) > progress.steps):
                first = rank
            if furthest is None or self._steps(furthest) < progress.steps:
                furthest = rank
        return first, furthest


class RankPasses:
    """The passes that this rank has begun, as it reports them."""

    def __init__(self) -> None:
        self._copy = uuid.uuid4().hex
        self._numbers = {True: 0, False: 0}  # of the newest passes, by whether they have batches
        self._again: dict[int, int] = {}
        self._newest: PassProgress | None = None
        self._step_rows: int | None = None
        self._left: deque[PassProgress] = deque(maxlen=KEPT_LEFT)  # one after the other, before the newest
        self._taken_back: dict[int, PassProgress] = {}
        self._step: object = None  # of the newest pass
        self._nothing: tuple[PassProgress, object] | None = (
            None  # the pass before with its step, where no row of it came
        )

    def next(self, start: Position, splits: int, *, has_batches: bool, step: object = None) -> PassProgress:
        """The pass that would begin now.

        Args:
            start: where.
            splits: k of this rank.
            has_batches: whether it delivers batches.
            step: how it steps; another one, or another start, than that of a pass which has delivered nothing is not to be
                compared with what other ranks have registered of that pass.
        """
        number = self._numbers[has_batches] + 1
        number = number if has_batches else -number
        nothing, self._nothing, self._step = self._nothing, None, step
        if nothing is not None and nothing[0].number == number and (nothing[0].start, nothing[1]) != (start, step):
            self._begin_again(nothing[0])
        return PassProgress(self._copy, number, self._again.get(number, 0), start, splits, None, start)

    def begin(self, begun: PassProgress, step_rows: int | None) -> None:
        """A pass begins, as `next` has made it.

        Args:
            begun: the pass.
            step_rows: rows of a step; None: its steps are not to be compared, or not known here.
        """
        self._numbers[begun.number > 0] = abs(begun.number)
        if self._newest is not None:
            if self._newest.state == "complete":
                self._left.clear()
            else:
                self._left.append(self._newest)
        self._newest, self._step_rows = replace(begun, steps=None if step_rows is None else 0), step_rows
        self._taken_back.pop(begun.number, None)

    def note(self, rows: int, place: Position, state: Literal["running", "left", "complete"]) -> None:
        """How far the newest pass is."""
        if self._newest is not None:
            steps = None if self._step_rows is None else -(-rows // self._step_rows)
            self._newest = replace(self._newest, steps=steps, place=place, state=state)

    def close(self) -> None:
        """The loop asks for another pass: one that an error has ended is left by now."""
        if self._newest is not None and self._newest.state == "running":
            self._newest = replace(self._newest, state="left")

    def take_back(self) -> None:
        """The newest pass has delivered nothing: the next one is begun in its place."""
        if self._newest is None:
            return
        self._numbers[self._newest.number > 0] -= 1
        self._nothing = self._newest, self._step
        self._newest = None

    def _begin_again(self, progress: PassProgress) -> None:
        again = self._again[progress.number] = progress.again + 1
        self._taken_back[progress.number] = replace(progress, again=again, start=None, steps=None, state="running")

    def go_to(self, place: Position) -> bool:
        """The next pass was told where to begin; returns whether that takes passes back.

        Those that the loop has left, and that began there or after one that did, were looks at what comes: a rank that takes
        one and goes back is where ranks are that took none.
        """
        looks = [*self._left, *(() if self._newest is None else (self._newest,))]
        if looks and looks[-1].state == "complete":
            return False
        first = next((i for i, each in enumerate(looks) if each.start == place), None)
        if first is None:
            return False
        for each in reversed(looks[first:]):
            self._begin_again(each)
            self._numbers[each.number > 0] = abs(each.number) - 1
        self._left = deque(looks[:first], maxlen=KEPT_LEFT)
        self._newest = None
        return True

    @property
    def reported(self) -> tuple[PassProgress, ...]:
        """What the other ranks' passes are compared with."""
        return (*self._taken_back.values(), *(() if self._newest is None else (self._newest,)))
