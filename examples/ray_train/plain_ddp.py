"""DistributedDataParallel in plain Ray actors, without Ray Train: stops in an epoch, and goes on with others.

    python examples/ray_train/plain_ddp.py --workers 2 --then 3
    python examples/ray_train/plain_ddp.py --loader-workers 2    # batches made by processes of a DataLoader

Some workers train until step 7 and save model and position into a folder; others go on from there. Every global step is
compared with the plan.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import lance
import numpy as np
import pyarrow as pa
import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_lance_stream import LanceStream, StreamDataLoader, lance_stream

ROWS, FEATURES, EPOCHS, STOP_AT_STEP = 2400, 8, 2, 7
SPLITS, GLOBAL_BATCH = 12, 240

Ids = dict[int, list[int]]  # the rows of each step


class Worker:
    """One rank, as an actor."""

    def address(self) -> str:
        """Where this rank can be met by the others."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def train(
        self, address: str, rank: int, world_size: int, stream: LanceStream, folder: str, until: int, workers: int
    ) -> Ids:
        """Train until a step, and save there; returns the ids of the rows that this rank received."""
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        shard = stream.shard(rank, world_size)
        loader = StreamDataLoader(shard.to_torch_dataset(), num_workers=workers, persistent_workers=workers > 0)
        torch.manual_seed(0)
        net, step = nn.Linear(FEATURES, 1), 0
        if Path(folder, "model.pt").exists():
            saved = torch.load(f"{folder}/model.pt")
            net.load_state_dict(saved["net"])
            step = saved["step"]
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids: Ids = {}
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
                optimizer.zero_grad()
                (loss * shard.loss_weight).backward()  # 1.0 where the ranks divide num_splits
                optimizer.step()
                ids[step] = batch["id"].tolist()
                step += 1
                if step == until:
                    if rank == 0:
                        torch.save({"net": net.state_dict(), "step": step}, f"{folder}/model.pt")
                        shard.save_state(folder)  # the same on every rank
                    return ids
        return ids


def run(stream: LanceStream, world_size: int, folder: Path, until: int, loader_workers: int) -> Ids:
    """Train on some workers; returns the sorted ids of the rows of each global step."""
    actor: Any = ray.remote(Worker)
    workers = [actor.remote() for _ in range(world_size)]
    address = ray.get(workers[0].address.remote())
    ranks = [
        worker.train.remote(address, rank, world_size, stream, str(folder), until, loader_workers)
        for rank, worker in enumerate(workers)
    ]
    steps: Ids = {}
    for ids in ray.get(ranks):
        for step, rows in ids.items():
            steps[step] = sorted(steps.get(step, []) + rows)
    return steps


def make_table(path: Path) -> str:
    """Made-up rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype("float32")
    columns = {
        "id": pa.array(range(ROWS), pa.int64()),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), FEATURES),
        "y": pa.array(x.sum(axis=1)),
    }
    lance.write_dataset(pa.table(columns), str(path))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains, stops and goes on with another number of workers.")
    parser.add_argument("--workers", type=int, default=2, help="ranks until the stop")
    parser.add_argument("--then", type=int, default=3, help="ranks that go on")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes of each rank's DataLoader")
    args = parser.parse_args()

    ray.init(address="local", num_cpus=max(args.workers, args.then), include_dashboard=False)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        table = make_table(folder / "rows.lance")
        first = lance_stream(table, num_splits=SPLITS, global_batch_size=GLOBAL_BATCH)
        steps_per_epoch = ROWS // GLOBAL_BATCH
        plan = {
            epoch * steps_per_epoch + step: sorted(first.row_ids(epoch, step, column="id"))
            for epoch in range(EPOCHS)
            for step in range(steps_per_epoch)
        }
        before = run(first, args.workers, folder, STOP_AT_STEP, args.loader_workers)
        print(f"{args.workers} workers: steps {min(before)} to {max(before)}")
        going_on = lance_stream(table, num_splits=SPLITS, global_batch_size=GLOBAL_BATCH, resume_from=folder)
        after = run(going_on, args.then, folder, len(plan), args.loader_workers)
        print(f"{args.then} workers: steps {min(after)} to {max(after)}")
    same = not before.keys() & after.keys() and before | after == plan
    print(f"{len(plan)} global steps: {'identical with' if same else 'DIFFERENT from'} the plan")
    ray.shutdown()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
