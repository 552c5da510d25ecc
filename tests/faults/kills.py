"""Kill rounds: a seeded schedule, the runs that it hits, and what a run does in its driver and its workers.

A run is a driver in a process of its own, so that it can be killed too. Its workers log what their loop receives, and wait
at a step that the test moves on: the moments of a schedule are steps, whatever the machine.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import LanceStream, lance_stream
from ray_lance_stream.splits import split_block
from tests.lancedb_support import ids_from, make_lancedb_table, streaming
from tests.support import AttemptLog, Oracle, after, effective_history, save, scan_ids, write

READER, READERS, WORKER = "a reader", "all readers", "a worker"
COORDINATOR, MANAGER, NODE, DRIVER = "the coordinator", "the DatasetManager", "the node with chunks", "the driver"
TARGETS = (READER, READERS, WORKER, COORDINATOR, MANAGER, NODE, DRIVER)
ROUNDS, ROUNDS_OF_A_RUN = 50, 5
SEED = 7

NUM_SPLITS, GLOBAL_BATCH, EPOCHS, STREAM_SEED = 12, 24, 2, 5
M = GLOBAL_BATCH // NUM_SPLITS
ROWS = 305  # 25 cycles, 13 steps an epoch: the last one is short, and five rows are left out
FILTER = "id % 5 != 2"
SAVE_EVERY = 5
AHEAD = 6  # steps that a run may go on while a kill is on its way
SIDE = {"num_cpus": 0.1, "resources": {"side": 0.01}}  # on the node that gets killed
OURS = ("StreamCoordinator", "SplitReader", "StageWorker")


# ---- the schedule


@dataclass(frozen=True)
class Kill:
    """One round.

    Attributes:
        target: what is killed.
        at: which part of the run's steps is done by then; None: as soon as the target is there again after the kill before,
            while the run still recovers from that.
        delay_s: seconds after that moment.
        choice: which one of several processes, as a share of them.
    """

    target: str
    at: float | None
    delay_s: float
    choice: float


@dataclass(frozen=True)
class Run:
    """A run and the kills that hit it.

    Attributes:
        kind: of its stream, see KINDS.
        worlds: numbers of workers, one after the other with each driver.
        kills: in their order.
    """

    kind: str
    worlds: tuple[int, ...]
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        return self.kind


def schedule(seed: int = SEED) -> list[Run]:
    """All rounds. The first run, a tenth of them, hits what no other test kills, or kills in a real run."""
    chance = random.Random(seed)
    first = [READERS, NODE, COORDINATOR, DRIVER, WORKER]
    rest = [target for target in TARGETS for _ in range(7 - first.count(target))] + [WORKER]
    chance.shuffle(rest)
    targets = first + rest
    runs = []
    for number, kind in enumerate(KINDS):
        mine = targets[number * ROUNDS_OF_A_RUN : (number + 1) * ROUNDS_OF_A_RUN]
        moments = sorted(chance.uniform(0.03, 0.85) for _ in mine)
        kills = [
            Kill(
                target,
                None if place and chance.random() < 0.3 else moments[place],
                chance.uniform(0.0, 0.6),
                chance.random(),
            )
            for place, target in enumerate(mine)
        ]
        worlds = (2, *(chance.choice([1, 2, 3]) for _ in mine))
        runs.append(Run(kind, worlds, tuple(kills)))
    return runs


# ---- streams


def doubled(batch: dict[str, Any], sleep_s: float = 0.03) -> dict[str, Any]:
    """Takes long enough to be hit."""
    time.sleep(sleep_s)
    return {**batch, "twice": 2 * batch["id"]}


class Doubled:
    """The same, as a class."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return doubled(batch)


def as_it_is(stream: LanceStream) -> LanceStream:
    """Without transforms."""
    return stream


SMALL: dict[str, Any] = {"read_batch_size": 1, "prefetch_chunks": 6}
KINDS: dict[str, tuple[dict[str, Any], Callable[[LanceStream], LanceStream]]] = {
    "listed, filtered, in actors": (
        {"order": "lancedb", "filter": FILTER, "read_batch_size": 2},
        lambda stream: stream.map_batches(Doubled, concurrency=2, **SIDE),
    ),
    "plain": ({}, as_it_is),
    "small chunks of two readers": ({**SMALL, "readers_per_worker": 2}, as_it_is),
    "filtered": ({"filter": FILTER, **SMALL}, as_it_is),
    "in tasks": (SMALL, lambda stream: stream.map_batches(doubled, concurrency=3, **SIDE)),
    "clumped": ({"shuffle_clump_size": 7, "prefetch_chunks": 1}, as_it_is),
    "in readers": (SMALL, lambda stream: stream.map_batches(doubled)),
    "new versions": ({"on_new_version": "next_epoch", "filter": FILTER, **SMALL}, as_it_is),
    "in readers, tasks and actors": (
        SMALL,
        lambda stream: (
            stream.map_batches(doubled).map_batches(doubled, **SIDE).map_batches(Doubled, concurrency=2, **SIDE)
        ),
    ),
    "in the order of the table": ({"shuffle": False}, as_it_is),
}


