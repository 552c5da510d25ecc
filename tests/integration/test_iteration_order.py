"""The rows of a shard come in the order of the oracle, whatever is read ahead and however threads and reads interleave.

Guarantees 1 and 2; B41, B49 and the order trap of Ray's batching. Orders are compared, never sets.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from ray.data.collate_fn import ArrowBatchCollateFn, NumpyBatchCollateFn

from tests.integration.conftest import Shards, flat, ids_of
from tests.support import Oracle, make_table, scan_ids

pytestmark = pytest.mark.timeout(120)

ROWS = 960
PREFETCH = (0, 1, 2, 4, 16)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("order") / "t", ROWS)


@pytest.fixture(scope="module")
def oracle(table) -> Oracle:
    return Oracle(scan_ids(table), 48, 1)


def rows_of_rank(oracle: Oracle, epoch: int, rank: int, world: int) -> list[int]:
    """The ids of one rank: its columns of each cycle of one worker."""
    cycles = np.concatenate(oracle.epoch(epoch)).reshape(-1, 48)
    return cycles[:, rank * 48 // world : (rank + 1) * 48 // world].reshape(-1).tolist()


class Uneven(NumpyBatchCollateFn):
    """Takes a different time for each batch, so that threads finish out of order."""

    def __init__(self, longest_s: float, seed: int | None = None) -> None:
        self._longest_s = longest_s
        self._random = random.Random(seed) if seed is not None else None

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        part = self._random.random() if self._random else (int(batch["id"][0]) * 2654435761 % 97) / 97
        time.sleep(self._longest_s * part**3)
        return {"id": torch.as_tensor(batch["id"])}


# ---- every way of reading ahead


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_order_is_the_oracles_for_every_chunk_size_and_depth(shards: Shards, table, oracle, prefetch):
    expected = np.concatenate(oracle.epoch(0)).tolist()
    for read_batch_size in (1, 3, None):
        for prefetch_chunks in (1, 4):
            stream = shards.stream(table, read_batch_size=read_batch_size, prefetch_chunks=prefetch_chunks)
            batches = [ids_of(b) for b in shards.of(stream).iter_batches(batch_size=96, prefetch_batches=prefetch)]
            assert [len(ids) for ids in batches] == [96] * 10
            assert [i for ids in batches for i in ids] == expected, (read_batch_size, prefetch_chunks)


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("options", [{"prefetch_bytes": 1}, {"readers_per_worker": 2, "read_batch_size": 1}], ids=str)
def test_order_with_no_room_to_read_ahead_and_with_two_readers(shards: Shards, table, oracle, prefetch, options):
    """With room for one byte each read is a single cycle, one at a time: slow, but neither stuck nor out of order."""
    shard = shards.of(shards.stream(table, **options), 1, 3)
    assert flat(shard.iter_batches(batch_size=16, prefetch_batches=prefetch)) == rows_of_rank(oracle, 0, 1, 3)


def test_every_way_to_iterate_gives_the_same_rows(shards: Shards, table, oracle):
    """One epoch after another, each through another method of `DataIterator`."""
    shard = shards.of(shards.stream(table), 2, 4)
    ways = [
        lambda: flat(shard.iter_batches(batch_size=12)),
        lambda: flat(shard.iter_batches(batch_size=12, batch_format="pyarrow")),
        lambda: flat(shard.iter_batches(batch_size=12, batch_format="pandas")),
        lambda: flat(shard.iter_torch_batches(batch_size=12, prefetch_batches=4)),
        lambda: flat(shard.iter_rows()),
        lambda: flat(shard.materialize().iter_rows()),
        lambda: [
            i for (ids, _) in shard.to_torch(feature_columns=["id"], batch_size=12) for i in ids.view(-1).tolist()
        ],
    ]
    for epoch, rows in enumerate(ways):
        assert shard.epoch == epoch
        assert rows() == rows_of_rank(oracle, epoch, 2, 4), epoch
    assert shard.state_dict()["epoch"] == len(ways)


def test_columns_keep_their_rows_and_types(shards: Shards, table):
    """Values belong to their ids, vectors are tensors of numbers, and no tensor shares read-only memory."""
    stream = shards.stream(table)
    for batch in shards.of(stream).iter_torch_batches(batch_size=96):
        assert batch["vec"].shape == (96, 4)
        assert batch["vec"].dtype == torch.float32
        assert torch.equal(batch["value"], 3 * batch["id"] + 1)
        assert torch.equal(batch["vec"][:, 2], batch["id"] + torch.tensor(0.25))
        batch["vec"].add_(1)
    shard = shards.of(stream)
    assert shard.schema().names == ["id", "value", "vec"]
    for row in shard.iter_rows():
        assert (row["value"], row["vec"][0]) == (3 * row["id"] + 1, row["id"])


class Sums(ArrowBatchCollateFn):
    def __call__(self, batch: pa.Table) -> torch.Tensor:
        return torch.as_tensor(batch["id"].to_numpy())


def test_torch_options_keep_order_and_count(shards: Shards, table, oracle):
    """dtypes, device, pin_memory and both kinds of collate_fn go through the shard's own counting."""
    expected = np.concatenate(oracle.epoch(0)).tolist()
    stream = shards.stream(table, columns=["id"])
    for options in (
        {"dtypes": torch.float64, "device": "cpu", "pin_memory": False},
        {"collate_fn": Uneven(0)},
        {"collate_fn": Sums(), "prefetch_batches": 0},
    ):
        shard = shards.of(stream)
        got: list[int] = []
        for number, batch in enumerate(shard.iter_torch_batches(batch_size=96, **options), start=1):
            ids = batch if isinstance(batch, torch.Tensor) else batch["id"]
            assert ids.dtype == options.get("dtypes", torch.int64)
            got += ids.int().tolist()
            assert shard.state_dict()["samples_consumed_per_split"] == (2 * number if number < 10 else 0)
        assert got == expected


