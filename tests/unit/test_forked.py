"""Forked processes: what would hang or crash there is an error at once; nothing else is refused.

`tests/integration/test_torch_dataset.py` has those that were forked from a process with Ray.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lance
import pytest

from ray_lance_stream import ConfigError, forked, lance_stream
from tests.support import in_fork, make_table

REFUSED = r'a forked process must not use Lance.*get_context\("spawn"\)'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_table(tmp_path_factory.mktemp("forked") / "t", 96)


def test_each_use_of_lance_in_a_fork_is_an_error_at_once(path: str) -> None:
    stream = lance_stream(path, num_splits=48, global_batch_size=96)
    ref = stream._plan.table
    uses: list[Callable[[], Any]] = [
        lambda: lance_stream(path, num_splits=48),
        lambda: lance_stream(lance.dataset, num_splits=48),  # whatever it is given
        lambda: lance_stream(path, num_splits=48, filter="id > 5"),
        lambda: stream.row_ids(0, 0, column="id"),
        lambda: stream.to_dataset(),
        lambda: stream.pin(tag="run"),
        ref.open,
        ref.open_uring,
        ref.newest_version,
        pickle.loads(pickle.dumps(ref)).open,
    ]
    for use in uses:
        with pytest.raises(ConfigError, match=REFUSED):
            in_fork(use)


def test_what_needs_no_lance_is_answered_in_a_fork(path: str) -> None:
    stream = lance_stream(path, num_splits=48, global_batch_size=96)
    assert in_fork(lambda: stream.row_ids(0, 0).tolist()) == stream.row_ids(0, 0).tolist()
    assert in_fork(lambda: stream.step_digest(0, 0)) == stream.step_digest(0, 0)
    assert in_fork(lambda: stream.state_dict()) == stream.state_dict()


def test_a_process_may_be_forked_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is forked from the copy after its own first use may not."""

    def use_and_fork() -> str:
        forked.use_lance()
        with pytest.raises(ConfigError, match=REFUSED) as caught:
            in_fork(forked.use_lance)
        return str(caught.value)

    monkeypatch.setattr(forked, "_uses_lance", False)
    assert f"got process {os.getpid()}" not in in_fork(use_and_fork)


@pytest.mark.parametrize("connected", [True, False])
def test_a_fork_knows_whether_its_parent_was_connected_to_ray(monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    assert in_fork(forked.is_cut_off) == connected
    if connected:
        with pytest.raises(ConfigError, match="must not use Ray"):
            in_fork(forked.use_ray)
    assert not forked.is_cut_off()
