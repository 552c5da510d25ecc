"""One Ray cluster for the test modules, with logical CPUs: the machine may have two."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy one takes its time
settings.load_profile("any machine")

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
# How often Ray Train looks at its workers: by default every 2 s, which each report with a checkpoint waits for.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
# Which takes a process in every run, of some 1.5 s.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
# Ray workers import tests.support by name.
ROOT = str(Path(__file__).resolve().parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` the modules that use a Ray cluster run in one process, one after another.

    Two clusters beside each other on two cores make each other miss the times within which errors and ends must come. Slow
    tests are whole programs with clusters of their own, and times to spare.
    """
    from xdist.scheduler import LoadFileScheduling

    class OneCluster(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return "ray" if scope.startswith(("tests/integration/", "tests/faults/")) else scope

    return OneCluster(config, log) if config.option.markexpr != "slow" else None


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A running cluster of 16 logical CPUs, that of the module before if that one had it: a start takes 8 s."""
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=16, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=True)
    yield
    gc.collect()  # streams in cycles keep their actors


@pytest.fixture(scope="module")
def no_cluster() -> Iterator[None]:
    """For modules that start one of their own."""
    _stop_ray()
    yield
    _stop_ray()


@pytest.fixture(scope="session", autouse=True)
def _no_cluster_left() -> Iterator[None]:
    yield
    _stop_ray()


def _stop_ray() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
