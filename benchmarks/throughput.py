"""Rows per second in one worker, beside what Lance itself reaches on the same rows; and totals of 1, 2 and 4 workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ray

from benchmarks.common import (
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
    shown,
    spread,
)
from benchmarks.consumers import (
    FORMATS,
    ORDERS,
    global_batch_rows,
    open_stream,
    shard_rate,
    start_consumers,
    total_rate,
)
from benchmarks.data import table_uri
from benchmarks.limits import URING, best_scan, best_take, uring_works

TORCH_TABLES = ("narrow", "tokens", "vectors")  # variable binary and text are no tensors
CLUMPED = ("narrow", "tokens", "vectors")
TARGETS = {
    ("row shuffle", "Arrow chunks", "tokens"): 0.9,
    ("row shuffle", "Arrow chunks", "narrow"): 0.9,
    ("row shuffle", "torch batches", "tokens"): 0.75,
    ("row shuffle", "torch batches", "vectors"): 0.75,
    ("clumps of 64", "Arrow chunks", "tokens"): 0.9,
    ("clumps of 64", "torch batches", "tokens"): 0.7,
    ("no shuffle", "Arrow chunks", "tokens"): 0.9,
    ("no shuffle", "torch batches", "tokens"): 0.7,
}
WHY = (
    "beside the read, a row costs its place in the order, one copy back into that order, one into the object store and, "
    "as a batch, one more; and each batch costs Ray Data's handling of it"
)
WORLD_SIZES = (1, 2, 4)


def run(context: Context) -> list[Table]:
    """See the module."""
    tables = [
        _against_limits(context, order, ["narrow", "tokens", "vectors", "images", "text"])
        if order != "clumps of 64"
        else _against_limits(context, order, list(CLUMPED))
        for order in ORDERS
    ]
    return [*tables, _totals(context)]


def _against_limits(context: Context, order: str, names: list[str]) -> Table:
    limit = "bare take" if order == "row shuffle" else "scan"
    table = Table(
        f"One worker, {order}",
        ["table", "delivered as", "rows/s", f"of {limit}", *(["of take on io_uring"] if limit == "bare take" else [])],
        note=_note(limit),
    )
    for name in names:
        say(f"throughput: {order}, {name}")
        competitors, limits = _competitors(context, order, name, limit)
        samples = paired(competitors, context.repeats)
        _add_rows(table, samples, order, name, limits)
    return table


def _note(limit: str) -> str:
    if limit == "scan":
        return "The limit is a sequential `to_batches` scan in the best of three batch sizes."
    return (
        "The limit is `take` of the same rows, offsets prepared and sorted, result thrown away, in the best of five batch "
        "sizes and three thread counts; once on the table's path, once through Lance's io_uring reader where the kernel "
        "allows it. Batches have 480 rows, of narrow 4,800 and of images 96."
    )


def _competitors(
    context: Context, order: str, name: str, limit: str
) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """(what is measured, the limits among it with the words for them)."""
    uri = table_uri(context, name)
    stream = open_stream(uri, name, order)
    shard = stream.shard()
    competitors: dict[str, Callable[[], float]] = {}
    for form in FORMATS:
        if form != "torch batches" or name in TORCH_TABLES:
            competitors[form] = partial(shard_rate, shard, form, context)
    if limit == "scan":
        rows, competitors["scan"] = best_scan(uri, context)
        return competitors, {"scan": f"{rows:,} rows at a time"}
    way, competitors["bare take"] = best_take(uri, stream, context)
    limits = {"bare take": str(way)}
    if uring_works(uri):
        way, competitors["take on io_uring"] = best_take(uri, stream, context, URING)
        limits["take on io_uring"] = str(way)
    return competitors, limits


def _add_rows(table: Table, samples: Samples, order: str, name: str, limits: dict[str, str]) -> None:
    width = len(table.columns) - 3
    for what, values in samples.items():
        label = f"{what}, {limits[what]}" if what in limits else what
        cells = [spread(ratios(samples, what, to), factor) if what not in limits else "" for to in list(limits)[:width]]
        table.rows.append([name, label, shown(values, per_s), *cells, *[""] * (width - len(cells))])
        target = TARGETS.get((order, what, name))
        if target is not None:
            limit = next(iter(limits))
            table.checks.append(
                at_least(f"{name}, {order}, {what} / {limit}", ratios(samples, what, limit), target, WHY)
            )


def _totals(context: Context) -> Table:
    table = Table(
        "Totals of 1, 2 and 4 workers, torch batches, row shuffle",
        ["table", "workers", "rows/s of all", "of one worker"],
        note="Each worker is a process of its own, on the same machine.",
    )
    for name in ("tokens", "narrow"):
        say(f"throughput: totals, {name}")
        stream = open_stream(table_uri(context, name), name)
        groups = {world: start_consumers(stream, world) for world in WORLD_SIZES}
        samples = paired({str(w): partial(total_rate, groups[w], context) for w in WORLD_SIZES}, context.repeats)
        for world in WORLD_SIZES:
            values, of_one = samples[str(world)], ratios(samples, str(world), "1")
            table.rows.append([name, str(world), shown(values, per_s), spread(of_one, factor) if world > 1 else ""])
            if world > 1 and not isinstance(values, Failure):
                what = f"{name}, total of {world} workers / of one, batches of {global_batch_rows(name)} over all"
                table.checks.append(
                    at_least(what, of_one, 0.9, "a worker's share of a batch is smaller, its cost is not")
                )
        for consumers in groups.values():
            for consumer in consumers:
                ray.kill(consumer)
    return table
