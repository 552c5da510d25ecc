"""Processes that torchrun or another launcher of PyTorch has started: their rank, and what goes wrong there with streams."""

from __future__ import annotations

import logging
import os

from ray_lance_stream._ray import in_train_worker, is_ray_worker, local_run, owns_cluster, train_rank

logger = logging.getLogger(__name__)


def launched_as() -> tuple[int, int] | None:
    """(rank, world size) of a process that a launcher has started; None of others, and of the workers of Ray and Ray Train."""
    if is_ray_worker() or (in_train_worker() and local_run() is None):
        return None
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, world_size) if 0 <= rank < world_size else None


def is_first_rank() -> bool:
    """Whether this process is the one of its group that logs what holds for all of them."""
    rank = train_rank() if in_train_worker() else None
    if rank is None:
        rank = (launched_as() or (0, 1))[0]
    return rank == 0


def warn_of_ranks(name: str, rank: int, world_size: int, evaluation: bool) -> None:
    """Warn, on the first rank, where ranks do not share a stream as their launcher has them share the work.

    Args:
        name: of the stream, or its table.
        rank: of the shard that was made.
        world_size: and how many there are.
        evaluation: whether every rank may read the whole stream.
    """
    launched = launched_as()
    if launched is None or launched[0] != 0 or launched[1] == 1:
        return
    if world_size == 1 and not evaluation:
        logger.warning(
            "stream %r: this is rank 0 of %d that a launcher such as torchrun has started, but its shard is the whole stream: "
            "each rank trains on every row; call stream.shard(rank, world_size), here stream.shard(%d, %d); evaluation=True "
            "is for streams that each rank reads as a whole",
            name,
            launched[1],
            *launched,
        )
    if owns_cluster():
        logger.warning(
            "stream %r: rank 0 of %d that a launcher such as torchrun started has a Ray cluster of its own, and so has each "
            "other rank that connects to none: each cluster takes half a minute to start, and processes and memory of its own; "
            'run `ray start --head` before, and call ray.init(address="auto") on each rank before it makes its stream, or have '
            "Ray Train start the ranks: TorchTrainer(loop, datasets=...)",
            name,
            launched[1],
        )
