"""Where a shard is, where the next pass begins, and what a saved position leads to (guarantee 2).

B01, B04, B06, B12, B38, B51. State is what the loop has received, whatever was read ahead.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
import torch

from ray_lance_stream import IterationError, StateError, StreamShard, VersionNotFoundError, lance_stream
from tests.integration.conftest import Shards, flat, ids_of
from tests.support import Oracle, fixed_size, make_table, scan_ids

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """120 rows: 15 steps of 8 with 8 splits."""
    return make_table(tmp_path_factory.mktemp("position") / "t", 120)


@pytest.fixture(scope="module")
def oracle(table) -> Oracle:
    return Oracle(scan_ids(table), 8, 1, seed=3)


OPTIONS: dict[str, Any] = {"num_splits": 8, "shuffle_seed": 3}


def epoch_ids(oracle: Oracle, epoch: int) -> list[int]:
    return np.concatenate(oracle.epoch(epoch)).tolist()


def take(shard: StreamShard, count: int, **options: Any) -> list[int]:
    """The ids of the first batches of the next pass; then the loop breaks."""
    if count == 0:
        return []
    ids: list[int] = []
    for number, batch in enumerate(shard.iter_batches(**{"batch_size": 8, **options}), start=1):
        ids += ids_of(batch)
        if number == count:
            break
    return ids


def at(state: dict[str, Any]) -> tuple[int, int, Any]:
    return state["epoch"], state["samples_consumed_per_split"], state["partial"]


# ---- what counts as received


@pytest.mark.parametrize("k", [0, 1, 5, 14])
def test_before_and_after_a_save_are_the_unbroken_epoch(shards: Shards, table, oracle, k):
    """B01: at every depth of reading ahead the same state, of what the loop received."""
    states = []
    for prefetch in (0, 2, 16):
        shard = shards(table, **OPTIONS)
        before: list[int] = []
        for number, batch in enumerate(shard.iter_batches(batch_size=8, prefetch_batches=prefetch)):
            if number == k:
                break  # this batch was handed out, but the state below is older
            before += ids_of(batch)
            time.sleep(0.05 if number < 5 else 0.01)  # lets the queues fill
            states_now = shard.state_dict()
            assert at(states_now) == (0, number + 1, None)
        state = shard.state_dict() if k == 0 else states_now
        if k == 0:
            assert at(state) == (0, 1, None)
            state = shards(table, **OPTIONS).state_dict()
            assert at(state) == (0, 0, None)
        states.append(json.dumps(state))
        rest = shards(table, state=json.loads(states[-1]), **OPTIONS)
        after = flat(rest.iter_batches(batch_size=8, prefetch_batches=prefetch))
        assert before + after == epoch_ids(oracle, 0), prefetch
    assert len(set(states)) == 1
    assert len(states[0]) < 2048


@pytest.mark.parametrize("stop", [1, 7, 8, 9, 100, 119])
def test_rows_count_one_by_one(shards: Shards, table, oracle, stop):
    """iter_rows: a state inside a cycle resumes at the very next row, through rows or batches."""
    shard = shards(table, **OPTIONS)
    before = []
    for row in shard.iter_rows():
        before.append(row["id"])
        if len(before) == stop:
            break
    state = shard.state_dict()
    assert at(state) == (0, stop // 8, {"rows": stop % 8, "world_size": 1} if stop % 8 else None)
    by_row = flat(shards(table, state=state, **OPTIONS).iter_rows())
    by_batch = flat(shards(table, state=state, **OPTIONS).iter_batches(batch_size=8))
    assert before + by_row == before + by_batch == epoch_ids(oracle, 0)


def test_materialize_counts_like_any_pass(shards: Shards, table, oracle):
    shard = shards(table, **OPTIONS)
    taken = take(shard, 4)
    rest = shards(table, state=shard.state_dict(), **OPTIONS)
    assert taken + flat(rest.materialize().iter_rows()) == epoch_ids(oracle, 0)
    assert at(rest.state_dict()) == (1, 0, None)


def test_other_threads_may_ask_for_the_state(shards: Shards, table):
    """B16: no wait, and never a position that is none."""
    from concurrent.futures import ThreadPoolExecutor

    shard = shards(table, **OPTIONS)
    shard.state_dict()
    running = True

    def watch() -> tuple[list[tuple[int, int]], list[float]]:
        seen, took_s = [(0, 0)], []
        while running:
            asked_s = time.perf_counter()
            state = shard.state_dict()
            took_s.append(time.perf_counter() - asked_s)
            seen.append((state["epoch"], state["samples_consumed_per_split"]))
        return seen, took_s

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for _ in range(6):
            flat(shard.iter_batches(batch_size=8))
        running = False
        seen, took_s = watching.result(20)
    assert seen == sorted(seen)
    assert (0, 0) < seen[-1] <= (6, 0)
    assert np.median(took_s) < 0.01


# ---- passes and epochs


def test_each_iter_is_the_next_epoch(shards: Shards, table, oracle):
    """Of one iterable, as libraries use it, and of several; each epoch in an order of its own."""
    shard = shards(table, **OPTIONS)
    iterable = shard.iter_batches(batch_size=8)
    for epoch in range(2):
        assert shard.epoch == epoch
        for batch in iterable:
            assert shard.epoch == epoch or not ids_of(batch)
            break
        assert at(shard.state_dict()) == (epoch, 1, None)
        assert shard.epoch == epoch + 1
    assert flat(iterable) == epoch_ids(oracle, 2)
    assert flat(shard.iter_rows()) == epoch_ids(oracle, 3)
    assert epoch_ids(oracle, 2) != epoch_ids(oracle, 3)


def test_epoch_before_during_and_after_a_pass(shards: Shards, table):
    shard = shards(table, epoch=4, **OPTIONS)
    seen = [shard.epoch]
    for batch in shard.iter_batches(batch_size=40):
        seen.append(shard.epoch)
        assert len(ids_of(batch)) == 40
    assert seen == [4, 4, 4, 5]  # with the last batch the epoch is done
    assert shard.epoch == 5


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_new_pass_ends_the_older_one(shards: Shards, table, oracle, prefetch):
    """The older iterator raises on its next item, although it has batches at hand."""
    shard = shards(table, **OPTIONS)
    older = iter(shard.iter_batches(batch_size=8, prefetch_batches=prefetch))
    assert ids_of(next(older)) == epoch_ids(oracle, 0)[:8]
    time.sleep(0.2)
    newer = iter(shard.iter_batches(batch_size=8, prefetch_batches=prefetch))
    assert ids_of(next(newer)) == epoch_ids(oracle, 1)[:8]
    with pytest.raises(IterationError, match="begun another pass"):
        next(older)
    assert flat(newer) == epoch_ids(oracle, 1)[8:]
    assert at(shard.state_dict()) == (2, 0, None)


def test_a_new_pass_ends_an_older_one_of_rows_and_of_blocks(shards: Shards, table, oracle):
    shard = shards(table, **OPTIONS)
    rows, (blocks, _, _) = iter(shard.iter_rows()), shard._to_ref_bundle_iterator()
    next(rows)
    next(blocks)
    with pytest.raises(IterationError, match="begun another pass"):
        next(rows)
    assert flat(shard.iter_batches(batch_size=8)) == epoch_ids(oracle, 2)
    with pytest.raises(IterationError, match="begun another pass"):
        list(blocks)


def test_a_pass_that_has_given_its_last_batch_ends_in_peace(shards: Shards, table, oracle):
    """The last batch's loop body may start the next pass."""
    shard = shards(table, **OPTIONS)
    for batch in shard.iter_batches(batch_size=120):
        assert ids_of(batch) == epoch_ids(oracle, 0)
        assert take(shard, 1) == epoch_ids(oracle, 1)[:8]
    assert at(shard.state_dict()) == (1, 1, None)


