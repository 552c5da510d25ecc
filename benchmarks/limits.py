"""What Lance itself reaches on the same rows: bare `take`, and a sequential scan."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import NUM_SPLITS, Context, best_of
from ray_lance_stream import LanceStream

# Rows of one take: up to what a chunk of the stream may hold.
TAKE_ROWS = (2_064, 8_208, 32_784, 65_520, 262_080)
TAKE_THREADS = (1, 2, 4)
TAKE_BYTES = 64 * 2**20
SCAN_ROWS = (1_024, 8_192, 65_536)
TAKE_SECONDS = 0.3  # of each candidate
URING = "file+uring://"


@dataclass(frozen=True)
class Take:
    """A way to call `take`: rows at a time, threads, and what is in front of the path."""

    rows: int
    threads: int
    scheme: str = ""

    def __str__(self) -> str:
        return f"{self.rows:,} rows at a time, {self.threads} thread{'s' if self.threads > 1 else ''}"


def offset_chunks(stream: LanceStream, rows: int) -> list[list[int]]:
    """The rows of epoch 0 in chunks of `rows`, each sorted: `take` is fastest so, and order is not its work."""
    rows = min(rows, stream._plan.order.num_rows // NUM_SPLITS * NUM_SPLITS)
    steps = stream._plan.grid.num_rows // rows
    whole = [stream.row_ids(0, step, global_batch_size=rows) for step in range(max(1, steps))]
    return [np.sort(np.asarray(chunk)).tolist() for chunk in whole]


def take_rate(dataset: Any, chunks: list[list[int]], threads: int, run_s: float) -> float:
    """Rows per second of `take` from some threads, chunk after chunk."""
    turn, lock = itertools.cycle(chunks), threading.Lock()
    end_s = time.perf_counter() + run_s

    def work() -> int:
        rows = 0
        while time.perf_counter() < end_s:
            with lock:
                chunk = next(turn)
            rows += dataset.take(chunk).num_rows
        return rows

    start_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        rows = sum(each.result() for each in [pool.submit(work) for _ in range(threads)])
    return rows / (time.perf_counter() - start_s)


def best_take(uri: str, stream: LanceStream, context: Context, scheme: str = "") -> tuple[Take, Callable[[], float]]:
    """The best batch size and thread count, and what measures them."""
    import lance

    dataset = lance.dataset(scheme + uri)
    sizes = [rows for rows in TAKE_ROWS if rows == TAKE_ROWS[0] or rows * stream._plan.row_bytes <= TAKE_BYTES]
    chunks = {rows: offset_chunks(stream, rows) for rows in sizes[:1] + sizes[-1:] if context.quick} or {
        rows: offset_chunks(stream, rows) for rows in sizes
    }
    run_s = 0.02 if context.quick else TAKE_SECONDS

    def candidate(way: Take) -> tuple[Take, Callable[[], float]]:
        return way, lambda: take_rate(dataset, chunks[way.rows], way.threads, run_s)

    best, _ = best_of(candidate(Take(rows, threads, scheme)) for rows in chunks for threads in TAKE_THREADS)
    assert isinstance(best, Take)
    return best, lambda: take_rate(dataset, chunks[best.rows], best.threads, context.window_s)


def best_scan(uri: str, context: Context) -> tuple[int, Callable[[], float]]:
    """The best batch size of a sequential scan, and what measures it."""
    import lance

    dataset = lance.dataset(uri)
    run_s = 0.05 if context.quick else 0.5

    def candidate(rows: int) -> tuple[int, Callable[[], float]]:
        return rows, lambda: scan_rate(dataset, rows, run_s)

    best, _ = best_of(candidate(rows) for rows in SCAN_ROWS)
    assert isinstance(best, int)
    return best, lambda: scan_rate(dataset, best, context.window_s)


def scan_rate(dataset: Any, batch_rows: int, run_s: float) -> float:
    """Rows per second of `to_batches`, whole scans one after the other."""
    rows, start_s = 0, time.perf_counter()
    while True:
        for batch in dataset.to_batches(batch_size=batch_rows):
            rows += batch.num_rows
            if (now_s := time.perf_counter()) - start_s >= run_s:
                return rows / (now_s - start_s)


def uring_works(uri: str) -> bool:
    """Whether Lance can read this path through io_uring."""
    import lance

    try:
        return bool(lance.dataset(URING + uri).take([0]).num_rows == 1)
    except OSError:  # forbidden, as in many containers, or not in this kernel
        return False
