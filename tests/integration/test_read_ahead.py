"""The next pass begins to read while the loop consumes the last chunks of the running one, within the same bounds."""

from __future__ import annotations

from typing import Any

import pytest

from ray_lance_stream import StreamShard
from ray_lance_stream.pool import ReaderPool
from ray_lance_stream.reader import ReadRequest
from tests.integration.conftest import Shards, flat
from tests.support import Oracle, make_table, scan_ids

pytestmark = pytest.mark.timeout(120)

NUM_ROWS = 480  # ten cycles
CYCLE = 48
ROW_BYTES = 32


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("ahead") / "t", NUM_ROWS)


@pytest.fixture(scope="module")
def epochs(table) -> list[list[int]]:
    """The ids of each epoch in order."""
    oracle = Oracle(scan_ids(table), CYCLE, 1)
    return [[i for step in oracle.epoch(epoch) for i in step.tolist()] for epoch in range(4)]


@pytest.fixture
def sent(monkeypatch) -> Any:
    """Has the reads of a shard noted: a list of (epoch, cycle)."""

    def note(shard: StreamShard) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        send = shard._supply.readers.send

        def noted(request: ReadRequest) -> Any:
            found.append((request.epoch, request.span.start))
            return send(request)

        monkeypatch.setattr(shard._supply.readers, "send", noted)
        return found

    return note


def passes(shard: StreamShard, count: int) -> list[list[int]]:
    return [flat(shard.iter_batches(batch_size=CYCLE, prefetch_batches=0)) for _ in range(count)]


def test_the_next_pass_is_read_before_the_last_batch_and_nothing_twice(shards: Shards, table, epochs, sent):
    shard = shards(table, read_batch_size=1, prefetch_chunks=3)
    reads = sent(shard)
    ids: list[int] = []
    ahead: list[int] = []
    for batch in shard.iter_batches(batch_size=CYCLE, prefetch_batches=0):
        ids += batch["id"].tolist()
        ahead.append([epoch for epoch, _ in reads].count(1))
    assert ahead[0] == 0
    assert ahead[-2] == 3  # before the last batch, and no more than prefetch_chunks
    assert [ids, *passes(shard, 2)] == epochs[:3]
    assert sorted(set(reads)) == sorted(reads)
    assert shard.state_dict()["epoch"] == 3


def test_an_epoch_that_fits_one_chunk_is_one_read_once_sizes_are_known(shards: Shards, table, epochs, sent):
    shard = shards(table)
    reads = sent(shard)
    assert passes(shard, 4) == epochs
    assert [epoch for epoch, _ in reads].count(0) > 1  # begins small, so that the first batch comes soon
    assert reads.count((3, 0)) == [epoch for epoch, _ in reads].count(3) == 1


def ahead_bytes(shard: StreamShard) -> int:
    """Bytes of what is read ahead."""
    window = shard._supply.ahead.window
    return window.held_bytes() if window is not None else 0


def test_both_passes_together_keep_to_prefetch_bytes(shards: Shards, table, epochs):
    cycle_bytes = CYCLE * ROW_BYTES
    bound = 4 * cycle_bytes
    shard = shards(table, read_batch_size=1, prefetch_chunks=8, prefetch_bytes=bound)
    held, ids = [], []
    for batch in shard.iter_batches(batch_size=CYCLE, prefetch_batches=0):
        held.append(shard._supply.in_flight()[1])
        ids += batch["id"].tolist()
    assert ids == epochs[0]
    assert max(held) <= bound + cycle_bytes
    assert ahead_bytes(shard) > 0
    shard._supply.ahead.drop()


def leave(shard: StreamShard) -> None:
    """The running pass is left before its end."""
    for number, _ in enumerate(shard.iter_batches(batch_size=CYCLE, prefetch_batches=0), start=1):
        if number == 9:
            break


def go_back(shard: StreamShard) -> None:
    passes(shard, 1)
    shard.set_epoch(0)


def load(shard: StreamShard) -> None:
    state = shard.state_dict()
    passes(shard, 1)
    shard.load_state_dict(state)


@pytest.mark.parametrize(("what", "epoch"), [(leave, 1), (go_back, 0), (load, 0)])
def test_another_pass_than_the_next_one_is_read_anew(shards: Shards, table, epochs, what, epoch):
    shard = shards(table, read_batch_size=1)
    what(shard)
    if what is leave:
        assert ahead_bytes(shard) == 0
    assert passes(shard, 2) == epochs[epoch : epoch + 2]


def test_another_batch_size_is_read_anew(shards: Shards, table, epochs):
    shard = shards(table, read_batch_size=1)
    passes(shard, 1)
    assert flat(shard.iter_batches(batch_size=2 * CYCLE)) == epochs[1]
    assert flat(shard.iter_batches(batch_size=7 * CYCLE, drop_last=True)) == epochs[2][: 7 * CYCLE]
    assert flat(shard.iter_batches(batch_size=7 * CYCLE, drop_last=True)) == epochs[3][: 7 * CYCLE]


def test_what_was_read_ahead_goes_when_the_shard_is_closed(shards: Shards, table):
    shard = shards(table, read_batch_size=1)
    passes(shard, 1)
    assert ahead_bytes(shard) > 0
    shard._supply.readers = ReaderPool(1, lambda *_: pytest.fail("asked for"))  # the other tests' readers stay
    shard.close()
    assert ahead_bytes(shard) == 0


def test_evaluation_reads_nothing_ahead(shards: Shards, table, sent):
    shard = shards(table, read_batch_size=1, evaluation=True)
    reads = sent(shard)
    passes(shard, 1)
    assert {epoch for epoch, _ in reads} == {0}
