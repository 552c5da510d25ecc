"""What the number of fragments of a table costs: making a stream, and what is sent to other processes."""

from __future__ import annotations

import pickle
import shutil
import time

import lance

from benchmarks.common import Check, Context, Table, say, seconds, spread
from benchmarks.data import commit_fragments
from ray_lance_stream import lance_stream

FRAGMENTS = (4, 1_000, 10_000)
MAX_OPEN_S = 2.0
MAX_PICKLED_BYTES = 100_000


def run(context: Context) -> list[Table]:
    """See the module."""
    say("fragments")
    table = Table(
        "Tables of many fragments",
        ["fragments", "take of one row, table just opened", "lance_stream()", "pickled stream"],
        note="Fragments of 3 rows, which share four files. The stream is made in a process that has opened the table before.",
    )
    made_s: list[float] = []
    size_bytes = 0
    for fragments in FRAGMENTS:
        uri = str(context.data / "fragments.lance")
        shutil.rmtree(uri, ignore_errors=True)
        commit_fragments(uri, fragments)
        bare_s, made_s = [], []
        for _ in range(context.repeats):
            begun_s = time.perf_counter()
            lance.dataset(uri).take([0])
            bare_s.append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
            stream = lance_stream(uri, num_splits=2)
            made_s.append(time.perf_counter() - begun_s)
            size_bytes = len(pickle.dumps(stream))
        table.rows.append([f"{fragments:,}", spread(bare_s, seconds), spread(made_s, seconds), f"{size_bytes:,} bytes"])
    median_s = sorted(made_s)[len(made_s) // 2]
    what = f"{FRAGMENTS[-1]:,} fragments"
    table.checks += [
        Check(f"{what}: lance_stream()", f"< {seconds(MAX_OPEN_S)}", spread(made_s, seconds), median_s < MAX_OPEN_S),
        Check(
            f"{what}: pickled stream",
            f"< {MAX_PICKLED_BYTES:,} bytes",
            f"{size_bytes:,} bytes",
            size_bytes < MAX_PICKLED_BYTES,
        ),
    ]
    return [table]
