"""Meter: what a rank counts of its passes. `stats()` of a shard and of a stream show it; Ray's metrics export it."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from ray.util import metrics

from ray_lance_stream.reader import ChunkInfo
from ray_lance_stream.state import StreamState

if TYPE_CHECKING:
    from ray_lance_stream._ray import DatasetStats

TAGS = ("stream", "rank", "run")
PREFIX = "lance_stream_"  # Ray puts a `ray_` before it
# Name of the metric: (attribute of a tally, description). What only grows is a counter.
COUNTERS = {
    "rows": ("rows", "Rows that the training loop has received."),
    "bytes": ("size_bytes", "Arrow bytes of the chunks that have come."),
    "wait_seconds": ("wait_s", "Seconds that the training loop has waited for batches."),
    "read_seconds": ("read_s", "Seconds of reading, added up over reads that may run together."),
    "transform_seconds": ("transform_s", "Seconds of map_batches, added up over processes."),
    "convert_seconds": ("convert_s", "Seconds of making batches out of chunks, added up over Ray Data's threads."),
    "retries": ("retries", "Reads that were lost and sent again."),
    "replaced_rows": ("replaced_rows", "Rows on which a transform failed and for which others stood in."),
}
GAUGES = {
    "chunks_in_flight": ("chunks_in_flight", "Chunks that are asked for and not received whole."),
    "in_flight_bytes": ("in_flight_bytes", "Bytes of these chunks."),
}
POSITION_GAUGES = {
    "epoch": ("epoch", "The open epoch."),
    "samples_consumed_per_split": (
        "samples_consumed_per_split",
        "Cycles of the open epoch that the training loop has received.",
    ),
}


@dataclass(frozen=True)
class Tally:
    """What one rank has counted since its shard arrived in its process; tallies add up.

    Attributes:
        rows: rows that the loop has received.
        size_bytes: Arrow bytes of the chunks that have come.
        chunks: chunks that have come.
        elapsed_s: seconds since the loop received its first row.
        wait_s: seconds that the loop has waited for batches.
        loop_s: seconds that the loop has spent between batches.
        read_s: seconds of reading, added up over reads that may run together.
        transform_s: seconds of `map_batches`, added up over processes.
        convert_s: seconds of making batches out of chunks, added up over Ray Data's threads.
        retries: reads that were lost and sent again.
        replaced_rows: rows that others stand in for.
        chunks_in_flight: chunks that are asked for and not received whole, now.
        in_flight_bytes: their bytes.
    """

    rows: int = 0
    size_bytes: int = 0
    chunks: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    loop_s: float = 0.0
    read_s: float = 0.0
    transform_s: float = 0.0
    convert_s: float = 0.0
    retries: int = 0
    replaced_rows: int = 0
    chunks_in_flight: int = 0
    in_flight_bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        added = [mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)]
        return Tally(*added)

    @property
    def rows_per_s(self) -> float:
        """Rows a second since the first one."""
        return self.rows / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """The part of the loop's time, from 0 to 1, that it has waited for batches."""
        spent_s = self.wait_s + self.loop_s
        return self.wait_s / spent_s if spent_s > 0 else 0.0

    def to_dict(self, rows_per_s: float | None = None) -> dict[str, Any]:
        """The figures as plain numbers, for `metrics()`.

        Args:
            rows_per_s: of all ranks together, which run at the same time; None: of this tally.
        """
        figures = asdict(self)
        rate = self.rows_per_s if rows_per_s is None else rows_per_s
        size_bytes = figures.pop("size_bytes")
        return {**figures, "bytes": size_bytes, "rows_per_s": rate, "wait_share": self.wait_share}


