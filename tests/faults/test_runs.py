"""Ray Train runs on an object store that expires credentials, fails requests and loses files (B46), and a remote table."""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import ReadError, lance_stream
from tests.faults.object_store import ObjectStore, ShortLived
from tests.faults.proxy import CUT, HANG_UP, PASS, Fault, Request
from tests.integration.conftest import Shards, flat
from tests.remote_service import RemoteService
from tests.support import Oracle, effective_history, log_loop, make_table, read_logs

pytestmark = [pytest.mark.timeout(300), pytest.mark.faults]

SECRET = "sh0rtl1vedS3cret"
LIFE_S = 1.5
NUM_SPLITS, GLOBAL_BATCH = 12, 24
M = GLOBAL_BATCH // NUM_SPLITS
ROWS = 30 * GLOBAL_BATCH
STEPS = Oracle(np.arange(ROWS), NUM_SPLITS, M).steps([0])


@pytest.fixture(scope="module")
def uri(bucket: ObjectStore) -> str:
    """A table of a few files, in the bucket."""
    return make_table(bucket.uri("t"), ROWS, storage_options=bucket.options(through_proxy=False))


@pytest.fixture
def provider(store: ObjectStore, tmp_path: Path) -> ShortLived:
    """Credentials that the proxy lets pass for a moment; no others."""
    (tmp_path / "calls").mkdir()
    provider = ShortLived(store.proxy.port, LIFE_S, SECRET, str(tmp_path / "calls"))
    store.proxy.allowed = provider.allows
    return provider


def shown_loop(config: dict[str, Any]) -> None:
    """log_loop, after what a user prints when something is odd, which ends up in the logs."""
    shard = ray.train.get_dataset_shard("train")
    print("the shard is", shard, repr(shard), shard.state_dict(), shard.stats())
    log_loop(config)


