"""TableContent: the fingerprints by which a state knows the table that it was saved with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream.content import content_of, field_text


def rows(num_rows: int, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    vectors = pa.FixedSizeListArray.from_arrays(np.zeros(num_rows * 4, np.float32), 4)
    return pa.table({"id": ids, "v": vectors})


def write(uri: str) -> lance.LanceDataset:
    """Version 2, of three fragments with deletions in one."""
    lance.write_dataset(rows(30), uri, max_rows_per_file=10)
    lance.dataset(uri).delete("id in (12, 17)")
    return lance.dataset(uri)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(str(tmp_path / "t.lance")).uri


def test_a_copy_of_the_files_has_both_fingerprints(path: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "elsewhere.lance")
    shutil.copytree(path, copy)
    assert content_of(lance.dataset(copy)) == content_of(lance.dataset(path))


def test_a_table_made_anew_has_the_same_content_and_other_files(path: str) -> None:
    before = content_of(lance.dataset(path))
    lance.LanceDataset.drop(path)
    after = content_of(write(path))
    assert after.content == before.content
    assert after.files != before.files


def test_other_deletions_of_the_same_number_are_other_files(path: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.lance")
    shutil.copytree(path, other)
    datasets = [lance.dataset(uri, version=1) for uri in (path, other)]
    for dataset, row in zip(datasets, (3, 4), strict=True):
        dataset.restore()
        lance.dataset(dataset.uri).delete(f"id = {row}")
    first, second = (content_of(lance.dataset(dataset.uri)) for dataset in datasets)
    assert first.content == second.content
    assert first.files != second.files


CHANGES: dict[str, Callable[[lance.LanceDataset], object]] = {
    "append": lambda dataset: dataset.insert(rows(5, 30)),
    "delete": lambda dataset: dataset.delete("id = 3"),
    "update": lambda dataset: dataset.update({"id": "7"}, where="id = 3"),
    "compact": lambda dataset: dataset.optimize.compact_files(),
    "new column": lambda dataset: dataset.add_columns({"twice": "id * 2"}),
    "lost column": lambda dataset: dataset.drop_columns(["v"]),
    "other type": lambda dataset: dataset.alter_columns({"path": "id", "data_type": pa.int32()}),
    "other name": lambda dataset: dataset.alter_columns({"path": "id", "name": "key"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_another_content(path: str, change: str) -> None:
    before = content_of(lance.dataset(path))
    CHANGES[change](lance.dataset(path))
    after = content_of(lance.dataset(path))
    assert after.content != before.content
    assert content_of(lance.dataset(path, version=2)) == before


def test_what_changes_no_row_is_the_same_content(path: str) -> None:
    before = content_of(lance.dataset(path))
    dataset = lance.dataset(path)
    dataset.create_scalar_index("id", "BTREE")
    dataset.tags.create("t", 1)
    assert content_of(lance.dataset(path)) == before


def test_no_data_is_read(path: str) -> None:
    dataset = lance.dataset(path)
    before = dataset.io_stats_snapshot().read_bytes
    content_of(dataset)
    assert dataset.io_stats_snapshot().read_bytes == before


def test_types_are_told_by_what_is_stored(tmp_path: Path) -> None:
    """Which extension types a process knows depends on what it has imported."""
    import ray.data.extensions  # noqa: F401 - registers its tensors

    tensor = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    known = pa.schema([("x", tensor), ("y", pa.list_(tensor)), ("z", pa.struct([("w", tensor)]))])
    plain = pa.list_(pa.float32(), 4)
    stored = pa.schema([("x", plain), ("y", pa.list_(plain)), ("z", pa.struct([("w", plain)]))])
    assert [field_text(field) for field in known] == [field_text(field) for field in stored]
    kinds = [
        plain,
        pa.list_(pa.float32(), 5),
        pa.list_(pa.float32()),
        pa.list_(pa.float64()),
        pa.large_list(pa.float32()),
    ]
    assert len({field_text(pa.field("x", kind)) for kind in kinds}) == len(kinds)


FRESH = """
import sys, lance
{extra}
sys.path.insert(0, {root!r})
from ray_lance_stream.content import content_of
print(content_of(lance.dataset({path!r})))
"""


def test_another_process_tells_the_same(tmp_path: Path) -> None:
    """Whatever else it has imported: a column of bfloat16, and tensors of Ray."""
    from lance.arrow import bfloat16_array
    from ray.data.extensions import ArrowTensorArray

    tensors = ArrowTensorArray.from_numpy(np.zeros((4, 2, 2), np.float32))
    path = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"b": bfloat16_array([1.0, 2.0, 3.0, 4.0]), "t": tensors}), path)
    told = {str(content_of(lance.dataset(path)))}
    root = str(Path(__file__).parents[2])
    for extra in ("", "import ray.data, lance.arrow"):
        code = FRESH.format(extra=extra, root=root, path=path)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        told.add(done.stdout.strip())
    assert len(told) == 1
