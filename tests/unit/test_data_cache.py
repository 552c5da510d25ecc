"""The disk cache: the same rows with it, each file downloaded once, and no failure of it is one of a read."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import cache_files, cache_filling, cache_locks, cache_stored, data_cache, lance_stream
from ray_lance_stream.cache_files import TableFiles
from ray_lance_stream.cache_held import Held, HeldRows
from ray_lance_stream.cache_parts import CachedFile, cached_parts, manifest_names
from ray_lance_stream.cache_spec import CacheSpec, cache_spec
from ray_lance_stream.cursor import ChunkSpan
from ray_lance_stream.data_cache import CachedTable, cached_tables, take_through_cache
from ray_lance_stream.errors import ConfigError, ReadError
from ray_lance_stream.reader import ReadRequest, read_chunk
from ray_lance_stream.source import table_ref, with_cache
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.table import TableRef, open_tables
from tests.faults.file_server import FileServer
from tests.faults.object_store import SECRET_KEY, storage_options
from tests.faults.proxy import CUT, PASS, FaultProxy
from tests.support import make_table

pytestmark = pytest.mark.timeout(60)

ROWS = 480
LIVE = ROWS - 2
FILES = 9
COLUMNS = ["id", "vec"]
NO_RETRIES = {"client_max_retries": "0", "download_retry_count": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bucket: table `t` of 480 rows in 9 files, without 5 and 100, and `u` of 300 rows in 7 files."""
    folder = tmp_path_factory.mktemp("store") / "tables"
    folder.mkdir()
    lance.dataset(make_table(folder / "t", ROWS)).delete("id in (5, 100)")
    make_table(folder / "u", 300)
    return folder


@pytest.fixture
def proxy(folder: Path) -> Iterator[FaultProxy]:
    """Before the bucket."""
    server = FileServer(folder.parent)
    proxy = FaultProxy(server.port)
    yield proxy
    cached_tables.close()
    open_tables._tables.clear()
    proxy.close()
    server.close()


Make = Callable[..., TableRef]


@pytest.fixture
def cached(proxy: FaultProxy, tmp_path: Path) -> Make:
    """A table that is read through a cache in tmp_path."""

    def make(name: str = "t", max_bytes: int | None = None, **options: str) -> TableRef:
        ref = table_ref(f"s3://tables/{name}", storage_options(proxy.port, **NO_RETRIES, **options))
        return with_cache(ref, CacheSpec(str(tmp_path / "cache"), max_bytes), COLUMNS)

    return make


def size_of(folder: Path, name: str) -> int:
    return cached_parts(lance.dataset(folder / name), COLUMNS).size_bytes


def begun(ref: TableRef) -> CachedTable:
    assert ref.cache is not None
    return cached_tables.of(ref, COLUMNS, ref.cache)


