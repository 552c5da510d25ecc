"""Ranks that torchrun has started: warned of a Ray cluster each, and of shards that are whole streams; plans are said once."""

from __future__ import annotations

import logging
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import LanceStream, lance_stream, launcher
from tests.fake_ray import without_coordinator

CLUSTER = "has a Ray cluster of its own"
WHOLE = "its shard is the whole stream"


@pytest.fixture
def uri(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A table of 100 rows; shards can be made without Ray."""
    without_coordinator(monkeypatch)
    return str(lance.write_dataset(pa.table({"id": np.arange(100)}), str(tmp_path / "t.lance")).uri)


@pytest.fixture
def stream(uri: str) -> LanceStream:
    return lance_stream(uri, num_splits=4)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process one that torchrun has started."""

    def as_rank(rank: int, world_size: int, *, owns_cluster: bool = True, in_ray: bool = False) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(launcher, "owns_cluster", lambda: owns_cluster)
        monkeypatch.setattr(launcher, "is_ray_worker", lambda: in_ray)

    return as_rank


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_cluster_of_each_rank_is_warned_of(stream, launch, caplog):
    launch(0, 2)
    stream.shard(0, 2)
    (text,) = warnings(caplog)
    assert CLUSTER in text
    assert "rank 0 of 2" in text
    assert "`ray start --head`" in text
    assert 'ray.init(address="auto")' in text
    assert "TorchTrainer(loop, datasets=...)" in text


@pytest.mark.parametrize(
    ("rank", "world", "options"),
    [
        (1, 2, {}),  # rank 0 says so for all
        (0, 1, {}),
        (0, 2, {"owns_cluster": False}),  # connected to a cluster that others share
        (0, 2, {"owns_cluster": False, "in_ray": True}),  # an actor, whose driver torchrun has started
    ],
)
def test_where_it_is_not_so_nothing_is_said(stream, launch, caplog, rank, world, options):
    launch(rank, world, **options)
    stream.shard(rank, world)
    assert warnings(caplog) == []


@pytest.mark.parametrize("value", ["", "x", "-1", "7"])
def test_variables_of_something_else_are_none(stream, monkeypatch, caplog, value):
    monkeypatch.setenv("RANK", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launcher.launched_as() is None
    stream.shard()
    assert warnings(caplog) == []


def test_a_shard_of_the_whole_stream_is_warned_of(uri, stream, launch, caplog):
    launch(0, 4, owns_cluster=False)
    stream.shard()
    stream.iter_batches()  # of its own local shard
    first, second = warnings(caplog)
    for text in (first, second):
        assert WHOLE in text
        assert "each rank trains on every row; call stream.shard(rank, world_size), here stream.shard(0, 4)" in text
    caplog.clear()
    lance_stream(uri, num_splits=4, evaluation=True).shard()
    launch(0, 4, owns_cluster=False, in_ray=True)
    stream.shard()
    assert warnings(caplog) == []


def test_workers_of_ray_train_are_not_those_of_a_launcher(stream, launch, monkeypatch, caplog):
    """Ray Train sets the same variables."""
    launch(0, 2, owns_cluster=False)
    monkeypatch.setattr(launcher, "in_train_worker", lambda: True)
    monkeypatch.setattr(launcher, "train_rank", lambda: 1)
    assert launcher.launched_as() is None
    assert not launcher.is_first_rank()
    stream.iterator()
    assert warnings(caplog) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_plan_is_warned_of_by_one_rank(uri, launch, caplog, rank):
    launch(rank, 3)
    lance_stream(uri, num_splits=3)
    assert len(warnings(caplog)) == (rank == 0), "1 of 100 rows is left out"
