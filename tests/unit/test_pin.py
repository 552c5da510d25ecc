"""stream.pin(): the tag that keeps the versions of a run, and what becomes of it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import ConfigError, TableError, lance_stream
from ray_lance_stream.take import take_rows


def rows(num_rows: int, start: int = 0) -> pa.Table:
    return pa.table({"id": np.arange(start, start + num_rows)})


@pytest.fixture
def path(tmp_path: Path) -> str:
    return lance.write_dataset(rows(40), str(tmp_path / "t.lance")).uri


def grow(path: str) -> int:
    return lance.write_dataset(rows(10, 100), path, mode="append").version


def clean_up(path: str) -> None:
    lance.dataset(path).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )


def tags(path: str) -> dict[str, int]:
    return {name: tag["version"] for name, tag in lance.dataset(path).tags.list().items()}


def stream_of(path: Any, **options: Any) -> Any:
    return lance_stream(path, num_splits=8, **options)


def test_a_pinned_version_outlives_a_clean_up(path: str) -> None:
    stream = stream_of(path)
    with stream.pin(tag="run-1") as pin:
        assert pin.tag == "run-1"
        assert "run-1" in repr(pin)
        grow(path)
        clean_up(path)
        assert tags(path) == {"run-1": 1}
        table = stream._plan.table.open(fresh=True)
        assert take_rows(table, np.arange(40), ["id"])["id"].to_pylist() == list(range(40))
    assert tags(path) == {}
    clean_up(path)
    with pytest.raises(TableError, match="version 1"):
        stream._plan.table.open(fresh=True)


def test_close_ends_a_pin_and_may_be_called_again(path: str) -> None:
    pin = stream_of(path).pin(tag="run-1")
    assert tags(path) == {"run-1": 1}
    grow(path)
    pin.close()
    pin.close()
    assert tags(path) == {}


def test_a_run_that_fails_keeps_its_tag_for_the_run_that_resumes_it(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the version that the checkpoint names, although the new driver pins a newer one."""
    with pytest.raises(RuntimeError, match="broken"), stream_of(path).pin(tag="run-1"):
        raise RuntimeError("broken")
    assert "stays, since the run may be resumed" in caplog.text
    grow(path)
    clean_up(path)
    with stream_of(path).pin(tag="run-1"):
        assert tags(path) == {"run-1": 1, "run-1-v2": 2}
        grow(path)
        clean_up(path)
        lance.dataset(path, version=1)
    assert tags(path) == {}


def test_a_driver_that_is_killed_leaves_its_tag(path: str) -> None:
    code = f"""
import os, signal
from ray_lance_stream import lance_stream
with lance_stream({path!r}, num_splits=8).pin(tag="run-1"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=100, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert tags(path) == {"run-1": 1}
    with stream_of(path).pin(tag="run-1"):
        assert tags(path) == {"run-1": 1}
    assert tags(path) == {}


def test_a_late_end_does_not_take_the_tag_of_the_run_that_follows(path: str, caplog: pytest.LogCaptureFixture) -> None:
    late = stream_of(path).pin(tag="run-1")
    with stream_of(path).pin(tag="run-1"):
        late.close()
        assert "somebody else has taken it over" in caplog.text
        assert tags(path) == {"run-1": 1}
    assert tags(path) == {}


def test_the_end_of_a_pin_is_known_to_its_stream(path: str) -> None:
    stream = stream_of(path)
    first = stream.pin(tag="run-1")
    second = stream.pin(tag="run-2")
    first.close()
    assert stream._config.pinned_as == second.held_as
    second.close()
    assert stream._config.pinned_as is None
    assert tags(path) == {}


def test_a_tag_of_somebody_else_is_left_alone(path: str) -> None:
    lance.dataset(path).tags.create("theirs", 1)
    with stream_of(path).pin(tag="theirs"):
        assert tags(path) == {"theirs": 1}
    assert tags(path) == {"theirs": 1}
    grow(path)
    with pytest.raises(ConfigError, match=r"'theirs' of table .*names version 1, not version 2, .*choose another name"):
        stream_of(path).pin(tag="theirs")
    assert tags(path) == {"theirs": 1}


@pytest.mark.parametrize("how", ["moved", "made anew", "unmarked"])
def test_a_tag_that_somebody_has_changed_is_left_alone(path: str, how: str) -> None:
    pin = stream_of(path).pin(tag="run-1")
    grow(path)
    names = lance.dataset(path).tags
    if how == "moved":
        names.update("run-1", 2)
    elif how == "made anew":
        names.delete("run-1")
        names.create("run-1", 2)
    else:
        names.replace_metadata("run-1", {"kept": "for ever"})
    expected = tags(path)
    pin.close()
    assert tags(path) == expected == {"run-1": 1 if how == "unmarked" else 2}
    if how != "unmarked":
        grow(path)
        with pytest.raises(ConfigError, match="not version 3, and is not as pin"):
            stream_of(path).pin(tag="run-1")


def test_runs_with_names_of_their_own_do_not_meet(path: str) -> None:
    first, second = (stream_of(path).pin(tag=name) for name in ("run-1", "run-2"))
    first.close()
    assert tags(path) == {"run-2": 1}
    second.close()


def test_a_branch_has_versions_of_its_own(path: str) -> None:
    dataset = lance.dataset(path)
    branch = dataset.create_branch("b")
    lance.write_dataset(rows(10, 500), branch, mode="append")
    grow(path)
    assert lance.dataset(f"{path}/tree/b").version == lance.dataset(path).version == 2
    with stream_of(f"{path}/tree/b").pin(tag="run-1"):
        assert lance.dataset(path).tags.list()["run-1"]["branch"] == "b"
        with stream_of(path).pin(tag="main"):
            assert set(tags(path)) == {"run-1", "main"}
    assert tags(path) == {}
    lance.dataset(path).tags.create("theirs", ("b", 2))
    with pytest.raises(ConfigError, match=r"'theirs' of table .* names version 2 of branch 'b', not version 2"):
        stream_of(path).pin(tag="theirs")


@pytest.mark.parametrize("tag", ["", None, 3])
def test_what_is_no_name(path: str, tag: Any) -> None:
    with pytest.raises(ConfigError, match="tag must be a name such as that of the run, got"):
        stream_of(path).pin(tag=tag)


def test_a_name_that_lance_refuses(path: str) -> None:
    with pytest.raises(TableError, match=r"tag 'a b/\.\.' cannot be made in table "):
        stream_of(path).pin(tag="a b/..")
    assert tags(path) == {}


def test_a_table_that_cannot_be_written_to(path: str) -> None:
    Path(path, "_refs").write_text("no folder")
    with pytest.raises(TableError, match=f"tag.* cannot be .* in table {path}: "):
        stream_of(path).pin(tag="run-1")


def test_a_pin_goes_along_with_streams_made_of_a_pinned_one(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stream = stream_of(path, global_batch_size=16)
    with stream.pin(tag="run-1") as pin:
        assert stream.skip(0, range(1))._config.pinned_as == stream._config.pinned_as == pin.held_as
    assert not caplog.records