# ---- time and order


@pytest.mark.parametrize("prefetch", [2, 4, 16])
def test_batches_that_finish_out_of_order_come_in_order(shards: Shards, table, oracle, prefetch):
    """The order trap: threads of Ray's batching hand out what is ready unless the shard's context says otherwise."""
    shard = shards(table)
    got = shard.iter_torch_batches(batch_size=48, prefetch_batches=prefetch, collate_fn=Uneven(0.06))
    assert flat(got) == np.concatenate(oracle.epoch(0)).tolist()


def test_a_slow_batch_does_not_let_the_rest_of_the_epoch_pile_up(shards: Shards, table):
    """Ray keeps batches that are early in a buffer without bound (guarantee 7)."""
    started: list[int] = []
    go_on = threading.Event()

    class First(NumpyBatchCollateFn):
        def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            started.append(len(started))
            if len(started) == 1:
                go_on.wait(20)
            return batch

    batches = iter(shards(table).iter_torch_batches(batch_size=12, prefetch_batches=4, collate_fn=First()))
    rows: list[int] = []
    reading = threading.Thread(target=lambda: rows.extend(flat(batches)), daemon=True)
    reading.start()
    while not started:
        time.sleep(0.01)
    time.sleep(1)
    ahead = len(started)
    go_on.set()
    reading.join(30)
    assert len(rows) == ROWS
    assert ahead <= 16, f"{ahead} of 80 batches were formatted while the first one was not"


def test_delays_load_and_depth_do_not_change_what_a_rank_gets(shards: Shards, table, oracle):
    """B49: batches of each rank of W=3, hashed in order, under CPU load, random delays and other reader settings."""
    calm = shards.stream(table)
    variants: list[tuple[Any, dict[str, Any]]] = [
        (calm, {"prefetch_batches": 0}),
        (shards.stream(table, readers_per_worker=2, read_batch_size=1, prefetch_chunks=8), {"prefetch_batches": 16}),
        (shards.stream(table, readers_per_worker=2, prefetch_bytes=20_000), {"prefetch_batches": 4}),
    ]
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(10_000))

    hashes = []
    threads = [threading.Thread(target=burn, daemon=True) for _ in range(2)]
    for number, (stream, options) in enumerate(variants):
        if number == 1:
            for thread in threads:
                thread.start()
        ranks = []
        for rank, shard in enumerate(shards.group(stream, 3)):
            options["collate_fn"] = Uneven(0.02 if number else 0, seed=number * 3 + rank)
            ranks.append([hash(tuple(ids_of(b))) for b in shard.iter_torch_batches(batch_size=32, **options)])
        hashes.append(ranks)
    stop.set()
    assert hashes[0] == hashes[1] == hashes[2]
    expected = [rows_of_rank(oracle, 0, rank, 3) for rank in range(3)]
    assert hashes[0] == [[hash(tuple(ids[i : i + 32])) for i in range(0, len(ids), 32)] for ids in expected]
