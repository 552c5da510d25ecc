"""Tables of ten thousand fragments: what is sent around stays small, and they open soon."""

from __future__ import annotations

import pickle

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.fragment import FragmentMetadata

from ray_lance_stream import lance_stream
from ray_lance_stream.take import take_rows

FRAGMENTS = 10_000
FILE_ROWS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fragments that share four files, committed at once: ten thousand files would take minutes."""
    uri = str(tmp_path_factory.mktemp("many") / "t.lance")
    written = lance.write_dataset(pa.table({"id": np.arange(4 * FILE_ROWS)}), uri, max_rows_per_file=FILE_ROWS)
    files = [fragment.metadata.files for fragment in written.get_fragments()]
    fragments = [FragmentMetadata(i, files[i % 4], FILE_ROWS) for i in range(FRAGMENTS)]
    operation = lance.LanceOperation.Overwrite(written.schema, fragments)
    committed = lance.LanceDataset.commit(uri, operation, read_version=written.version)
    assert len(committed.get_fragments()) == FRAGMENTS
    return uri


def test_a_stream_is_small(path: str) -> None:
    stream = lance_stream(path, num_splits=48)
    assert len(pickle.dumps(stream._plan)) < 2_000
    assert len(pickle.dumps(stream)) < 100_000
    assert stream._plan.order.num_rows == FRAGMENTS * FILE_ROWS


def test_rows_of_any_fragment_are_found(path: str) -> None:
    stream = lance_stream(path, num_splits=48, global_batch_size=480)
    rows = np.asarray(stream.row_ids(epoch=1, step=7))
    ids = take_rows(stream._plan.table.open(), rows, ["id"])["id"].to_numpy()
    assert np.array_equal(ids, rows % (4 * FILE_ROWS))
