"""What a pass holds is bounded, and let go when it ends, however it ends (guarantee 7; B16, B27, B30)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray

from ray_lance_stream import IterationError, lance_stream
from tests.integration.conftest import Shards, flat
from tests.support import live_actor_ids, live_actors, make_table

# A cluster of its own: errors that the tests of other modules keep hold blocks.
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_cluster")]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("release") / "t", 480)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """480 rows of 32 KiB."""
    path = str(tmp_path_factory.mktemp("release") / "wide")
    ids = np.arange(480)
    vec = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids.astype(np.float32), 8192)), 8192)
    lance.write_dataset(pa.table({"id": ids, "vec": vec}), path)
    return path


def eventually(what: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    until_s = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def blocks_held() -> int:
    """Blocks that this process owns and something in it still refers to. Each has an info beside it, see SplitReader."""
    refs = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return sum(ref.endswith(b"01000000") for ref in refs)


def readers() -> list[int]:
    """Process ids of the readers that run."""
    actors = ray._private.state.actors().values()
    return [a["Pid"] for a in actors if a["ActorClassName"] == "SplitReader" and a["State"] == "ALIVE"]


# ---- breaks


def broken_off(shard: Any, kept: list[Any]) -> None:
    for number, _ in enumerate(shard.iter_batches(batch_size=48, prefetch_batches=4)):
        if number:
            break


def kept_by_the_loop(shard: Any, kept: list[Any]) -> None:
    kept.append(iter(shard.iter_batches(batch_size=48, prefetch_batches=4)))
    next(kept[-1]), next(kept[-1])


def raised_in(shard: Any, kept: list[Any]) -> None:
    rows = shard.iter_rows()
    with pytest.raises(KeyError):
        [row["no such column"] for row in rows]


@pytest.mark.parametrize("leave", [broken_off, kept_by_the_loop, raised_in])
def test_passes_left_early_leave_nothing(shards: Shards, wide, leave):
    """B27: threads, files and objects stay flat over many rounds."""
    shard = shards(wide, columns=["id", "vec"], read_batch_size=1)
    kept: list[Any] = []
    for _ in range(3):
        leave(shard, kept)
    assert eventually(lambda: threading.active_count() < 20)
    threads, files = threading.active_count(), open_files()
    for _ in range(30):
        leave(shard, kept)
    assert eventually(lambda: threading.active_count() <= threads), [t.name for t in threading.enumerate()]
    assert eventually(lambda: open_files() < files + 10)  # Ray opens a connection now and then
    if kept:
        with pytest.raises(IterationError, match="another pass"):
            next(kept[0])
    assert shard._pass is None or leave is kept_by_the_loop
    if shard._pass is not None:
        shard._end_pass(shard._pass)  # what close() does; the readers are for the other tests
    assert eventually(lambda: not blocks_held()), blocks_held()


def test_a_shard_goes_with_its_last_holder(shards: Shards, table):
    """Without the garbage collector: what it holds are readers, and `report` saves the shards that there are."""
    shard = shards.of(shards.stream(table).map_batches(lambda batch: batch))
    held = weakref.ref(shard)
    shard.stats()
    assert len(flat(shard.iter_batches(batch_size=48))) > 0
    assert shard._supply.ahead.window is not None
    shard.state_dict()
    gc.collect()
    gc.disable()
    try:
        del shard
        assert held() is None
    finally:
        gc.enable()


def test_closing_lets_readers_go(table, cluster):
    stream = lance_stream(table, num_splits=48)
    shard = stream.shard()
    for _ in range(2):
        batches = iter(shard.iter_batches(batch_size=48))
        next(batches)
        reader = stream.progress()[0]["reader"]
        assert reader in live_actor_ids("SplitReader")
        shard.close()
        with pytest.raises(IterationError, match="was closed"):
            next(batches)
        assert eventually(lambda: not blocks_held())
    stream.close()
    assert eventually(lambda: reader not in live_actor_ids("SplitReader"))


def test_a_stream_that_was_sent_away_goes_with_its_last_holder(table, cluster):
    """Its coordinator is started, and its rows and functions are shared, while Ray pickles it: Ray must still count them."""
    coordinators = live_actors("StreamCoordinator")
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    held = set(counts())
    stream = lance_stream(table, num_splits=48, filter="id % 3 = 0").map_batches(lambda batch: batch)
    sent = ray.put(stream)
    assert live_actors("StreamCoordinator") == coordinators + 1
    assert len(set(counts()) - held) == 3  # the stream, its rows and its function
    del stream, sent
    assert eventually(lambda: set(counts()) <= held), set(counts()) - held
    assert eventually(lambda: live_actors("StreamCoordinator") == coordinators)


# ---- a read that does not end


def test_a_blocked_read_blocks_nothing_else(table):
    """B16, B27: state and close() take no time while the reader hangs."""
    stream = lance_stream(table, num_splits=48, read_batch_size=1)
    shard = stream.shard()
    batches = iter(shard.iter_batches(batch_size=48, prefetch_batches=0))
    next(batches)
    stopped = readers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    failures: list[BaseException] = []

    def drain() -> None:
        try:
            flat(batches)
        except IterationError as error:
            failures.append(error)

    waiting = threading.Thread(target=drain, daemon=True)
    try:
        waiting.start()
        time.sleep(1.0)
        assert waiting.is_alive()
        asked_s = time.perf_counter()
        state = shard.state_dict()
        assert time.perf_counter() - asked_s < 0.05
        assert 1 <= state["samples_consumed_per_split"] < 10
        asked_s = time.perf_counter()
        shard.close()
        assert time.perf_counter() - asked_s < 1
        waiting.join(5)
        assert not waiting.is_alive()
        assert "was closed" in str(failures[0])
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    stream.close()


EXIT = """
import sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from ray_lance_stream import lance_stream
shard = lance_stream(sys.argv[2], num_splits=48, read_batch_size=1).shard()
batches = iter(shard.iter_batches(batch_size=48, prefetch_batches=4))
next(batches), next(batches)
if sys.argv[3] == "rows":
    rows = iter(shard.iter_rows())
    next(rows)
