"""Readers, coordinators, blocks and threads that are lost on the way: the rows stay exact, or the cause is told (B22).

Guarantees 2 and 8, and the end trap: threads of Ray's batching that die without a word.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.data._internal.block_batching import util as ray_batching
from ray.data.collate_fn import NumpyBatchCollateFn

from ray_lance_stream import IterationError, ReadError, VersionNotFoundError, lance_stream, watch, window
from ray_lance_stream._ray import BatchIterator
from ray_lance_stream.pool import ReaderPool
from tests.integration.conftest import Shards, flat, ids_of
from tests.support import Oracle, make_table, scan_ids

pytestmark = [pytest.mark.timeout(120), pytest.mark.faults]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("faults") / "t", 480)


@pytest.fixture(scope="module")
def expected(table) -> list[int]:
    """Epoch 0 of 48 splits."""
    return np.concatenate(Oracle(scan_ids(table), 48, 1).epoch(0)).tolist()


def running_readers() -> list[dict[str, Any]]:
    actors = ray._private.state.actors().values()
    return [actor for actor in actors if actor["ActorClassName"] == "SplitReader" and actor["State"] == "ALIVE"]


def kill_readers() -> None:
    """SIGKILL every reader of the cluster."""
    for actor in running_readers():
        os.kill(actor["Pid"], signal.SIGKILL)


# ---- what is lost is read again


@pytest.mark.parametrize("readers", [1, 2])
def test_killed_readers_lose_nothing(shards: Shards, table, expected, readers):
    """B15: all of them, twice within the epoch."""
    shard = shards(table, read_batch_size=1, readers_per_worker=readers)
    rows: list[int] = []
    for number, batch in enumerate(shard.iter_batches(batch_size=48), start=1):
        rows += ids_of(batch)
        if number in (2, 5):
            kill_readers()
    assert rows == expected


def test_a_killed_coordinator_loses_nothing(table, expected):
    """Its readers die with it; the one that restarts hands out new ones (B31)."""
    others = len(running_readers())
    stream = lance_stream(table, num_splits=48, read_batch_size=1, prefetch_chunks=2)
    shard = stream.shard()
    rows: list[int] = []
    for number, batch in enumerate(shard.iter_batches(batch_size=48, prefetch_batches=0), start=1):
        rows += ids_of(batch)
        if number == 3:
            ray.kill(stream._coordinator, no_restart=False)
    assert rows == expected
    assert len(running_readers()) == others + 1  # none that nobody has asked for
    stream.close()


def test_lost_blocks_are_read_again(shards: Shards, table, expected, monkeypatch, caplog):
    """Blocks whose node has gone between the end of the read and the fetch."""
    lost: set[ray.ObjectRef] = set()
    get = ray.get

    def get_or_lose(refs: Any, **options: Any) -> Any:
        if isinstance(refs, ray.ObjectRef) and refs in lost:
            lost.remove(refs)
            raise ray.exceptions.ObjectLostError(refs.hex(), None, "")
        return get(refs, **options)

    monkeypatch.setattr(ray, "get", get_or_lose)
    shard = shards(table, read_batch_size=1)
    rows: list[int] = []
    for number, batch in enumerate(shard.iter_batches(batch_size=48, prefetch_batches=0), start=1):
        rows += ids_of(batch)
        if number == 3:
            lost |= {read.sent.block_ref for read in shard._pass._window._reads}
            count = len(lost)
    assert rows == expected
    told = [record.getMessage() for record in caplog.records if "(ObjectLostError)" in record.getMessage()]
    assert len(told) == count - len(lost) > 0  # a read that was sent again for another reason has another block


def test_a_reader_that_hangs_is_replaced(table, expected, monkeypatch, caplog, cluster):
    """A read that makes no progress cannot be cancelled: its reader is ended, and the read sent to another. What is waited
    for is told, with process and place."""
    monkeypatch.setattr(watch, "ANSWER_S", 1.0)
    stream = lance_stream(table, num_splits=48, read_batch_size=1, read_timeout_s=5.0, stall_warn_s=1.0)
    shard = stream.shard()
    rows: list[int] = []
    stopped: list[dict[str, Any]] = []
    try:
        for number, batch in enumerate(shard.iter_batches(batch_size=48, prefetch_batches=0), start=1):
            rows += ids_of(batch)
            if number == 3:
                serving = shard._pass._window._reads[-1].sent.reader._actor_id.hex()
                stopped = [actor for actor in running_readers() if actor["ActorID"] == serving]
                for actor in stopped:
                    os.kill(actor["Pid"], signal.SIGSTOP)
    finally:
        for actor in stopped:
            with suppress(ProcessLookupError):
                os.kill(actor["Pid"], signal.SIGCONT)
    assert len(stopped) == 1
    assert rows == expected
    address, pid = stopped[0]["Address"], stopped[0]["Pid"]
    place = f"{stopped[0]['ActorID']} (ALIVE, on node {address['NodeID']} ({address['IPAddress']}), pid {pid})"
    chunk = rf": epoch 0, splits \[0, 48\), cycles \[\d, \d\) of {re.escape(table)} version \d+, attempt 1 of 4"
    silent = rf"reader {re.escape(place)}, which does not answer{chunk}"
    assert re.search(rf"still waiting after \d+ s for {silent}", caplog.text)
    assert re.search(rf"reader ended: no progress for \d+ s of {silent}", caplog.text)
    stream.close()


def test_a_read_that_hangs_in_every_reader_is_told(tmp_path, monkeypatch, cluster):
    """A data file that is never opened: a pipe without a writer. A reader hangs as it starts, when it tries a first read."""
    monkeypatch.setattr(window, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)
    path = make_table(tmp_path / "t", 480)
    stream = lance_stream(path, num_splits=48, read_timeout_s=1.5)
    shard = stream.shard()
    for file in Path(path, "data").iterdir():
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(ReadError, match=r"cannot read epoch 0, splits \[0, 48\), cycles \[0, \d+\) of ") as told:
        flat(shard.iter_batches(batch_size=48))
    said = str(told.value)
    assert path in said
    assert re.search(
        r"lost 2 times, at last to NoProgressError: no progress for \d+ s of reader \w+ \([A-Z_]+, on node", said
    )
    assert re.search(r"which (does not answer|has been reading for \d+ s): epoch 0.*, attempt 2 of 2$", said)
    assert shard.state_dict()["samples_consumed_per_split"] == 0
    stream.close()


@ray.remote(num_cpus=0)
class Dying:
    """A reader that no read survives."""

    @ray.method(num_returns=2)
    def read(self, request: Any) -> Any:
        os._exit(1)


def test_a_read_that_kills_every_reader_is_told(shards: Shards, table, monkeypatch):
    monkeypatch.setattr(window, "MAX_ATTEMPTS", 2)
    shard = shards(table)
    shard._supply.readers = ReaderPool(1, lambda slot, fresh: (Dying.remote(), None))
    with pytest.raises(ReadError, match=r"epoch 0, splits \[0, 48\).*lost 2 times, at last to ActorDiedError") as told:
        flat(shard.iter_batches(batch_size=48))
    assert table in str(told.value)
    assert shard.state_dict()["samples_consumed_per_split"] == 0


class Idle:
    """A reader that does nothing."""

    class read:
        remote = staticmethod(lambda request: [object(), object()])


def test_a_read_sent_again_meets_no_other_dead_reader():
    """All readers die with the coordinator: attempts must not be spent on going through them one by one."""
    made: list[Any] = []

    def claim(slot: int, fresh: bool) -> tuple[Any, None]:
        made.append(Idle())
        return made[-1], None

    pool = ReaderPool(6, claim)
    assert [pool.send(None)[0] for _ in range(8)] == made + made[:2]
    pool.drop(made[3])
    assert pool.send(None)[0] is made[6]  # the new one, although it is another one's turn
    pool.clear()
    assert pool.send(None)[0] is made[7]


def test_a_reader_that_comes_after_the_pool_was_cleared_is_not_kept():
    """A closed shard holds no reader, also where one was being started for it."""

    def claim(slot: int, fresh: bool) -> tuple[Any, None]:
        pool.clear()
        return Idle(), None

    pool = ReaderPool(1, claim)
    pool.send(None)
    assert pool._slots == [None]


# ---- what cannot be read is told


def test_missing_files_are_told_with_table_and_cause(shards: Shards, tmp_path):
    path = make_table(tmp_path / "t", 480)
    shard = shards(path)
    shutil.rmtree(f"{path}/data")
    began_s = time.monotonic()
    with pytest.raises((ReadError, VersionNotFoundError), match=r"(?i)not found") as told:
        flat(shard.iter_batches(batch_size=48))
    assert path in str(told.value)
    assert time.monotonic() - began_s < 20


def test_a_null_in_a_vector_is_told_with_column_and_row(shards: Shards, tmp_path):
    """B42: a tensor has no null; which row it is can be looked up."""
    vectors: list[Any] = [[float(i), 0.0] for i in range(96)]
    vectors[61] = None
    path = str(tmp_path / "t")
    vec = pa.array(vectors, type=pa.list_(pa.float32(), 2))
    lance.write_dataset(pa.table({"id": np.arange(96), "vec": vec}), path)
    with pytest.raises(ReadError, match=r"column 'vec'.*holds a null.*row 61 of table .*IS NOT NULL"):
        flat(shards(path).iter_batches(batch_size=48))
    assert len(flat(shards(path, columns=["id"]).iter_batches(batch_size=48))) == 96
    assert len(flat(shards(path, filter="vec is not null", num_splits=19).iter_batches(batch_size=19))) == 95


# ---- threads that die

dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Raises(NumpyBatchCollateFn):
    """Raises at its n-th call."""

    def __init__(self, error: BaseException, at: int) -> None:
        self._error, self._at, self._calls, self._lock = error, at, 0, threading.Lock()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with self._lock:
            self._calls += 1
            number = self._calls
        if number == self._at:
            raise self._error
        return batch


class Panic(BaseException):
    """As a Rust library raises it."""


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("error", [Panic("index out of bounds"), StopIteration()], ids=repr)
def test_what_ray_would_swallow_is_raised(shards: Shards, table, expected, prefetch, error):
    """End trap: Ray ends the pass as if it were complete."""
    shard = shards(table)
    rows: list[int] = []
    batches = shard.iter_torch_batches(batch_size=24, prefetch_batches=prefetch, collate_fn=Raises(error, 4))
    with pytest.raises(IterationError, match=f"collate_fn raised {type(error).__name__}") as told:
        rows.extend(i for batch in batches for i in ids_of(batch))
    assert told.value.__cause__ is error
    assert rows == expected[: len(rows)]
    assert shard.state_dict()["samples_consumed_per_split"] == len(rows) // 48
    assert len(rows) <= 5 * 24


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_ends_the_program_passes_unchanged(shards: Shards, table, prefetch, error):
    """Through Ray's threads, which would end in silence."""
    shard = shards(table)
    with pytest.raises(type(error)) as told:
        flat(shard.iter_torch_batches(batch_size=24, prefetch_batches=prefetch, collate_fn=Raises(error, 4)))
    assert told.value is error


