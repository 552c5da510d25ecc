"""From `streaming_split` of a new worker group to the first batch in each worker, in real Ray Train runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from benchmarks.common import Context, Table, below, say, seconds, spread
from benchmarks.data import table_uri
from benchmarks.train_runs import POSITIONS, Arrival, fit, stream_at

TARGET_S = 1.0
WORKERS = 2
GROWN_WORKERS = 4
GROWTHS = 3
WHY = "readers that no worker group hands on start a Python process and import Lance"


def run(context: Context) -> list[Table]:
    """See the module."""
    table = Table(
        "A new worker group",
        ["position", "group", "streaming_split to first batch", "of that, after get_dataset_shard"],
        note=f"Ray Train runs over the 20 million rows of `large`, {WORKERS} workers. The group before fails after a "
        "checkpoint and a new one follows; or it ends, and the run goes on with twice as many workers. Over all ranks and "
        "groups. The first group of a run meets a coordinator that was made with the trainer, moments before.",
    )
    uri = table_uri(context, "large")
    with tempfile.TemporaryDirectory() as storage:
        for where, share in POSITIONS.items():
            say(f"rescale: {where}")
            stream = stream_at(uri, "large", share, groups=context.repeats + 2)
            arrivals = fit(stream, f"restart at {where}", storage, WORKERS, context.repeats)
            _add(table, where, "first of the run", [a for a in arrivals if a.group == 0], None)
            _add(table, where, f"after a failure, {WORKERS} workers", [a for a in arrivals if a.group], TARGET_S)
        grown: list[Arrival] = []
        for number in range(1 if context.quick else GROWTHS):
            say(f"rescale: growth {number + 1}")
            stream = stream_at(uri, "large", 0.5)
            fit(stream, f"growth {number}", storage, WORKERS)
            grown += fit(stream, f"growth {number}", storage, GROWN_WORKERS)
        _add(table, "50 %", f"from {WORKERS} to {GROWN_WORKERS} workers", grown, TARGET_S)
    return [table]


def _add(table: Table, where: str, group: str, arrivals: Sequence[Arrival], target_s: float | None) -> None:
    in_all = [arrival.since_split_s for arrival in arrivals]
    table.rows.append([where, group, spread(in_all, seconds), spread([a.since_got_s for a in arrivals], seconds)])
    if target_s is not None:
        table.checks.append(below(f"first batch of a new group, {group}, at {where}", in_all, target_s, seconds, WHY))
