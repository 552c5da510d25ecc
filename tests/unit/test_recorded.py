"""What a saved state continues on (B39): one thing changed at a time, moved tables, tables made anew; no Ray."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import LanceStream, StateMismatchError, VersionNotFoundError, lance_stream
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.planner import PlanBook
from tests.fake_ray import without_coordinator

OPTIONS: dict[str, Any] = {"num_splits": 8, "filter": "id < 64", "shuffle_seed": 7}


def rows(num_rows: int, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    return pa.table({"id": ids, "value": ids * 3})


def write(uri: str, num_rows: int = 80, start: int = 0, max_rows_per_file: int = 30) -> str:
    return lance.write_dataset(rows(num_rows, start), uri, max_rows_per_file=max_rows_per_file).uri


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Version 1, of 80 rows."""
    return write(str(tmp_path / "t.lance"))


def read_by(table: Any, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Which table a stream that is resumed on the driver reads: its identity."""
    stream = lance_stream(table, resume_from=state, **{**OPTIONS, **options})
    return stream._plan.identity(1).__dict__


def loaded(table: Any, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The same in a worker."""
    stream = lance_stream(table, **{**OPTIONS, **options})
    replicas = stream._config.replicas
    shard = stream.shard(0, replicas)
    shard.load_state_dict(state)
    return shard._position.plan.identity(1).__dict__


WAYS = pytest.mark.parametrize("continued", [read_by, loaded])


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards can be made without Ray, as long as they read nothing; other versions are planned in this process."""
    without_coordinator(monkeypatch)
    monkeypatch.setattr(CoordinatorLink, "plan_at", lambda self, plan, version, _: PlanBook().at(plan, version))


@pytest.fixture
def state(path: str) -> dict[str, Any]:
    return lance_stream(path, epoch=2, **OPTIONS).state_dict() | {"samples_consumed_per_split": 3}


# One thing changed at a time

REFUSED: dict[str, tuple[str, Any, Any]] = {
    "filter": ("filter", "id < 64", "id < 65"),
    "shuffle_seed": ("shuffle_seed", 7, 8),
    "num_splits": ("num_splits", 8, 4),
    "shuffle": ("shuffle", True, False),
    "shuffle_clump_size": ("shuffle_clump_size", None, 4),
    "drop_remainder": ("drop_remainder", True, False),
    "replicas": ("replicas", 1, 2),
}


@WAYS
@pytest.mark.parametrize("name", REFUSED)
def test_what_fixes_the_order_must_agree(path: str, state: dict[str, Any], name: str, continued: Callable) -> None:
    field, saved, current = REFUSED[name]
    with pytest.raises(StateMismatchError) as error:
        continued(path, state, **{name: current})
    assert error.value.differences == [(field, saved, current)]
    assert f"{field}: saved {saved!r}, current {current!r}" in str(error.value)
    assert "make the stream with the saved values" in str(error.value)


@WAYS
@pytest.mark.parametrize("name", ["table_content", "table_files", "num_rows", "order"])
def test_what_a_state_tells_of_its_table_must_agree(
    path: str, state: dict[str, Any], name: str, continued: Callable
) -> None:
    other = {**state, name: state[name] - 8 if name == "num_rows" else "other"}
    with pytest.raises(StateMismatchError) as error:
        continued(path, other)
    assert error.value.differences == [(name, other[name], state[name])]


MAY_CHANGE: dict[str, dict[str, Any]] = {
    "columns": {"columns": ["id"]},
    "global batch": {"global_batch_size": 16},
    "prefetching": {"prefetch_chunks": 1, "prefetch_bytes": 1000, "read_batch_size": 2},
    "readers": {"readers_per_worker": 3},
    "storage options": {"storage_options": {"k": "v"}},
    "what new versions mean": {"on_new_version": "next_epoch"},
    "whether it may be moved": {"allow_moved": True},
}


@WAYS
@pytest.mark.parametrize("case", MAY_CHANGE)
def test_what_does_not_fix_the_order_may_change(
    path: str, state: dict[str, Any], case: str, continued: Callable
) -> None:
    assert continued(path, state, **MAY_CHANGE[case])["table_version"] == 1


def test_transforms_may_change(path: str, state: dict[str, Any]) -> None:
    stream: LanceStream = lance_stream(path, resume_from=state, **OPTIONS).map_batches(lambda batch: batch)
    stream.shard().load_state_dict(state)
    assert (stream.shard().epoch, stream.state_dict()["samples_consumed_per_split"]) == (2, 3)


@WAYS
def test_the_version_is_the_recorded_one(path: str, state: dict[str, Any], continued: Callable) -> None:
    lance.write_dataset(rows(8, 80), path, mode="append")
    lance.dataset(path).delete("id < 8")
    assert continued(path, state)["table_version"] == 1
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    for allow_moved in (False, True):
        with pytest.raises(VersionNotFoundError, match=rf"version 1 of table {path} no longer exists.*tag it"):
            continued(path, state, allow_moved=allow_moved)


@WAYS
def test_columns_that_came_later_are_not_missed(path: str, state: dict[str, Any], continued: Callable) -> None:
    """Where none are named, those of the recorded version are read."""
    lance.dataset(path).add_columns({"twice": "id * 2"})
    assert lance_stream(path, **OPTIONS)._plan.columns == ("id", "value", "twice")
    assert continued(path, state)["table_version"] == 1


# Moved tables


def copied(path: str, to: str) -> str:
    shutil.copytree(path, to)
    return to


@WAYS
def test_a_table_that_was_moved(
    path: str, state: dict[str, Any], tmp_path: Path, continued: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    other = copied(path, str(tmp_path / "other.lance"))
    lance.write_dataset(rows(8, 80), other, mode="append")
    with pytest.raises(StateMismatchError, match=rf"table_uri: saved '{path}', current '{other}'.*allow_moved=True"):
        continued(other, state)
    found = continued(other, state, allow_moved=True)
    assert (found["table_uri"], found["table_version"], found["num_rows"]) == (other, 1, 64)
    assert f"the table of the saved state, {path} version 1, was moved: it is read at {other} version 1" in caplog.text


@WAYS
def test_a_moved_table_must_have_the_same_content(
    path: str, state: dict[str, Any], tmp_path: Path, continued: Callable
) -> None:
    """As many rows match; the schema, the fragments or the number of rows tell that it is another one."""
    other = str(tmp_path / "other.lance")
    for change in ({"num_rows": 81}, {"max_rows_per_file": 40}):
        write(other, **change)
        with pytest.raises(StateMismatchError, match="table_content: saved") as error:
            continued(other, state, allow_moved=True)
        assert [name for name, _, _ in error.value.differences] == ["table_content"]
        lance.LanceDataset.drop(other)
    write(other, start=1)
    with pytest.raises(StateMismatchError, match="num_rows: saved 64, current 63"):
        continued(other, state, allow_moved=True)


@WAYS
def test_a_table_that_was_written_anew_elsewhere_has_other_versions(
    path: str, tmp_path: Path, continued: Callable
) -> None:
    lance.write_dataset(rows(16, 80), path, mode="append")
    state = lance_stream(path, **OPTIONS).state_dict()
    assert state["table_version"] == 2
    other = str(tmp_path / "other.lance")
    written = lance.write_dataset(rows(96), other)
    with pytest.raises(VersionNotFoundError, match="version 2"):
        continued(written, state, allow_moved=True)  # one fragment: not the same content
    lance.LanceDataset.drop(other)
    for start, stop in ((0, 30), (30, 60), (60, 80), (80, 96)):
        lance.write_dataset(rows(stop - start, start), other, mode="append" if start else "create")
    found = continued(other, state, allow_moved=True)  # version 2 holds 60 rows, the pinned version 4 the recorded ones
    assert (found["table_uri"], found["table_version"]) == (other, 4)


@WAYS
def test_a_table_that_was_made_anew_in_the_same_place(path: str, state: dict[str, Any], continued: Callable) -> None:
    """The recorded version number names other rows: never read by accident."""
    lance.LanceDataset.drop(path)
    write(path)
    with pytest.raises(
        StateMismatchError, match=r"moved or written anew with the same rows.*allow_moved=True"
    ) as error:
        continued(path, state)
    assert [name for name, _, _ in error.value.differences] == ["table_files"]
    assert continued(path, state, allow_moved=True)["table_version"] == 1
    lance.LanceDataset.drop(path)
    write(path, max_rows_per_file=25)
    for allow_moved in (False, True):
        with pytest.raises(StateMismatchError, match="table_content: saved"):
            continued(path, state, allow_moved=allow_moved)


def test_without_num_splits_workers_bring_their_number(path: str, tmp_path: Path) -> None:
    state = lance_stream(path, **{**OPTIONS, "num_splits": None}).state_dict() | {"num_splits": 4}
    other = copied(path, str(tmp_path / "other.lance"))
    assert read_by(other, state, num_splits=None, allow_moved=True)["table_uri"] == other
    with pytest.raises(StateMismatchError, match="table_uri"):
        read_by(other, state, num_splits=None)


# States of format 1


@pytest.fixture
def old_state(state: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in state.items() if name not in ("table_content", "table_files")}
    return {**kept, "format": 1}


@WAYS
def test_a_state_without_fingerprints_is_continued(
    path: str,
    old_state: dict[str, Any],
    tmp_path: Path,
    continued: Callable,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert continued(path, old_state)["table_version"] == 1
    other = copied(path, str(tmp_path / "other.lance"))
    with pytest.raises(StateMismatchError, match="table_uri"):
        continued(other, old_state)
    caplog.set_level(logging.WARNING)
    assert continued(other, old_state, allow_moved=True)["table_uri"] == other
    assert "tells no more of it than its number of rows" in caplog.text
    write(str(tmp_path / "short.lance"), num_rows=60)
    with pytest.raises(StateMismatchError, match="num_rows: saved 64, current 60"):
        continued(str(tmp_path / "short.lance"), old_state, allow_moved=True)


def test_what_goes_on_from_it_is_saved_with_fingerprints(path: str, old_state: dict[str, Any]) -> None:
    stream = lance_stream(path, **OPTIONS)
    shard = stream.shard()
    shard.load_state_dict(old_state)
    saved = shard.state_dict()
    assert saved["format"] == 2
    assert saved["table_content"] == stream.state_dict()["table_content"] is not None
    assert (saved["epoch"], saved["samples_consumed_per_split"]) == (2, 3)
