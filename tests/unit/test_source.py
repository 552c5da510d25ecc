"""Pinning tables, opening them, and what is validated before anything is read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import lance
import lance_namespace
import lancedb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ray_lance_stream import table
from ray_lance_stream.errors import ConfigError, ReadError, TableError, VersionNotFoundError
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
from ray_lance_stream.storage_options import with_retries
from ray_lance_stream.take import take_rows

SECRET = "s3cr3t-v4lue"


def ids(num_rows: int, start: int = 0) -> pa.Table:
    return pa.table({"id": np.arange(start, start + num_rows)})


def read_ids(ref: TableRef) -> list[int]:
    return take_rows(ref.open(), np.arange(count_rows(ref)), ["id"])["id"].to_pylist()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A table with version 1 of 10 rows and version 2 of 15."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(ids(10), uri)
    lance.write_dataset(ids(5, 10), uri, mode="append")
    return uri


# What can be pinned


def test_every_kind_of_table_names_the_same_version(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(path).parent)
    tables = [path, Path(path), "t.lance", lance.dataset(path), lancedb.connect(".").open_table("t")]
    assert {table_ref(table) for table in tables} == {TableRef(path, 2)}
    by_url = table_ref(f"file://{path}")
    assert (by_url.identity, by_url.version) == (path, 2)


def test_checked_out_versions_are_pinned(path: str) -> None:
    table = lancedb.connect(Path(path).parent).open_table("t")
    table.checkout(1)
    for ref in (table_ref(table), table_ref(lance.dataset(path, version=1)), table_ref(path).at(1)):
        assert ref == TableRef(path, 1)
        assert read_ids(ref) == list(range(10))


@pytest.mark.parametrize("stable_ids", [False, True])
def test_a_pinned_version_does_not_see_later_changes(tmp_path: Path, stable_ids: bool) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(ids(100), uri, max_rows_per_file=13, enable_stable_row_ids=stable_ids)
    ref = table_ref(uri)
    ref.open()

    dataset = lance.write_dataset(ids(50, 100), uri, mode="append")
    dataset.delete("id < 30")
    dataset.update({"id": "id + 1000"}, where="id > 80")
    dataset.optimize.compact_files()

    assert read_ids(ref) == list(range(100))
    assert match_rows(ref, "id < 30").tolist() == list(range(30))
    assert take_rows(ref.open(fresh=True), np.array([99, 0]), ["id"])["id"].to_pylist() == [99, 0]


def test_a_version_that_is_cleaned_up(path: str) -> None:
    lance.dataset(path).cleanup_old_versions(timedelta(0), delete_unverified=True)
    with pytest.raises(VersionNotFoundError, match=rf"version 1 of table {path} no longer .* newest version is 2.*tag"):
        TableRef(path, 1).open()
    with pytest.raises(VersionNotFoundError, match="version 7"):
        table_ref(path).at(7).open()


def test_a_tag_keeps_the_version(path: str) -> None:
    dataset = lance.dataset(path)
    dataset.tags.create("run", 1)
    dataset.cleanup_old_versions(timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False)
    assert read_ids(TableRef(path, 1)) == list(range(10))


def test_empty_tables_can_be_pinned(tmp_path: Path) -> None:
    ref = table_ref(lance.write_dataset(ids(0), str(tmp_path / "t.lance")))
    assert count_rows(ref) == 0
    assert match_rows(ref, "id > 3").tolist() == []
    assert sample_row_bytes(ref, ["id"], 0) == 1


def test_branches(path: str) -> None:
    dataset = lance.dataset(path)
    dataset.create_branch("b")
    checked_out = dataset.checkout_version(("b", None))
    # Carries the URI of the main branch, where the same version number names other rows.
    assert checked_out.uri == path
    assert table_ref(checked_out) == table_ref(f"{path}/tree/b")
    assert read_ids(table_ref(checked_out)) == list(range(15))

    branch = lance.write_dataset(ids(7, 100), checked_out, mode="append")
    assert read_ids(table_ref(branch)) == [*range(15), *range(100, 107)]
    assert table_ref(f"{path}/tree/b") == table_ref(branch)

    table = lancedb.connect(Path(path).parent).open_table("t")
    table.add(ids(3, 500))  # on the main branch, where version 3 now names other rows
    assert table.version == branch.version
    assert table_ref(table.branches.checkout("b")) == table_ref(branch)
    by_version = lance.dataset(path).checkout_version(("b", branch.version))
    dataset.tags.create("on-branch", ("b", branch.version))
    for given in (by_version, lance.dataset(path, version="on-branch")):
        assert table_ref(given) == table_ref(branch)
    assert table_ref(lance.dataset(path)) == TableRef(path, 3)


@pytest.mark.parametrize("name", ["feature/x", "a-b_c.d"])
def test_names_of_branches(path: str, name: str) -> None:
    table = lancedb.connect(Path(path).parent).open_table("t")
    branch = table.branches.create(name)
    branch.add(ids(5, 70))
    assert read_ids(table_ref(branch)) == [*range(15), *range(70, 75)]


def test_a_version_that_was_checked_out_by_its_tag(path: str) -> None:
    table = lancedb.connect(Path(path).parent).open_table("t")
    table.tags.create("old", 1)
    table.checkout("old")
    for given in (table, lance.dataset(path, version="old")):
        assert table_ref(given) == TableRef(path, 1)


def test_tables_of_namespaces(tmp_path: Path) -> None:
    """Known by an id, they lie where the namespace says; the name of a nested one is no path."""
    db = lancedb.connect_namespace("dir", {"root": str(tmp_path)})
    db.create_namespace(["ns"])
    top = db.create_table("t", ids(10))
    db.create_table("t", ids(7, 100), namespace_path=["ns"])
    nested = db.open_table("t", namespace_path=["ns"])
    top.add(ids(5, 10))
    assert read_ids(table_ref(top)) == list(range(15))
    assert read_ids(table_ref(nested)) == list(range(100, 107))
    assert table_ref(top).identity == str(tmp_path / "t.lance")
    top.checkout(1)
    assert read_ids(pickle.loads(pickle.dumps(table_ref(top)))) == list(range(10))
    branch = nested.branches.create("b")
    branch.add(ids(2, 200))
    assert read_ids(table_ref(branch)) == [*range(100, 107), 200, 201]
    by_uring = table_ref(branch).open_uring()
    assert by_uring is None or by_uring.take([8, 0])["id"].to_pylist() == [201, 100]
    client = lance_namespace.connect("dir", {"root": str(tmp_path)})
    assert table_ref(lance.dataset(namespace_client=client, table_id=["ns", "t"])) == table_ref(nested)
    with pytest.raises(ConfigError, match="in-memory"):
        table_ref(lancedb.connect_namespace("dir", {"root": "memory://x"}).create_table("m", ids(3)))


def test_a_dataset_whose_table_was_made_anew(path: str) -> None:
    dataset = lance.dataset(path, version=1)
    lance.LanceDataset.drop(path)
    lance.write_dataset(ids(10, 500), path)
    with pytest.raises(TableError, match="made anew"):
        table_ref(dataset)


# What is refused


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (None, "got builtins.NoneType: pass a LanceDB table"),
        ([1, 2], "got builtins.list: one stream reads one table"),
        (("a.lance", "b.lance"), "one stream reads one table"),
        (pd.DataFrame({"id": [1]}), r"DataFrame.*lance\.write_dataset"),
        (ids(3), r"pyarrow.*write_dataset"),
        (17, "got builtins.int"),
        ("", "non-empty string"),
        ("memory://x.lance", r"in-memory table memory://x\.lance: create it with lancedb\.connect"),
        ("db://project/x", r"given as the table itself.*got db://project/x: pass lancedb\.connect.*or the URI of"),
    ],
)
def test_what_is_no_table(table: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        table_ref(table)


def test_lancedb_tables_that_other_processes_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in-memory"):
        table_ref(lancedb.connect("memory://").create_table("x", ids(3)))
    with pytest.raises(ConfigError, match="got AsyncTable: open it with"):
        table_ref(object.__new__(lancedb.table.AsyncTable))
    with pytest.raises(ConfigError, match="got LanceDBConnection"):
        table_ref(lancedb.connect(tmp_path))


def test_parts_of_lance_that_are_no_dataset(path: str) -> None:
    with pytest.raises(ConfigError, match="got lance's LanceFragment"):
        table_ref(lance.dataset(path).get_fragments()[0])


@pytest.mark.parametrize("name", ["none.lance", ""])
def test_missing_tables(path: str, name: str) -> None:
    with pytest.raises(TableError, match=r"no Lance dataset can be opened at .*<database>/<name>\.lance"):
        table_ref(Path(path).parent / name)
    with pytest.raises(TableError):
        TableRef(str(Path(path).parent / name), 1).open()


def test_dropped_and_closed_lancedb_tables(tmp_path: Path) -> None:
    db = lancedb.connect(tmp_path)
    table, other = db.create_table("t", ids(3)), db.create_table("u", ids(3))
    table_ref(table).open()
    db.drop_table("t")
    with pytest.raises(TableError, match="no Lance dataset"):
        table_ref(table)
    other._table.close()
    with pytest.raises(TableError, match=r"'u' cannot be used.*closed"):
        table_ref(other)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", 1), "uri must be a non-empty string"),
        ((Path("x"), 1), "uri must be a non-empty string"),
        (("x", 0), "version must be an integer >= 1, got 0"),
        (("x", "1"), "version must be"),
        (("x", True), "version must be"),
        (("x", 1, "k=v"), "storage_options must be a mapping"),
        (("x", 1, {"k": 3}), "got int for 'k'"),
    ],
)
def test_malformed_references(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TableRef(*arguments)


# Identity and secrets


@pytest.mark.parametrize(
    ("uri", "identity"),
    [
        ("s3://bucket/a/t.lance/", "s3://bucket/a/t.lance"),
        (f"s3://user:{SECRET}@bucket/t.lance?token={SECRET}#x", "s3://bucket/t.lance"),
        (f"https://{SECRET}@host:9000/t.lance?sig={SECRET}", "https://host:9000/t.lance"),
        ("abfss://container@account.dfs.core.windows.net/t", "abfss://container@account.dfs.core.windows.net/t"),
        ("/data/./x/../t.lance/", "/data/t.lance"),
        ("/data/c#/t.lance", "/data/c#/t.lance"),
        (f"/data/t.lance?token={SECRET}", "/data/t.lance"),
        ("file:///data/my%20t.lance", "/data/my t.lance"),
        ("t.lance", os.path.abspath("t.lance")),
        ("~/t.lance", os.path.expanduser("~/t.lance")),
    ],
)
def test_identity_and_repr_hold_no_secret(uri: str, identity: str) -> None:
    ref = TableRef(uri, 3, {"aws_secret_access_key": SECRET})
    assert ref.identity == identity
    assert repr(ref) == f"TableRef({identity!r}, version=3)"
    assert SECRET.encode() not in pickle.dumps(ref.identity)


def test_storage_options_travel_but_do_not_identify(path: str) -> None:
    ref = table_ref(path, {"k": SECRET})
    copy = pickle.loads(pickle.dumps(ref))
    assert copy.storage_options == {"k": SECRET}
    assert ref == copy == TableRef(path, 2)
    assert hash(ref) == hash(TableRef(path, 2))
    assert ref.at(1).storage_options == {"k": SECRET}


def test_storage_options_of_a_dataset_are_kept_unless_given(path: str) -> None:
    dataset = lance.dataset(path, storage_options={"k": SECRET})
    assert (table_ref(dataset).storage_options or {})["k"] == SECRET  # type: ignore[index, union-attr]
    assert table_ref(dataset, {"k": "other"}).storage_options == {"k": "other"}


def test_storage_options_of_a_lancedb_connection_are_kept(path: str) -> None:
    table = lancedb.connect(Path(path).parent, storage_options={"k": SECRET}).open_table("t")
    assert table_ref(table).storage_options == {"k": SECRET}


def everything_said(error: BaseException | None) -> str:
    """The text of an error, of all that it carries, and as printed."""
    if error is None:
        return ""
    lines = "".join(traceback.format_exception_only(error))
    return lines + repr(error.args) + everything_said(error.__cause__) + everything_said(error.__context__)


@pytest.mark.parametrize("uri", [f"s3://user:{SECRET}@bucket/t.lance?token={SECRET}", f"/none.lance?token={SECRET}"])
@pytest.mark.parametrize("inner", [OSError, ValueError])
def test_errors_hold_no_secret(uri: str, inner: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uri: str, **options: Any) -> None:
        try:
            raise inner(f"inner {options}")
        except inner as cause:
            raise inner(f"403 at {uri} with {options}") from cause

    monkeypatch.setattr(lance, "dataset", fail)
    options = {"aws_secret_access_key": SECRET, "aws_region": "us-east-1"}
    for action in (lambda: table_ref(uri, options), TableRef(uri, 1, options).open):
        with pytest.raises(TableError) as info:
            action()
        assert "403 at" in str(info.value)
        assert SECRET not in everything_said(info.value)


def test_errors_that_hold_no_secret_keep_their_cause(tmp_path: Path) -> None:
    with pytest.raises(TableError) as info:
        table_ref(tmp_path / "none.lance", {"k": SECRET})
    assert isinstance(info.value.__cause__, ValueError)


def test_an_error_of_the_options_callable_hides_its_text(path: str) -> None:
    def provider() -> dict[str, str]:
        raise RuntimeError(f"token {SECRET} refused")

    with pytest.raises(TableError, match=r"callable raised RuntimeError at .*test_source\.py:\d+; its message") as info:
        table_ref(path, provider)
    assert SECRET not in everything_said(info.value)


@pytest.mark.parametrize("result", [["k", SECRET], {"k": 3}])
def test_a_callable_must_return_strings(path: str, result: Any) -> None:
    with pytest.raises(ConfigError, match="storage_options must") as info:
        table_ref(path, lambda: result)
    assert SECRET not in everything_said(info.value)


# Opening


def test_open_is_cached_and_thread_safe(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = lance.dataset
    monkeypatch.setattr(lance, "dataset", lambda *a, **k: (calls.append(1), time.sleep(0.05), original(*a, **k))[-1])
    start = threading.Barrier(8)

    def open_copy(_: int) -> lance.LanceDataset:
        start.wait()
        return TableRef(path, 1).open()

    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(open_copy, range(8)))

    assert len(calls) == 1
    assert all(dataset is opened[0] for dataset in opened)
    assert TableRef(path, 2).open() is not opened[0]
    assert TableRef(path, 1).open(fresh=True) is not opened[0]


def test_least_recently_used_tables_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_MAX_OPEN_TABLES", 2)
    refs = [table_ref(lance.write_dataset(ids(3), str(tmp_path / f"{i}.lance"))) for i in range(3)]
    first = refs[0].open()
    refs[1].open()
    assert refs[0].open() is first
    refs[2].open()
    assert refs[0].open() is first
    refs[1].open()
    refs[2].open()
    assert refs[0].open() is not first


def test_other_static_options_open_anew(path: str) -> None:
    first = TableRef(path, 1, {"k": "a"}).open()
    assert TableRef(path, 1, {"k": "a"}).open() is first
    assert TableRef(path, 1, {"k": "b"}).open() is not first


def test_a_callable_is_called_at_each_real_open(path: str) -> None:
    calls = []
    ref = TableRef(path, 1, lambda: calls.append(1) or {"k": str(len(calls))})
    ref.open(fresh=True)
    assert ref.open().initial_storage_options["k"] == "1"
    assert len(calls) == 1
    assert ref.open(fresh=True).initial_storage_options["k"] == "2"


def test_options_are_renewed_before_they_expire(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    calls = []

    def provider() -> dict[str, str]:
        calls.append(1)
        return {"expires_at_millis": str(int((now_s + 100) * 1000))}

    ref = TableRef(path, 1, provider)
    ref.open(fresh=True)
    now_s += 74
    ref.open()
    assert len(calls) == 1
    now_s += 2
    ref.open()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("uri", "given", "retries"),
    [
        ("s3://b/t", {}, "1000"),
        ("gs://b/t", {"k": "v"}, "1000"),
        ("abfss://c@a.dfs.core.windows.net/t", {}, "1000"),
        ("s3://b/t", {"client_max_retries": "2"}, "2"),
        ("s3://b/t", {"CLIENT_MAX_RETRIES": "2"}, None),
        ("/data/t", {}, None),
        ("hf://datasets/t", {}, None),
    ],
)
def test_object_stores_get_more_retries_than_lance_gives_them(
    uri: str, given: dict[str, str], retries: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, str]] = []
    monkeypatch.setattr(
        lance, "dataset", lambda uri, **options: passed.append(options["storage_options"] or {}) or "it"
    )
    ref = TableRef(uri, 1, given)
    ref.open(fresh=True)
    assert passed[0].get("client_max_retries") == retries
    assert given.items() <= passed[0].items()
    assert ref.storage_options == given
    monkeypatch.setenv("OBJECT_STORE_CLIENT_MAX_RETRIES", "3")
    monkeypatch.setenv("LANCE_AIMD_MAX_RETRIES", "3")
    assert not {"client_max_retries", "lance_aimd_max_retries"} & (set(with_retries(uri, given)) - set(given))


# Filters that read no column


@pytest.fixture
def parties(tmp_path: Path) -> TableRef:
    table = pa.table({"id": [0, 1, 2, 3], "PartyAbbrev": list("DRDI"), "s": [{"a": i, "id": "x"} for i in range(4)]})
    return table_ref(lance.write_dataset(table, str(tmp_path / "t.lance")))


@pytest.mark.parametrize(
    "filter",
    [
        "\"PartyAbbrev\" != 'D'",
        "id >= 0 AND \"partyabbrev\" != 'D'",
        "'PartyAbbrev' != 'D' AND id >= 0",
        "\"s.a\" = 'x' OR id = 1",
    ],
)
def test_a_filter_with_the_name_of_a_column_in_quotes_is_refused(parties: TableRef, filter: str) -> None:
    with pytest.raises(ConfigError, match=r"filter must name columns without quotes.*write `(PartyAbbrev|s\.a)` for"):
        validate_filter(parties, filter)


@pytest.mark.parametrize(
    "filter", ["true", "1 = 1", "'a' = 'b'", "\"Party\" != 'D'", "lower('A') = 'a'", "'_rowid' = 'x'"]
)
def test_a_filter_that_reads_no_column_is_refused(parties: TableRef, filter: str) -> None:
    with pytest.raises(ConfigError, match=r"filter must tell the rows of table .* apart.*`Name`"):
        validate_filter(parties, filter)


@pytest.mark.parametrize(
    ("filter", "matches"),
    [
        ("`PartyAbbrev` != 'D'", [1, 3]),
        ("partyabbrev != 'D'", [1, 3]),  # Lance finds a name in any case
        ('PartyAbbrev != "D"', [1, 3]),
        ("PartyAbbrev IN ('D', \"I\")", [0, 2, 3]),
        ("lower(PartyAbbrev) = 'd'", [0, 2]),
        ("PartyAbbrev = 'id' OR id = 1", [1]),
        ("1 = 1 AND id % 3 = 0", [0, 3]),
        ("s.a > 2", [3]),
        ("id IS NOT NULL", [0, 1, 2, 3]),
        ("_rowid = 2", [2]),
        ("`_rowid` = 2", [2]),
    ],
)
def test_a_filter_on_a_column_is_accepted(parties: TableRef, filter: str, matches: list[int]) -> None:
    validate_filter(parties, filter)
    assert match_rows(parties, filter, progress=False).tolist() == matches


def test_a_filter_that_no_column_with_nulls_can_fail_is_accepted(tmp_path: Path) -> None:
    """Lance knows that it is true for each row; it is a condition on a column all the same."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    ref = table_ref(lance.write_dataset(pa.table({"id": [1, 2]}, schema=schema), str(tmp_path / "t.lance")))
    validate_filter(ref, "id IS NOT NULL")