@pytest.mark.parametrize("prefetch", [0, 4])
def test_errors_of_the_loops_own_code_pass_unchanged(shards: Shards, table, prefetch):
    error = ValueError("bad row 17")
    with pytest.raises(ValueError, match="bad row 17") as told:
        flat(shards(table).iter_torch_batches(batch_size=24, prefetch_batches=prefetch, collate_fn=Raises(error, 3)))
    assert told.value is error


@dies
@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_thread_that_ends_without_a_word_does_not_end_the_epoch(shards: Shards, table, monkeypatch, prefetch):
    """End trap: the rows that came are counted against those that were planned."""
    calls: list[int] = []
    next_batch = BatchIterator._blocks_to_batches

    def few_batches(self: BatchIterator, blocks: Any) -> Any:
        for batch in next_batch(self, blocks):
            calls.append(1)
            if len(calls) == 4:
                raise SystemExit
            yield batch

    monkeypatch.setattr(BatchIterator, "_blocks_to_batches", few_batches)
    shard = shards(table, read_batch_size=1)
    with pytest.raises(IterationError, match=r"epoch 0 ended after \d+ of 480 rows"):
        flat(shard.iter_batches(batch_size=48, prefetch_batches=prefetch))
    assert shard.state_dict()["epoch"] == 0


@dies
def test_a_thread_that_dies_over_a_batch_does_not_let_the_others_wait(shards: Shards, table, monkeypatch):
    formatted: list[int] = []
    format_batch = ray_batching._format_batch

    def format_or_die(batch: Any, **options: Any) -> Any:
        formatted.append(batch.metadata.batch_idx)
        if batch.metadata.batch_idx == 2:
            raise SystemExit
        return format_batch(batch, **options)

    monkeypatch.setattr(ray_batching, "_format_batch", format_or_die)
    with pytest.raises(IterationError, match="a thread of Ray's batching"):
        flat(shards(table).iter_batches(batch_size=12, prefetch_batches=4))
    assert len(formatted) < 20  # of 40
