"""What planning costs as the table grows: without a filter, and with one that matches half of 20 million rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.common import Check, Context, Table, mib, say, seconds, spread
from benchmarks.data import num_rows, table_uri

SIZES = (10**6, 10**7, 10**8, 10**9, 10**10)
CHUNK_ROWS = 8_208
KEPT_BYTES_PER_ROW = 8
PEAK_BYTES_PER_ROW = 24
MEMORY_LIMIT_BYTES = 2 * 2**30  # of the process that plans with a filter
CGROUPS = Path("/sys/fs/cgroup")
WHY_NOT_FLAT = (
    "the order of N rows permutes the next power of two and goes again for the rows that land outside. 10^10 fills 58 % of it, "
    "which takes some ten more rounds over ever fewer rows; 10^9 fills 93 % and costs what 10^6 costs"
)
WHY = "the scan's own buffers of fixed size are part of it"


def run(context: Context) -> list[Table]:
    """See the module."""
    return [_unfiltered(context), _filtered(context)]


def _unfiltered(context: Context) -> Table:
    say("planning: unfiltered")
    table = Table(
        "Planning without a filter",
        ["rows", "make the plan", "rows of the first chunk", "rows of the last chunk", "memory of both"],
        note=f"The pure plan, chunks of {CHUNK_ROWS:,} rows, each size in a process of its own.",
    )
    measured = {size: [_measure("plan", str(size)) for _ in range(context.repeats)] for size in SIZES}
    for size, runs in measured.items():
        cells = [spread(_each(runs, key), seconds) for key in ("plan_s", "first_s", "last_s")]
        table.rows.append([f"{size:,}", *cells, spread(_each(runs, "peak_bytes"), mib)])
    small, large = (measured[size] for size in (SIZES[0], SIZES[-1]))
    for key, what in (("last_s", "time"), ("peak_bytes", "memory")):
        pairs = zip(_each(large, key), _each(small, key), strict=True)
        growth = [big / base for big, base in pairs]
        flat = sorted(growth)[len(growth) // 2] < 2
        value = spread(growth, lambda ratio: f"{ratio:.2f}")
        table.checks.append(Check(f"planning 10^10 rows / 10^6 rows, {what}", "flat: < 2 x", value, flat, WHY_NOT_FLAT))
    return table


def _filtered(context: Context) -> Table:
    rows = num_rows(context, "large")
    say(f"planning: filtered, {rows:,} rows")
    table = Table(
        "Planning with a filter",
        ["rows", "matching", "time", "bytes kept a match", "peak above base", "peak a match"],
    )
    uri = table_uri(context, "large")
    for share, what in ((1, "all"), (2, "half")):
        condition = f"value < {(1 << 40) // share}"
        with _limited_memory() as enter:
            runs = [_measure("filter", uri, condition, enter=enter) for _ in range(min(3, context.repeats))]
        table.note = (
            "`lance_stream(..., filter=...)` in a process of its own, "
            f"{f'in a cgroup of {mib(MEMORY_LIMIT_BYTES)}' if enter else 'its memory not limited: no cgroup can be made'}. "
            "Base is its resident memory once the libraries are imported and the table is open, peak the most that it ever "
            "had."
        )
        matches = int(runs[0]["matches"])
        peaks = _each(runs, "peak_bytes")
        per_match = [peak / matches for peak in peaks]
        kept = [run["kept_bytes"] / matches for run in runs]
        table.rows.append(
            [
                f"{rows:,}",
                f"{matches:,} ({what})",
                spread(_each(runs, "plan_s"), seconds),
                spread(kept, _one),
                spread(peaks, mib),
                spread(per_match, _one),
            ]
        )
        checks = ((kept, KEPT_BYTES_PER_ROW, "kept"), (per_match, PEAK_BYTES_PER_ROW, "peak above base"))
        for values, limit, name in checks:
            met = sorted(values)[len(values) // 2] <= limit
            label = f"filter that matches {what} of {rows:,} rows, bytes a match, {name}"
            table.checks.append(Check(label, f"<= {limit}", spread(values, _one), met, WHY))
    return table


def _one(value: float) -> str:
    return f"{value:.1f}"


def _each(runs: Sequence[dict[str, float]], key: str) -> list[float]:
    return [run[key] for run in runs]


def _measure(*arguments: str, enter: Callable[[], None] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planning", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def _limited_memory() -> Iterator[Callable[[], None] | None]:
    """What a new process calls to be bound to MEMORY_LIMIT_BYTES; None where this user may make no cgroup."""
    is_v1 = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if is_v1 else CGROUPS) / f"ray_lance_stream_{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(MEMORY_LIMIT_BYTES))
    except OSError:
        yield None
    else:
        yield lambda: _enter(group)
    finally:
        with suppress(OSError):
            group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _resident_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def _plan(num_rows: int) -> dict[str, float]:
    import time
    import tracemalloc

    from ray_lance_stream.order import Order
    from ray_lance_stream.plan import StreamPlan
    from ray_lance_stream.splits import SplitBlock, SplitGrid

    def once() -> tuple[float, float, float]:
        begun_s = time.perf_counter()
        plan = StreamPlan(Order(num_rows), SplitGrid(num_rows, 48))
        planned_s = time.perf_counter()
        cycles, block = CHUNK_ROWS // 48, SplitBlock(0, 48)
        plan.rows(0, block, 0, cycles)
        first_s = time.perf_counter()
        plan.rows(0, block, plan.grid.num_cycles - cycles, plan.grid.num_cycles)
        return planned_s - begun_s, first_s - planned_s, time.perf_counter() - first_s

    once()
    plan_s, first_s, last_s = map(min, zip(*(once() for _ in range(20)), strict=True))
    tracemalloc.start()
    once()
    return {"plan_s": plan_s, "first_s": first_s, "last_s": last_s, "peak_bytes": tracemalloc.get_traced_memory()[1]}


def _filter(uri: str, condition: str) -> dict[str, float]:
    import time

    import lance

    from ray_lance_stream import lance_stream
    from ray_lance_stream.take import take_rows  # noqa: F401

    dataset = lance.dataset(uri)
    dataset.take([0])
    base_bytes, begun_s = _resident_bytes("VmRSS"), time.perf_counter()
    stream = lance_stream(dataset, num_splits=48, filter=condition)
    took_s = time.perf_counter() - begun_s
    matched = stream._plan.matched
    assert matched is not None
    return {
        "plan_s": took_s,
        "matches": len(matched.get()),
        "kept_bytes": matched.get().nbytes,
        "peak_bytes": _resident_bytes("VmHWM") - base_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(_plan(int(sys.argv[2])) if sys.argv[1] == "plan" else _filter(*sys.argv[2:])))
