"""Short measurements of a table in this process: what a stream delivers, and what bare `take` reads of the same rows."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_lance_stream.reader import LOCAL_READS_AT_A_TIME, REMOTE_READS_AT_A_TIME

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.stream import LanceStream

ROUNDS = 3
MAX_TAKE_ROWS = 2**20  # offsets are computed before the clock runs
_WARM_UP = 0.5  # of a turn: processes start, tables are opened
_WARM_SHARE = 0.25  # of a turn, so that what was read ahead of the first batch does not count


@dataclass
class Trial:
    """One competitor, measured in every round.

    Attributes:
        name: as it is shown.
        options: what it changes of the stream as given.
        measure: (epoch, seconds) -> rows per second.
        rates: rows per second, one of each round that it was measured in.
    """

    name: str
    options: dict[str, Any]
    measure: Callable[[int, float], float]
    rates: list[float] = field(default_factory=list)


def run_rounds(trials: list[Trial], seconds: float, epoch: int, told: Callable[[str], None]) -> tuple[int, float]:
    """Measure all trials in turns, forwards and backwards, so that drift of the machine hits them alike.

    Before that each of them runs for a moment that does not count. The first two, the stream as given and bare take,
    read the same epoch; every other turn has an epoch of its own, so that no trial finds in memory what another one has
    just read, unless the table fits there.

    Args:
        trials: the first two are measured once in any case.
        seconds: when they are over, no turn begins any more.
        epoch: the first one.
        told: is told what is measured.

    Returns:
        (rounds begun, seconds of a turn).
    """
    end_s = time.monotonic() + seconds
    turn_s = seconds / ((ROUNDS + _WARM_UP) * len(trials))
    for trial in trials:
        if time.monotonic() < end_s:
            told(f"warming up: {trial.name}")
            trial.measure(epoch, turn_s * _WARM_UP)
    for number in range(ROUNDS):
        places = list(range(len(trials)))
        if number % 2:
            places.reverse()
        for place in places:
            is_needed = number == 0 and place < 2
            if time.monotonic() > end_s and not is_needed:
                return number + (place != places[0]), turn_s
            told(f"round {number + 1} of {ROUNDS}: {trials[place].name}")
            own_epoch = epoch + 1 + number * len(trials) + max(place - 1, 0)
            trials[place].rates.append(trials[place].measure(own_epoch, turn_s))
    return ROUNDS, turn_s


def stream_rate(shard: StreamShard, batches_of: Callable[[StreamShard], Any], epoch: int, seconds: float) -> float:
    """Rows per second of a shard's batches from the start of an epoch, and on into the next ones."""
    shard.set_epoch(epoch)
    batches: Iterator[Any] = itertools.chain.from_iterable(batches_of(shard) for _ in itertools.count())
    begun_s = now_s = time.perf_counter()
    next(batches)
    rows, counted_from_s = 0, 0.0
    for batch in batches:
        now_s = time.perf_counter()
        if counted_from_s:
            rows += _num_rows(batch)
            if now_s - begun_s >= seconds:
                break
        elif now_s - begun_s >= seconds * _WARM_SHARE:
            counted_from_s = now_s
    if shard._pass is not None:
        shard._end_pass(shard._pass)
    return rows / (now_s - counted_from_s)


def _num_rows(batch: Any) -> int:
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else int(batch.num_rows)


class BareTake:
    """`take` of Lance, on the rows of an epoch in the stream's order, a chunk at a time, its offsets sorted.

    Args:
        stream: whose rows and columns.
        chunk_rows: about so many rows at a time: those of the stream's own chunks.
    """

    def __init__(self, stream: LanceStream, chunk_rows: int) -> None:
        self._stream, self._plan = stream, stream._plan
        grid = self._plan.grid
        self.rows_at_a_time = max(1, min(chunk_rows // grid.num_splits, grid.num_cycles)) * grid.num_splits
        self.threads = LOCAL_READS_AT_A_TIME if self._plan.table.is_local else REMOTE_READS_AT_A_TIME

    def rate(self, epoch: int, seconds: float) -> float:
        """Rows per second of as many threads as a reader has."""
        chunks = itertools.cycle(self._chunks(epoch))
        dataset, columns, lock = self._plan.table.open(), list(self._plan.columns), threading.Lock()
        begun_s = time.perf_counter()
        end_s = begun_s + seconds

        def work(_: int) -> int:
            rows = 0
            while rows == 0 or time.perf_counter() < end_s:
                with lock:
                    chunk = next(chunks)
                rows += dataset.take(chunk, columns=columns).num_rows
            return rows

        with ThreadPoolExecutor(self.threads) as pool:
            rows = sum(pool.map(work, range(self.threads)))
        return rows / (time.perf_counter() - begun_s)

    def _chunks(self, epoch: int) -> list[list[int]]:
        """Offsets of the chunks from the start of an epoch, each sorted: `take` is fastest so, and order is not its work."""
        size = self.rows_at_a_time
        steps = range(min(self._plan.grid.num_steps(size), max(1, MAX_TAKE_ROWS // size)))
        chunks = (np.asarray(self._stream.row_ids(epoch, step, global_batch_size=size)) for step in steps)
        return [np.sort(chunk).tolist() for chunk in chunks]
