"""Training loops without a model: rates of what a shard delivers, in this process or in one actor per rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from benchmarks.common import NUM_SPLITS, Context
from ray_lance_stream import LanceStream, StreamShard, lance_stream

# Rows of a global step. Two integers a row make 480 of them a batch of 8 kB, so narrow rows come in larger ones.
GLOBAL_BATCH_ROWS = {"narrow": 4800, "large": 4800, "images": 96}
DEFAULT_GLOBAL_BATCH_ROWS = 480
ORDERS: dict[str, dict[str, Any]] = {
    "row shuffle": {"shuffle": True},
    "clumps of 64": {"shuffle": True, "shuffle_clump_size": 64},
    "no shuffle": {"shuffle": False},
}


def global_batch_rows(table: str) -> int:
    """G of a table."""
    return GLOBAL_BATCH_ROWS.get(table, DEFAULT_GLOBAL_BATCH_ROWS)


def open_stream(uri: str, table: str, order: str = "row shuffle", **options: Any) -> LanceStream:
    """The stream of a table as all benchmarks make it."""
    size = global_batch_rows(table)
    return lance_stream(uri, num_splits=NUM_SPLITS, global_batch_size=size, **ORDERS[order], **options)


def batch_rows(batch: Any) -> int:
    """Rows of an Arrow table or of a dict of tensors."""
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else batch.num_rows


def arrow_batches(shard: StreamShard) -> Iterator[Any]:
    """One pass as Arrow batches."""
    return iter(shard.iter_batches(batch_format="pyarrow"))


def torch_batches(shard: StreamShard) -> Iterator[Any]:
    """One pass as torch batches."""
    return iter(shard.iter_torch_batches())


def arrow_chunks(shard: StreamShard) -> Iterator[Any]:
    """Chunks as they lie in the worker before Ray Data's batching; no public call hands them out."""
    plan = shard._plan_of_next()
    walk = shard._walk(shard._restore().next_start, plan)
    window = shard._supply.take(plan, walk)
    try:
        for ref, _ in window:
            fetched = window.fetch(ref)
            assert fetched is not None
            window.received(fetched[0].num_rows)
            yield fetched[0]
    finally:
        window.close()


FORMATS: dict[str, Callable[[StreamShard], Iterator[Any]]] = {
    "Arrow chunks": arrow_chunks,
    "Arrow batches": arrow_batches,
    "torch batches": torch_batches,
}


def endless(one_pass: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Pass after pass."""
    return itertools.chain.from_iterable(one_pass() for _ in itertools.count())


def rate(batches: Iterator[Any], context: Context) -> float:
    """Rows per second, counted from a moment after the first batch."""
    next(batches)
    warm_until_s = time.perf_counter() + context.warm_s
    for _ in batches:
        if time.perf_counter() >= warm_until_s:
            break
    rows, start_s = 0, time.perf_counter()
    for batch in batches:
        rows += batch_rows(batch)
        if (now_s := time.perf_counter()) - start_s >= context.window_s:
            return rows / (now_s - start_s)
    raise RuntimeError(f"no more batches after {rows} rows")


def shard_rate(shard: StreamShard, form: str, context: Context) -> float:
    """Rate of a shard in this process; its running pass is ended."""
    batches = endless(lambda: FORMATS[form](shard))
    try:
        return rate(batches, context)
    finally:
        if shard._pass is not None:
            shard._end_pass(shard._pass)


class Consumer:
    """One rank in an actor of its own."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def hold(self, shard: StreamShard, form: str = "torch batches") -> None:
        """Iterate this shard from now on; its readers stay warm from one pass to the next."""
        self._shard = shard
        self._form = form

    def begin(self) -> float:
        """Begin a pass and take its first batch; returns the time of day."""
        self._batches = endless(lambda: FORMATS[self._form](self._shard))
        next(self._batches)
        return time.time()

    def end(self) -> None:
        """End the pass, and let go what was read ahead."""
        if self._shard._pass is not None:
            self._shard._end_pass(self._shard._pass)

    def rows_until(self, end_s: float) -> int:
        """Rows received until a time of day."""
        rows = 0
        for batch in self._batches:
            if time.time() >= end_s:
                return rows
            rows += batch_rows(batch)
        raise RuntimeError("no more batches")

    def waits(self, run_s: float, step_s: float) -> tuple[list[float], float]:
        """(seconds that each step waited for its batch, seconds in all) of a loop with a step that takes `step_s`."""
        waited: list[float] = []
        begun = time.perf_counter()
        while True:
            time.sleep(step_s)
            asked = time.perf_counter()
            next(self._batches)
            now = time.perf_counter()
            waited.append(now - asked)
            if now - begun >= run_s:
                return waited, now - begun


def start_consumers(stream: LanceStream, world_size: int, form: str = "torch batches") -> list[Any]:
    """One warm consumer per rank, its readers started."""
    actor: Any = ray.remote(Consumer)
    consumers = [actor.options(num_cpus=0).remote() for _ in range(world_size)]
    shards = [stream.shard(rank, world_size) for rank in range(world_size)]
    ray.get([consumer.hold.remote(shard, form) for consumer, shard in zip(consumers, shards, strict=True)])
    ray.get([consumer.begin.remote() for consumer in consumers])
    ray.get([consumer.end.remote() for consumer in consumers])
    return consumers


def total_rate(consumers: list[Any], context: Context) -> float:
    """Rows per second of all ranks together, once each of them has filled its window of reads in flight."""
    ray.get([consumer.begin.remote() for consumer in consumers])
    warm_until_s = time.time() + 15 * context.warm_s
    ray.get([consumer.rows_until.remote(warm_until_s) for consumer in consumers])
    start_s = time.time()
    rows = ray.get([consumer.rows_until.remote(start_s + 2 * context.window_s) for consumer in consumers])
    end_s = time.time()
    ray.get([consumer.end.remote() for consumer in consumers])
    return sum(rows) / (end_s - start_s)
