"""Tables, train loops and the oracle that the integration tests share.

Workers append what their loop received to files; only these files are compared with the oracle. The oracle is the pure
plan of one worker over a plain table scan: no reader, no shard, no Ray.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import ray.train

import ray_lance_stream
from ray_lance_stream.order import Order
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.splits import SplitBlock, SplitGrid

FRAGMENT_ROWS = (30, 10, 1, 7, 129, 64, 200)


def make_table(path: Path | str, num_rows: int, **write: Any) -> str:
    """T(n): int64 `id` = 0..n-1 and `value` = 3 * id + 1, in uneven fragments. Returns the path."""
    ids = np.arange(num_rows)
    table = pa.table({"id": ids, "value": 3 * ids + 1, "vec": fixed_size(ids)})
    start, turn = 0, 0
    while start < num_rows or turn == 0:
        size = FRAGMENT_ROWS[turn % len(FRAGMENT_ROWS)]
        lance.write_dataset(table.slice(start, size), str(path), mode="append" if turn else "create", **write)
        start, turn = start + size, turn + 1
    return str(path)


def fixed_size(ids: np.ndarray, width: int = 4) -> pa.FixedSizeListArray:
    """A vector column whose values tell the id."""
    flat = (ids[:, None] + np.arange(width) / 8).astype(np.float32).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), width)


def scan_ids(path: str, filter: str | None = None, version: int | None = None) -> np.ndarray:
    """Ids of the live rows in table order."""
    return lance.dataset(path, version=version).to_table(columns=["id"], filter=filter)["id"].to_numpy()


def in_fork(function: Callable[[], Any], timeout_s: float = 20) -> Any:
    """What a function returns, or raises, in a fork of this process."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lance's and Python's own, of forks
        pid = os.fork()
    if pid == 0:
        try:
            answer = (True, function())
        except BaseException as error:
            answer = (False, error)
        os.write(theirs, pickle.dumps(answer))
        os._exit(0)
    os.close(theirs)
    try:
        assert select.select([ours], [], [], timeout_s)[0], "the forked process hangs"
        sent = os.read(ours, 1 << 16)
        assert sent, "the forked process has crashed"
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    is_result, answer = pickle.loads(sent)
    if not is_result:
        raise answer
    return answer


@dataclass(frozen=True)
class Oracle:
    """The ids of each global step of the unbroken run on one worker."""

    ids: np.ndarray
    num_splits: int
    cycles_per_step: int
    seed: int = 0
    shuffle: bool = True
    clump: int | None = None
    drop_remainder: bool = True
    skipped: dict[int, set[int]] = field(default_factory=dict)  # epoch -> steps

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Per step: ids in the order of one worker."""
        order = Order(len(self.ids), shuffle=self.shuffle, seed=self.seed, clump_size=self.clump)
        grid = SplitGrid(len(self.ids), self.num_splits, self.drop_remainder)
        plan = StreamPlan(order, grid)
        rows = plan.rows(epoch, SplitBlock(0, self.num_splits), 0, grid.num_cycles)
        size = self.cycles_per_step * self.num_splits
        return [self.ids[rows[i : i + size]] for i in range(0, len(rows), size)]

    def steps(self, epochs: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        """(epoch, step) -> sorted ids."""
        return {
            (e, t): sorted(ids.tolist())
            for e in epochs
            for t, ids in enumerate(self.epoch(e))
            if t not in self.skipped.get(e, ())
        }


def log_loop(config: dict[str, Any]) -> None:
    """A training loop that logs what it receives.

    Config: dir, tag, epochs, global_batch (G) or batch_size, and optionally: name, drop_last, prefetch_batches, torch,
    save_every (steps), stop_after (steps of this attempt), stop ("raise", "exit", "return"), stop_rank, sleep_s,
    explicit_state (load it before the first pass).
    """
    name = config.get("name", "train")
    shard = ray.train.get_dataset_shard(name)
    if "explicit_state" in config:
        shard.load_state_dict(config["explicit_state"])
    log_stream(shard, name, config)


def log_stream(shard: Any, name: str, config: dict[str, Any]) -> None:
    """Log one stream, as `log_loop`."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    path = Path(config["dir"]) / f"{config['tag']}-{time.time_ns()}-{rank}.jsonl"
    steps = 0
    with path.open("w") as log:
        state = shard.state_dict()
        start = [state["epoch"], state["samples_consumed_per_split"]]
        write(log, {"tag": config["tag"], "rank": rank, "world": world, "start": start})
        for epoch in range(shard.epoch, config["epochs"]):
            for ids in batches(shard, config):
                steps += 1
                state = shard.state_dict()
                line = {"epoch": epoch, "after": after(state, epoch), "rank": rank, "ids": ids}
                write(log, {**line, "version": state["table_version"]})
                if steps % config.get("save_every", 10**9) == 0:
                    save(shard, rank, config)
                if steps == config.get("stop_after") and rank in (config.get("stop_rank", rank), -1):
                    stop(config.get("stop", "return"))
                    return
                time.sleep(config.get("sleep_s", 0))
        if config.get("save_end"):
            save(shard, rank, config)
        write(log, {"end": shard.state_dict()})


