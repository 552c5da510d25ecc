"""Meter: figures add up over ranks, and metrics are told what came on top."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.data._internal.stats import DatasetStats

from ray_lance_stream import TransformError, lance_stream, meter
from ray_lance_stream.meter import COUNTERS, GAUGES, POSITION_GAUGES, TAGS, Meter, Tally, metrics_text
from ray_lance_stream.reader import ChunkInfo
from tests.fake_ray import Cluster
from tests.support import make_table
from tests.unit.test_state import STATE

DOCS = Path(__file__).parents[2] / "docs"
# As Ray exports them.
EXPORTED = {f"ray_lance_stream_{name}_total" for name in COUNTERS} | {
    f"ray_lance_stream_{name}" for name in (*GAUGES, *POSITION_GAUGES)
}
TAGGED = {"stream": "train", "rank": "1", "run": "a"}


class Held:
    """What is in flight, as a shard's supply knows it."""

    def in_flight(self) -> tuple[int, int]:
        return 2, 200


HELD = Held()


class Recorded:
    """A metric that keeps what it is told."""

    def __init__(self, told: dict[str, list[float]], name: str) -> None:
        self._told = told.setdefault(name, [])

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert tags == TAGGED
        self._told.append(value)

    set = inc


@pytest.fixture
def told(monkeypatch) -> dict[str, list[float]]:
    """What metrics are told, by name."""
    found: dict[str, list[float]] = {}
    for kind in ("_counter", "_gauge"):
        monkeypatch.setattr(meter, kind, lambda name, text: Recorded(found, name))
    return found


def counted(rows: int) -> Meter:
    """A meter that has seen one chunk and four seconds."""
    stats = DatasetStats(metadata={}, parent=None)
    made = Meter(stats)
    made.watch(HELD.in_flight)
    made.received(rows)
    made.came(ChunkInfo(rows, 100, 100, read_s=0.5, transform_s=0.25))
    stats.iter_total_blocked_s.add(1.0)
    stats.iter_user_s.add(3.0)
    return made


def test_counters_grow_by_what_came_on_top(told):
    made = counted(10)
    made.export(made.tally(), STATE, TAGGED)
    made.received(5)
    made.retried()
    made.export(made.tally(), replace(STATE, samples_consumed_per_split=9), TAGGED)
    made.export(made.tally(), STATE, TAGGED)
    assert told["rows"] == [10, 5]
    assert told["bytes"] == [100]
    assert told["wait_seconds"] == [1.0]
    assert told["retries"] == [1]
    assert told["chunks_in_flight"] == [2, 2, 2]
    assert told["in_flight_bytes"] == [200, 200, 200]
    cycles = STATE.samples_consumed_per_split
    assert told["samples_consumed_per_split"] == [cycles, 9, cycles]
    assert told["epoch"] == [STATE.epoch] * 3
    assert set(told) <= {*COUNTERS, *GAUGES, *POSITION_GAUGES}


def test_ray_takes_the_metrics():
    for make, group in ((meter._counter, COUNTERS), (meter._gauge, {**GAUGES, **POSITION_GAUGES})):
        for name, (_, text) in group.items():
            metric = make(name, text)
            assert metric.info["name"] == f"lance_stream_{name}"
            assert metric.info["tag_keys"] == TAGS
            assert make(name, text) is metric


def test_tallies_add_up():
    both = counted(10).tally() + counted(20).tally()
    assert (both.rows, both.size_bytes, both.chunks, both.read_s, both.transform_s) == (30, 200, 2, 1.0, 0.5)
    assert both.wait_share == 0.25
    assert Tally().wait_share == 0.0
    assert Tally().rows_per_s == 0.0
    tally = Tally(rows=30, size_bytes=3 << 20, chunks=2, elapsed_s=2.0, wait_s=1.0, loop_s=3.0, retries=4)
    figures = tally.to_dict()
    text = metrics_text(figures)
    assert "* Rows received: 30 (15 rows/s)\n" in text
    assert "* Chunks: 2 (3.0 MiB), 4 read again after a loss\n" in text
    assert "* Loop waited for batches: 1.00s (25.0% of its time)\n" in text
    assert (figures["rows"], figures["bytes"], figures["rows_per_s"], figures["wait_share"]) == (
        30,
        3 << 20,
        15.0,
        0.25,
    )
    assert json.loads(json.dumps(figures)) == figures


def test_metrics_of_shard_and_stream_are_numbers(tmp_path, monkeypatch):
    """Those of the stream are sums, with each rank's own; in a process that iterates the stream itself, of its shard."""
    Cluster(monkeypatch)
    path = make_table(tmp_path / "t", 48)
    stream = lance_stream(path, num_splits=4, global_batch_size=4)
    assert stream.metrics()["rows"] == 0
    for shard in stream.streaming_split(2):
        for _ in shard.iter_batches():
            pass
        assert shard.metrics()["rows"] == 24
        assert f"* Rows received: {shard.metrics()['rows']} (" in shard.stats()
        shard.close()
    figures = stream.metrics()
    assert (figures["rows"], [each["rows"] for each in figures["ranks"].values()]) == (48, [24, 24])
    assert figures["bytes"] == sum(each["bytes"] for each in figures["ranks"].values()) > 0
    assert figures.keys() - {"ranks"} == figures["ranks"][0].keys()
    assert "Ranks: 2\n* Rows received: 48 (" in stream.stats()
    alone = lance_stream(path, num_splits=4, global_batch_size=4)
    for _ in alone.iter_batches():
        pass
    assert alone.metrics()["rows"] == alone.metrics()["ranks"][0]["rows"] == 48


def test_the_dashboard_shows_what_is_exported():
    """Every query names metrics that there are, and every metric is shown somewhere."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"ray_lance_stream_\w+", query)}
    assert named == EXPORTED
    # A counter that appears as 1 has not increased, to Prometheus.
    assert [query for query in queries if "increase(" in query] == []
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_page_names_what_is_exported():
    page = (DOCS / "monitoring.md").read_text()
    assert set(re.findall(r"`(ray_lance_stream_\w+)`", page)) == EXPORTED


def fail(batch: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    if np.isin(ids, batch["id"]).any():
        raise ValueError("bad row")
    return batch


def test_a_chunk_that_is_read_for_the_schema_does_not_count(tmp_path, monkeypatch):
    """Two rows of its only cycle are replaced, of which a pass may have one."""
    Cluster(monkeypatch)
    stream = lance_stream(make_table(tmp_path / "t", 48), num_splits=4, shuffle=False, read_batch_size=1)
    options = {"fn_args": [[12, 24]], "on_transform_error": "replace"}
    shard = stream.map_batches(fail, **options, max_replaced_rows=1).shard()
    before = shard._meter.tally()
    assert "value" in shard.schema().names
    assert shard._meter.tally() == before == Tally()
    with pytest.raises(TransformError, match="failed on 2 rows of this pass, more than max_replaced_rows=1"):
        next(iter(shard.iter_batches(batch_size=4)))
    shard.close()
    other = stream.map_batches(fail, **options).shard()
    batches = iter(other.iter_batches(batch_size=48))
    next(batches)
    counted = other._meter.tally()
    assert (counted.chunks, counted.replaced_rows) == (12, 2)
    told = other._supply.replaced
    assert "Rows replaced in this pass: 2 (" in told
    other.schema()
    assert (other._meter.tally().chunks, other._supply.replaced) == (12, told)
    other.close()