def test_close_ends_a_pass(shards: Shards, table, oracle):
    shard = shards(table, **OPTIONS)
    batches = iter(shard.iter_batches(batch_size=8))
    next(batches)
    pool, shard._supply.readers = (
        shard._supply.readers,
        type(shard._supply.readers)(1, lambda: None),
    )  # the other tests' readers stay
    shard.close()
    shard._supply.readers = pool
    with pytest.raises(IterationError, match="was closed"):
        next(batches)
    assert at(shard.state_dict()) == (0, 1, None)
    assert flat(shard.iter_batches(batch_size=8)) == epoch_ids(oracle, 1)


def test_load_comes_before_iteration(shards: Shards, table, oracle):
    shard = shards(table, **OPTIONS)
    state = shard.state_dict()
    batches = iter(shard.iter_batches(batch_size=8))
    next(batches)
    with pytest.raises(IterationError, match="an iterator of this shard is live"):
        shard.load_state_dict(state)
    batches.close()
    shard.load_state_dict(state)
    assert flat(shard.iter_batches(batch_size=8)) == epoch_ids(oracle, 0)
    shard.load_state_dict(state)  # a pass that is over is not live
    assert take(shard, 1) == epoch_ids(oracle, 0)[:8]
    evaluation = shards(table, evaluation=True, **OPTIONS)
    with pytest.raises(StateError, match="never resumed"):
        evaluation.load_state_dict(state)


