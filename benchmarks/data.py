"""The tables of the benchmarks, generated once into a folder and found there by later runs."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata

from benchmarks.common import Context, say

TOKENS_PER_ROW = 512
VECTOR_DIM = 768
WRITTEN_ROWS = 50_000  # at a time
FRAGMENT_ROWS = 3

Rows = tuple[int, int]
MakeRows = Callable[[np.random.Generator, Rows], pa.Table]


def _narrow(rng: np.random.Generator, rows: Rows) -> pa.Table:
    ids = np.arange(*rows, dtype=np.int64)
    return pa.table({"id": ids, "value": rng.integers(0, 1 << 40, len(ids))})


def _tokens(rng: np.random.Generator, rows: Rows) -> pa.Table:
    size = rows[1] - rows[0]
    flat = rng.integers(0, 50_000, size * TOKENS_PER_ROW, dtype=np.int32)
    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, TOKENS_PER_ROW)})


def _vectors(rng: np.random.Generator, rows: Rows) -> pa.Table:
    size = rows[1] - rows[0]
    flat = rng.standard_normal(size * VECTOR_DIM, dtype=np.float32)
    return pa.table({"vector": pa.FixedSizeListArray.from_arrays(flat, VECTOR_DIM)})


def _images(rng: np.random.Generator, rows: Rows) -> pa.Table:
    sizes = rng.integers(20_000, 60_000, rows[1] - rows[0])
    values = pa.array([rng.bytes(int(size)) for size in sizes], pa.binary())
    return pa.table({"image": values, "label": rng.integers(0, 1000, len(sizes))})


def _text(rng: np.random.Generator, rows: Rows) -> pa.Table:
    """Four text columns of 200 to 2,000 characters."""
    words = np.array(["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), n)) for n in rng.integers(2, 10, 5000)])
    columns = {}
    for name in ("title", "body", "summary", "source"):
        lengths = rng.integers(40, 300, rows[1] - rows[0])
        picked = words[rng.integers(0, len(words), int(lengths.sum()))]
        ends = np.cumsum(lengths)
        columns[name] = [" ".join(picked[end - size : end]) for end, size in zip(ends, lengths, strict=True)]
    return pa.table(columns)


# name -> (how, rows, rows with --quick)
TABLES: dict[str, tuple[MakeRows, int, int]] = {
    "narrow": (_narrow, 1_000_000, 50_000),
    "tokens": (_tokens, 200_000, 10_000),
    "vectors": (_vectors, 100_000, 5_000),
    "images": (_images, 10_000, 500),
    "text": (_text, 50_000, 2_000),
    "large": (_narrow, 20_000_000, 200_000),
}


def num_rows(context: Context, name: str) -> int:
    """Rows of a table."""
    _, full, quick = TABLES[name]
    return quick if context.quick else full


def table_uri(context: Context, name: str) -> str:
    """Path of a table, generated if it is not there."""
    folder = context.data / ("quick" if context.quick else "full")
    path = folder / f"{name}.lance"
    if path.exists():
        return str(path)
    say(f"generating table {name}")
    folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(TABLES[name][0], num_rows(context, name))
    first = next(parts)
    unfinished = folder / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    batches = (batch for part in itertools.chain([first], parts) for batch in part.to_batches())
    lance.write_dataset(pa.RecordBatchReader.from_batches(first.schema, batches), str(unfinished))
    unfinished.rename(path)
    return str(path)


def _parts(make: MakeRows, rows: int) -> Iterator[pa.Table]:
    rng = np.random.default_rng(0)
    for start in range(0, rows, WRITTEN_ROWS):
        yield make(rng, (start, min(start + WRITTEN_ROWS, rows)))


def database_of(uri: str) -> tuple[str, str]:
    """(LanceDB database, table name) of a table's path."""
    path = Path(uri)
    return str(path.parent), path.stem


def commit_fragments(uri: str, fragments: int) -> None:
    """Write a table of many fragments, which share four files of FRAGMENT_ROWS rows: so many files would take minutes."""
    written = lance.write_dataset(pa.table({"id": np.arange(4 * FRAGMENT_ROWS)}), uri, max_rows_per_file=FRAGMENT_ROWS)
    files = [fragment.metadata.files for fragment in written.get_fragments()]
    metadata = [FragmentMetadata(i, files[i % 4], FRAGMENT_ROWS) for i in range(fragments)]
    operation = lance.LanceOperation.Overwrite(written.schema, metadata)
    lance.LanceDataset.commit(uri, operation, read_version=written.version)