def metrics_text(figures: Mapping[str, Any]) -> str:
    """What `Tally.to_dict` gives, as lines in the style of Ray Data's statistics."""
    lines = [
        "Rows received: {rows} ({rows_per_s:.0f} rows/s)",
        "Chunks: {chunks} ({mebibytes:.1f} MiB), {retries} read again after a loss",
        "Loop waited for batches: {wait_s:.2f}s ({wait_share:.1%} of its time)",
        "Reading: {read_s:.2f}s, transforms: {transform_s:.2f}s, making batches: {convert_s:.2f}s",
        "In flight: {chunks_in_flight} chunks ({in_flight_mebibytes:.1f} MiB)",
        "Rows replaced: {replaced_rows}",
    ]
    mebibytes = {"mebibytes": figures["bytes"] / 2**20, "in_flight_mebibytes": figures["in_flight_bytes"] / 2**20}
    return "".join(f"* {line}\n" for line in lines).format(**figures, **mebibytes)


class Meter:
    """Counts for one shard; each figure is written by one thread at a time.

    Args:
        stats: Ray Data's, which know how long the loop waited.
    """

    def __init__(self, stats: DatasetStats) -> None:
        self._stats = stats
        self._in_flight: weakref.WeakMethod[Callable[[], tuple[int, int]]] | None = None
        self._first_row_s: float | None = None
        self._rows = self._chunks = self._size_bytes = self._retries = self._replaced_rows = 0
        self._read_s = self._transform_s = 0.0
        self._exported: dict[str, float] = {}

    def aside(self) -> Meter:
        """One for chunks that the loop does not receive: nobody asks it."""
        return Meter(self._stats)

    def watch(self, in_flight: Callable[[], tuple[int, int]]) -> None:
        """Ask this method for (chunks, bytes) in flight. Its object, which holds this one, is not kept by it."""
        self._in_flight = weakref.WeakMethod(in_flight)

    def received(self, rows: int) -> None:
        """The loop has received rows."""
        if self._first_row_s is None:
            self._first_row_s = time.monotonic()
        self._rows += rows

    def came(self, info: ChunkInfo) -> None:
        """A chunk has come."""
        self._chunks += 1
        self._size_bytes += info.size_bytes
        self._read_s += info.read_s
        self._transform_s += info.transform_s

    def retried(self) -> None:
        """A read was lost and is sent again."""
        self._retries += 1

    def replaced(self, rows: int) -> None:
        """Other rows stand in for some."""
        self._replaced_rows += rows

    def tally(self) -> Tally:
        """The figures now."""
        stats = self._stats
        in_flight = self._in_flight() if self._in_flight is not None else None
        chunks, size_bytes = in_flight() if in_flight is not None else (0, 0)
        return Tally(
            rows=self._rows,
            size_bytes=self._size_bytes,
            chunks=self._chunks,
            elapsed_s=time.monotonic() - self._first_row_s if self._first_row_s is not None else 0.0,
            wait_s=stats.iter_total_blocked_s.get(),
            loop_s=stats.iter_user_s.get(),
            read_s=self._read_s,
            transform_s=self._transform_s,
            convert_s=sum(
                each.get()
                for each in (stats.iter_format_batch_s, stats.iter_collate_batch_s, stats.iter_finalize_batch_s)
            ),
            retries=self._retries,
            replaced_rows=self._replaced_rows,
            chunks_in_flight=chunks,
            in_flight_bytes=size_bytes,
        )

    def export(self, tally: Tally, state: StreamState, tags: Mapping[str, str]) -> None:
        """Tell Ray's metrics, of which counters take what came on top.

        Args:
            tally: figures of now.
            state: position of now.
            tags: stream, rank and run.
        """
        for name, (attribute, text) in COUNTERS.items():
            value = getattr(tally, attribute)
            more = value - self._exported.get(name, 0)
            if more > 0:
                _counter(name, text).inc(more, dict(tags))
                self._exported[name] = value
        for source, gauges in ((tally, GAUGES), (state, POSITION_GAUGES)):
            for name, (attribute, text) in gauges.items():
                _gauge(name, text).set(getattr(source, attribute), dict(tags))


# Ray lets a process make a metric once.
@functools.cache
def _counter(name: str, text: str) -> metrics.Counter:
    return metrics.Counter(PREFIX + name, text, TAGS)


@functools.cache
def _gauge(name: str, text: str) -> metrics.Gauge:
    return metrics.Gauge(PREFIX + name, text, TAGS)
