"""Real Ray Train runs: the rows of every global step for several worker counts (guarantees 1 and 3; B11, B19, B20)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
import ray.train
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lance_stream import lance_stream
from tests.support import (
    AttemptLog,
    Oracle,
    log_stream,
    make_table,
    no_readers_left,
    read_logs,
    scan_ids,
)

pytestmark = pytest.mark.timeout(580)

NUM_SPLITS = 12
GLOBAL_BATCH = 24
FILTER = "id % 5 != 2"
EPOCHS = 2


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """540 rows in uneven fragments, with deletions at fragment edges and of a whole fragment."""
    path = make_table(tmp_path_factory.mktemp("elastic") / "t", 540)
    dataset = lance.dataset(path)
    dataset.delete("id in (0, 29, 30, 39, 100, 101, 102, 539) or (id >= 41 and id < 48)")
    assert dataset.count_rows() == 525
    return path


def streams(table: str) -> dict[str, Any]:
    """Every kind of stream, in one run."""
    common = {"num_splits": NUM_SPLITS, "shuffle_seed": 3}
    return {
        "plain": lance_stream(table, **common),
        "filtered": lance_stream(table, filter=FILTER, global_batch_size=GLOBAL_BATCH, **common),
        "clumped": lance_stream(table, shuffle_clump_size=7, readers_per_worker=2, read_batch_size=3, **common),
        "ordered": lance_stream(table, shuffle=False, prefetch_chunks=1, **common),
        "val": lance_stream(table, drop_remainder=False, evaluation=True, **common),
        "whole": lance_stream(table, evaluation=True, drop_remainder=False, num_splits=NUM_SPLITS, shuffle=False),
    }


def oracles(table: str) -> dict[str, Oracle]:
    ids, m = scan_ids(table), GLOBAL_BATCH // NUM_SPLITS
    return {
        "plain": Oracle(ids, NUM_SPLITS, m, seed=3),
        "filtered": Oracle(scan_ids(table, FILTER), NUM_SPLITS, m, seed=3),
        "clumped": Oracle(ids, NUM_SPLITS, m, seed=3, clump=7),
        "ordered": Oracle(ids, NUM_SPLITS, m, shuffle=False),
        "val": Oracle(ids, NUM_SPLITS, m, seed=3, drop_remainder=False),
    }


def all_streams_loop(config: dict[str, Any]) -> None:
    """Iterates every stream for two epochs; W and prefetch vary between runs."""
    for name in config["names"]:
        shard = ray.train.get_dataset_shard(name)
        log_stream(shard, name, {**config, "tag": f"{name}_w{config['world']}"})
    whole = ray.train.get_dataset_shard("whole")
    ids = [row["id"] for row in whole.iter_rows()]
    rank = ray.train.get_context().get_world_rank()
    (Path(config["dir"]) / f"whole_w{config['world']}-{rank}.txt").write_text(" ".join(map(str, ids)))


@pytest.fixture(scope="module")
def logs(cluster, table, tmp_path_factory) -> dict[int, Path]:
    """One run per worker count; the directory of its logs."""
    found = {}
    kept = []
    for world, prefetch in ((1, 0), (2, 1), (4, 4)):
        directory = tmp_path_factory.mktemp(f"w{world}")
        made = streams(table)
        names = [name for name in made if name != "whole"]
        trainer = DataParallelTrainer(
            all_streams_loop,
            train_loop_config={
                "dir": str(directory),
                "world": world,
                "names": names,
                "epochs": EPOCHS,
                "global_batch": GLOBAL_BATCH,
                "prefetch_batches": prefetch,
            },
            datasets=made,
            dataset_config=DataConfig(datasets_to_split=names),
            scaling_config=ScalingConfig(num_workers=world),
            run_config=RunConfig(name=f"w{world}", storage_path=str(directory)),
        )
        trainer.fit()
        progress = made["plain"].progress()
        assert sorted(progress) == list(range(world))
        assert all(told["epoch"] == EPOCHS and told["rows_per_s"] > 0 for told in progress.values())
        rows = sum(told["rows"] for told in progress.values())
        assert rows == EPOCHS * made["plain"].num_rows > 0
        assert made["plain"].stats().startswith(f"Ranks: {world}\n* Rows received: {rows} (")
        assert made["plain"].state_dict()["epoch"] == EPOCHS
        kept += made.values()
        found[world] = directory
    no_readers_left()  # though nobody has closed the streams
    for stream in kept:
        stream.close()
    return found


def attempt(logs: dict[int, Path], name: str, world: int) -> AttemptLog:
    (only,) = read_logs(logs[world], f"{name}_w{world}")
    assert sorted(only.ranks) == list(range(world))
    return only


@pytest.mark.parametrize("name", ["plain", "filtered", "clumped", "ordered", "val"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_rows_of_each_global_step_are_those_of_one_worker(logs, table, name, world):
    oracle = oracles(table)[name].steps(range(EPOCHS))
    assert attempt(logs, name, world).steps(GLOBAL_BATCH // NUM_SPLITS) == oracle


@pytest.mark.parametrize("name", ["plain", "filtered", "clumped", "ordered"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_take_even_steps_and_their_own_columns_of_the_cycle(logs, table, name, world):
    """B19 and the order within a rank: rank r has the columns of its split block of each cycle, in cycle order."""
    oracle, k = oracles(table)[name], NUM_SPLITS // world
    log = attempt(logs, name, world)
    for epoch in range(EPOCHS):
        cycles = np.concatenate(oracle.epoch(epoch)).reshape(-1, NUM_SPLITS)
        sizes = set()
        for rank, lines in log.ranks.items():
            mine = [line["ids"] for line in lines if line.get("epoch") == epoch]
            sizes.add(tuple(map(len, mine)))
            assert np.array_equal(np.concatenate(mine), cycles[:, rank * k : (rank + 1) * k].reshape(-1))
        (steps,) = sizes
        assert set(steps[:-1]) == {2 * k}


def test_epochs_differ_and_each_has_every_row_once(logs, table):
    first, second = (attempt(logs, "val", 4).steps(2, None), attempt(logs, "clumped", 4).steps(2, None))
    ids = sorted(scan_ids(table).tolist())
    assert sorted(i for (e, _), step in first.items() if e == 0 for i in step) == ids
    assert [first[0, t] for t in range(20)] != [first[1, t] for t in range(20)]
    left_out = [
        set(ids) - {i for (e, _), step in second.items() if e == epoch for i in step} for epoch in range(EPOCHS)
    ]
    assert all(len(rows) == 525 % NUM_SPLITS for rows in left_out)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_stream_outside_datasets_to_split_is_seen_whole_by_each_worker(logs, table, world):
    for rank in range(world):
        ids = (logs[world] / f"whole_w{world}-{rank}.txt").read_text().split()
        assert sorted(map(int, ids)) == sorted(scan_ids(table).tolist())
