"""TorchTrainer with a gloo process group: even steps under real collectives, DDP weights, a new process (B02, B19)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import pytest
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from ray_lance_stream import lance_stream
from tests.support import Oracle, effective_history, log_loop, make_table, read_logs, scan_ids

pytestmark = pytest.mark.timeout(580)

NUM_SPLITS = 12
GLOBAL_BATCH = 24
M = GLOBAL_BATCH // NUM_SPLITS
FILTER = "id % 4 != 1"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    path = make_table(tmp_path_factory.mktemp("torch") / "t", 441)
    lance.dataset(path).delete("id in (0, 29, 40) or (id >= 100 and id < 120)")
    return path


def collective_loop(config: dict[str, Any]) -> None:
    """all_reduce in every step of every stream: uneven ranks would hang here."""
    for name in config["names"]:
        shard = ray.train.get_dataset_shard(name)
        steps = rows = 0
        for drop_last in (False, True):
            for batch in shard.iter_torch_batches(batch_size=config["batch_size"], drop_last=drop_last):
                total = torch.tensor([1.0, len(batch["id"])])
                dist.all_reduce(total)
                assert total[0] == dist.get_world_size()
                assert total[1] == dist.get_world_size() * len(batch["id"])
                steps, rows = steps + 1, rows + int(total[1])
        if ray.train.get_context().get_world_rank() == 0:
            Path(config["dir"], f"{name}.json").write_text(json.dumps([steps, rows]))


def test_all_reduce_in_every_step_never_hangs(cluster, table, tmp_path):
    """B19: uneven fragments, deletions, filter, a batch size that is no multiple of the block, drop_last both ways."""
    made = {
        "plain": lance_stream(table, num_splits=NUM_SPLITS),
        "filtered": lance_stream(table, num_splits=NUM_SPLITS, filter=FILTER),
    }
    TorchTrainer(
        collective_loop,
        train_loop_config={"dir": str(tmp_path), "names": list(made), "batch_size": 8},
        datasets=made,
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(name="even", storage_path=str(tmp_path / "runs")),
    ).fit()
    for name, filter in (("plain", None), ("filtered", FILTER)):
        mine = len(scan_ids(table, filter)) // NUM_SPLITS * NUM_SPLITS // 3
        steps, rows = json.loads((tmp_path / f"{name}.json").read_text())
        assert steps == -(-mine // 8) + mine // 8
        assert rows == 3 * (mine + mine // 8 * 8)


def torch_run(table: str, directory: str, world: int, tag: str, **config: Any) -> None:
    TorchTrainer(
        log_loop,
        train_loop_config={
            "dir": directory,
            "tag": tag,
            "global_batch": GLOBAL_BATCH,
            "epochs": 1,
            "torch": True,
            **config,
        },
        datasets={"train": lance_stream(table, num_splits=NUM_SPLITS)},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(name="run", storage_path=f"{directory}/runs"),
    ).fit()


def test_a_new_process_resumes_a_torch_trainer(cluster, table, tmp_path):
    """B02: two TorchTrainer runs, the second one in a new `python` process, on another number of workers."""
    torch_run(table, str(tmp_path), 2, "a", save_every=4, stop_after=5)
    script = (
        "import ray, sys; from tests.integration.test_torch_trainer import torch_run;"
        "ray.init(address=sys.argv[1], log_to_driver=False); torch_run(sys.argv[2], sys.argv[3], 3, 'b')"
    )
    command = [sys.executable, "-c", script, ray.get_runtime_context().gcs_address, table, str(tmp_path)]
    subprocess.run(command, check=True, timeout=200, env=dict(os.environ))
    attempts = read_logs(tmp_path)
    assert [(a.world, a.start) for a in attempts] == [(2, (0, 0)), (3, (0, 8))]
    assert effective_history(attempts, M) == Oracle(scan_ids(table), NUM_SPLITS, M).steps([0])


def train_steps(shard: Any, dtype: torch.dtype) -> list[list[float]]:
    """Twenty steps of SGD on a linear model; blocks of uneven size are weighted with `loss_weight`."""
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    steps = 0
    while steps < 20:
        for batch in shard.iter_torch_batches():
            target = batch["value"].to(dtype)[:, None]
            loss = torch.nn.functional.mse_loss(model(batch["vec"].to(dtype)), target)
            optimizer.zero_grad()
            (loss * shard.loss_weight).backward()
            optimizer.step()
            steps += 1
            if steps == 20:
                break
    return [p.detach().double().flatten().tolist() for p in model.parameters()]


def ddp_loop(config: dict[str, Any]) -> None:
    """The weights in float64 and float32, and the sum of the ranks' digests."""
    found: dict[str, Any] = {}
    for name in ("float64", "float32"):
        shard = ray.train.get_dataset_shard(name)
        found[name] = train_steps(shard, getattr(torch, name))
        digest = torch.tensor([shard.digest() >> 32, shard.digest() & 0xFFFFFFFF])
        dist.all_reduce(digest)
        found[f"digest of {name}"] = (int(digest[0]) * 2**32 + int(digest[1])) % 2**64
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["dir"], f"{dist.get_world_size()}.json").write_text(json.dumps(found))


@pytest.mark.timeout(590)
def test_ddp_weights_agree_for_every_worker_count(cluster, table, tmp_path):
    """The same data and global batch give the same model on 1, 3 and 5 workers; 5 do not divide 12 splits."""
    found = {}
    for world in (1, 3, 5):
        made = {
            name: lance_stream(table, num_splits=NUM_SPLITS, global_batch_size=GLOBAL_BATCH)
            for name in ("float64", "float32")
        }
        TorchTrainer(
            ddp_loop,
            train_loop_config={"dir": str(tmp_path)},
            datasets=made,
            scaling_config=ScalingConfig(num_workers=world),
            run_config=RunConfig(name=str(world), storage_path=str(tmp_path / "runs")),
        ).fit()
        found[world] = json.loads((tmp_path / f"{world}.json").read_text())
    steps = {world: result.pop("digest of float64") for world, result in found.items()}
    assert set(steps.values()) == {result.pop("digest of float32") for result in found.values()}
    assert steps[1] == sum(made["float64"].step_digest(1, step) for step in range(3)) % 2**64
    for world, result in found.items():
        for name, tolerance in (("float64", 1e-10), ("float32", 1e-4)):
            for ours, one in zip(result[name], found[1][name], strict=True):
                assert ours == pytest.approx(one, rel=tolerance, abs=tolerance), (world, name)
