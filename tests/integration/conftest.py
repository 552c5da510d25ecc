"""Shards in the test's own process, on readers that the tests of a module share: an actor takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ray_lance_stream import LanceStream, StreamShard, lance_stream
from ray_lance_stream.pool import ReaderPool


class Shards:
    """Makes streams and shards that share one coordinator and, by number of readers, one pool of readers.

    Readers keep no position and take the table with each read, so one of them can serve every stream.
    """

    def __init__(self) -> None:
        self._first: LanceStream | None = None
        self._pools: dict[int, ReaderPool] = {}

    def stream(self, path: str, **options: Any) -> LanceStream:
        """`lance_stream(path, num_splits=48, **options)`."""
        stream = lance_stream(path, **{"num_splits": 48, **options})
        self._first = self._first or stream
        stream._coordinator = self._first._coordinator_handle()
        return stream

    def of(
        self, stream: LanceStream, rank: int = 0, world_size: int = 1, state: Mapping[str, Any] | None = None
    ) -> StreamShard:
        """A fresh shard of a stream."""
        shard = stream.shard(rank, world_size)
        shard._supply.readers = self._pools.setdefault(stream._config.readers_per_worker, shard._supply.readers)
        if state is not None:
            shard.load_state_dict(state)
        return shard

    def __call__(self, path: str, **options: Any) -> StreamShard:
        """The only shard of a fresh stream; `state` is loaded into it."""
        state = options.pop("state", None)
        return self.of(self.stream(path, **options), state=state)

    def group(self, stream: LanceStream, world_size: int, state: Mapping[str, Any] | None = None) -> list[StreamShard]:
        """A fresh shard of each rank."""
        return [self.of(stream, rank, world_size, state) for rank in range(world_size)]


@pytest.fixture(scope="module")
def shards(cluster) -> Iterator[Shards]:
    """See Shards."""
    return Shards()


def ids_of(batch: Any) -> list[int]:
    """The ids of a batch of any kind, or of a row."""
    return np.asarray(batch["id"]).reshape(-1).tolist()


def flat(batches: Any) -> list[int]:
    """The ids of batches, one after another."""
    return [i for batch in batches for i in ids_of(batch)]
