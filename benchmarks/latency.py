"""From `get_dataset_shard` to the first batch, at several places of an epoch, and over the edge between two."""

from __future__ import annotations

import tempfile

from benchmarks.common import Context, Table, below, say, seconds, spread
from benchmarks.data import table_uri
from benchmarks.train_runs import POSITIONS, Arrival, fit, stream_at

TARGET_S = 1.0
WORKERS = 2
FITS = 3
WHY = "a reader is a Python process that imports Lance, and each worker has its own"


def run(context: Context) -> list[Table]:
    """See the module."""
    table = Table(
        "First batch",
        ["position", "get_dataset_shard to first batch", "first batch of the next epoch"],
        note=f"New Ray Train runs of {WORKERS} workers over the 20 million rows of `large`, cluster warm, over all ranks and "
        f"{FITS} runs at each place. An edge is counted from the end of one pass to the first batch of the next.",
    )
    uri = table_uri(context, "large")
    places = {**POSITIONS, "3 steps before the end": 1.0}
    found: dict[str, list[Arrival]] = {where: [] for where in places}
    with tempfile.TemporaryDirectory() as storage:
        fit(stream_at(uri, "large", 0.0), "warm the cluster", storage, WORKERS)
        for number in range(1 if context.quick else FITS):
            for where, share in places.items():
                say(f"latency: {where}")
                stream = stream_at(uri, "large", share)
                found[where] += fit(stream, f"{where} {number}", storage, WORKERS, over_edge=share == 1.0)
    for where, arrivals in found.items():
        first = [arrival.since_got_s for arrival in arrivals]
        edges = [arrival.edge_s for arrival in arrivals if arrival.edge_s is not None]
        table.rows.append([where, spread(first, seconds), spread(edges, seconds)])
        table.checks.append(below(f"first batch after get_dataset_shard, {where}", first, TARGET_S, seconds, WHY))
        if edges:
            table.checks.append(below("first batch after the edge of an epoch", edges, TARGET_S, seconds))
    return [table]
