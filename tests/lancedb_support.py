"""What LanceDB's own loader delivers, for comparison with the orders that are taken over from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.streaming import StreamingDataset

from ray_lance_stream.row_lists import driver_lists
from ray_lance_stream.splits import split_block
from ray_lance_stream.stream import LanceStream
from tests.support import FRAGMENT_ROWS, fixed_size


def make_lancedb_table(folder: Path | str, num_rows: int, name: str = "t", **options: str) -> Any:
    """A LanceDB table of T(n), see tests.support.make_table, in uneven fragments."""
    ids = np.arange(num_rows)
    data = pa.table({"id": ids, "value": 3 * ids + 1, "vec": fixed_size(ids)})
    database = lancedb.connect(folder, storage_options=options or None)
    table = database.create_table(name, data.slice(0, FRAGMENT_ROWS[0]))
    start, turn = FRAGMENT_ROWS[0], 1
    while start < num_rows:
        table.add(data.slice(start, FRAGMENT_ROWS[turn % len(FRAGMENT_ROWS)]))
        start, turn = start + FRAGMENT_ROWS[turn % len(FRAGMENT_ROWS)], turn + 1
    return table


def streaming(table: Any, state: dict[str, Any] | None = None, **options: Any) -> StreamingDataset:
    """LanceDB's loader, continued from a state as its users do it."""
    dataset = StreamingDataset(table, **options, **({} if state is None else {"epoch": state["epoch"]}))
    if state is not None:
        dataset.load_state_dict(state)
    return dataset


def ids_from(dataset: StreamingDataset) -> list[int]:
    """The ids that LanceDB's loader delivers."""
    return [row["id"] for row in dataset]


def planned_ids(stream: LanceStream, epoch: int, rank: int = 0, world_size: int = 1) -> list[int]:
    """The ids that a stream plans for a rank and an epoch."""
    plan = driver_lists.plan_of(stream._plan, epoch)
    grid = plan.grid
    rows = plan.resolve().rows(epoch, split_block(grid.num_splits, world_size, rank), 0, grid.num_cycles)
    return plan.table.open().take(rows, columns=["id"])["id"].to_pylist()