def after(state: dict[str, Any], epoch: int) -> int | None:
    """Cycles done after a batch; None at the end of the epoch, whose state is the start of the next one."""
    return state["samples_consumed_per_split"] if state["epoch"] == epoch else None


def batches(shard: Any, config: dict[str, Any]) -> Iterator[list[int]]:
    """The ids of each batch; checks the other columns against them."""
    options = {"drop_last": config.get("drop_last", False)}
    if config.get("batch_size") != "default":
        size = shard.local_batch_size(config["global_batch"]) if "global_batch" in config else config["batch_size"]
        options["batch_size"] = size
    options["prefetch_batches"] = config.get("prefetch_batches", 2)
    found = shard.iter_torch_batches(**options) if config.get("torch") else shard.iter_batches(**options)
    for batch in found:
        ids = np.asarray(batch["id"])
        assert np.array_equal(np.asarray(batch["value"]), 3 * ids + 1)
        assert np.array_equal(np.asarray(batch["vec"])[:, 0], ids.astype(np.float32))
        yield ids.tolist()


def save(shard: Any, rank: int, config: dict[str, Any]) -> None:
    """Report; rank 0 brings the checkpoint."""
    report = ray.train.report if config.get("plain_report") else ray_lance_stream.report
    if rank:
        report({"rank": rank})
        return
    directory = Path(config["dir"]) / f"checkpoint-{time.time_ns()}"
    directory.mkdir()
    (directory / "model.txt").write_text(json.dumps(shard.state_dict()))
    report({"rank": rank}, checkpoint=ray.train.Checkpoint.from_directory(str(directory)))


def stop(how: str) -> None:
    """End this worker in the given way."""
    if how == "raise":
        raise RuntimeError("planned failure")
    if how == "exit":
        os._exit(1)


def write(log: Any, line: dict[str, Any]) -> None:
    """One line, on disk before the worker can die."""
    log.write(json.dumps(line) + "\n")
    log.flush()


@dataclass(frozen=True)
class AttemptLog:
    """What one worker group received: start (epoch, cycle) and per rank its lines."""

    tag: str
    world: int
    start: tuple[int, int]
    ranks: dict[int, list[dict[str, Any]]]

    def steps(self, cycles_per_step: int, until: tuple[int, int] | None = None) -> dict[tuple[int, int], list[int]]:
        """(epoch, step) -> sorted ids over all ranks, of the steps that end at or before `until`."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for lines in self.ranks.values():
            cycle = self.start[1]
            epoch = self.start[0]
            for line in lines:
                if "ids" not in line:
                    continue
                if line["epoch"] != epoch:
                    epoch, cycle = line["epoch"], 0
                end = (epoch, line["after"]) if line["after"] is not None else (epoch + 1, 0)
                if until is None or end <= until:
                    found[epoch, cycle // cycles_per_step] += line["ids"]
                cycle = end[1]
        return {key: sorted(ids) for key, ids in found.items()}


def read_logs(directory: Path | str, tag: str | None = None) -> list[AttemptLog]:
    """The attempts logged in a directory, oldest first; ranks whose files begin within the same attempt belong together."""
    files = sorted(Path(directory).glob(f"{tag or '*'}-*-*.jsonl"), key=lambda p: int(p.stem.split("-")[-2]))
    attempts: list[AttemptLog] = []
    for path in files:
        lines = [json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")]
        if not lines:
            continue
        head = lines[0]
        last = attempts[-1] if attempts else None
        if last is None or last.tag != head["tag"] or head["rank"] in last.ranks or last.world != head["world"]:
            attempts.append(AttemptLog(head["tag"], head["world"], tuple(head["start"]), {}))
        attempts[-1].ranks[head["rank"]] = lines[1:]
    return attempts


def effective_history(attempts: Sequence[AttemptLog], cycles_per_step: int) -> dict[tuple[int, int], list[int]]:
    """Each attempt cut where the next one resumed; raises if two attempts deliver the same step."""
    history: dict[tuple[int, int], list[int]] = {}
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        steps = attempt.steps(cycles_per_step, following.start if following else None)
        assert not set(steps) & set(history), "a step was delivered by two attempts"
        history.update(steps)
    return history


def live_actors(class_name: str) -> int:
    """Actors of a class that are not dead."""
    return len(live_actor_ids(class_name))


def live_actor_ids(class_name: str) -> set[str]:
    """The ids of these."""
    from ray._private.state import actors

    return {actor_id for actor_id, a in actors().items() if a["ActorClassName"] == class_name and a["State"] != "DEAD"}


def no_readers_left(timeout_s: float = 60.0) -> None:
    """Wait until the last reader has ended, some 20 s after its worker; an error if it does not."""
    until_s = time.monotonic() + timeout_s
    while live_actors("SplitReader"):
        assert time.monotonic() < until_s, f"{live_actors('SplitReader')} readers are left"
        time.sleep(0.2)
