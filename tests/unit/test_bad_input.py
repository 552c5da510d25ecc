"""What cannot be served is refused on the driver, before any worker starts: no test here runs Ray."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import ray.train

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    StateError,
    StateMismatchError,
    StreamError,
    TableError,
    VersionNotFoundError,
    lance_stream,
)
from ray_lance_stream.train import STATE_FILE
from tests.fake_ray import without_coordinator

NUM_ROWS = 480
SECRET = "hunter2"


def rows(num_rows: int, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    return pa.table({"id": ids, "value": 3 * ids + 1, "name": [f"row {i}" for i in ids]})


@pytest.fixture(autouse=True)
def _without_ray() -> Iterator[None]:
    assert not ray.is_initialized()
    yield
    assert not ray.is_initialized(), "a check on the driver must not start Ray"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of 480 rows in uneven fragments; version 1 has 7 rows."""
    uri = str(tmp_path_factory.mktemp("tables") / "t.lance")
    for start, stop in ((0, 7), (7, 130), (130, 131), (131, NUM_ROWS)):
        lance.write_dataset(rows(stop - start, start), uri, mode="append" if start else "create")
    return uri


def refusal(kind: type[StreamError], texts: tuple[Any, ...], call: Any) -> StreamError:
    """The error of a call: of exactly this kind, holding the texts, and the same after its way from another process."""
    with pytest.raises(StreamError) as caught:
        call()
    error = caught.value
    assert type(error) is kind, error
    for text in texts:
        assert str(text) in str(error)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == str(error)
    return error


# Arguments: each refusal holds the words of the rule, the value and what to do