def test_set_epoch(shards: Shards, table, oracle):
    """Keeps a resumed position of that epoch; else starts the epoch anew; ends a live pass."""
    shard = shards(table, **OPTIONS)
    taken = take(shard, 5)
    state = shard.state_dict()
    resumed = shards(table, state=state, **OPTIONS)
    for epoch in range(resumed.epoch, 2):
        resumed.set_epoch(epoch)
        rows = flat(resumed.iter_batches(batch_size=8))
        assert (taken if epoch == 0 else []) + rows == epoch_ids(oracle, epoch)
    shard.set_epoch(0)  # after a break: from its beginning
    batches = iter(shard.iter_batches(batch_size=8))
    assert ids_of(next(batches)) == epoch_ids(oracle, 0)[:8]
    shard.set_epoch(7)
    with pytest.raises(IterationError, match="has ended"):
        next(batches)
    assert (shard.epoch, flat(shard.iter_batches(batch_size=8))) == (7, epoch_ids(oracle, 7))
    for wrong in (-1, True, "1", 1.0):
        with pytest.raises(ValueError, match="epoch must be an int"):
            shard.set_epoch(wrong)


# ---- saved at the edges


@pytest.mark.parametrize(
    "batch", [{"batch_size": 8}, {"batch_size": 32}, {"batch_size": 32, "drop_last": True}], ids=str
)
@pytest.mark.parametrize("saved", ["in the last batch", "after the loop", "before it"])
def test_saved_at_the_edge_of_an_epoch(shards: Shards, table, oracle, saved, batch):
    """B04: a finished epoch is the start of the next one, with a short or a dropped last batch too."""
    shard = shards(table, **OPTIONS)
    state = shard.state_dict()
    if saved != "before it":
        left = shard.num_batches(**batch)
        for _ in shard.iter_batches(**batch):
            left -= 1
            if not left:
                state = shard.state_dict()
        assert left == 0
    if saved == "after the loop":
        assert state == shard.state_dict()
    first = 0 if saved == "before it" else 1
    assert at(state) == (first, 0, None)
    resumed = shards(table, state=state, **OPTIONS)
    rows = 96 if "drop_last" in batch else 120
    for epoch in range(resumed.epoch, 3):
        assert flat(resumed.iter_batches(**batch)) == epoch_ids(oracle, epoch)[:rows]
    assert (first, resumed.epoch) == (first, 3)


CHILD = """
import json, random, sys
import numpy, ray, torch
for seed in (random.seed, numpy.random.seed, torch.manual_seed):
    seed(int(sys.argv[3]))
ray.init(address=sys.argv[1], log_to_driver=False)
from ray_lance_stream import lance_stream
job = json.loads(sys.argv[2])
shard = lance_stream(job["table"], **job["options"]).shard()
shard.load_state_dict(job["state"])
print(json.dumps([b["id"].tolist() for b in shard.iter_batches(batch_size=8)]))
"""


