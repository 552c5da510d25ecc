"""Tables of LanceDB's remote service, through lancedb's own client, against a stand-in that Lance answers for."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import lance_stream
from ray_lance_stream.config import ReadPlan
from ray_lance_stream.epoch_versions import newest_version
from ray_lance_stream.errors import ConfigError, ReadError, StreamError, TableError, VersionNotFoundError
from ray_lance_stream.order import Order
from ray_lance_stream.pin import Pin
from ray_lance_stream.planner import plan_table
from ray_lance_stream.remote import RemoteTableRef
from ray_lance_stream.source import (
    TableRef,
    count_rows,
    match_rows,
    projected_schema,
    resolve_columns,
    sample_row_bytes,
    table_ref,
    validate_filter,
)
from tests.remote_service import RemoteService
from tests.unit.test_source import everything_said

SECRET = "k3y-s3cret"
QUERY = "/v1/table/t/query/"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`t`: version 1 of 40 rows in fragments of 7, version 2 without ids 3 and 9, version 3 with one row more."""
    folder = tmp_path_factory.mktemp("remote")
    ids = np.arange(40)
    vec = pa.FixedSizeListArray.from_arrays((ids[:, None] + np.arange(2)).astype(np.float32).reshape(-1), 2)
    structs = [None if i % 6 == 0 else {"b": i, "c": {"d": str(i)}} for i in ids.tolist()]
    words = pa.array([f"w{i % 3}" for i in ids.tolist()]).dictionary_encode()
    data = pa.table({"id": ids, "vec": vec, "s": structs, "word": words})
    uri = str(folder / "t.lance")
    lance.write_dataset(data, uri, max_rows_per_file=7).delete("id in (3, 9)")
    lance.write_dataset(data.slice(0, 1), uri, mode="append")
    payload = pa.field("payload", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs = pa.table({"id": [1]}).append_column(payload, pa.array([b"x"], pa.large_binary()))
    lance.write_dataset(blobs, str(folder / "blobs.lance"), data_storage_version="2.1")
    return folder


@pytest.fixture
def service(folder: Path) -> Iterator[RemoteService]:
    service = RemoteService(folder, SECRET)
    yield service
    service.close()


@pytest.fixture
def table(service: RemoteService) -> Any:
    """`t` at version 2."""
    table = service.connect(retry_config={"retries": 2, "backoff_factor": 0.01}).open_table("t")
    table.checkout(2)
    return table


@pytest.fixture
def ref(table: Any) -> RemoteTableRef:
    pinned = table_ref(table)
    assert isinstance(pinned, RemoteTableRef)
    return pinned


@pytest.fixture
def local(folder: Path) -> TableRef:
    """The same version, as Lance reads it."""
    return TableRef(str(folder / "t.lance"), 2)


def test_the_version_is_pinned(service: RemoteService, ref: RemoteTableRef) -> None:
    assert (ref.identity, ref.version) == ("db://tests/t", 2)
    assert table_ref(service.connect().open_table("t")).version == 3
    assert count_rows(ref) == 38
    assert count_rows(ref.at(3)) == 39
    assert newest_version(ref) == 3
    ref.take(np.array([5]), ["id"])
    assert {body["version"] for path, body in service.calls if path == QUERY} == {2}


@pytest.mark.parametrize("columns", [["id"], ["word", "vec", "id"], ["s.c.d", "id", "s.b"], ["s"]])
def test_rows_come_as_from_the_table_itself(ref: RemoteTableRef, local: TableRef, columns: list[str]) -> None:
    """In the order asked for, with repeats, although the service answers in an order of its own."""
    assert resolve_columns(ref, columns) == columns
    for rows in (np.array([5, 1, 17, 5, 37, 0]), np.arange(38), np.array([], np.int64)):
        assert ref.take(rows, columns).equals(local.take(rows, columns))
    assert projected_schema(ref, columns) == projected_schema(local, columns)


def test_each_row_is_asked_for_once(service: RemoteService, ref: RemoteTableRef) -> None:
    ref.take(np.array([5, 1, 5, 5]), ["s.b", "s.c.d"])
    assert service.calls[-1][1]["filter"] == "_rowoffset IN (1, 5)"
    assert service.calls[-1][1]["columns"] == ["s", "_rowoffset"]


def test_a_filter_is_served(ref: RemoteTableRef, local: TableRef) -> None:
    filter = "id > 5 and (s.b < 30 or word = 'w0')"
    validate_filter(ref, filter)
    assert match_rows(ref, filter).tolist() == match_rows(local, filter).tolist()
    plan = ReadPlan(ref, ("id",), filter, Order(1), num_splits=4, drop_remainder=True)
    assert plan_table(plan).order.num_rows == len(match_rows(local, filter))
    assert sample_row_bytes(ref, ["id"], 38) == sample_row_bytes(local, ["id"], 38)


def test_a_filter_that_the_service_refuses(ref: RemoteTableRef, service: RemoteService) -> None:
    with pytest.raises(ConfigError, match=r"filter must be .* of table db://tests/t, got 'nope > 3'.*No field named"):
        validate_filter(ref, "nope > 3")
    with pytest.raises(ConfigError, match="same rows whenever it is scanned"):
        validate_filter(ref, "random() < 0.5")
    service.fault = lambda path, body: (503, b"busy", "text/plain")
    with pytest.raises(ReadError, match=r"db://tests/t.*cannot be counted.*request_failures=2/2"):
        validate_filter(ref, "id > 3")


def test_an_answer_that_is_cut_short_is_an_error(service: RemoteService, ref: RemoteTableRef) -> None:
    """A service that limits its answers must not shorten the epoch in silence."""

    def few(path: str, body: dict[str, Any]) -> None:
        body["k"] = 3

    service.fault = few
    with pytest.raises(ReadError, match="the service counts 31 rows, but answers 3"):
        match_rows(ref, "id > 7")
    with pytest.raises(ReadError, match="the service answered 3 rows for 10 offsets of RemoteTableRef"):
        ref.take(np.arange(10), ["id"])
    with pytest.raises(ReadError, match="answered 0 rows for 1 offsets"):
        ref.take(np.array([38]), ["id"])


def test_columns_that_are_refused(service: RemoteService, ref: RemoteTableRef) -> None:
    with pytest.raises(ConfigError, match=r"unknown \['nope'\].*available are \['id'"):
        resolve_columns(ref, ["nope"])
    with pytest.raises(ConfigError, match=r"neither blobs nor meta columns, got \['_rowid'\]"):
        resolve_columns(ref, ["id", "_rowid"])
    blobs = table_ref(service.connect().open_table("blobs"))
    with pytest.raises(ConfigError, match=r"neither blobs nor .* got \['payload'\] of table db://tests/blobs: leave"):
        resolve_columns(blobs, None)
    assert resolve_columns(blobs, ["id"]) == ["id"]


def test_it_travels_with_its_connection(ref: RemoteTableRef, local: TableRef) -> None:
    opened, copy = ref.open(), pickle.loads(pickle.dumps(ref))
    assert copy == ref
    assert copy.open() is opened
    assert copy.open(fresh=True) is not opened
    assert copy.take(np.array([7]), ["id"]).equals(local.take(np.array([7]), ["id"]))
    assert not ref.is_local
    assert ref.open_uring() is None


def test_tables_that_are_no_snapshot_of_a_main_branch(
    service: RemoteService, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="storage_options must not be given with a remote table"):
        table_ref(table, {"k": "v"})
    with pytest.raises(ConfigError, match=r"pin\(\) takes a table that Lance opens itself, got RemoteTableRef"):
        Pin(table_ref(table), "run", lambda pin: None)
    with pytest.raises(ConfigError, match="the order of a remote table must be a computed one, got order='lancedb'"):
        lance_stream(table, num_splits=2, order="lancedb")
    monkeypatch.setattr(type(table), "current_branch", lambda self: "b")
    with pytest.raises(ConfigError, match="main branch, got branch 'b' of db://tests/t"):
        table_ref(table)


def test_a_connection_that_cannot_travel(service: RemoteService) -> None:
    from lancedb.remote.header import HeaderProvider

    class Headers(HeaderProvider):
        def get_headers(self) -> dict[str, str]:
            return {"x-token": SECRET}

    table = service.connect(header_provider=Headers()).open_table("t")
    with pytest.raises(ConfigError, match=r"other processes can open, got db://tests/t: .*header_provider.*api_key"):
        table_ref(table)


def test_a_version_or_table_that_is_gone(service: RemoteService, ref: RemoteTableRef) -> None:
    with pytest.raises(VersionNotFoundError, match=r"version 9 of remote table db://tests/t no .*newest version is 3"):
        ref.at(9).open()
    ref.open()
    service.fault = lambda path, body: (404, b"no such table", "text/plain")
    with pytest.raises(TableError, match="db://tests/t cannot be opened"):
        ref.open(fresh=True)
    with pytest.raises(VersionNotFoundError, match=r"1 rows of table db://tests/t version 2 could not be read.*tag it"):
        ref.take(np.array([1]), ["id"])


def test_what_passes_is_tried_again_and_what_stays_is_told(service: RemoteService, ref: RemoteTableRef) -> None:
    """By lancedb's client, as its connection says: here it gives up after two failures."""
    busy = [1]

    def now_and_then(path: str, body: dict[str, Any]) -> tuple[int, bytes, str] | None:
        return (503, b"busy", "text/plain") if busy and busy.pop() else None

    service.fault = now_and_then
    assert ref.take(np.array([4]), ["id"])["id"].to_pylist() == [5]
    service.fault = lambda path, body: (503, b"busy", "text/plain")
    before = len(service.calls)
    with pytest.raises(
        ReadError, match=r"1 rows of table db://tests/t version 2 could not be read: .*request_failures"
    ):
        ref.take(np.array([4]), ["id"])
    assert len(service.calls) - before == 2
    service.fault = lambda path, body: (401, b"who are you", "text/plain")
    before = len(service.calls)
    with pytest.raises(ReadError, match="401"):
        ref.take(np.array([4]), ["id"])
    assert len(service.calls) - before == 1


def test_the_api_key_shows_nowhere(service: RemoteService, table: Any) -> None:
    ref = table_ref(table)
    assert SECRET not in f"{ref!r} {ref} {ref.identity}"
    echo = f"the key {SECRET} is not known".encode()
    service.fault = lambda path, body: (401, echo, "text/plain")
    for action in (
        lambda: table_ref(table),
        lambda: ref.open(fresh=True),
        lambda: ref.take(np.array([1]), ["id"]),
        lambda: count_rows(ref),
        lambda: validate_filter(ref, "id > 3"),
        lambda: match_rows(ref, "id > 3"),
    ):
        with pytest.raises(StreamError, match=r"the key \*\*\* is not known") as told:
            action()
        assert SECRET not in everything_said(told.value)
        assert SECRET.encode() not in pickle.dumps(told.value)
    assert SECRET.encode() in pickle.dumps(ref), "readers need it"