print(time.time(), flush=True)
if sys.argv[3] == "raise":
    for batch in shard.iter_batches(batch_size=48):
        raise RuntimeError("planned failure")
"""


@pytest.mark.parametrize("how", ["end", "rows", "raise"])
def test_the_interpreter_exits_in_the_middle_of_an_epoch(table, cluster, how):
    """B27: at once, with no word of ours, and without readers left behind."""
    before = live_actors("SplitReader")
    address = ray.get_runtime_context().gcs_address
    child = subprocess.run(
        [sys.executable, "-c", EXIT, address, table, how], capture_output=True, text=True, timeout=60, check=False
    )
    took_s = time.time() - float(child.stdout.split()[0])
    assert child.returncode == (1 if how == "raise" else 0), child.stderr
    tracebacks = child.stderr.count("Traceback")
    assert tracebacks == (1 if how == "raise" else 0), child.stderr
    assert ("planned failure" in child.stderr) == (how == "raise")
    assert "Exception ignored" not in child.stderr
    assert took_s < 6
    assert eventually(lambda: live_actors("SplitReader") <= before)


SHUTDOWN = """
import os, signal, sys, threading, time
import ray
from ray._private.state import actors
from ray_lance_stream import lance_stream

ray.init(address=sys.argv[1], log_to_driver=False)
shard = lance_stream(sys.argv[2], num_splits=12, read_batch_size=1, prefetch_chunks=1).shard()
batches = iter(shard.iter_batches(batch_size=12, prefetch_batches=1))
next(batches)
job = ray.get_runtime_context().get_job_id()
pids = [a["Pid"] for a in actors().values() if a["ActorClassName"] == "SplitReader" and a["JobID"] == job and a["Pid"]]
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
assert pids


def drain():
    try:
        list(batches)
    except Exception as error:
        print(type(error).__name__)


threading.Thread(target=drain, daemon=True).start()
time.sleep(2)  # till it waits for a read that does not come
ray.shutdown()
time.sleep(2)
print("still here")
for pid in pids:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


def test_ray_is_shut_down_while_a_read_is_waited_for(table, cluster):
    """A thread that waits for a read must not touch Ray any more: Ray would end the whole process."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", SHUTDOWN, address, table]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "still here" in child.stdout, child.stderr
    assert child.returncode == 0, child.stderr


# ---- bounds


def test_bytes_in_flight_are_bounded(shards: Shards, wide):
    """B30: with a slow loop, at most prefetch_bytes and one chunk wait; nothing is spilled."""
    bound, chunk = 2 * 2**20, 8 * (32 * 1024 + 8)
    shard = shards(wide, num_splits=8, prefetch_bytes=bound, prefetch_chunks=64)
    held: list[int] = []
    blocks: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            current = shard._pass
            if current is not None and current._window is not None:
                held.append(current._window.held_bytes())
                blocks.append(blocks_held())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for batch in shard.iter_batches(batch_size=8, prefetch_batches=2):
            assert np.array_equal(batch["vec"][:, 0], batch["id"])
            time.sleep(0.02)
    finally:
        done.set()
        watching.join()
    assert len(held) > 100
    assert bound - 2 * chunk < max(held) <= bound + chunk
    assert max(blocks) * chunk <= bound + chunk + 4 * 8 * 32 * 1024
    assert not [path for path in session().rglob("*") if "spill" in path.name and path.is_file()]


def session() -> Path:
    """Where this cluster keeps its files."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def test_rows_larger_than_any_before_are_told(shards: Shards, tmp_path, caplog):
    """Guarantee 7: chunk sizes follow the largest rows seen so far; what goes beyond the bound is told, once."""
    path = str(tmp_path / "t")
    blobs = [bytes(100)] * 400 + [bytes(100_000)] * 80
    lance.write_dataset(pa.table({"id": np.arange(480), "blob": pa.array(blobs, pa.large_binary())}), path)
    shard = shards(path, num_splits=1, shuffle=False, prefetch_bytes=600_000)
    assert flat(shard.iter_batches(batch_size=8)) == list(range(480))
    told = [record.getMessage() for record in caplog.records if "prefetch_bytes=600000" in record.getMessage()]
    assert len(told) == 1
    assert "raise prefetch_bytes, or lower prefetch_batches" in told[0]
    caplog.clear()
    assert flat(shards(path, num_splits=1, shuffle=False).iter_batches(batch_size=8)) == list(range(480))
    assert "held in flight" not in caplog.text
