"""The tests of this folder start no Ray."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_a_cluster(no_cluster: None) -> None:
    """Nor do they see that of other tests."""