def fit(uri: str, folder: Path, world: int, tag: str, storage_options: Any, failures: int = 0, **config: Any) -> Any:
    """One `fit()` over an epoch, read step by step; the run name and the storage path are the same in a folder."""
    made = lance_stream(
        uri, num_splits=NUM_SPLITS, read_batch_size=M, prefetch_chunks=1, storage_options=storage_options
    )
    assert SECRET not in repr(made) + str(made)
    folder.mkdir(exist_ok=True)
    return DataParallelTrainer(
        shown_loop,
        train_loop_config={"dir": str(folder), "tag": tag, "global_batch": GLOBAL_BATCH, "epochs": 1, **config},
        datasets={"train": made},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()


def files_with(text: str, folder: Path) -> list[Path]:
    """Regular files below a folder that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if text.encode() in path.read_bytes()]


def session_folder() -> Path:
    """Where the Ray session keeps its logs, among others."""
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_session_dir_path())


def starts(folder: Path) -> list[tuple[str, int, tuple[int, int]]]:
    """(tag, workers, position) of each attempt."""
    return [(attempt.tag, attempt.world, attempt.start) for attempt in read_logs(folder)]


def sometimes(faults: list[Fault], share: float) -> Callable[[Request], Fault]:
    """A share of the requests fails, each time in another way."""
    chance = random.Random(7)
    return lambda request: chance.choice(faults) if chance.random() < share else PASS


def when(folder: Path, batches: int, action: Callable[[], Any]) -> None:
    """`action()`, in a thread, once rank 0 of the second attempt has logged so many batches."""

    def wait() -> None:
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s:
            logs = sorted(folder.glob("a-*-0.jsonl"))  # by their time
            if len(logs) == 2 and logs[1].read_text().count("\n") > batches:
                action()
                return
            time.sleep(0.05)

    threading.Thread(target=wait, daemon=True).start()


def test_a_run_on_a_bad_object_store(cluster, store: ObjectStore, uri: str, provider: ShortLived, tmp_path, caplog):
    """Credentials run out, 5% of the requests fail, a worker fails: nothing is lost. Then a data file is cut short: the run
    ends and says which one. With the file restored it goes on from its checkpoint, with other options on other workers."""
    folder = tmp_path / "run"
    store.proxy.fault = sometimes([500, 503, 429, CUT, HANG_UP], 0.05)
    key = max(store.files("t/data/"), key=lambda key: len(store.request("GET", key)))  # each step has rows of it
    whole = store.request("GET", key)
    when(folder, 7, lambda: store.request("PUT", key, whole[:10]))
    with pytest.raises(ray.train.TrainingFailedError) as failed:
        fit(
            uri,
            folder,
            2,
            "a",
            provider,
            failures=1,
            save_every=5,
            stop_after=14,
            stop="raise",
            stop_rank=1,
            sleep_s=0.6,  # the file is cut short after 7 steps, and is to be met before the 14th
        )
    said = str(failed.value)
    assert "ReadError" in said
    assert re.search(rf"rows of table {uri} version \d+, offsets \d+ to \d+, could not be read", said)
    assert f"Damaged or unreadable: {key.removeprefix('t/')}" in said

    passed = [request for request, what in store.proxy.requests if what == PASS]
    assert len({request.token for request in passed}) >= 6
    assert passed[-1].at_s - passed[0].at_s > 3 * LIFE_S
    assert len({path.name.split("-")[0] for path in Path(provider.folder).iterdir()}) >= 3, "driver and two readers ask"
    assert all(store.proxy.count(fault) for fault in (500, 503, 429, CUT, HANG_UP))

    store.request("PUT", key, whole)
    store.proxy.allowed = lambda request: True
    fit(uri, folder, 3, "b", store.options())
    assert [(tag, world) for tag, world, _ in starts(folder)] == [("a", 2), ("a", 2), ("b", 3)]
    assert starts(folder)[1][2] == (0, 20)
    assert starts(folder)[2][2] in [(0, 30), (0, 40)]  # how soon the file is read again is open
    assert effective_history(read_logs(folder), M) == STEPS

    assert SECRET not in "".join(traceback.format_exception(failed.value))
    assert SECRET not in caplog.text
    assert files_with("the shard is", session_folder()), "what workers print is found in the logs"
    assert files_with(SECRET, session_folder()) == []
    assert files_with(SECRET, tmp_path) == []


def test_a_run_that_is_locked_out_ends_at_once(
    shards: Shards, store: ObjectStore, uri: str, provider: ShortLived, caplog
):
    """No retries for credentials; and no text holds them, although the object store repeats those that it refuses."""
    stream = shards.stream(uri, num_splits=NUM_SPLITS, storage_options=provider)
    shard = shards.of(stream)
    store.proxy.allowed = lambda request: not request.is_data
    began_s = time.monotonic()
    with pytest.raises(ReadError, match=rf"rows of table {uri} .*403 Forbidden.*<Token-0>\*\*\*<") as refused:
        flat(shard.iter_batches(batch_size=NUM_SPLITS))
    assert time.monotonic() - began_s < 60  # retries would take 86 s
    assert SECRET not in "".join(traceback.format_exception(refused.value)) + caplog.text
    assert files_with(SECRET, session_folder()) == []


def test_later_epochs_of_a_cached_stream_ask_the_store_for_nothing(
    shards: Shards, store: ObjectStore, uri: str, tmp_path
):
    """Read by two readers, each in a process of its own, that share the cache; the rows are those without it."""
    plain = shards.of(shards.stream(uri, storage_options=store.options()))
    wanted = [flat(plain.iter_batches()) for _ in range(3)]
    cached = {"storage_options": store.options(), "cache_dir": tmp_path, "readers_per_worker": 2}
    shard = shards.of(shards.stream(uri, **cached))
    assert flat(shard.iter_batches()) == wanted[0]
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        store.proxy.requests.clear()
        shard.set_epoch(1)
        assert flat(shard.iter_batches()) == wanted[1]
        if not store.proxy.data_requests:
            break
    store.proxy.fault = lambda request: 503
    assert flat(shard.iter_batches()) == wanted[2]


def test_a_remote_table_is_streamed_as_the_table_itself(shards: Shards, tmp_path):
    """By readers in other processes, with a filter, and on from a state."""
    path = make_table(tmp_path / "t.lance", ROWS)
    service = RemoteService(tmp_path, SECRET)
    try:
        table = service.connect().open_table("t")
        kinds: list[list[list[int]]] = []
        for source in (path, table):
            stream = shards.stream(source, num_splits=NUM_SPLITS, filter="id % 5 <> 0", global_batch_size=GLOBAL_BATCH)
            first = shards.of(stream)
            batches = iter(first.iter_batches())
            received = [flat([next(batches)]) for _ in range(4)]
            state = first.state_dict()
            ranks = [flat(shard.iter_batches()) for shard in shards.group(stream, 2, state)]
            kinds.append([*received, *ranks])
        assert kinds[0] == kinds[1]
        assert state["table_uri"] == "db://tests/t"
        assert SECRET not in f"{state} {stream!r} {first!r}"
    finally:
        service.close()