@dataclass(frozen=True)
class Table:
    """The table of a run, in its folder, and what its stream delivers."""

    folder: Path
    kind: str

    @property
    def path(self) -> str:
        """Of the Lance dataset."""
        return str(self.folder / "t.lance")

    @property
    def options(self) -> dict[str, Any]:
        """Of `lance_stream`."""
        return KINDS[self.kind][0]

    @property
    def is_mapped(self) -> bool:
        """Whether there is a column more."""
        return KINDS[self.kind][1] is not as_it_is

    @property
    def grows(self) -> bool:
        """Whether epochs take up new versions."""
        return "on_new_version" in self.options

    def make(self) -> None:
        """Write it."""
        make_lancedb_table(self.folder, ROWS).delete("id in (0, 29, 30, 200)")

    def steps(self) -> int:
        """Of an epoch of the newest version."""
        return math.ceil(len(self.epoch(0, lance.dataset(self.path).version)) / M)

    def append(self) -> None:
        """A version more, with some 70 rows more."""
        rows = lance.dataset(self.path).to_table(filter="id < 75")
        lance.write_dataset(rows, self.path, mode="append")

    def stream(self) -> LanceStream:
        """The stream of the run."""
        options, mapped = KINDS[self.kind]
        source = lancedb.connect(self.folder).open_table("t") if "order" in options else self.path
        return mapped(lance_stream(source, num_splits=NUM_SPLITS, shuffle_seed=STREAM_SEED, **options))

    def epoch(self, epoch: int, version: int) -> np.ndarray:
        """int64 [cycles, splits]: the ids of an epoch, without the library's readers, shards and coordinator."""
        options = self.options
        if "order" in options:
            table = lancedb.connect(self.folder).open_table("t")
            table.checkout(version)
            theirs = streaming(
                table, num_splits=NUM_SPLITS, shuffle_seed=STREAM_SEED, epoch=epoch, filter=options["filter"]
            )
            ids = np.asarray(ids_from(theirs))
        else:
            oracle = Oracle(
                scan_ids(self.path, options.get("filter"), version),
                NUM_SPLITS,
                M,
                seed=STREAM_SEED,
                shuffle=options.get("shuffle", True),
                clump=options.get("shuffle_clump_size"),
            )
            ids = np.concatenate(oracle.epoch(epoch))
        return ids.reshape(-1, NUM_SPLITS)


# ---- in the workers


def allow(folder: Path, total: int) -> None:
    """Let the loops go on up to this step of the run."""
    new = folder / "allowed.new"
    new.write_text(str(total))
    os.replace(new, folder / "allowed")