def test_resume_in_a_later_epoch_in_any_object_or_process(shards: Shards, table, oracle):
    """B06: state and arguments alone decide the order; global random generators are neither read nor moved."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    shard = shards(table, **OPTIONS)
    shard.set_epoch(2)
    before = take(shard, 3)
    state = shard.state_dict()
    shard.load_state_dict(state)
    assert before + flat(shard.iter_batches(batch_size=8)) == epoch_ids(oracle, 2)
    fresh = shards(table, state=state, **OPTIONS)
    assert before + flat(fresh.iter_torch_batches(batch_size=8)) == epoch_ids(oracle, 2)
    drawn = (random.random(), np.random.random(), torch.rand(1).item())
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    assert drawn == (random.random(), np.random.random(), torch.rand(1).item())

    job = json.dumps({"table": table, "options": OPTIONS, "state": state})
    address = ray.get_runtime_context().gcs_address
    child = subprocess.run(
        [sys.executable, "-c", CHILD, address, job, "99"],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    after = json.loads(child.stdout.splitlines()[-1])
    assert before + [i for ids in after for i in ids] == epoch_ids(oracle, 2)


@pytest.mark.parametrize("batch_size", [8, 16, 24, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_num_batches_is_what_comes(shards: Shards, table, batch_size, drop_last):
    """B51: before a pass, and for the rest of an epoch after a resume in it."""
    shard = shards(table, **OPTIONS)
    told = shard.num_batches(batch_size, drop_last)
    assert told == len(list(shard.iter_batches(batch_size=batch_size, drop_last=drop_last)))
    assert shard.num_rows == 120
    taken = take(shard, 3, batch_size=batch_size)
    resumed = shards(table, state=shard.state_dict(), **OPTIONS)
    told = resumed.num_batches(batch_size, drop_last)
    rows = [len(ids_of(b)) for b in resumed.iter_batches(batch_size=batch_size, drop_last=drop_last)]
    assert told == len(rows)
    assert resumed.num_rows == 120
    assert drop_last or sum(rows) + len(taken) == 120


# ---- inside a cycle


def test_saved_inside_a_cycle(shards: Shards, table, oracle, caplog):
    """B12: exact on the same number of workers; on another one less than a cycle comes again, and the log says so."""
    stream = shards.stream(table, **OPTIONS)
    group = shards.group(stream, 2)
    before = [take(shard, 3, batch_size=7) for shard in group]
    states = [shard.state_dict() for shard in group]
    assert states[0] == states[1]
    assert at(states[0]) == (0, 5, {"rows": 1, "world_size": 2})  # 21 rows of 4 splits each

    same = [flat(shard.iter_batches(batch_size=7)) for shard in shards.group(stream, 2, states[0])]
    cycles = np.array(epoch_ids(oracle, 0)).reshape(15, 8)
    for rank in range(2):
        assert before[rank] + same[rank] == cycles[:, 4 * rank : 4 * rank + 4].reshape(-1).tolist()

    with caplog.at_level(logging.WARNING):
        other = shards.of(stream, state=states[1])
    assert "saved inside a cycle on 2 workers and is loaded on 1: 2 rows are delivered again" in caplog.text
    rows = flat(other.iter_batches(batch_size=8))
    assert rows == cycles[5:].reshape(-1).tolist()
    assert len({*before[0], *before[1]} & set(rows)) == 2


# ---- a table that moves on


@pytest.mark.parametrize("stable", [False, True])
def test_a_table_that_moves_on(shards: Shards, tmp_path, stable):
    """B38: the pinned version is read to the end, and by every later run from the state; when it is gone, that is told."""
    path = make_table(tmp_path / "t", 120, enable_stable_row_ids=stable)
    oracle = Oracle(scan_ids(path), 8, 1)
    stream = shards.stream(path, num_splits=8, read_batch_size=1)
    shard = shards.of(stream)
    got: list[int] = []
    for number, batch in enumerate(shard.iter_batches(batch_size=8), start=1):
        assert np.array_equal(batch["value"], 3 * batch["id"] + 1)
        got += ids_of(batch)
        if number == 3:
            state = shard.state_dict()
            move(path)
    assert got == epoch_ids(oracle, 0)

    late = shards.stream(path, num_splits=8)
    assert late._plan.table.version > state["table_version"]
    for resumed in (shards.of(stream, state=state), shards.of(late, state=state)):
        batches = list(resumed.iter_batches(batch_size=8))
        assert got[:24] + flat(batches) == epoch_ids(oracle, 0)
        assert all(np.array_equal(batch["value"], 3 * batch["id"] + 1) for batch in batches)
        assert resumed.state_dict()["table_version"] == state["table_version"]

    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0))
    gone = rf"version {state['table_version']}\b"
    with pytest.raises(VersionNotFoundError, match=gone) as told:
        flat(shards.of(late, state=state).iter_batches(batch_size=8))  # planned before the clean-up
    assert path in str(told.value)
    afresh = lance_stream(path, num_splits=8)
    with pytest.raises(VersionNotFoundError, match=gone) as told:
        afresh.shard().load_state_dict(state)
    assert path in str(told.value)
    afresh.close()


def move(path: str) -> None:
    """Append, delete, update and compact."""
    ids = np.arange(1000, 1100)
    more = pa.table({"id": ids, "value": -ids, "vec": fixed_size(ids)})
    lance.write_dataset(more, path, mode="append")
    dataset = lance.dataset(path)
    dataset.delete("id < 50")
    dataset.update({"value": "-1"}, where="id >= 50 and id < 100")
    dataset.optimize.compact_files()
