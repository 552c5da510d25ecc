"""What the number of columns of a table costs: making a stream, one read and its batch, beside Lance's own take."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import lance
import numpy as np
import pyarrow as pa

from benchmarks.common import Check, Context, Table, say, seconds, spread
from ray_lance_stream import lance_stream
from ray_lance_stream.columns import TensorCollateFn, refuse_nulls, with_tensor_columns
from ray_lance_stream.take import take_rows

COLUMNS = (1_000, 8_000)
TABLE_ROWS = 600
READ_ROWS = 60
MAX_RATIO = 1.5


def run(context: Context) -> list[Table]:
    """See the module."""
    say("columns")
    table = Table(
        "Tables of many columns",
        ["columns", "Lance's take", "our read", "read / take", "tensors of the rows", "lance_stream()"],
        note=f"{READ_ROWS} of {TABLE_ROWS} rows of float32 columns, scattered. Lance's take has its offsets sorted; both "
        "read all columns. lance_stream() reads 16 rows.",
    )
    rows = np.random.default_rng(0).permutation(TABLE_ROWS)[:READ_ROWS].astype(np.int64)
    for num_columns in (100, 200) if context.quick else COLUMNS:
        uri = str(context.data / f"columns-{num_columns}.lance")
        shutil.rmtree(uri, ignore_errors=True)
        take_s, read_s, tensors_s, made_s = _measured(uri, num_columns, rows, context.repeats)
        ratios = [read / take for read, take in zip(read_s, take_s, strict=True)]
        times = [spread(take_s, seconds), spread(read_s, seconds)]
        ratio = spread(ratios, "{:.2f}".format)
        table.rows.append([f"{num_columns:,}", *times, ratio, spread(tensors_s, seconds), spread(made_s, seconds)])
        is_met = sorted(ratios)[len(ratios) // 2] <= MAX_RATIO
        table.checks.append(Check(f"{num_columns:,} columns: read / take", f"<= {MAX_RATIO}", ratio, is_met))
    return [table]


def _measured(uri: str, num_columns: int, rows: np.ndarray, repeats: int) -> tuple[list[float], ...]:
    """Seconds of Lance's take, of our read, of tensors of its rows, and of making a stream, in turns."""
    values = np.arange(TABLE_ROWS, dtype=np.float32)
    names = [f"c{number}" for number in range(num_columns)]
    dataset = lance.write_dataset(pa.table(dict.fromkeys(names, values)), uri)
    in_order = sorted(rows.tolist())
    read = take_rows(dataset, rows, names)
    steps = (
        lambda: dataset.take(in_order, columns=names),
        lambda: take_rows(dataset, rows, names),
        lambda: _collated(read),
        lambda: lance_stream(uri, num_splits=6),
    )
    times = [[_timed(step) for step in steps] for _ in range(repeats)]
    return tuple(list(each) for each in zip(*times, strict=True))


def _collated(table: pa.Table) -> None:
    collate = TensorCollateFn()
    collate.prepare(table.schema)
    tensors = with_tensor_columns(table)
    refuse_nulls(tensors)
    collate(tensors)


def _timed(function: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s
