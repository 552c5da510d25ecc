"""Reads from an object store that fails now and then, for a while, or for good: what passes is tried again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_lance_stream import table
from ray_lance_stream.errors import ReadError, TableError, VersionNotFoundError
from ray_lance_stream.source import match_rows, table_ref
from ray_lance_stream.table import TableRef
from tests.faults.object_store import ObjectStore, ShortLived
from tests.faults.proxy import CUT, HANG_UP, PASS, Fault, Request
from tests.support import make_table

pytestmark = [pytest.mark.timeout(120), pytest.mark.faults]

ROWS = 480
# Lance asks four times for what its object store could not get, which asks (1 + 1) * (1 + 1) times.
IMPATIENT = {"client_max_retries": "1", "lance_aimd_max_retries": "1"}


@pytest.fixture(scope="module")
def uri(bucket: ObjectStore) -> str:
    """ids 0 to 479, in nine files."""
    return make_table(bucket.uri("t"), ROWS, storage_options=bucket.options(through_proxy=False))


@pytest.fixture
def data_file(store: ObjectStore, uri: str):
    """The key of a data file, which is put back after the test."""
    key = store.files("t/data/")[-1]
    whole = store.request("GET", key)
    yield key
    store.request("PUT", key, whole)


def opened(uri: str, store: ObjectStore, **options: str) -> TableRef:
    """The table, open in this process."""
    ref = table_ref(uri, store.options(**options))
    ref.open(fresh=True)
    return ref


def on_data(fault: Fault) -> Callable[[Request], Fault]:
    """Each request for a data file fails."""
    return lambda request: fault if request.is_data else PASS


def ids(ref: TableRef, rows: np.ndarray | None = None) -> list[int]:
    return ref.take(np.arange(ROWS) if rows is None else rows, ["id"])["id"].to_pylist()


def requests_per_file(store: ObjectStore) -> int:
    """The most requests that were made for one data file."""
    return max(Counter(request.path for request, _ in store.proxy.requests if request.is_data).values())


# What passes


def test_failed_requests_are_sent_again(store: ObjectStore, uri: str) -> None:
    """One in twenty: errors of the server, throttling, answers cut in the middle, and none at all."""
    chance = random.Random(3)
    faults: list[Fault] = [500, 503, 429, CUT, HANG_UP]
    store.proxy.fault = lambda request: chance.choice(faults) if chance.random() < 0.05 else PASS
    for seed in range(40):
        ref = opened(uri, store) if seed % 10 == 0 else ref  # noqa: F821
        rows = np.random.default_rng(seed).permutation(ROWS)[:60]
        assert ids(ref, rows) == rows.tolist()
        assert len(match_rows(ref, f"id < {seed}", progress=False)) == seed
    assert all(store.proxy.count(fault) > 0 for fault in faults)


@pytest.mark.parametrize("status", [503, 429])
def test_throttling_is_waited_out(store: ObjectStore, uri: str, status: int) -> None:
    until_s = time.time() + 2
    ref = opened(uri, store)
    store.proxy.fault = lambda request: status if request.at_s < until_s else PASS
    assert ids(ref) == list(range(ROWS))
    assert store.proxy.count(status) < 300, "requests come slower and slower"


def test_an_endpoint_that_is_gone_for_ten_seconds(store: ObjectStore, uri: str) -> None:
    """Both for a table that is open, and for one that is being opened."""
    ref = opened(uri, store)
    store.proxy.go_away()
    threading.Timer(10, store.proxy.come_back).start()
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        read, other = pool.submit(ids, ref), pool.submit(lambda: ids(opened(uri, store)))
        assert read.result() == other.result() == list(range(ROWS))
    assert 10 < time.monotonic() - began_s < 60


def test_a_listing_that_is_cut_is_asked_for_again(
    store: ObjectStore, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Lance does not do."""
    cuts = [CUT]
    store.proxy.fault = lambda request: cuts.pop() if "list-type" in request.path and cuts else PASS
    assert ids(table_ref(uri, store.options())) == list(range(ROWS))
    monkeypatch.setattr(table, "_LISTINGS", 2)
    store.proxy.fault = lambda request: CUT if "list-type" in request.path else PASS
    with pytest.raises(TableError, match=f"no Lance dataset can be opened at {uri}.*response body error"):
        table_ref(uri, store.options(**IMPATIENT))


