"""How long a loop with a step of 5 ms waits for its batches."""

from __future__ import annotations

import statistics

import ray

from benchmarks.common import Check as Judged
from benchmarks.common import Context, Table, say, seconds, spread
from benchmarks.consumers import DEFAULT_GLOBAL_BATCH_ROWS, ORDERS, open_stream, start_consumers
from benchmarks.data import table_uri

STEP_S = 0.005
WORKERS = 2
TARGET = 0.03
WARM_STEPS_S = 1.0


def run(context: Context) -> list[Table]:
    """See the module."""
    table = Table(
        "Waiting for batches",
        ["order", "share of its time that a worker waits", "median wait of a step", "steps/s", "rows/s of all workers"],
        note=f"tokens, {DEFAULT_GLOBAL_BATCH_ROWS} rows a global step over {WORKERS} workers, each sleeping "
        f"{STEP_S * 1000:.0f} ms a step like a loop whose accelerator is busy; the worker that waits more of the two "
        f"counts. It takes up to {DEFAULT_GLOBAL_BATCH_ROWS / STEP_S:,.0f} rows/s.",
    )
    uri = table_uri(context, "tokens")
    run_s = 0.5 if context.quick else 4.0
    for order in ORDERS:
        say(f"stall: {order}")
        consumers = start_consumers(open_stream(uri, "tokens", order), WORKERS)
        shares, medians, steps_per_s = [], [], []
        for _ in range(context.repeats):
            ray.get([consumer.begin.remote() for consumer in consumers])
            ray.get([consumer.waits.remote(WARM_STEPS_S, STEP_S) for consumer in consumers])
            found = ray.get([consumer.waits.remote(run_s, STEP_S) for consumer in consumers])
            ray.get([consumer.end.remote() for consumer in consumers])
            shares.append(max(sum(waited) / took for waited, took in found))
            medians.append(max(statistics.median(waited) for waited, _ in found))
            steps_per_s.append(min(len(waited) / took for waited, took in found))
        rows = [DEFAULT_GLOBAL_BATCH_ROWS * steps for steps in steps_per_s]
        cells = [spread(shares, _percent), spread(medians, seconds), spread(steps_per_s, _whole), spread(rows, _whole)]
        table.rows.append([order, *cells])
        met = sorted(shares)[len(shares) // 2] < TARGET
        why = f"a batch that is ready takes Ray Data's threads a while to hand over: the median step waits {cells[1]}"
        table.checks.append(Judged(f"tokens, {order}, waiting with a 5 ms step", "< 3 %", cells[0], met, why))
        for consumer in consumers:
            ray.kill(consumer)
    return [table]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _whole(value: float) -> str:
    return f"{value:,.0f}"
