"""A table behind requests that take time: rows/s, requests and bytes; and the disk cache beside a local table."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    NUM_SPLITS,
    Context,
    Failure,
    Samples,
    Table,
    at_least,
    factor,
    paired,
    per_s,
    ratios,
    say,
    seconds,
    shown,
    spread,
)
from benchmarks.consumers import FORMATS, batch_rows, endless, global_batch_rows, shard_rate
from benchmarks.data import table_uri
from benchmarks.store import Store, served
from ray_lance_stream import LanceStream, StreamShard, lance_stream
from ray_lance_stream.splits import SplitBlock

DELAYS_S = (0.0, 0.03, 0.1)
CLUMPS = (1, 16, 64, 256)
TARGET_CLUMP = 64
TABLE = "tokens"
SETTLED_S = 0.3


def run(context: Context) -> list[Table]:
    """See the module."""
    path = table_uri(context, TABLE)
    with served(Path(path).parent) as store:
        return [_latency(context, store, path), _cache(context, store, path)]


def _stream(uri: str, clump: int, **options: Any) -> LanceStream:
    size: dict[str, Any] = {} if clump == 1 else {"shuffle_clump_size": clump}
    return lance_stream(uri, num_splits=NUM_SPLITS, global_batch_size=global_batch_rows(TABLE), **size, **options)


# Latency


def _latency(context: Context, store: Store, path: str) -> Table:
    table = Table(
        "Object storage with slow requests",
        [
            "runs of rows",
            "delay of a request",
            "rows/s",
            "of no delay",
            "requests per row",
            "bytes read per byte delivered",
        ],
        note=f"{TABLE}, Arrow chunks of one worker, from a server of files on this machine behind a proxy in Python that "
        "delays each request; both take CPU time of the same cores, about 1 ms a request. Requests and bytes are those of one "
        "chunk as a reader reads it, measured apart from the rates.",
    )
    for clump in CLUMPS:
        say(f"object storage: runs of {clump}")
        stream = _stream(store.uri(path), clump, storage_options=store.options)
        cost = _cost(store, stream)
        shard = stream.shard(0, 1)
        competitors: dict[str, Callable[[], float]] = {
            seconds(delay_s): partial(_rate_behind, store, shard, context, delay_s) for delay_s in DELAYS_S
        }
        samples = paired(competitors, context.repeats)
        for name in competitors:
            gains = ratios(samples, name, seconds(0.0))
            table.rows.append([str(clump), name, shown(samples[name], per_s), spread(gains, factor), *cost])
        if clump == TARGET_CLUMP:
            gains = ratios(samples, seconds(0.1), seconds(0.0))
            table.checks.append(at_least(f"{TABLE}, clumps of {clump}, 100 ms a request / no delay", gains, 0.5))
        shard.close()
    store.delay(0.0)
    return table


def _rate_behind(store: Store, shard: StreamShard, context: Context, delay_s: float) -> float:
    """Rows a second once chunks have their full size, over as many chunks as are in flight, or more."""
    _settle(store)
    store.delay(delay_s)
    chunks = endless(lambda: FORMATS["Arrow chunks"](shard))
    for chunk in chunks:
        if context.quick or chunk.nbytes > 0.9 * shard._config.chunk_bytes:
            break
    count, rows, begun_s = 0, 0, time.perf_counter()
    while (took_s := time.perf_counter() - begun_s) < 3 * context.window_s or count < shard._config.prefetch_chunks:
        rows += batch_rows(next(chunks))
        count += 1
    del chunks  # which closes the window
    return rows / took_s


def _cost(store: Store, stream: LanceStream) -> list[str]:
    """Requests and bytes of one chunk of the size that chunks grow to."""
    plan = stream._plan
    table, pure = plan.table, plan.resolve()
    cycles = max(1, stream._config.chunk_bytes // (plan.row_bytes * NUM_SPLITS))
    rows = pure.rows(0, SplitBlock(0, NUM_SPLITS), 0, min(cycles, pure.grid.num_cycles))
    table.take(np.sort(rows)[:1], list(plan.columns))  # opened, and its metadata at hand
    _settle(store)
    delivered = table.take(rows, list(plan.columns)).nbytes
    requests, read = store.delay(0.0)
    return [f"{requests / len(rows):.3f}", f"{read / delivered:.2f}"]


def _settle(store: Store) -> None:
    """Wait until the reads are over that the window of the sample before had sent."""
    while store.delay(0.0)[0]:
        time.sleep(SETTLED_S)


# The disk cache


def _cache(context: Context, store: Store, path: str) -> Table:
    table = Table(
        "The disk cache",
        ["order", "read from", "rows/s", "of a local table"],
        note=f"{TABLE}, Arrow batches of one worker. The cache is full: it was filled through the proxy, without a delay.",
    )
    folder = tempfile.mkdtemp(prefix="ray_lance_stream_cache")
    try:
        for clump, order in ((1, "row shuffle"), (64, "clumps of 64")):
            say(f"disk cache: {order}")
            cached = _stream(store.uri(path), clump, storage_options=store.options, cache_dir=folder).shard(0, 1)
            _fill(store, cached)
            shards = {"local table": _stream(path, clump).shard(0, 1), "cache": cached}
            samples = paired({name: _timed(shard, context) for name, shard in shards.items()}, context.repeats)
            _add(table, samples, order)
            for shard in shards.values():
                shard.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return table


def _timed(shard: StreamShard, context: Context) -> Callable[[], float]:
    return partial(shard_rate, shard, "Arrow batches", context)


def _fill(store: Store, shard: StreamShard) -> None:
    """Read until reads send no more requests."""
    store.delay(0.0)
    for until_s in np.arange(1, 60) + time.monotonic():
        for _ in endless(lambda: FORMATS["Arrow batches"](shard)):
            if time.monotonic() > until_s:
                break
        if store.delay(0.0)[0] == 0:
            return
    raise RuntimeError("the cache is not full after a minute")


def _add(table: Table, samples: Samples, order: str) -> None:
    for name, values in samples.items():
        gains = ratios(samples, name, "local table")
        table.rows.append(
            [order, name, shown(values, per_s), "-" if isinstance(values, Failure) else spread(gains, factor)]
        )
    gains = ratios(samples, "cache", "local table")
    table.checks.append(at_least(f"{TABLE}, {order}, full disk cache / local table", gains, 0.9))