# What does not pass


def test_an_endpoint_that_stays_away_is_told(store: ObjectStore, uri: str) -> None:
    """Bounded by the options of Lance's object store, with table, rows and cause."""
    ref = opened(uri, store, **IMPATIENT)
    store.proxy.fault = on_data(503)
    with pytest.raises(ReadError) as told:
        ids(ref, np.arange(7, 70))
    assert f"63 rows of table {uri} version {ref.version}, offsets 7 to 69, could not be read" in str(told.value)
    assert "after 1 retries, max_retries: 1" in str(told.value)
    assert "503 Service Unavailable" in str(told.value)
    assert "Damaged" not in str(told.value)
    assert "503" in str(told.value.__cause__)
    assert requests_per_file(store) == 2 * 2 * 4
    store.proxy.fault = lambda request: 503
    with pytest.raises(TableError, match=rf"{uri} cannot be opened at version .*503"):
        ref.open(fresh=True)


def test_wrong_credentials_are_told_at_once(store: ObjectStore, uri: str) -> None:
    ref = opened(uri, store)
    store.proxy.allowed = lambda request: False
    began_s = time.monotonic()
    with pytest.raises(ReadError, match=rf"480 rows of table {uri} version.*403 Forbidden") as told:
        ids(ref)
    with pytest.raises(TableError, match=rf"table {uri} cannot be opened.*403 Forbidden"):
        ref.open(fresh=True)
    with pytest.raises(TableError, match=rf"no Lance dataset can be opened at {uri}.*403 Forbidden"):
        table_ref(uri, store.options())
    assert time.monotonic() - began_s < 10
    assert requests_per_file(store) <= 4
    assert "Damaged" not in str(told.value)


@pytest.mark.parametrize("left", [b"", b"LANC", None], ids=["empty", "cut short", "missing"])
def test_a_damaged_file_is_told_at_once(store: ObjectStore, uri: str, data_file: str, left: bytes | None) -> None:
    store.request("DELETE" if left is None else "PUT", data_file, left)
    ref = opened(uri, store)
    began_s = time.monotonic()
    error: type[Exception] = VersionNotFoundError if left is None else ReadError
    name = data_file if left is None else f"Damaged or unreadable: {data_file.removeprefix('t/')}"
    with pytest.raises(error, match=rf"480 rows of table {uri} version.*{name}"):
        ids(ref)
    assert time.monotonic() - began_s < 10
    assert requests_per_file(store) <= 10


# Credentials that expire


def provider_of(store: ObjectStore, folder: Path, **more: Any) -> ShortLived:
    provider = ShortLived(
        store.proxy.port, **{"life_s": 1.0, "secret": "sh0rtl1vedS3cret", "folder": str(folder), **more}
    )
    store.proxy.allowed = provider.allows
    return provider


def test_options_are_renewed_before_they_expire(store: ObjectStore, uri: str, tmp_path: Path) -> None:
    ref = table_ref(uri, provider_of(store, tmp_path, life_s=2.0))
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s:
        assert ids(ref) == list(range(ROWS))
        time.sleep(0.02)
    assert 4 <= len(list(tmp_path.iterdir())) <= 6
    assert store.proxy.count(403) <= 4 * 9, "a busy machine may let one read run out"


def test_options_that_tell_no_time_are_asked_for_again_when_refused(
    store: ObjectStore, uri: str, tmp_path: Path
) -> None:
    """Once for all threads that were refused."""
    ref = table_ref(uri, provider_of(store, tmp_path, tells_expiry=False))
    ref.open(fresh=True)
    assert ids(ref) == list(range(ROWS))
    time.sleep(1.1)
    calls = len(list(tmp_path.iterdir()))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: ids(ref), range(4))) == [list(range(ROWS))] * 4
    assert store.proxy.count(403) > 0
    assert 1 <= len(list(tmp_path.iterdir())) - calls <= 2


def test_refused_options_are_asked_for_once_a_read(store: ObjectStore, uri: str, tmp_path: Path) -> None:
    ref = table_ref(uri, provider_of(store, tmp_path))
    ref.open(fresh=True)
    calls = len(list(tmp_path.iterdir()))
    store.proxy.fault = on_data(403)
    with pytest.raises(ReadError, match="403 Forbidden"):
        ids(ref)
    assert len(list(tmp_path.iterdir())) == calls + 1
