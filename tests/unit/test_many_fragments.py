"""Tables of ten thousand fragments: what is sent around stays small. How soon they open is measured in benchmarks/."""

from __future__ import annotations

import pickle

import lance
import numpy as np
import pytest

from benchmarks.data import FRAGMENT_ROWS, commit_fragments
from ray_lance_stream import lance_stream
from ray_lance_stream.take import take_rows

FRAGMENTS = 10_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("many") / "t.lance")
    commit_fragments(uri, FRAGMENTS)
    assert len(lance.dataset(uri).get_fragments()) == FRAGMENTS
    return uri


def test_a_stream_is_small(path: str) -> None:
    stream = lance_stream(path, num_splits=48)
    assert len(pickle.dumps(stream._plan)) < 2_000
    assert len(pickle.dumps(stream)) < 100_000
    assert stream._plan.order.num_rows == FRAGMENTS * FRAGMENT_ROWS


def test_rows_of_any_fragment_are_found(path: str) -> None:
    stream = lance_stream(path, num_splits=48, global_batch_size=480)
    rows = np.asarray(stream.row_ids(epoch=1, step=7))
    ids = take_rows(stream._plan.table.open(), rows, ["id"])["id"].to_numpy()
    assert np.array_equal(ids, rows % (4 * FRAGMENT_ROWS))
