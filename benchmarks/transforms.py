"""A pure-Python function in two processes of a stage, beside two bare processes that run it on the same chunks."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from benchmarks.common import Context, Table, at_least, factor, paired, per_s, ratios, say, shown, spread
from benchmarks.consumers import arrow_chunks, open_stream, shard_rate
from benchmarks.data import table_uri
from ray_lance_stream import LanceStream
from ray_lance_stream.columns import to_batch

PROCESSES = 2
CHUNK_CYCLES = 40  # 1920 rows, 4 MB: a quarter of what a stream takes by itself
CHUNKS = 8
DRAIN_S = 2.0
TARGET = 0.85
BARE = f"{PROCESSES} bare processes"
WHY = "reader, consumer and object store share the cores with the processes of the stage"


def checksum(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """About 50 microseconds of pure Python a row."""
    sums = []
    for tokens in batch["tokens"].tolist():
        total = 0
        for token in tokens:
            total = (total * 31 + token) & 0xFFFFFFFF
        sums.append(total)
    return {"sum": np.array(sums, dtype=np.int64)}


class Checksum:
    """`checksum`, as a class."""

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return checksum(batch)


class LongWindows(Context):
    """Long enough for some forty chunks."""

    @property
    def window_s(self) -> float:
        """See Context."""
        return 4 * super().window_s


class Bare:
    """A process that has its chunks at hand and does nothing but run the function on them."""

    def hold(self, chunks: list[pa.Table]) -> None:
        """The chunks to run on; runs on each of them once, to be warm."""
        self._chunks = chunks
        for chunk in chunks:
            checksum(to_batch(chunk, "numpy"))

    def rows_until(self, end_s: float) -> int:
        """Rows done until a time of day."""
        rows = 0
        for chunk in itertools.cycle(self._chunks):
            checksum(to_batch(chunk, "numpy"))
            rows += chunk.num_rows
            if time.time() >= end_s:
                return rows
        raise RuntimeError("no chunks")


def bare_rate(processes: list[Any], context: Context) -> float:
    """Rows per second of all processes together."""
    start_s = time.time()
    rows = sum(ray.get([process.rows_until.remote(start_s + context.window_s) for process in processes]))
    return rows / (time.time() - start_s)


def staged_rate(stream: LanceStream, context: Context) -> float:
    """Rows per second of the stream's only shard; its processes end with it."""
    shard = stream.shard()
    try:
        shard_rate(shard, "Arrow chunks", context)  # starts the processes
        return shard_rate(shard, "Arrow chunks", context)
    finally:
        shard.close()
        time.sleep(DRAIN_S)  # chunks under way are still transformed, which would slow down what is measured next


def run(context: Context) -> list[Table]:
    """See the module."""
    say("transforms: tokens")
    context = LongWindows(context.data, context.quick, context.repeats)
    stream = open_stream(table_uri(context, "tokens"), "tokens", read_batch_size=CHUNK_CYCLES)
    shard = stream.shard()
    chunks = list(itertools.islice(arrow_chunks(shard), CHUNKS))
    shard.close()
    actor: Any = ray.remote(Bare)
    processes = [actor.options(num_cpus=0).remote() for _ in range(PROCESSES)]
    ray.get([process.hold.remote(chunks[number::PROCESSES]) for number, process in enumerate(processes)])
    ways = {
        f"{PROCESSES} tasks": stream.map_batches(checksum, concurrency=PROCESSES),
        f"{PROCESSES} actors": stream.map_batches(Checksum, concurrency=PROCESSES),
    }
    competitors = {name: partial(staged_rate, mapped, context) for name, mapped in ways.items()}
    samples = paired({**competitors, BARE: partial(bare_rate, processes, context)}, context.repeats)
    table = Table(
        "A pure-Python function",
        ["where it runs", "rows/s", f"of {BARE}"],
        note=f"tokens, chunks of {chunks[0].num_rows} rows; the bare processes have their chunks in memory and throw the "
        "results away, a stage gets them from a reader and its results go to a worker.",
    )
    for name, values in samples.items():
        of_bare = ratios(samples, name, BARE) if name != BARE else []
        table.rows.append([name, shown(values, per_s), spread(of_bare, factor) if of_bare else ""])
        if name != BARE:
            table.checks.append(at_least(f"a pure-Python function in {name} / in {BARE}", of_bare, TARGET, WHY))
    return [table]
