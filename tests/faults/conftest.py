"""One object store per test module, and the shards of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.object_store import ObjectStore, object_store
from tests.integration.conftest import shards  # noqa: F401


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A bucket behind a fault proxy."""
    with object_store(tmp_path_factory.mktemp("moto")) as store:
        yield store


@pytest.fixture
def store(bucket: ObjectStore) -> Iterator[ObjectStore]:
    """The bucket, with a proxy that lets all pass at first."""
    bucket.proxy.reset()
    yield bucket
    bucket.proxy.reset()
