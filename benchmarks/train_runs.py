"""Real Ray Train runs that note when their streams were split, shards arrived and first batches came."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import ray_lance_stream
from benchmarks.common import NUM_SPLITS
from benchmarks.consumers import global_batch_rows, open_stream
from ray_lance_stream import LanceStream, StreamShard

STEPS = 3
WORKER_CPUS = 0.1  # more workers than cores
POSITIONS = {"0 %": 0.0, "50 %": 0.5, "99 %": 0.99}
AT_EDGE = "end"


class TimedStream(LanceStream):
    """A stream that notes when it is split."""

    folder: str

    def copy(self, stream: LanceStream) -> LanceStream:
        """As LanceStream's, and still timed."""
        return timed(super().copy(stream), self.folder)

    def streaming_split(
        self, n: int, *, equal: bool = True, locality_hints: Sequence[str] | None = None
    ) -> list[StreamShard]:
        """As LanceStream's."""
        _note(self.folder, "split", {"split_s": time.time()})
        return super().streaming_split(n, equal=equal, locality_hints=locality_hints)


def timed(stream: LanceStream, folder: str) -> TimedStream:
    """The stream itself, with a clock."""
    stream.__class__ = TimedStream
    assert isinstance(stream, TimedStream)
    stream.folder = folder
    return stream


@dataclass(frozen=True)
class Arrival:
    """One rank of one worker group; times of day. `edge_s`: from the end of the epoch to the next one's first batch."""

    group: int
    rank: int
    split_s: float
    got_s: float
    first_s: float
    edge_s: float | None

    @property
    def since_split_s(self) -> float:
        return self.first_s - self.split_s

    @property
    def since_got_s(self) -> float:
        return self.first_s - self.got_s


def stream_at(uri: str, table: str, position: float, groups: int = 1) -> LanceStream:
    """The stream of a table, to go on at a share of the epoch, or where STEPS steps are left for each of `groups`."""
    stream = open_stream(uri, table)
    state = stream.state_dict()
    per_step = global_batch_rows(table) // NUM_SPLITS
    steps = stream._plan.grid.num_cycles // per_step
    state["samples_consumed_per_split"] = min(int(steps * position), steps - STEPS * groups) * per_step
    return open_stream(uri, table, resume_from=state) if position else stream


def fit(
    stream: LanceStream, name: str, storage: str, world_size: int, restarts: int = 0, over_edge: bool = False
) -> list[Arrival]:
    """Train in a worker group that fails `restarts` times; what each rank of each group noted."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = DataParallelTrainer(
            _loop,
            train_loop_config={"folder": folder, "restarts": restarts, "over_edge": over_edge},
            datasets={"train": cast(Any, timed(stream, folder))},
            scaling_config=ScalingConfig(num_workers=world_size, resources_per_worker={"CPU": WORKER_CPUS}),
            run_config=RunConfig(name=name, storage_path=storage, failure_config=FailureConfig(max_failures=restarts)),
        )
        trainer.fit()
        return _arrivals(folder)


def _loop(config: dict[str, Any]) -> None:
    import torch  # noqa: F401  # a training loop has it before it asks for data

    shard = ray.train.get_dataset_shard("train")
    got_s = time.time()
    batches = iter(shard.iter_torch_batches())
    next(batches)
    found: dict[str, Any] = {"got_s": got_s, "first_s": time.time(), "edge_s": None}
    rank = ray.train.get_context().get_world_rank()
    if config["over_edge"]:
        for _ in batches:
            pass
        ended_s = time.time()
        next(iter(shard.iter_torch_batches()))
        found["edge_s"] = time.time() - ended_s
    else:
        for _ in range(STEPS - 1):
            next(batches)
    _note(config["folder"], "rank", {**found, "rank": rank})
    with tempfile.TemporaryDirectory() as saved:
        ray_lance_stream.report({}, checkpoint=None if rank else Checkpoint.from_directory(saved))
    if len(list(Path(config["folder"]).glob("split-*"))) <= config["restarts"]:
        raise RuntimeError("this group ends here, so that another one starts")


def _note(folder: str, kind: str, what: dict[str, Any]) -> None:
    path = Path(folder) / f"{kind}-{time.time_ns()}-{what.get('rank', 0)}"
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(what))
    unfinished.rename(path)


def _arrivals(folder: str) -> list[Arrival]:
    splits = sorted(json.loads(path.read_text())["split_s"] for path in Path(folder).glob("split-*"))
    found = []
    for path in sorted(Path(folder).glob("rank-*")):
        noted = json.loads(path.read_text())
        group = max(number for number, split_s in enumerate(splits) if split_s <= noted["got_s"])
        found.append(Arrival(group=group, split_s=splits[group], **noted))
    return found
