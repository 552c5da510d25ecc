"""Tables that lose files under an open stream: a typed error that names what is missing or damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pytest

from ray_lance_stream import damage
from ray_lance_stream.config import ReadPlan
from ray_lance_stream.cursor import ChunkSpan
from ray_lance_stream.errors import ReadError, TableError, VersionNotFoundError
from ray_lance_stream.order import Order
from ray_lance_stream.planner import plan_table
from ray_lance_stream.reader import ReadRequest, read_chunk
from ray_lance_stream.source import table_ref
from ray_lance_stream.splits import SplitBlock
from tests.support import make_table

pytestmark = [pytest.mark.timeout(60), pytest.mark.faults]

ROWS = 480


def data_files(path: str) -> list[Path]:
    """Those of the fragments, in their order."""
    return [Path(path, "data", each.data_files()[0].path) for each in lance.dataset(path).get_fragments()]


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[: len(content) // 2] = b"\xab" * (len(content) // 2)
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "cut at its end": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "garbled": garble,
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return make_table(tmp_path / "t", ROWS)


def read_all(path: str) -> list[int]:
    """Epoch 0 at the newest version, as a reader reads it."""
    ref = table_ref(path)
    plan = plan_table(ReadPlan(ref, ("id", "vec"), None, Order(1), num_splits=12, drop_remainder=True))
    request = ReadRequest(plan, 0, SplitBlock(0, 12), ChunkSpan(0, ROWS // 12, 0, ROWS, ROWS))
    return read_chunk(request, plan.resolve())[0]["id"].to_pylist()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_data_file_is_named(path: str, how: str) -> None:
    damaged = data_files(path)[4]
    ref = table_ref(path)
    ref.open()
    DAMAGES[how](damaged)
    with pytest.raises(
        ReadError, match=rf"480 rows of table {path} version \d, offsets 0 to 479, could not be read"
    ) as told:
        ref.take(np.arange(ROWS), ["id", "vec"])
    assert f"Damaged or unreadable: data/{damaged.name}; restore the file" in str(told.value)
    others = np.setdiff1d(np.arange(ROWS), np.arange(48, 177))
    assert ref.take(others, ["id", "vec"])["id"].to_pylist() == others.tolist()
    with pytest.raises(ReadError, match=damaged.name):
        ref.take(others, ["id"])  # so dense that the rows between are read as well


def test_a_missing_data_file_is_named(path: str) -> None:
    lost = data_files(path)[4]
    table_ref(path).open()
    lost.unlink()
    with pytest.raises(VersionNotFoundError, match=rf"table {path} version.*{lost.name}.*tag it"):
        read_all(path)


def test_a_missing_manifest_is_a_missing_version(path: str) -> None:
    """Processes that have the table open go on."""
    ref = table_ref(path)
    ref.open()
    [newest] = [file for file in Path(path, "_versions").iterdir() if file.stem == str(2**64 - 1 - ref.version)]
    newest.unlink()
    assert ref.take(np.arange(3), ["id"])["id"].to_pylist() == [0, 1, 2]
    with pytest.raises(VersionNotFoundError, match=rf"version {ref.version} of table {path} no longer exists.*tag it"):
        ref.open(fresh=True)
    shutil.rmtree(Path(path, "_versions"))
    with pytest.raises(TableError, match=f"no Lance dataset can be opened at {path}"):
        ref.open(fresh=True)


def test_a_version_that_is_cleaned_up_under_a_run(path: str) -> None:
    ref = table_ref(path)
    ref.open()
    dataset = lance.dataset(path)
    dataset.optimize.compact_files()
    dataset.cleanup_old_versions(timedelta(0), delete_unverified=True)
    with pytest.raises(
        VersionNotFoundError, match=rf"480 rows of table {path} version {ref.version}, .*Not found.*tag it"
    ):
        ref.take(np.arange(ROWS), ["id"])
    assert len(read_all(path)) == ROWS
    with pytest.raises(VersionNotFoundError, match=f"version {ref.version} of table {path} no longer exists"):
        ref.open(fresh=True)


def test_the_search_for_a_damaged_file_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a fragment at a time, which may be many."""
    dataset = lance.dataset(path)
    DAMAGES["empty"](data_files(path)[4])
    rows = np.array([0, 60, 470])
    assert damage.unreadable_files(dataset, rows, ["id"]) == [f"data/{data_files(path)[4].name}"]
    assert damage.unreadable_files(dataset, rows[:1], ["id"]) == []
    assert damage.unreadable_files(dataset, np.array([10**6]), ["id"]) == []
    monkeypatch.setattr(damage, "SEARCH_S", -1.0)
    assert damage.unreadable_files(dataset, rows, ["id"]) == []