def kill_loop(config: dict[str, Any]) -> None:
    """Logs what comes, saves every few steps, and goes no further than it is allowed to."""
    shard = ray.train.get_dataset_shard("train")
    context, folder = ray.train.get_context(), Path(config["dir"])
    rank, attempt = context.get_world_rank(), shard._attempt.attempt_id
    with (folder / f"{attempt}-{time.time_ns()}-{rank}.jsonl").open("w") as log:
        state = shard.state_dict()
        start = [state["epoch"], state["samples_consumed_per_split"]]
        write(log, {"tag": attempt, "rank": rank, "world": context.get_world_size(), "start": start})
        for epoch in range(shard.epoch, EPOCHS):
            for batch in shard.iter_batches(batch_size=shard.local_batch_size(GLOBAL_BATCH)):
                check_columns(batch, config["mapped"])
                state = shard.state_dict()
                done = after(state, epoch)
                total = epoch * config["steps"] + (config["steps"] if done is None else done // M)
                line = {"epoch": epoch, "after": done, "ids": batch["id"].tolist(), "version": state["table_version"]}
                write(log, {**line, "total": total, "at_s": time.time()})
                if total % SAVE_EVERY == 0:
                    save(shard, rank, config)
                time.sleep(0.08)
                while total >= int((folder / "allowed").read_text()):
                    time.sleep(0.02)
        write(log, {"end": shard.state_dict()})


def check_columns(batch: dict[str, Any], is_mapped: bool) -> None:
    """The other columns belong to the ids."""
    assert np.array_equal(batch["value"], 3 * batch["id"] + 1)
    assert np.array_equal(batch["vec"][:, 0], batch["id"].astype(np.float32))
    assert ("twice" in batch) == is_mapped
    assert not is_mapped or np.array_equal(batch["twice"], 2 * batch["id"])


# ---- in the driver


def drive(address: str, folder: str, kind: str, world: str) -> None:
    """One driver of a run: to its end, and then until nothing of it is left."""
    ray.init(address=address, log_to_driver=False)
    before = footprint()
    fit(Table(Path(folder), kind), int(world))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # that of `fit()` keeps its controller, with the stream in it
    left = left_behind(before)
    if left:
        sys.exit(f"left behind: {left}")


def fit(table: Table, world: int) -> None:
    """The run itself; run name, storage and pin are the same with every driver."""
    stream = table.stream()
    steps = math.ceil(stream._plan.grid.num_cycles / M)
    with stream.pin(tag="run"):
        DataParallelTrainer(
            kill_loop,
            train_loop_config={"dir": str(table.folder), "steps": steps, "mapped": table.is_mapped},
            datasets={"train": stream},
            # Where transforms run on the other node, it holds the chunks of workers that are not there, else their own.
            scaling_config=ScalingConfig(num_workers=world, placement_strategy="PACK" if table.is_mapped else "SPREAD"),
            run_config=RunConfig(
                name="run", storage_path=str(table.folder / "runs"), failure_config=FailureConfig(max_failures=-1)
            ),
        ).fit()


def footprint() -> dict[str, Any]:
    """Threads of this process, bytes in the object store of the cluster, and actors of this library."""
    from ray._private.state import actors

    capacity, free = ray.cluster_resources(), ray.available_resources()
    return {
        "threads": Counter(thread.name.rstrip("-0123456789") for thread in threading.enumerate()),
        "bytes": capacity["object_store_memory"] - free.get("object_store_memory", 0.0),
        "actors": [
            a["ActorClassName"] for a in actors().values() if a["ActorClassName"] in OURS and a["State"] != "DEAD"
        ],
    }


def left_behind(before: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
    """What there still is after some seconds and was not before."""
    until_s = time.monotonic() + timeout_s
    while (left := _more_than(before)) and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.2)
    return left


def _more_than(before: dict[str, Any]) -> dict[str, Any]:
    now = footprint()
    left = {
        "threads": dict(now["threads"] - before["threads"]),
        "bytes": max(0.0, now["bytes"] - before["bytes"]),
        "actors": now["actors"],
    }
    return {what: found for what, found in left.items() if found}


# ---- the history of a run


def attempts(folder: Path) -> list[AttemptLog]:
    """The worker groups of a run, oldest first. By their ids: the last lines of a dying one may come after the next begins."""
    found: dict[str, AttemptLog] = {}
    for path in sorted(folder.glob("*-*-*.jsonl"), key=lambda path: int(path.stem.split("-")[1])):
        head, *lines = [json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")] or [None]
        if head is not None:
            attempt = AttemptLog(head["tag"], head["world"], tuple(head["start"]), {})
            found.setdefault(head["tag"], attempt).ranks[head["rank"]] = lines
    return list(found.values())


def total_since(folder: Path, at_s: float) -> int:
    """The furthest step of the run that any rank has reached after a time."""
    lines = [line for attempt in attempts(folder) for rank in attempt.ranks.values() for line in rank]
    return max((line["total"] for line in lines if line.get("at_s", 0.0) > at_s), default=-1)


def check_history(table: Table) -> None:
    """Every batch of every rank holds the rows that its place says, and what counts is the unbroken run."""
    logged = attempts(table.folder)
    epochs: dict[tuple[int, int], np.ndarray] = {}
    versions: dict[int, set[int]] = {epoch: set() for epoch in range(EPOCHS)}
    for number, attempt in enumerate(logged):
        until = logged[number + 1].start if number + 1 < len(logged) else (EPOCHS, 0)
        for rank, lines in attempt.ranks.items():
            block, (epoch, cycle) = split_block(NUM_SPLITS, attempt.world, rank), attempt.start
            for line in (line for line in lines if "ids" in line):
                if line["epoch"] != epoch:
                    epoch, cycle = line["epoch"], 0
                if (epoch, line["version"]) not in epochs:
                    epochs[epoch, line["version"]] = table.epoch(epoch, line["version"])
                expected = epochs[epoch, line["version"]]
                stop = len(expected) if line["after"] is None else line["after"]
                where = f"{table.kind}: attempt {number}, rank {rank} of {attempt.world}, epoch {epoch}, cycle {cycle}"
                assert line["ids"] == expected[cycle:stop, block.lo : block.hi].reshape(-1).tolist(), where
                if (epoch, stop) <= until or epoch < until[0]:
                    versions[epoch].add(line["version"])
                cycle = stop
    assert all(len(found) == 1 for found in versions.values()), f"{table.kind}: versions of epochs {versions}"
    assert not table.grows or versions[0] != versions[1], f"{table.kind}: nothing was taken up"
    oracle = {}
    for epoch, (version,) in versions.items():
        expected = epochs[epoch, version]
        for step, start in enumerate(range(0, len(expected), M)):
            oracle[epoch, step] = sorted(expected[start : start + M].reshape(-1).tolist())
    assert effective_history(logged, M) == oracle, f"{table.kind}: what counts is not the unbroken run"
