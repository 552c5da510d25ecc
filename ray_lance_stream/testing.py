"""Proofs that you run on your own table, in seconds and without a trainer.

    stream = lance_stream(table, num_splits=48, global_batch_size=480)
    assert_elastic(stream, world_sizes=(1, 2, 3, 8))
    assert_resume_exact(stream, world_sizes=(8, 4))

They read real rows through real readers and compare row contents; ranks take turns in this process. All of it is of the
pinned version, also where epochs would take up newer ones.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any

import pyarrow as pa

from ray_lance_stream.explain import step_size
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.stream import LanceStream

Step = list[bytes]  # a digest of each row of a global step, in the order of one worker


def assert_elastic(
    stream: LanceStream,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    global_batch_size: int | None = None,
    epoch: int = 0,
    max_steps: int = 8,
) -> None:
    """Every worker count gives the same rows in every global step, and each rank its own columns of every cycle.

    Args:
        stream: made by `lance_stream`.
        world_sizes: worker counts to compare; the first one is what the others are compared with.
        global_batch_size: G, where it is not the stream's; a stream without one has its default.
        epoch: which epoch.
        max_steps: how many steps of it.

    Raises:
        AssertionError: names worker counts and step.
        ConfigError: a worker count or batch size that cannot be served.
    """
    size, stream = _batch_size(stream, global_batch_size), _on_one_version(stream)
    first, *others = world_sizes
    expected = list(islice(_steps(_shards(stream, first, epoch=epoch), size), max_steps))
    if not expected:
        raise AssertionError(f"epoch {epoch} has no step")
    for world in others:
        found = list(islice(_steps(_shards(stream, world, epoch=epoch), size), max_steps))
        _compare(expected, found, f"epoch {epoch} on {first} and {world} workers")


def assert_resume_exact(
    stream: LanceStream,
    *,
    world_sizes: Sequence[int] = (2, 4, 1),
    global_batch_size: int | None = None,
    epoch: int = 0,
    steps_between: int = 2,
    max_steps: int = 8,
) -> None:
    """A run that stops every few steps and goes on with another worker count has the rows of an unbroken one.

    Args:
        stream: made by `lance_stream`.
        world_sizes: worker counts of the broken run, one after the other, from one rank's state each.
        global_batch_size: G, where it is not the stream's; a stream without one has its default.
        epoch: first epoch.
        steps_between: steps from one stop to the next.
        max_steps: steps compared in total.

    Raises:
        AssertionError: names the step.
        ConfigError: a worker count or batch size that cannot be served.
    """
    size, stream = _batch_size(stream, global_batch_size), _on_one_version(stream)
    expected = list(islice(_epochs(_shards(stream, 1, epoch=epoch), size), max_steps))
    found: list[Step] = []
    state: dict[str, Any] | None = None
    turn = 0
    while len(found) < len(expected):
        world = world_sizes[turn % len(world_sizes)]
        shards = _shards(stream, world, epoch=epoch, state=state)
        found += islice(_epochs(shards, size), min(steps_between, len(expected) - len(found)))
        state = shards[turn % world].state_dict()
        for shard in shards:
            shard.close()
        turn += 1
    _compare(expected, found, f"an unbroken run and one resumed on {list(world_sizes)} workers")


def _batch_size(stream: LanceStream, global_batch_size: int | None) -> int:
    return step_size(stream._plan, stream._config, global_batch_size)


def _on_one_version(stream: LanceStream) -> LanceStream:
    """The stream on its pinned version: shards that are made one by one could not agree on others."""
    if not stream._config.takes_up_versions:
        return stream
    return stream._with(replace(stream._config, on_new_version="stay"))


def _shards(
    stream: LanceStream, world_size: int, *, epoch: int, state: dict[str, Any] | None = None
) -> list[StreamShard]:
    """Fresh shards of every data rank; they share readers, which keep no position."""
    replicas = stream._config.replicas
    shards = [stream.shard(rank * replicas, world_size * replicas) for rank in range(world_size)]
    for shard in shards:
        shard._supply.readers = shards[0]._supply.readers
        if state is None:
            shard.set_epoch(epoch)
        else:
            shard.load_state_dict(state)
    return shards


def _epochs(shards: list[StreamShard], global_batch_size: int) -> Iterator[Step]:
    """Global steps, epoch after epoch, from where the shards are."""
    while True:
        yield from _steps(shards, global_batch_size)


def _steps(shards: list[StreamShard], global_batch_size: int) -> Iterator[Step]:
    """The global steps of one pass, put together from all ranks in cycle order."""
    passes = [
        shard.iter_batches(batch_size=shard.local_batch_size(global_batch_size), batch_format="pyarrow")
        for shard in shards
    ]
    sizes = [hi - lo for lo, hi in (shard.split_block for shard in shards)]
    for batches in zip_longest(*passes):
        if any(batch is None for batch in batches) and shards[0]._plan.drop_remainder:
            raise AssertionError(f"on {len(shards)} workers some have fewer batches than others")
        rows = [[] if batch is None else _row_digests(batch) for batch in batches]
        cycles = max(-(-len(part) // size) for part, size in zip(rows, sizes, strict=True))
        yield list(
            chain.from_iterable(
                part[cycle * size : (cycle + 1) * size]
                for cycle in range(cycles)
                for part, size in zip(rows, sizes, strict=True)
            )
        )


def _row_digests(batch: pa.Table) -> list[bytes]:
    columns = [batch.column(name).to_pylist() for name in batch.column_names]
    return [hashlib.blake2b(pickle.dumps(_plain(row)), digest_size=16).digest() for row in zip(*columns, strict=True)]


def _plain(row: tuple[Any, ...]) -> list[Any]:
    return [value.tobytes() if hasattr(value, "tobytes") else value for value in row]


def _compare(expected: list[Step], found: list[Step], what: str) -> None:
    # Not `assert`: these are for users, and hold under `python -O` as well.
    if len(expected) != len(found):
        raise AssertionError(f"{what}: {len(expected)} and {len(found)} steps")
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        if left != right:
            kind = "other rows" if sorted(left) != sorted(right) else "the same rows in another order"
            raise AssertionError(f"{what}: step {step} holds {kind} ({len(left)} and {len(right)} rows)")