WHOLE = "must be an int >= "
ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "an unknown column": ({"columns": ["id", "valeu"]}, ("must exist", "['valeu']", "did you mean ['value']")),
    "columns as text": ({"columns": "id"}, ("must be a list of names", "'id'", "columns=[...]")),
    "no columns": ({"columns": []}, ("at least one column", "[]", "pass None for all")),
    "a repeated column": ({"columns": ["id", "id"]}, ("must not repeat", "['id']")),
    "columns that are no text": ({"columns": [1]}, ("must be a list of names", "[1]", "columns=[...]")),
    "a filter that is no SQL": ({"filter": "id >>> 3"}, ("must be an SQL condition", "'id >>> 3'", "parser error")),
    "a filter that is no condition": ({"filter": "id + 1"}, ("must be an SQL condition", "'id + 1'", "boolean")),
    "a filter on an unknown column": ({"filter": "nope = 3"}, ("SQL condition on columns", "No field named nope")),
    "an empty filter": ({"filter": " "}, ("must be an SQL condition", "' '", "pass None for all rows")),
    "a filter that is no text": ({"filter": 3}, ("filter must be SQL text", "3", "pass None for all rows")),
    "a filter that matches nothing": ({"filter": "id < 0"}, ("at least one row", "'id < 0'", "use one that does")),
    "too few matches": ({"filter": "id < 10"}, ("at least one row", "10 rows for num_splits=48", "num_splits <= 10")),
    "more splits than rows": ({"num_splits": 481}, ("at least one row", "480 rows for num_splits=481", "<= 480")),
    "an unknown order": ({"order": "lexical"}, ("must be one of", "feistel-1", "'lexical'", "leave it out")),
    "a seed that is text": ({"shuffle_seed": "7"}, ("seed must be an int", "'7'", "pass int(seed)")),
    "a seed with a fraction": ({"shuffle_seed": 1.5}, ("seed must be an int", "1.5", "pass int(seed)")),
    "no seed": ({"shuffle_seed": None}, ("seed must be an int", "None", "pass int(seed)")),
    "a bool as seed": ({"shuffle_seed": True}, ("seed must be an int", "True", "pass int(seed)")),
    "a seed of 5001 bits": ({"shuffle_seed": 2**5000}, ("at most 4096 bits", "5001 bits", "smaller seed")),
    "shuffle as text": ({"shuffle": "yes"}, ("shuffle must be True or False", "'yes'", "pass a bool")),
    "a wrong resume": ({"resume": "maybe"}, ('"auto" or "manual"', "'maybe'")),
    "options that are no mapping": ({"storage_options": "x"}, ("must be a mapping", "callable", "str")),
    "options that are no text": ({"storage_options": {"timeout": 3}}, ("strings to strings", "int", "'timeout'")),
    "evaluation as text": ({"evaluation": "yes"}, ("evaluation must be True or False", "'yes'")),
    "drop_remainder as a number": ({"drop_remainder": 0}, ("drop_remainder must be True or False", "0")),
}
ARGUMENTS |= {
    f"num_splits={n!r}": ({"num_splits": n}, ("num_splits " + WHOLE + "1", n)) for n in (0, -1, True, "48", 1.5)
}
ARGUMENTS |= {f"clump {n!r}": ({"shuffle_clump_size": n}, (WHOLE + "1", n, "pass None")) for n in (0, -1, 1.5, True)}
ARGUMENTS |= {
    f"{name}={value!r}": ({name: value}, (f"{name} {WHOLE}{0 if name == 'epoch' else 1}", repr(value)))
    for name, values in {
        "epoch": (-1, 1.5, True, None),
        "global_batch_size": (0, -48, "96", 96.0, True),
        "prefetch_chunks": (0, -1, 2.5, None),
        "prefetch_bytes": (0, 1e6),
        "readers_per_worker": (0, True),
        "replicas": (0, None),
        "read_batch_size": (0, -3, True),
    }.items()
    for value in values
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_cannot_be_served(path: str, case: str) -> None:
    arguments, texts = ARGUMENTS[case]
    refusal(ConfigError, texts, lambda: lance_stream(path, **{"num_splits": 48, **arguments}))


@pytest.mark.parametrize(
    ("global_batch_size", "batch_sizes", "splits"),
    [
        (24, "48", "12 or 24"),
        (72, "48 or 96", "24 or 36"),
        (100, "96 or 144", "25 or 50"),
        (1, "48", "1"),
        (47, "48", "47"),
    ],
)
def test_a_global_batch_that_is_no_multiple_names_what_is(
    path: str, global_batch_size: int, batch_sizes: str, splits: str
) -> None:
    texts = (
        "global_batch_size must be a positive multiple of num_splits",
        f"global_batch_size={global_batch_size} and num_splits=48",
        f"use global_batch_size={batch_sizes}, or num_splits=",
        splits,
    )
    refusal(ConfigError, texts, lambda: lance_stream(path, num_splits=48, global_batch_size=global_batch_size))


@pytest.mark.parametrize("value", [24, 72, 100, 47])
def test_what_the_error_names_is_served(path: str, value: int) -> None:
    error = refusal(ConfigError, (), lambda: lance_stream(path, num_splits=48, global_batch_size=value))
    named_sizes, _, named_splits = str(error).partition("use global_batch_size=")[2].partition(", or num_splits=")
    for size in named_sizes.split(" or "):
        lance_stream(path, num_splits=48, global_batch_size=int(size))
    for num_splits in named_splits.split(" or "):
        lance_stream(path, num_splits=int(num_splits), global_batch_size=value)


def test_without_num_splits_the_global_batch_is_checked_against_the_workers(path: str) -> None:
    stream = lance_stream(path, global_batch_size=100)
    texts = ("multiple of num_splits", "global_batch_size=100 and num_splits=3", "99 or 102", "2 or 4")
    refusal(ConfigError, texts, lambda: stream.streaming_split(3))


# Tables


@dataclass(frozen=True)
class Tables:
    """Things that are no table that can be streamed."""

    directory: Path

    def dropped(self) -> Any:
        db = lancedb.connect(self.directory)
        table = db.create_table("dropped", data=rows(100))
        db.drop_table("dropped")
        return table

    def cleaned_up(self) -> Any:
        """A dataset at version 1, which is cleaned up while it is checked out."""
        uri = str(self.directory / "cleaned.lance")
        lance.write_dataset(rows(100), uri)
        old = lance.dataset(uri, version=1)
        lance.write_dataset(rows(50), uri, mode="overwrite")
        lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
        return old

    def empty(self) -> Any:
        return lance.write_dataset(rows(0), str(self.directory / "empty.lance"))

    def in_memory(self) -> Any:
        return lancedb.connect("memory://").create_table("m", data=rows(100))

    def memory_uri(self) -> Any:
        return "memory://m.lance"

    def folder_of_a_database(self) -> Any:
        lancedb.connect(self.directory).create_table("some", data=rows(100))
        return self.directory

    def missing(self) -> Any:
        return str(self.directory / "missing.lance")

    def unknown_scheme(self) -> Any:
        return "nope://bucket/t.lance"

    def several(self) -> Any:
        return [self.missing(), self.missing()]

    def nothing(self) -> Any:
        return None

    def no_path(self) -> Any:
        return ""

    def number(self) -> Any:
        return 3

    def data_frame(self) -> Any:
        return pd.DataFrame({"id": [1, 2]})

    def arrow(self) -> Any:
        return rows(100)


TABLES: dict[str, tuple[type[StreamError], tuple[str, ...]]] = {
    "dropped": (TableError, ("no Lance dataset can be opened", "dropped.lance", "pass the table")),
    "cleaned_up": (VersionNotFoundError, ("version 1", "cleaned.lance", "no longer exists", "newest", "tag it")),
    "empty": (ConfigError, ("at least one row", "empty.lance version 1 has none", "write rows")),
    "in_memory": (ConfigError, ("readable from other processes", "memory://", "create it with lancedb.connect(")),
    "memory_uri": (ConfigError, ("readable from other processes", "memory://m.lance", "create it with")),
    "folder_of_a_database": (TableError, ("no Lance dataset", "its folder <database>/<name>.lance")),
    "missing": (TableError, ("no Lance dataset can be opened", "missing.lance", "pass the table")),
    "unknown_scheme": (TableError, ("no Lance dataset can be opened", "nope://bucket/t.lance", "Valid schemes")),
    "several": (ConfigError, ("must be one Lance table", "list", "make a stream per table")),
    "nothing": (ConfigError, ("must be one Lance table", "None", "pass a LanceDB table")),
    "no_path": (ConfigError, ("must be a non-empty string", "str", "pass a LanceDB table")),
    "number": (ConfigError, ("must be one Lance table", "int", "pass a LanceDB table")),
    "data_frame": (ConfigError, ("must be one Lance table", "pandas.DataFrame", "lance.write_dataset(data, uri)")),
    "arrow": (ConfigError, ("must be one Lance table", "pyarrow", "lance.write_dataset(data, uri)")),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_cannot_be_streamed(tmp_path: Path, case: str) -> None:
    kind, texts = TABLES[case]
    table = getattr(Tables(tmp_path), case)()
    refusal(kind, texts, lambda: lance_stream(table, num_splits=48))


def test_every_kind_of_table_gives_the_same_plan(tmp_path: Path) -> None:
    table = lancedb.connect(tmp_path).create_table("t", data=rows(100))
    table.add(rows(NUM_ROWS - 100, 100))
    uri = str(tmp_path / "t.lance")
    streams = [lance_stream(given, num_splits=48) for given in (table, lance.dataset(uri), uri, Path(uri))]
    assert {stream._plan.resolve().fingerprint(epoch=2) for stream in streams} == {
        streams[0]._plan.resolve().fingerprint(epoch=2)
    }
    assert {stream._plan.order.num_rows for stream in streams} == {NUM_ROWS}
    assert {json.dumps(stream.state_dict()) for stream in streams} == {json.dumps(streams[0].state_dict())}
    other = lance_stream(uri, num_splits=48, shuffle_seed=1)
    assert other._plan.resolve().fingerprint(epoch=2) != streams[0]._plan.resolve().fingerprint(epoch=2)


def test_a_version_that_is_checked_out_is_pinned(tmp_path: Path) -> None:
    table = lancedb.connect(tmp_path).create_table("t", data=rows(100))
    table.add(rows(50, 100))
    old = lancedb.connect(tmp_path).open_table("t")
    old.checkout(1)
    uri = str(tmp_path / "t.lance")
    for given in (old, lance.dataset(uri, version=1)):
        state = lance_stream(given, num_splits=10).state_dict()
        assert (state["table_version"], state["num_rows"]) == (1, 100)
    state = lance_stream(uri, num_splits=10).state_dict()
    assert (state["table_version"], state["num_rows"]) == (2, 150)


# Splitting


@pytest.fixture
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards can be made without Ray, as long as they read nothing."""
    without_coordinator(monkeypatch)


def test_more_workers_than_splits(path: str) -> None:
    stream = lance_stream(path, num_splits=48)
    texts = ("each worker needs at least one split", "49 workers for num_splits=48", "at most 48 workers")
    refusal(ConfigError, texts, lambda: stream.streaming_split(49))
    refusal(ConfigError, texts, lambda: stream.shard(rank=0, world_size=49))


def test_without_num_splits_workers_are_bound_by_the_rows(path: str) -> None:
    stream = lance_stream(path)
    texts = ("each split needs at least one row", "480 rows for num_splits=481", "<= 480")
    refusal(ConfigError, texts, lambda: stream.streaming_split(481))


def test_workers_that_are_no_multiple_of_replicas(path: str) -> None:
    stream = lance_stream(path, num_splits=48, replicas=2)
    texts = ("number of workers must be a multiple of replicas", "3 workers and replicas=2")
    refusal(ConfigError, texts, lambda: stream.streaming_split(3))


def test_no_workers(path: str) -> None:
    refusal(ConfigError, ("at least 1", "0"), lambda: lance_stream(path, num_splits=48).streaming_split(0))


def test_a_rank_outside_of_the_world(path: str) -> None:
    texts = ("rank must be in [0, 4)", "got 4")
    refusal(ConfigError, texts, lambda: lance_stream(path, num_splits=48).shard(rank=4, world_size=4))


def test_unequal_shares(path: str) -> None:
    stream = lance_stream(path, num_splits=48)
    texts = ("equal must be True", "False", "the same number of steps")
    refusal(ConfigError, texts, lambda: stream.streaming_split(2, equal=False))


@pytest.mark.usefixtures("_no_coordinator")
def test_without_num_splits_a_run_is_not_elastic(path: str, caplog: pytest.LogCaptureFixture) -> None:
    shards = lance_stream(path).streaming_split(4)
    assert [shard.split_block for shard in shards] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    text = record.getMessage()
    assert "num_splits is the number of workers, 4" in text
    assert "cannot be resumed on another number of workers" in text
    assert "pass lance_stream(..., num_splits=S)" in text


@pytest.mark.usefixtures("_no_coordinator")
def test_with_num_splits_there_is_nothing_to_warn_of(path: str, caplog: pytest.LogCaptureFixture) -> None:
    shards = lance_stream(path, num_splits=48).streaming_split(5)  # not a divisor
    assert [shard.split_block for shard in shards] == [(0, 9), (9, 19), (19, 28), (28, 38), (38, 48)]
    assert not caplog.records


# Steps


def test_rows_of_a_step_that_does_not_exist(path: str) -> None:
    stream = lance_stream(path, num_splits=48, global_batch_size=96)
    for ask in (stream.row_ids, stream.step_digest):
        for step in (5, -1, True, 1.5):
            refusal(ConfigError, ("step must be an int in [0, 5)", f"got {step!r}"), lambda: ask(0, step))  # noqa: B023
        refusal(ConfigError, ("epoch must be an int >= 0", "-1"), lambda: ask(-1, 0))  # noqa: B023
    texts = ("column must be one of ['id', 'value', 'name']", "'nope'")
    refusal(ConfigError, texts, lambda: stream.row_ids(0, 0, column="nope"))


def test_rows_of_a_step_of_unknown_size(path: str) -> None:
    assert len(lance_stream(path, num_splits=48).row_ids(0, 0)) == 288  # by default
    for size in (96.0, True, 0):
        texts = ("global_batch_size must be an int >= 1", repr(size))
        ask = lance_stream(path, num_splits=48).row_ids
        refusal(ConfigError, texts, lambda: ask(0, 0, global_batch_size=size))  # noqa: B023
    texts = ("depend on num_splits", "pass lance_stream(..., num_splits=S)")
    refusal(ConfigError, texts, lambda: lance_stream(path, global_batch_size=96).row_ids(0, 0))


def test_steps_that_cannot_be_skipped(path: str) -> None:
    stream = lance_stream(path, num_splits=48, global_batch_size=96)
    for steps in (range(3, 3), [1, 2], 3):
        refusal(ConfigError, ("range of at least one step", repr(steps)), lambda: stream.skip(0, steps))  # noqa: B023
    refusal(ConfigError, ("step must be an int in [0, 5)", "got 5"), lambda: stream.skip(0, range(4, 6)))


# Rows that are left out


@pytest.mark.parametrize(("num_splits", "left_out"), [(47, 10), (479, 1), (241, 239)])
def test_rows_that_are_left_out_are_announced(
    path: str, caplog: pytest.LogCaptureFixture, num_splits: int, left_out: int
) -> None:
    lance_stream(path, num_splits=num_splits)
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert f"{left_out} of {NUM_ROWS} rows are left out of each epoch (num_splits={num_splits}" in text
    assert "others in each epoch" in text
    assert "drop_remainder=False" in text


def test_left_out_rows_count_what_the_filter_matches(path: str, caplog: pytest.LogCaptureFixture) -> None:
    lance_stream(path, num_splits=48, filter="id < 100", shuffle=False)
    (record,) = caplog.records
    assert "4 of 100 rows are left out of each epoch" in record.getMessage()
    assert "others in each epoch" not in record.getMessage()


@pytest.mark.parametrize("arguments", [{"num_splits": 48}, {"num_splits": 48, "drop_remainder": False}])
def test_nothing_is_announced_where_nothing_is_left_over(
    path: str, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any]
) -> None:
    lance_stream(path, **arguments)
    assert not caplog.records


def test_uneven_ranks_of_a_whole_pass_are_announced(path: str, caplog: pytest.LogCaptureFixture) -> None:
    lance_stream(path, num_splits=47, drop_remainder=False)
    assert "the last 10 of 480 rows are one more row for the first splits, so ranks may differ" in caplog.text


# resume_from


def save(stream: LanceStream, directory: Path, name: str = "train") -> str:
    """A checkpoint directory as `shard.save_state` writes it."""
    stream.set_name(name)
    directory.mkdir(exist_ok=True)
    stream.shard().save_state(directory)
    return str(directory)


ORIGINAL: dict[str, Any] = {"num_splits": 24, "filter": "id < 240", "shuffle_seed": 7, "epoch": 3}
CHANGES: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    "seed": ({"shuffle_seed": 8}, "shuffle_seed", 7, 8),
    "shuffle": ({"shuffle": False}, "shuffle", True, False),
    "num_splits": ({"num_splits": 12}, "num_splits", 24, 12),
    "filter": ({"filter": "id >= 240"}, "filter", "id < 240", "id >= 240"),
    "no filter": ({"filter": None}, "filter", "id < 240", None),
    "clump": ({"shuffle_clump_size": 4}, "shuffle_clump_size", None, 4),
    "drop_remainder": ({"drop_remainder": False}, "drop_remainder", True, False),
    "replicas": ({"replicas": 2}, "replicas", 1, 2),
}


@pytest.mark.usefixtures("_no_coordinator")
@pytest.mark.parametrize("form", ["dict", "str", "Path", "Checkpoint"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_state_of_another_row_order(path: str, tmp_path: Path, case: str, form: str) -> None:
    changes, name, saved, current = CHANGES[case]
    original = lance_stream(path, **ORIGINAL)
    directory = save(original, tmp_path / "checkpoint")
    source = {
        "dict": original.state_dict(),
        "str": directory,
        "Path": Path(directory),
        "Checkpoint": ray.train.Checkpoint.from_directory(directory),
    }[form]
    texts = (f"{name}: saved {saved!r}, current {current!r}", "make the stream with the saved values")
    error = refusal(
        StateMismatchError, texts, lambda: lance_stream(path, resume_from=source, **{**ORIGINAL, **changes})
    )
    assert isinstance(error, StateMismatchError)
    assert error.differences == [(name, saved, current)]


@pytest.mark.usefixtures("_no_coordinator")
def test_a_state_of_the_same_row_order_is_continued(path: str, tmp_path: Path) -> None:
    original = lance_stream(path, **ORIGINAL)
    directory = save(original, tmp_path / "checkpoint")
    moved = {"global_batch_size": 48, "columns": ["id"], "prefetch_chunks": 1, "readers_per_worker": 2}
    given = (original.state_dict(), directory, Path(directory), ray.train.Checkpoint.from_directory(directory))
    for source in given:
        stream = lance_stream(path, resume_from=source, **{**ORIGINAL, "epoch": 0, **moved})
        assert stream.state_dict()["epoch"] == 3
        assert stream.shard().epoch == 3


@pytest.mark.usefixtures("_no_coordinator")
def test_a_relative_path_is_found(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(lance_stream(path, **ORIGINAL), tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    for source in ("checkpoint", Path("checkpoint")):
        assert lance_stream(path, resume_from=source, **{**ORIGINAL, "epoch": 0}).state_dict()["epoch"] == 3


def test_a_state_of_another_table(path: str, tmp_path: Path) -> None:
    other = lance.write_dataset(rows(NUM_ROWS), str(tmp_path / "other.lance")).uri
    state = lance_stream(path, num_splits=48).state_dict()
    texts = (f"table_uri: saved {path!r}, current {other!r}", "make the stream of the table that the state names")
    refusal(StateMismatchError, texts, lambda: lance_stream(other, num_splits=48, resume_from=state))


def test_a_state_of_another_order(path: str) -> None:
    state = {**lance_stream(path, num_splits=48).state_dict(), "order": "feistel-0"}
    texts = ("order: saved 'feistel-0', current 'feistel-1'", "make the stream with the saved values")
    refusal(StateMismatchError, texts, lambda: lance_stream(path, num_splits=48, resume_from=state))


def test_all_fields_that_differ_are_named(path: str) -> None:
    state = lance_stream(path, num_splits=48).state_dict()
    texts = ("shuffle_seed: saved 0, current 1", "num_splits: saved 48, current 24")
    refusal(StateMismatchError, texts, lambda: lance_stream(path, num_splits=24, shuffle_seed=1, resume_from=state))


def test_the_recorded_version_is_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(100), uri)
    state = lance_stream(uri, num_splits=10).state_dict()
    lance.write_dataset(rows(50, 100), uri, mode="append")
    resumed = lance_stream(uri, num_splits=10, resume_from=state).state_dict()
    assert (resumed["table_version"], resumed["num_rows"]) == (1, 100)


def test_a_recorded_version_that_is_gone(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(100), uri)
    state = lance_stream(uri, num_splits=10).state_dict()
    lance.write_dataset(rows(50, 100), uri, mode="append")
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    texts = ("version 1", "t.lance", "no longer exists", "tag it")
    refusal(VersionNotFoundError, texts, lambda: lance_stream(uri, num_splits=10, resume_from=state))


STATES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "an int": (3, ("Checkpoint, its path or a state dict", "int")),
    "bytes": (b"/x", ("Checkpoint, its path or a state dict", "bytes")),
    "an empty dict": ({}, ("of format 1", "format=None", "load it with the release that wrote it")),
    "an empty path": ("", ("resume_from", "path")),
    "an unknown scheme": ("nope://bucket/checkpoint", ("resume_from", "nope://bucket/checkpoint")),
}


@pytest.mark.parametrize("case", STATES)
def test_what_is_no_state(path: str, case: str) -> None:
    source, texts = STATES[case]
    refusal(StateError, texts, lambda: lance_stream(path, num_splits=48, resume_from=source))


FILES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "no file": (None, ("holds no stream state", STATE_FILE, "save checkpoints with ray.train.report")),
    "no stream": ('{"format": 1, "streams": {}}', ("holds no stream state", "ray_lance_stream.report(")),
    "truncated": ('{"format": 1, "streams": {"tr', ("holds JSON", '{"format": 1, "streams": {"tr', "truncated")),
    "empty": ("", ("holds JSON", "truncated")),
    "a list": ("[1]", ("holds a dict 'streams'", "[1]")),
}


@pytest.mark.parametrize("case", FILES)
def test_directories_without_a_usable_state(path: str, tmp_path: Path, case: str) -> None:
    text, texts = FILES[case]
    if text is not None:
        (tmp_path / STATE_FILE).write_text(text)
    for source in (str(tmp_path), tmp_path, ray.train.Checkpoint.from_directory(str(tmp_path))):
        refusal(StateError, texts, lambda: lance_stream(path, num_splits=48, resume_from=source))  # noqa: B023


def test_a_directory_that_does_not_exist(path: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    refusal(StateError, (missing, STATE_FILE), lambda: lance_stream(path, num_splits=48, resume_from=missing))


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"format": 3}, ("of format 1 to 2", "format=3", "load it with the release that wrote it")),
        ({"samples_consumed_per_split": 11}, ("at most the 10 cycles", "got 11")),
        ({"samples_consumed_per_split": -1}, ("must be an int in [0, 2**63)", "got -1")),
        ({"epoch": "3"}, ("'epoch'", "must be an int in [0, 2**63)", "got '3'")),
        ({"num_splits": 0}, ("'num_splits'", "must be an int in [1, 2**63)", "got 0")),
        ({"workers": 4}, ("unknown ['workers']",)),
        ({"filter": ...}, ("missing ['filter']",)),
    ],
)
def test_a_state_that_is_malformed(path: str, changes: dict[str, Any], texts: tuple[str, ...]) -> None:
    state = {**lance_stream(path, num_splits=48).state_dict(), **changes}
    state = {key: value for key, value in state.items() if value is not ...}
    refusal(StateError, texts, lambda: lance_stream(path, num_splits=48, resume_from=state))


def test_an_evaluation_is_never_resumed(path: str) -> None:
    state = lance_stream(path, num_splits=48).state_dict()
    texts = ("resume_from must not be given with evaluation=True", "never resumed")
    refusal(ConfigError, texts, lambda: lance_stream(path, num_splits=48, evaluation=True, resume_from=state))


# What is shown of a stream, and how much of it travels


def test_a_repr_is_one_short_line(path: str) -> None:
    stream = lance_stream(path, num_splits=48, filter="id >= 0 AND " * 100 + "id >= 0")
    stream.set_name("train")
    text = repr(stream)
    assert "\n" not in text
    assert len(text) < 150 + len(path)
    for part in ("LanceStream", "'train'", path, "version=4", f"rows={NUM_ROWS}", "num_splits=48"):
        assert part in text


@pytest.mark.usefixtures("_no_coordinator")
def test_secrets_are_shown_nowhere(path: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    options = {"aws_secret_access_key": SECRET}
    stream = lance_stream(path, num_splits=47, storage_options=options)
    shard = stream.shard()
    checkpoint = Path(save(stream, tmp_path / "checkpoint"))
    missing = refusal(TableError, (), lambda: lance_stream(f"{path}.no", num_splits=47, storage_options=options))
    bad_filter = refusal(
        ConfigError, (), lambda: lance_stream(path, num_splits=47, filter="x = 1", storage_options=options)
    )
    shown = [
        *(repr(part) for part in (stream, stream._plan, stream._config, stream._plan.table, shard, shard.state())),
        *(str(part) for part in (missing, bad_filter, stream.state_dict())),
        *(record.getMessage() for record in caplog.records),
        (checkpoint / STATE_FILE).read_text(),
    ]
    assert caplog.records  # that of the rows left out
    assert not [text for text in shown if SECRET in text]
    assert SECRET.encode() not in pickle.dumps([stream.state_dict(), missing, bad_filter])
    assert SECRET.encode() in pickle.dumps(stream), "workers need it"


def test_a_stream_is_small_whatever_the_number_of_fragments(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows(1000), uri, max_rows_per_file=2)
    assert len(lance.dataset(uri).get_fragments()) == 500
    assert len(pickle.dumps(lance_stream(uri, num_splits=8))) < 100_000