# io_uring


@pytest.mark.parametrize("name", ["t", "a b", "a%20b", "ü#x", "q?x", "a+b[1]"])
def test_io_uring_reads_the_table_at_that_path(tmp_path: Path, name: str) -> None:
    lance.write_dataset(pa.table({"id": np.arange(5)}), str(tmp_path / "a b"))
    lance.write_dataset(pa.table({"id": np.arange(5) * 7}), str(tmp_path / name), mode="overwrite")
    ref = TableRef(str(tmp_path / name), lance.dataset(str(tmp_path / name)).version)

    opened = ref.open_uring()

    if opened is None:
        pytest.skip("io_uring is forbidden here")
    assert opened.take([0, 4])["id"].to_pylist() == [0, 28]
    assert ref.open_uring() is opened
    assert TableRef(f"file://{quote(ref.uri)}", ref.version).open_uring().take([4])["id"].to_pylist() == [28]


@pytest.mark.parametrize("name", ["t?v=1", "link/../t"])
def test_io_uring_never_reads_another_table(tmp_path: Path, name: str) -> None:
    """Where two tables would be one to whoever cleans up the path."""
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "inner")
    for number, path in enumerate([tmp_path / "t", tmp_path / "t?v=1", tmp_path / "elsewhere" / "t"]):
        lance.write_dataset(pa.table({"id": np.arange(5) + 10 * number}), str(path))
    uri = f"file://{tmp_path}/{name}" if ".." in name else str(tmp_path / name)
    ref = TableRef(uri, 1)

    opened = ref.open_uring()

    assert opened is None or opened.take([2]) == ref.open().take([2])