def wait(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def filled(ref: TableRef) -> CachedTable:
    """The table with all of it in the cache."""
    table = begun(ref)
    wait(lambda: table.share == 1)
    return table


def taken(ref: TableRef, rows: np.ndarray) -> pa.Table:
    return take_through_cache(ref, rows, COLUMNS)


def anew() -> None:
    """What a restarted process has in memory: nothing."""
    cached_tables.close()
    open_tables._tables.clear()


def data_paths(proxy: FaultProxy) -> Counter[str]:
    """Requests by data file."""
    return Counter(request.path for request, _ in proxy.requests if request.is_data)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def data_files(tmp_path: Path) -> list[Path]:
    return [path for path in files_in(tmp_path / "cache") if path.parent.name == "data"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# The same rows


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_the_table_however_much_of_it_is_cached(cached: Make, proxy: FaultProxy, seed: int) -> None:
    ref = cached()
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, LIVE, 200)  # some of them twice
    wanted = ref.take(rows, COLUMNS)
    table = filled(ref)
    held = table._rows.held
    assert held is not None
    for share in (0.0, 0.3, 0.7, 1.0):
        table._rows.held = Held(held.table, held.parts, rng.random(FILES) < share)
        found = taken(ref, rows)
        assert found.equals(wanted)
        assert all(column.num_chunks == 1 for column in found.columns)


def test_what_is_cached_takes_no_request(cached: Make, proxy: FaultProxy) -> None:
    ref = cached()
    rows = np.random.default_rng(0).permutation(LIVE)
    wanted = ref.take(rows, COLUMNS)
    filled(ref)
    proxy.fault = lambda request: 503
    assert taken(ref, rows).equals(wanted)


def test_what_is_not_cached_yet_is_read_from_the_store(cached: Make, proxy: FaultProxy) -> None:
    """No read waits for a download."""
    ref = cached()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    proxy.fault = lambda request: 403 if "_versions" in request.path else PASS  # so the cache cannot begin
    assert taken(ref, np.arange(LIVE)).equals(wanted)
    assert begun(ref).share == 0


def test_a_row_beyond_the_end_is_the_error_that_it_is_without_a_cache(cached: Make) -> None:
    ref = cached()
    filled(ref)
    with pytest.raises(Exception, match=f"below the {LIVE} live rows, got up to {LIVE}"):
        taken(ref, np.array([0, LIVE]))
    assert taken(ref, np.empty(0, np.int64)).schema == ref.take(np.empty(0, np.int64), COLUMNS).schema


def test_fields_of_structs_and_only_the_files_of_the_columns(tmp_path: Path, proxy: FaultProxy, folder: Path) -> None:
    path = folder / f"structs-{os.getpid()}"
    rows = pa.table({"s": [{"a": i, "b": str(i)} for i in range(50)], "id": np.arange(50)})
    lance.write_dataset(rows, str(path), max_rows_per_file=20)
    dataset = lance.dataset(str(path))
    first = {CachedFile(file.path, file.file_size_bytes) for f in dataset.get_fragments() for file in f.data_files()}
    dataset.add_columns({"more": "id * 2"})
    latest = lance.dataset(str(path))
    assert set(cached_parts(latest, ["s.a"]).files) == first
    assert len(cached_parts(latest, ["more", "s.b"]).files) == 2 * len(first)
    ref = with_cache(
        table_ref(f"s3://tables/{path.name}", storage_options(proxy.port)), CacheSpec(str(tmp_path / "cache")), ["more"]
    )
    columns = ["s.b", "more", "id"]
    order = np.random.default_rng(0).permutation(50)
    wanted = ref.take(order, columns)
    assert ref.cache is not None
    table = cached_tables.of(ref, columns, ref.cache)
    wait(lambda: table.share == 1)
    held = table._rows.held
    assert held is not None
    table._rows.held = Held(held.table, held.parts, np.array([True, False, True]))
    assert take_through_cache(ref, order, columns).equals(wanted)


def test_another_version_shares_the_files_and_has_its_own_rows(folder: Path, cached: Make, proxy: FaultProxy) -> None:
    path = make_table(folder / f"grows-{os.getpid()}", 100)
    old = cached(Path(path).name)
    filled(old)
    proxy.requests.clear()
    lance.dataset(path).delete("id < 20")
    lance.write_dataset(lance.dataset(path).to_table(limit=10), path, mode="append")
    new = cached(Path(path).name)
    filled(new)
    assert len(data_paths(proxy)) == 1  # the one that was appended
    proxy.fault = lambda request: 503
    assert taken(old, np.arange(3))["id"].to_pylist() == [0, 1, 2]
    assert taken(new, np.arange(3))["id"].to_pylist() == [20, 21, 22]


# Downloads


def test_two_readers_of_a_node_download_each_file_once(cached: Make, proxy: FaultProxy) -> None:
    ref = cached()
    assert ref.cache is not None
    ref.open()
    proxy.requests.clear()
    tables = [CachedTable(ref, COLUMNS, ref.cache) for _ in range(3)]
    wait(lambda: all(table.share == 1 for table in tables))
    for table in tables:
        table.close()
        table.join(10)
    assert set(data_paths(proxy).values()) == {1}
    assert len(data_paths(proxy)) == FILES


def test_a_restarted_reader_finds_what_is_there(cached: Make, proxy: FaultProxy) -> None:
    filled(cached())
    anew()
    proxy.requests.clear()
    filled(cached())
    assert not data_paths(proxy)


def test_a_reader_goes_on_where_one_was_killed_in_the_middle_of_a_download(
    cached: Make, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the lock and a file in part, which is not taken for a file."""
    ref = cached()
    code = (
        "import sys, pickle, time\n"
        "from ray_lance_stream import cache_filling, data_cache\n"
        "read = cache_filling.StoredFiles.read\n"
        "def slow(self, path, start, size):\n"
        "    if len(read_paths) == 4: print('there', flush=True); time.sleep(60)\n"
        "    read_paths.append(path)\n"
        "    return read(self, path, start, size)\n"
        "read_paths = []\n"
        "cache_filling.StoredFiles.read = slow\n"
        "cache_filling.PIECES_AT_A_TIME = 1\n"
        "ref = pickle.loads(sys.stdin.buffer.read())\n"
        "data_cache.cached_tables.of(ref, ['id', 'vec'], ref.cache)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(ref))
    process.stdin.close()
    assert process.stdout.readline() == b"there\n"
    proxy.requests.clear()
    mine = begun(ref)
    wait(lambda: mine.share > 0)  # it sees what the other one has
    assert mine.share < 0.5
    assert not data_paths(proxy)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.close()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    proxy.requests.clear()
    wait(lambda: mine.share == 1)
    assert FILES - 4 <= len(data_paths(proxy)) < FILES
    assert taken(ref, np.arange(LIVE)).equals(wanted)
    assert not [path for path in data_files(tmp_path) if path.suffix == ".part"]


def test_a_file_that_cannot_be_read_is_left_out(
    cached: Make, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = cached()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    lost = ref.open().get_fragments()[3].data_files()[0].path
    proxy.fault = lambda request: 403 if lost in request.path else PASS
    table = begun(ref)
    wait(lambda: table.share > 0.85)
    proxy.fault = lambda request: PASS
    assert taken(ref, np.arange(LIVE)).equals(wanted)
    [text] = warnings(caplog)
    assert text.startswith("a data file is not cached, and read from the object store (1 of 3 in a row)")
    assert lost in text


def test_filling_ends_after_some_failures_and_is_tried_again_ever_later(
    cached: Make, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the warnings of the first try alone."""
    monkeypatch.setattr(data_cache, "_RETRY_S", 0.05)
    monkeypatch.setattr(data_cache, "_LOOK_S", 0.01)
    tried: list[tuple[float, int]] = []
    write, run = TableFiles.write, cache_filling.Filling.run
    written: list[str] = []
    monkeypatch.setattr(
        TableFiles, "write", lambda self, file, pieces: written.append(file.name) or write(self, file, pieces)
    )

    def counted(self: cache_filling.Filling, *args: Any) -> None:
        written.clear()
        run(self, *args)
        tried.append((time.monotonic(), len(written)))

    monkeypatch.setattr(cache_filling.Filling, "run", counted)
    ref = cached()
    ref.open()
    proxy.fault = lambda request: CUT if request.is_data else PASS
    table = begun(ref)
    wait(lambda: len(tried) == 4)
    assert [count for _, count in tried] == [3] * 4  # of 9 files
    assert tried[3][0] - tried[2][0] > 0.35
    assert len(warnings(caplog)) == 3
    proxy.fault = lambda request: PASS
    wait(lambda: table.share == 1)


def test_a_version_that_cannot_be_downloaded_holds_up_no_other_one(
    folder: Path, cached: Make, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_table(folder / f"two-{os.getpid()}", 100)
    old = cached(Path(path).name)
    lost = old.open().get_fragments()[0].data_files()[0].path
    proxy.fault = lambda request: 403 if lost in request.path else PASS
    first = begun(old)
    wait(lambda: len(warnings(caplog)) == 1 and first.share > 0)
    lance.write_dataset(lance.dataset(path).to_table(limit=10), path, mode="append")
    second = begun(cached(Path(path).name))
    count = len(lance.dataset(path).get_fragments())
    wait(lambda: second.share == (count - 1) / count)
    assert not first.is_closed


def test_what_is_there_is_read_while_another_version_is_downloaded(cached: Make, tmp_path: Path) -> None:
    filled(cached())
    anew()
    [table] = (tmp_path / "cache" / "ray_lance_stream").glob("*/")
    for view in (table / "versions").iterdir():
        shutil.rmtree(view)
    with cache_locks.filling(table) as is_filling:
        assert is_filling
        filled(cached())


def test_two_processes_may_make_a_view_at_once(cached: Make, tmp_path: Path) -> None:
    ref = cached()
    parts = cached_parts(ref.open(), COLUMNS)
    for _ in range(2):
        cache_stored.make_view(tmp_path / "view", ref.version, parts, cache_stored.StoredFiles(ref))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("view")] == ["view"]


def test_a_reader_that_waits_for_files_walks_the_folder_only_when_it_has_changed(
    cached: Make, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_cache, "_LOOK_S", 0.02)
    monkeypatch.setattr(data_cache, "_SETTLED_S", 0.1)
    walked: list[float] = []
    names = TableFiles.names
    monkeypatch.setattr(TableFiles, "names", lambda self: walked.append(time.monotonic()) or names(self))
    ref = cached()
    assert ref.cache is not None
    lost = ref.open().get_fragments()[3].data_files()[0].path
    proxy.fault = lambda request: 403 if lost in request.path else PASS
    tables = [CachedTable(ref, COLUMNS, ref.cache) for _ in range(2)]
    wait(lambda: all(table.share == 8 / 9 for table in tables))
    wait(lambda: time.monotonic() - walked[-1] > 0.5)
    for table in tables:
        table.close()
        table.join(10)


def test_looking_takes_a_small_part_of_the_time(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "_LOOK_S", 0.02)
    monkeypatch.setattr(data_cache, "_LOOK_SHARE", 0.2)
    monkeypatch.setattr(data_cache, "_SETTLED_S", 1e9)  # so that it looks each time
    looked: list[float] = []

    def slow(self: TableFiles) -> set[str]:
        time.sleep(0.1)
        looked.append(time.monotonic())
        return set()

    monkeypatch.setattr(TableFiles, "names", slow)
    monkeypatch.setattr(cache_filling.Filling, "run", lambda *args: None)
    begun(cached())
    wait(lambda: len(looked) == 3)
    assert looked[2] - looked[1] > 0.5


def test_a_process_that_ends_while_it_downloads_waits_for_no_read(cached: Make, proxy: FaultProxy) -> None:
    def hang(request: Any) -> str:
        if request.is_data:
            proxy.delay_s = 50.0
        return PASS

    ref = cached()
    proxy.fault = hang
    code = (
        "import logging, sys, pickle, threading, time\n"
        "logging.basicConfig()\n"
        "from ray_lance_stream import cache_stored, data_cache\n"
        "read, reads = cache_stored.StoredFiles.read, threading.Event()\n"
        "cache_stored.StoredFiles.read = lambda *args: reads.set() or read(*args)\n"
        "ref = pickle.loads(sys.stdin.buffer.read())\n"
        "data_cache.cached_tables.of(ref, ['id', 'vec'], ref.cache)\n"
        "reads.wait(40)\n"
        "time.sleep(0.5)\n"
        "print('ends', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(ref))
    process.stdin.close()
    try:
        assert process.stdout.readline() == b"ends\n"
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    finally:
        process.kill()
        process.stdout.close()
    process.stderr.close()
    assert proxy.data_requests
    assert b"WARNING" not in said, said


def test_a_table_that_is_closed_lets_its_files_go_though_the_store_hangs(
    cached: Make, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_filling, "_LAST_S", 0.1)
    ref = cached()
    ref.open()
    begun_s = time.monotonic()

    def hang(request: Any) -> str:
        if request.is_data:
            proxy.delay_s = 15.0
        return PASS

    proxy.fault = hang
    table = begun(ref)
    wait(lambda: proxy.data_requests > 0)
    table.close()
    table.join(10)
    assert not table._thread.is_alive()
    assert time.monotonic() - begun_s < 10
    assert not [path for path in files_in(tmp_path / "cache") if path.parent.name == "users" or path.suffix == ".part"]
    assert warnings(caplog) == []


def test_a_table_that_nobody_reads_is_let_go(cached: Make, tmp_path: Path) -> None:
    table = filled(cached())
    table.used_s -= data_cache.IDLE_S
    table.join(10)
    assert not [path for path in files_in(tmp_path / "cache") if path.parent.name == "users"]
    assert filled(cached()) is not table


def test_a_table_that_nobody_reads_is_not_downloaded_further(
    cached: Make, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_filling, "PIECES_AT_A_TIME", 1)
    ref = cached()
    ref.open()
    proxy.delay_s = 0.1
    table = begun(ref)
    wait(lambda: proxy.data_requests > 0)
    table.used_s -= data_cache.IDLE_S
    table.join(10)
    assert not table._thread.is_alive()
    assert 0 < len(data_files(tmp_path)) < FILES


def test_a_failure_is_told_without_the_secret_of_its_session(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another thread has made the session anew by then."""
    keys = iter(range(9))
    ref = table_ref(
        "s3://tables/t",
        lambda: storage_options(proxy.port, **NO_RETRIES) | {"aws_session_token": f"s3cret-{next(keys)}"},
    )
    stored = cache_stored.StoredFiles(ref)
    opened = stored._opened

    def raced(instead_of: Any = None) -> Any:
        found = opened(instead_of)
        opened(found[0])
        return found

    monkeypatch.setattr(stored, "_opened", raced)
    before = next(keys) + 1

    def fail(session: Any) -> None:
        raise OSError(f"with s3cret-{before} in it")

    with pytest.raises(ReadError) as raised:
        stored._tried(fail, "x")
    assert "s3cret" not in str(raised.value)
    assert next(keys) == before + 2


def test_options_of_a_callable_are_asked_for_again_when_they_are_refused(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["old"]

    def options() -> dict[str, str]:
        return storage_options(proxy.port, **NO_RETRIES) | {"aws_access_key_id": keys[0]}

    good = ["old"]
    proxy.allowed = lambda request: request.access_key == good[0]
    ref = with_cache(table_ref("s3://tables/t", options), CacheSpec(str(tmp_path / "cache")), COLUMNS)
    stored = cache_stored.StoredFiles(ref)
    manifest = f"_versions/{manifest_names(ref.version)[0]}"
    assert stored.read(manifest, 0, 4)
    keys[0] = good[0] = "new"
    assert stored.read(manifest, 0, 4)


# Damage


def flip(path: Path) -> None:
    """Change a byte, and leave size and times as they are."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(status.st_size // 2)
        file.write(bytes([byte[0] ^ 255]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("how", ["written to", "cut short", "gone", "flipped over a start of the machine"])
def test_a_damaged_file_is_downloaded_again(
    cached: Make, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    wanted = cached().take(np.arange(LIVE), COLUMNS)
    filled(cached())
    anew()
    path = sorted(data_files(tmp_path))[2]
    if how == "written to":
        flip(path)
        path.touch()
    elif how == "cut short":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "gone":
        path.unlink()
    else:
        flip(path)
        monkeypatch.setattr(cache_files, "_boot", lambda: "after")
    proxy.requests.clear()
    filled(cached())
    assert list(data_paths(proxy)) == [f"/tables/t/data/{path.name}"]
    assert taken(cached(), np.arange(LIVE)).equals(wanted)


def test_checksums_are_computed_once_after_a_start_of_the_machine(
    cached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    digest = cache_files._digest
    monkeypatch.setattr(cache_files, "_digest", lambda path: checked.append(path) or digest(path))
    filled(cached())
    anew()
    filled(cached())
    assert checked == []
    monkeypatch.setattr(cache_files, "_boot", lambda: "after")
    for _ in range(2):
        anew()
        filled(cached())
        assert len(checked) == FILES


def test_files_that_vanish_under_a_reader_cost_one_warning(
    cached: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = cached()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    filled(ref)
    for path in data_files(tmp_path):
        os.truncate(path, 10)
    for _ in range(2):
        assert taken(ref, np.arange(LIVE)).equals(wanted)
    [text] = warnings(caplog)
    assert text.startswith("cached files of table s3://tables/t cannot be read, so they are read from the object store")


def test_a_damaged_file_costs_its_own_rows_and_is_downloaded_by_the_next_run(
    cached: Make, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that looks as before, as after a failure of the disk."""
    ref = cached()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    table = filled(ref)
    path = sorted(data_files(tmp_path))[2]
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(bytes(40))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert taken(ref, np.arange(LIVE)).equals(wanted)
    assert table.share == (FILES - 1) / FILES
    wait(lambda: not (path.parent.parent / "checks" / path.name).exists())
    assert table.share == (FILES - 1) / FILES
    assert len(warnings(caplog)) == 1
    anew()
    proxy.requests.clear()
    filled(cached())
    assert list(data_paths(proxy)) == [f"/tables/t/data/{path.name}"]
    assert taken(cached(), np.arange(LIVE)).equals(wanted)


def failing(monkeypatch: pytest.MonkeyPatch, times: list[int]) -> None:
    """Let reads of local tables fail as often as `times[0]` says."""
    take = TableRef.take

    def failing_take(self: TableRef, rows: np.ndarray, columns: Any) -> pa.Table:
        if self.is_local and times[0]:
            times[0] -= 1
            raise MemoryError("on purpose")
        return take(self, rows, columns)

    monkeypatch.setattr(TableRef, "take", failing_take)


def test_a_failure_that_passes_costs_one_read(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = cached()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    table = filled(ref)
    failing(monkeypatch, [1])
    assert taken(ref, np.arange(LIVE)).equals(wanted)
    assert table.share == 1


def test_what_is_whole_is_read_from_the_cache_again_once(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = HeldRows.verify
    monkeypatch.setattr(HeldRows, "verify", lambda self: None)  # when the test says
    ref = cached()
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    table = filled(ref)
    failing(monkeypatch, [10**6])
    for share in (1, 0):
        assert taken(ref, np.arange(LIVE)).equals(wanted)
        assert table.share == 0
        verify(table._rows)
        assert table.share == share


def test_a_cache_of_another_table_in_the_same_place_is_not_read(folder: Path, cached: Make) -> None:
    name = f"anew-{os.getpid()}"
    make_table(folder / name, 50)
    filled(cached(name))
    anew()
    shutil.rmtree(folder / name)
    make_table(folder / name, 60)
    ref = cached(name)
    filled(ref)
    assert taken(ref, np.arange(60))["id"].to_pylist() == list(range(60))


def test_a_manifest_that_is_not_that_of_the_version_is_not_read(
    folder: Path, cached: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(cached())
    anew()
    [manifest] = [path for path in files_in(tmp_path / "cache") if path.suffix == ".manifest"]
    other = tmp_path / "other"
    lance.dataset(make_table(other, ROWS)).delete("id in (6, 101)")
    shutil.copy(other / "_versions" / manifest.name, manifest)
    table = begun(cached())
    wait(lambda: len(warnings(caplog)) == 1)
    assert table.share == 0
    assert taken(cached(), np.arange(LIVE)).equals(cached().take(np.arange(LIVE), COLUMNS))


# Room


def test_another_table_takes_the_room_of_one_that_nobody_reads(
    cached: Make, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = size_of(folder, "t")
    filled(cached("t", room))
    anew()
    filled(cached("u", room))
    assert sum(path.stat().st_size for path in data_files(tmp_path)) <= room
    anew()
    wanted = cached("t", room)
    filled(wanted)
    assert taken(wanted, np.arange(10)).equals(wanted.take(np.arange(10), COLUMNS))
    assert warnings(caplog) == []


def test_the_files_not_used_for_longest_go_first(cached: Make, folder: Path, tmp_path: Path) -> None:
    for name in ("t", "u"):
        filled(cached(name))
        anew()
    names = {name: {path.name for path in folder.joinpath(name, "data").iterdir()} for name in ("t", "u")}
    for path in files_in(tmp_path / "cache"):
        if path.parent.name == "checks":
            os.utime(path, (1, 1 if path.name in names["t"] else 2))
    filled(cached("t"))  # used again
    anew()
    path = make_table(folder / f"third-{os.getpid()}", 30)
    size = size_of(folder, Path(path).name)
    filled(cached(Path(path).name, sum(size_of(folder, name) for name in ("t", "u")) + size // 2))
    left = {path.name for path in data_files(tmp_path)}
    assert len(names["u"] & left) < len(names["u"])
    assert names["t"] <= left


def test_what_a_dead_process_has_left_of_another_table_takes_no_room(
    cached: Make, folder: Path, tmp_path: Path
) -> None:
    filled(cached("t"))
    anew()
    left = data_files(tmp_path)[0].with_name("x.lance.part")
    with left.open("wb") as file:
        file.truncate(10 * size_of(folder, "t"))
    filled(cached("u", size_of(folder, "t") + size_of(folder, "u")))
    assert not left.exists()
    assert len(data_files(tmp_path)) == FILES + 7


def test_files_that_are_read_stay_and_what_has_no_room_is_read_from_the_store(
    cached: Make, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = size_of(folder, "t") + size_of(folder, "u") // 2
    first, second = cached("t", room), cached("u", room)
    filled(first)
    table = begun(second)
    wait(lambda: len(warnings(caplog)) == 1)
    assert "has no room for" in warnings(caplog)[0]
    wait(lambda: 0 < table.share < 1)
    assert begun(first).share == 1
    rows = np.random.default_rng(0).permutation(300)
    assert taken(second, rows).equals(second.take(rows, COLUMNS))
    assert sum(path.stat().st_size for path in data_files(tmp_path)) <= room


def test_room_that_another_table_has_reserved_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing has been written there yet."""

    class Disk:
        total, free = 0, 1_500_000

    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: Disk)
    first, second = (TableFiles(CacheSpec(str(tmp_path)), name) for name in "ab")
    first.prepare()
    second.prepare()
    with cache_locks.filling(first.folder):
        assert first.reserve([CachedFile("x", 1_000_000)]) == 1
        assert second.reserve([CachedFile("y", 400_000), CachedFile("z", 200_000)]) == 1


def test_what_lies_in_the_folder_besides_is_let_alone(cached: Make, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    mine = tmp_path / "cache" / "mine.lance"
    mine.write_bytes(bytes(10_000))
    filled(cached("t", size_of(folder, "t")))
    anew()
    filled(cached("u", size_of(folder, "u")))
    assert mine.stat().st_size == 10_000


@pytest.mark.parametrize("max_bytes", [None, 2**40])
def test_the_disk_is_not_filled_up(
    cached: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    """A tenth of it stays free, with cache_bytes nothing."""
    room = size_of(folder, "t") // 2

    class Disk:
        total, free = 10_000, room + (1_000 if max_bytes is None else 0)

    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: Disk)
    table = begun(cached(max_bytes=max_bytes))
    wait(lambda: table.share > 0)
    assert 0 < sum(path.stat().st_size for path in data_files(tmp_path)) <= room


def test_room_that_comes_free_is_taken(
    cached: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_cache, "_RETRY_S", 0.05)
    room = size_of(folder, "t") + size_of(folder, "u") // 2
    filled(cached("t", room))
    table = begun(cached("u", room))
    wait(lambda: 0 < table.share < 1)
    begun(cached("t", room)).used_s -= data_cache.IDLE_S  # so that it is let go
    wait(lambda: table.share == 1)
    assert len(warnings(caplog)) == 1


# Failures of the disk


def test_a_full_disk_costs_one_warning(
    cached: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[str] = []
    write = TableFiles.write

    def full(self: TableFiles, file: CachedFile, pieces: Any) -> None:
        if len(written) == 2:
            next(iter(pieces))
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file.name)
        write(self, file, pieces)

    monkeypatch.setattr(TableFiles, "write", full)
    ref = cached()
    assert ref.cache is not None
    wanted = ref.take(np.arange(LIVE), COLUMNS)
    others = [CachedTable(ref, COLUMNS, ref.cache) for _ in range(2)]
    table = begun(ref)
    wait(lambda: table.share > 0.2 and all(other.share > 0.2 for other in others))
    assert taken(ref, np.arange(LIVE)).equals(wanted)
    time.sleep(0.2)
    [text] = warnings(caplog)
    assert "cannot be used, or not further, so the object store is read: [Errno 28] No space left on device" in text
    assert not [path for path in data_files(tmp_path) if path.suffix == ".part"]
    for other in others:
        other.close()
        other.join(10)


def test_a_folder_that_cannot_be_made_costs_one_warning(
    proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    ref = with_cache(
        table_ref("s3://tables/t", storage_options(proxy.port)), CacheSpec(str(tmp_path / "file" / "cache")), COLUMNS
    )
    for _ in range(3):
        assert taken(ref, np.arange(LIVE)).equals(ref.take(np.arange(LIVE), COLUMNS))
    wait(lambda: len(warnings(caplog)) == 1)


def test_no_credentials_are_written(cached: Make, tmp_path: Path) -> None:
    filled(cached(aws_session_token="t0ken-s3cret"))
    found = files_in(tmp_path / "cache")
    assert len(found) > 2 * FILES
    for secret in (SECRET_KEY, "t0ken-s3cret", "tables/t"):
        assert not [path for path in found if secret in str(path) or secret.encode() in path.read_bytes()]
    assert all(re.fullmatch("[0-9a-f]{24}|room.lock", path.name) for path in (tmp_path / "cache").glob("*/*"))
    assert (tmp_path / "cache" / "ray_lance_stream").stat().st_mode & 0o077 == 0


# On the driver


@pytest.mark.parametrize(
    ("cache_dir", "cache_bytes", "text"),
    [
        ("here", None, "cache_dir must be the absolute path of a folder, got 'here'"),
        (3, None, "cache_dir must be the absolute path of a folder, got 3"),
        ("/x", 0, "cache_bytes must be an int >= 1 or None, got 0"),
        ("/x", 1.5, "cache_bytes must be an int >= 1 or None, got 1.5"),
        ("/x", True, "cache_bytes must be an int >= 1 or None, got True"),
        (None, 10, "cache_bytes needs a folder, got cache_bytes=10 alone"),
    ],
)
def test_arguments_that_cannot_be_used(cache_dir: Any, cache_bytes: Any, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        cache_spec(cache_dir, cache_bytes)
    assert text in str(raised.value)


def test_arguments(tmp_path: Path) -> None:
    assert cache_spec(None, None) is None
    assert cache_spec(tmp_path, 5) == CacheSpec(str(tmp_path), 5)


def test_a_local_table_is_read_in_place(folder: Path, tmp_path: Path) -> None:
    assert with_cache(table_ref(folder / "t"), CacheSpec(str(tmp_path)), COLUMNS).cache is None


def test_the_cache_travels_and_is_no_part_of_the_table(cached: Make) -> None:
    ref = cached()
    assert pickle.loads(pickle.dumps(ref)).cache == ref.cache
    assert ref.at(1).cache == ref.cache
    assert ref == table_ref("s3://tables/t", ref.storage_options)
    assert "cache" not in repr(ref)


def test_the_readers_of_a_stream_read_through_the_cache(proxy: FaultProxy, tmp_path: Path) -> None:
    stream = lance_stream(
        "s3://tables/t",
        num_splits=4,
        storage_options=storage_options(proxy.port),
        cache_dir=tmp_path,
        cache_bytes=2**20,
    )
    plan = stream._plan
    assert plan.table.cache == CacheSpec(str(tmp_path), 2**20)
    request = ReadRequest(plan, 0, SplitBlock(0, 4), ChunkSpan(0, 10, 0, 40, 40))
    wanted, _ = read_chunk(request, plan.resolve())
    wait(lambda: all(table.share == 1 for table in cached_tables._tables.values()))
    proxy.requests.clear()
    found, _ = read_chunk(request, plan.resolve())
    assert found.equals(wanted)
    assert proxy.data_requests == 0


def test_a_cache_that_is_too_small_is_told(cached: Make, caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    cached(max_bytes=size_of(folder, "t"))
    assert warnings(caplog) == []
    cached(max_bytes=1000)
    [text] = warnings(caplog)
    assert text.startswith(f"cache_bytes=1000 is less than the {size_of(folder, 't')} bytes of the data files of")


def test_blobs_in_files_of_their_own_are_not_cached(
    folder: Path, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lance.blob import blob_array, blob_field

    schema = pa.schema([pa.field("id", pa.int64()), blob_field("x")])
    rows = pa.table([pa.array([0, 1]), blob_array([b"a", b"b" * 200_000])], schema=schema)
    path = folder / f"blobs-{os.getpid()}"
    lance.write_dataset(rows, str(path), data_storage_version="2.2")
    ref = table_ref(f"s3://tables/{path.name}", storage_options(proxy.port))
    ref = with_cache(ref, CacheSpec(str(tmp_path / "cache")), ["id", "x"])
    [text] = warnings(caplog)
    assert "cache_dir is of no use" in text
    assert "blobs that lie in files of their own are not cached" in text
    assert take_through_cache(ref, np.array([1, 0]), ["id", "x"])["x"].to_pylist() == [b"b" * 200_000, b"a"]
    assert len(cached_parts(ref.open(), ["id"]).files) == 1


def test_what_a_clone_has_of_another_table_is_not_cached(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "clone"
    source = lance.dataset(folder / "u")
    source.shallow_clone(str(path), source.version)
    lance.write_dataset(source.to_table(limit=7), str(path), mode="append")
    parts = cached_parts(lance.dataset(path), COLUMNS)
    assert [files is not None for files in parts.of_fragment] == [False] * 7 + [True]
    assert len(parts.files) == 1


def test_the_bar_begins_after_a_moment(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Bar:
        def __init__(self, **given: Any) -> None:
            self.n, self.given = 0, given
            shown.append(self)

        def update(self, n: int) -> None:
            self.n += n

        def close(self) -> None:
            self.given["closed"] = True

    from ray.experimental import tqdm_ray

    monkeypatch.setattr(tqdm_ray, "tqdm", Bar)
    monkeypatch.setattr(cache_filling.ray, "is_initialized", lambda: True)
    filled(cached())
    assert shown == []
    anew()
    monkeypatch.setattr(cache_filling, "_PROGRESS_DELAY_S", -1.0)
    filled(cached("u"))
    [bar] = shown
    wait(lambda: bar.given.get("closed", False))
    assert bar.given == {"desc": "caching s3://tables/u", "total": bar.n, "unit": "MiB", "closed": True}
