"""What a worker holds in flight while its loop is slow, what is spilled, and whether readers grow from epoch to epoch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.common import Check, Context, Table, mib, say
from benchmarks.consumers import open_stream
from benchmarks.data import table_uri
from ray_lance_stream.config import MAX_CHUNK_BYTES

PREFETCH_BYTES = 48 * 2**20
EPOCHS = 10
SLOW_EPOCH_S = 15.0
GROWTH_BYTES = 32 * 2**20
OBJECT_STORE_BYTES = 256 * 2**20  # what is in flight fits, not much more
RAY_OPTIONS = {"object_store_memory": OBJECT_STORE_BYTES}


def run(context: Context) -> list[Table]:
    """See the module."""
    return [_in_flight(context), _readers(context)]


def _in_flight(context: Context) -> Table:
    table = Table(
        "Bytes in flight over a slow epoch",
        ["table", "prefetch_bytes", "most held, first third", "most held, last third", "spilled"],
        note="One worker whose loop takes its time over an epoch; counted before each batch, from the sending of a read "
        f"until the loop has received the last row of its chunk. The object store has {mib(OBJECT_STORE_BYTES)}.",
    )
    for name in ("tokens", "images"):
        say(f"memory: {name}")
        stream = open_stream(table_uri(context, name), name, prefetch_bytes=PREFETCH_BYTES)
        held, spilled_bytes = _slow_epoch(stream, context)
        third = max(1, len(held) // 3)
        early, late = max(held[:third]), max(held[-third:])
        table.rows.append([name, mib(PREFETCH_BYTES), mib(early), mib(late), f"{spilled_bytes:,} bytes"])
        bound = PREFETCH_BYTES + MAX_CHUNK_BYTES
        label = f"{name}, most bytes in flight"
        table.checks.append(Check(label, f"<= {mib(bound)}", mib(max(held)), max(held) <= bound))
        table.checks.append(Check(f"{name}, bytes spilled", "0", f"{spilled_bytes:,}", not spilled_bytes))
    return table


def _slow_epoch(stream: Any, context: Context) -> tuple[list[int], int]:
    """(bytes in flight before each batch, most bytes spilled)."""
    shard = stream.shard()
    size = shard.num_batches()
    pause_s = (1.0 if context.quick else SLOW_EPOCH_S) / size
    held, spilled_bytes = [], 0
    for _ in shard.iter_batches(batch_format="pyarrow"):
        time.sleep(pause_s)
        held.append(shard._supply.in_flight()[1])
        spilled_bytes = max(spilled_bytes, _spilled_bytes())
    shard.close()
    return held, spilled_bytes


def _spilled_bytes() -> int:
    """What lies on disk of the objects of this cluster now."""
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    return sum(path.stat().st_size for path in session.glob("ray_spilled_objects*/*"))


def _readers(context: Context) -> Table:
    say(f"memory: {EPOCHS} epochs")
    shard = open_stream(table_uri(context, "tokens"), "tokens").shard()
    sizes = []
    for _ in range(EPOCHS):
        for _ in shard.iter_batches(batch_format="pyarrow"):
            pass
        sizes.append(_reader_bytes())
    table = Table(
        f"Memory of the readers over {EPOCHS} epochs",
        ["after epoch", *[str(number + 1) for number in range(EPOCHS)]],
        [["of its own", *[mib(size) for size in sizes]]],
        note="tokens, one worker; resident memory of the largest reader, without what it shares with the object store.",
    )
    growth = sizes[-1] - sizes[1]
    limit = f"< {mib(GROWTH_BYTES)}"
    table.checks.append(Check("readers' growth from epoch 2 to 10", limit, mib(growth), growth < GROWTH_BYTES))
    return table


def _reader_bytes() -> int:
    """Anonymous resident memory of the largest reader of this user's cluster."""
    ours, sizes = _descendants(), []
    for pid in ours:
        try:
            is_reader = b"SplitReader" in Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if is_reader:
            sizes += [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")]
    return max(sizes)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