def test_where_io_uring_is_forbidden_it_is_tried_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    open_dataset = lance.dataset

    def forbid(uri: str, **options: Any) -> lance.LanceDataset:
        if uri.startswith("file+uring://"):
            tried.append(uri)
            raise OSError("Operation not permitted (os error 1)")
        return open_dataset(uri, **options)

    monkeypatch.setattr(lance, "dataset", forbid)
    ref = TableRef(path, 1)

    assert ref.open_uring() is None
    assert ref.open_uring() is None
    assert len(tried) == 1
    assert ref.open().count_rows() == open_dataset(path, version=1).count_rows()


@pytest.mark.parametrize("uri", ["s3://bucket/t.lance", "gs://bucket/t.lance", "az://container/t.lance"])
def test_io_uring_is_for_local_tables(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance, "dataset", lambda *args, **options: pytest.fail("opened"))

    assert TableRef(uri, 1).open_uring() is None


def test_import_is_light() -> None:
    code = (
        "import sys, ray_lance_stream.source; "
        "assert not {'lance', 'lancedb', 'ray', 'torch', 'pandas'} & set(sys.modules), 'imported too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Columns


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> TableRef:
    """100 rows in 7 fragments, without ids 0, 13, 14 and 99."""
    data = pa.table(
        {
            "id": range(100),
            "Label": [None if i % 5 == 0 else f"l{i % 3}" for i in range(100)],
            "x": [None if i % 4 == 0 else i for i in range(100)],
            "s": [None if i % 6 == 0 else {"b": i, "t": {"c": str(i)}} for i in range(100)],
            "list": [[i] for i in range(100)],
        }
    )
    uri = str(tmp_path_factory.mktemp("t") / "typed.lance")
    for start, stop in ((0, 1), (1, 14), (14, 40), (40, 41), (41, 60), (60, 99), (99, 100)):
        # Copied, because Lance panics at writing a slice of nested structs with nulls.
        part = data.take(pa.array(range(start, stop)))
        lance.write_dataset(part, uri, mode="append" if start else "create")
    lance.dataset(uri).delete("id in (0, 13, 14, 99)")
    return table_ref(uri)


def test_columns_that_can_be_read(typed: TableRef) -> None:
    assert resolve_columns(typed, None) == ["id", "Label", "x", "s", "list"]
    for columns in (["x", "id"], ("s.t.c", "id", "s.b"), ["_rowid", "_rowaddr", "_rowoffset", "s"]):
        assert resolve_columns(typed, columns) == list(columns)
        assert take_rows(typed.open(), np.array([3, 0]), list(columns)).column_names == list(columns)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (["id", "label", "nope"], r"got unknown \['label', 'nope'\]: did you mean \['Label'\]\? available are \['id'"),
        (["zzzzzz"], r"unknown \['zzzzzz'\]: available are"),
        (["s.x"], r"unknown \['s\.x'\]"),
        (["list.item"], "unknown"),
        (["`id`"], "unknown"),
        (["id", "x", "id"], r"must not repeat a name, got \['id'\]"),
        ([], "at least one column"),
        ("id", "must be a list of names, got 'id'"),
        ([1], "must be a list of names"),
        ({"id": "id"}, "must be a list of names"),
        (["_row_created_at_version"], "from scans only"),
        (["_distance"], "unknown"),
    ],
)
def test_columns_that_are_refused(typed: TableRef, columns: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_columns(typed, columns)


def test_projected_schema(typed: TableRef) -> None:
    columns = ["s.b", "Label"]
    schema = projected_schema(typed, columns)
    assert schema == take_rows(typed.open(), np.array([5, 2]), columns).schema
    assert schema.names == columns


# Filters


@pytest.mark.parametrize(
    "filter",
    [
        "id % 3 = 0",
        "x > 50",
        "NOT (x > 50)",
        "x IS NULL",
        "x > 50 OR Label = 'l1'",
        "NOT (x > 50 AND Label = 'l1')",
        "Label IN ('l0', 'l2')",
        "Label <> 'l0'",
        "s.b < 40",
        "s.t.c = '33'",
        "x = NULL",
        "id > 20\n  AND id < 30 -- a comment",
        "_rowid > 40",
        "_rowaddr < 4294967296",
        "Label = 'now()'",
    ],
)
def test_matches_are_those_of_a_lancedb_search(typed: TableRef, filter: str) -> None:
    table = lancedb.connect(Path(typed.uri).parent).open_table("typed")
    validate_filter(typed, filter)

    rows = match_rows(typed, filter)

    assert rows.dtype == np.int64
    got = take_rows(typed.open(), rows, ["id"])["id"].to_pylist()
    assert got == sorted(table.search().where(filter).limit(None).to_arrow()["id"].to_pylist())
    assert len(rows) == table.count_rows(filter)


@pytest.mark.parametrize(
    ("filter", "text"),
    [
        ("id >", "got 'id >': .*sql parser error"),
        ("nope > 3", "No field named nope"),
        ("id", "does not return a boolean"),
        ("count(id) > 3", "got 'count"),
        ("no_function(id)", "Invalid function"),
        ("list = 3", "filter must be an SQL condition on columns of table"),
        ("", "such as 'id > 3', got ''"),
        ("  \n", "pass None for all rows"),
        (3, "got 3"),
        ("random() < 0.5", r"same rows whenever it is scanned.*'random\('"),
        ("x > 3 AND NOW () > timestamp '2020-01-01'", "same rows"),
        ("current_date > date '2020-01-01'", "'current_date'"),
        ("_rowoffset > 3", "_rowoffset does not exist"),
    ],
)
def test_filters_that_are_refused(typed: TableRef, filter: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        validate_filter(typed, filter)


def test_validating_a_filter_reads_no_rows(typed: TableRef, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("to_table", "to_batches", "count_rows"):
        monkeypatch.setattr(lance.LanceDataset, name, lambda *a, **k: pytest.fail("rows were read"))
    before = typed.open().io_stats_snapshot().read_bytes
    validate_filter(typed, "id > 3 AND Label = 'l1'")
    assert typed.open().io_stats_snapshot().read_bytes == before


@pytest.mark.parametrize("stable_ids", [False, True])
@pytest.mark.parametrize("index", ["BTREE", "BITMAP", None])
def test_matches_do_not_depend_on_indexes(tmp_path: Path, index: str | None, stable_ids: bool) -> None:
    rng = np.random.default_rng(0)
    data = pa.table({"id": np.arange(2000), "k": rng.integers(0, 20, 2000)})
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(data, uri, max_rows_per_file=300, enable_stable_row_ids=stable_ids)
    if index:
        dataset.create_scalar_index("k", index)
    lance.write_dataset(data.set_column(0, "id", pa.array(np.arange(2000, 4000))), uri, mode="append")
    dataset = lance.dataset(uri)
    dataset.delete("id % 11 = 4 or id < 5")
    ref = table_ref(uri)
    live = dataset.to_table()
    for filter, expected in (("k = 3", live["k"].to_numpy() == 3), ("k > 4 OR id < 50", None)):
        if expected is None:
            expected = (live["k"].to_numpy() > 4) | (live["id"].to_numpy() < 50)
        assert match_rows(ref, filter).tolist() == np.flatnonzero(expected).tolist()


def test_a_scan_that_fails_is_a_read_error(typed: TableRef) -> None:
    with pytest.raises(ReadError, match=r"typed\.lance.*filter='nope > 3' cannot be found: .*No field named nope"):
        match_rows(typed, "nope > 3")


# Counts and sizes


def test_count_is_of_live_rows(typed: TableRef) -> None:
    assert count_rows(typed) == 96


def test_row_size_is_that_of_the_columns_read(tmp_path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(np.zeros(1000 * 64, np.float32), 64)
    data = pa.table({"id": np.arange(1000), "v": vectors, "t": ["x" * (i // 10) for i in range(1000)]})
    ref = table_ref(lance.write_dataset(data, str(tmp_path / "t.lance"), max_rows_per_file=130))
    assert 8 <= sample_row_bytes(ref, ["id"], 1000) <= 10
    assert 256 <= sample_row_bytes(ref, ["v"], 1000) <= 260
    assert 45 <= sample_row_bytes(ref, ["t"], 1000) <= 65
    assert sample_row_bytes(ref, ["id"], 10**9) >= 8
    assert sample_row_bytes(ref, ["id"], 1) >= 8
