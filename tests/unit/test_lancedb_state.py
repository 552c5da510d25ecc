"""States go over from LanceDB's StreamingDataset and back, and what would not continue exactly is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from lancedb.streaming import StreamingDataset

from ray_lance_stream import (
    ConfigError,
    StateError,
    StateMismatchError,
    lance_stream,
    merge_state_dicts,
    to_lancedb_state,
)
from ray_lance_stream.lancedb_state import from_lancedb_state, is_lancedb_state
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.list_cache import FOLDER_VARIABLE
from ray_lance_stream.state import PartialCycle, StreamIdentity, StreamState
from tests.fake_ray import without_coordinator
from tests.lancedb_support import ids_from, make_lancedb_table, planned_ids, streaming

S, SEED = 4, 5
IDENTITY = StreamIdentity("/data/t.lance", 3, 81, None, "lancedb", True, SEED, None, S, True, 1)
STATE = {
    "shuffle_seed": SEED,
    "num_splits": S,
    "epoch": 2,
    "samples_consumed_per_split": [7] * S,
    "positions_consumed_per_split": [7] * S,
}


def without(name: str) -> dict:
    return {key: value for key, value in STATE.items() if key != name}


OLDER = without("positions_consumed_per_split")


@pytest.mark.parametrize("state", [STATE, OLDER, {**OLDER, "samples_consumed_per_split": 7}])
def test_a_merged_state_is_one_number(state):
    assert is_lancedb_state(state)
    assert from_lancedb_state(state, IDENTITY, 8) == StreamState(IDENTITY, 2, 7, 8)
    assert from_lancedb_state(json.loads(json.dumps(state)), IDENTITY, None).samples_consumed_per_split == 7


def test_states_go_there_and_back():
    state = StreamState(IDENTITY, 2, 7, 8)
    exported = to_lancedb_state(state.to_dict())
    assert exported == STATE
    assert from_lancedb_state(exported, IDENTITY, 8) == state


def test_where_states_of_lancedb_are_none_their_own_merge_is_named():
    with pytest.raises(StateError, match=r"lancedb.streaming.StreamingDataset.merge_state_dicts\(states\)"):
        merge_state_dicts([STATE, OLDER])


def test_states_are_told_apart():
    assert not is_lancedb_state(StreamState(IDENTITY, 2, 7, 8).to_dict())
    assert not is_lancedb_state("runs/checkpoint_3")
    assert not is_lancedb_state({"samples_consumed_per_split": 3})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"samples_consumed_per_split": [7, 7, 6, 6]},
            "at 6 to 7 samples: merge the states of all ranks with",
        ),
        ({"positions_consumed_per_split": [7, 9, 7, 8]}, "skipped 3 rows.*end the epoch with the StreamingDataset"),
        ({"pack_buffers": {}}, "pack_sequences counts blocks of tokens.*end the epoch"),
        ({"pack_sequences": 128}, "pack_sequences"),
        (
            {"samples_consumed_per_split": [21] * S, "positions_consumed_per_split": [21] * S},
            "21 samples.*20: its table",
        ),
        ({"samples_consumed_per_split": [7] * 3}, "one int >= 0 for each of its 4 splits"),
        ({"samples_consumed_per_split": [7, 7, 7, -1]}, "one int >= 0"),
        ({"samples_consumed_per_split": "7777"}, "one int >= 0"),
        ({"samples_consumed_per_split": True}, "one int >= 0"),
        ({"positions_consumed_per_split": [7.0] * 4}, "positions_consumed_per_split"),
        ({"epoch": -1}, "'epoch'"),
        ({"epoch": None}, "'epoch'"),
        ({"extra": 1}, "unknown.*extra"),
    ],
)
def test_what_does_not_continue_exactly_is_refused(changes, says):
    changes = {"positions_consumed_per_split": None, **changes} if "samples_consumed_per_split" in changes else changes
    with pytest.raises(StateError, match=says):
        from_lancedb_state({**STATE, **changes}, IDENTITY, None)


def test_a_state_without_its_epoch_is_refused():
    with pytest.raises(StateError, match=r"missing \['epoch'\]"):
        from_lancedb_state(without("epoch"), IDENTITY, None)


def test_another_order_number_of_splits_or_seed_is_refused():
    other = replace(IDENTITY, order="feistel-1", num_splits=8, shuffle_seed=6)
    with pytest.raises(StateMismatchError, match='order="lancedb"') as error:
        from_lancedb_state(STATE, other, None)
    assert error.value.differences == [
        ("order", "lancedb", "feistel-1"),
        ("num_splits", 4, 8),
        ("shuffle_seed", 5, 6),
    ]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (StreamState(replace(IDENTITY, order="feistel-1"), 2, 7), "order: saved 'feistel-1', current 'lancedb'"),
        (StreamState(IDENTITY, 2, 7, partial=PartialCycle(1, 2)), "1 rows into a cycle"),
        (StreamState(IDENTITY, 2, 7, skipped=((2, 6, 9),)), "skips steps that are still to come"),
        (StreamState(IDENTITY, 2, 7, skipped=((3, 0, 1),)), "skips steps that are still to come"),
    ],
)
def test_what_a_streaming_dataset_would_not_continue_exactly_is_refused(state, says):
    with pytest.raises(StateError, match=says):
        to_lancedb_state(state.to_dict())


def test_skipped_steps_that_are_over_are_no_obstacle():
    assert to_lancedb_state(StreamState(IDENTITY, 2, 7, skipped=((2, 3, 7), (1, 0, 9))).to_dict()) == STATE


def test_the_end_of_an_epoch_is_the_start_of_the_next_one():
    state = {**STATE, "samples_consumed_per_split": [20] * S, "positions_consumed_per_split": [20] * S}
    assert from_lancedb_state(state, IDENTITY, None).samples_consumed_per_split == 20
    assert to_lancedb_state(StreamState(IDENTITY, 3, 0).to_dict())["epoch"] == 3


# Against the real one


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    table = make_lancedb_table(tmp_path_factory.mktemp("state"), 93)
    table.delete("id % 8 = 7")
    return table  # 82 rows: 20 cycles, 2 rows are left out


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_of_streaming_dataset_is_continued(table, world):
    """Saved at the end of any cycle and merged over ranks, the rows that are left are those that it has not delivered."""
    options = {"num_splits": S, "shuffle_seed": SEED}
    stream = lance_stream(table, order="lancedb", **options)
    expected = planned_ids(stream, 1)
    for cycles in (1, 7, 19):
        ranks = [streaming(table, epoch=1, rank=rank, world_size=world, **options) for rank in range(world)]
        for rank in ranks:
            rows = iter(rank)
            for _ in range(cycles * S // world):
                next(rows)
        merged = StreamingDataset.merge_state_dicts([rank.state_dict() for rank in ranks])
        state = from_lancedb_state(merged, stream._plan.identity(1), None)
        assert (state.epoch, state.samples_consumed_per_split) == (1, cycles)
        assert ids_from(streaming(table, merged, **options)) == expected[cycles * S :]


def test_an_epoch_that_is_over_goes_over_as_the_start_of_the_next(table, monkeypatch):
    without_coordinator(monkeypatch)
    monkeypatch.setattr(CoordinatorLink, "tell", lambda *args: None)
    options = {"num_splits": S, "shuffle_seed": SEED}
    theirs = streaming(table, epoch=1, **options)
    ids_from(theirs)
    shard = lance_stream(table, order="lancedb", resume_from=theirs.state_dict(), **options).shard()
    state = shard.state_dict()
    assert (state["epoch"], state["samples_consumed_per_split"]) == (2, 0)
    back = to_lancedb_state(state)
    assert (back["epoch"], set(back["samples_consumed_per_split"])) == (2, {0})


def test_what_a_streaming_dataset_does_after_an_epoch_and_a_break(table):
    """As docs/migrating-from-streamingdataset.md says: another `iter()` has the rows that are left, or none."""
    options = {"num_splits": S, "shuffle_seed": SEED}
    theirs = streaming(table, epoch=1, **options)
    rows = iter(theirs)
    first = [next(rows)["id"] for _ in range(3 * S)]
    rows.close()
    assert first + ids_from(theirs) == ids_from(streaming(table, epoch=1, **options))
    assert ids_from(theirs) == []


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_of_both_loaders_deliver_the_same_rows_by_turns(table, num_workers):
    """Theirs have the splits divided among them: a turn of them, a batch of each, has the rows of as many steps of ours."""
    options = {"num_splits": S, "shuffle_seed": SEED}
    expected = planned_ids(lance_stream(table, order="lancedb", **options), 1)
    size = 2 * S
    workers = [
        ids_from(
            streaming(table, epoch=1, worker_info_override=SimpleNamespace(id=i, num_workers=num_workers), **options)
        )
        for i in range(num_workers)
    ]
    for turn in range(len(expected) // (size * num_workers)):
        theirs = [batch for ids in workers for batch in ids[turn * size : (turn + 1) * size]]
        ours = expected[turn * size * num_workers : (turn + 1) * size * num_workers]
        assert sorted(theirs) == sorted(ours)
        assert (theirs == ours) == (num_workers == 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_streaming_dataset_continues_a_run_of_ours(table, world):
    options = {"num_splits": S, "shuffle_seed": SEED}
    stream = lance_stream(table, order="lancedb", **options)
    for cycles in (1, 13):
        state = to_lancedb_state(StreamState(stream._plan.identity(1), 2, cycles).to_dict())
        for rank in range(world):
            expected = planned_ids(stream, 2, rank, world)
            theirs = streaming(table, state, rank=rank, world_size=world, **options)
            assert ids_from(theirs) == expected[cycles * S // world :]
        assert theirs.state_dict()["epoch"] == 2


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_a_state_within_a_cycle_is_refused(table, stop):
    rows = iter(theirs := streaming(table, num_splits=S, shuffle_seed=SEED))
    for _ in range(stop):
        next(rows)
    identity = lance_stream(table, num_splits=S, shuffle_seed=SEED, order="lancedb")._plan.identity(1)
    with pytest.raises(StateError, match="at 1 to 2 samples"):
        from_lancedb_state(theirs.state_dict(), identity, None)


def test_a_state_with_skipped_rows_is_refused(table):
    def transform(batch):
        ids = batch.column("id").to_pylist()
        if 12 in ids:
            raise ValueError("bad row")
        return ids

    theirs = streaming(table, num_splits=S, shuffle_seed=SEED, transform=transform, on_transform_error="skip")
    for _ in theirs:
        pass
    assert theirs.rows_skipped == 1
    identity = lance_stream(table, num_splits=S, shuffle_seed=SEED, order="lancedb")._plan.identity(1)
    with pytest.raises(StateError, match="skipped 1 rows of this epoch"):
        from_lancedb_state(theirs.state_dict(), identity, None)


def test_resume_from_takes_such_a_state(table):
    options = {"num_splits": S, "shuffle_seed": SEED, "order": "lancedb"}
    stream = lance_stream(table, resume_from=STATE, global_batch_size=2 * S, **options)
    found = stream.state_dict()
    assert (found["epoch"], found["samples_consumed_per_split"], found["global_batch_size"]) == (2, 7, 2 * S)
    with pytest.raises(StateMismatchError, match="feistel-1"):
        lance_stream(table, resume_from=STATE, num_splits=S, shuffle_seed=SEED)
    with pytest.raises(StateError, match="pass num_splits=4"):
        lance_stream(table, resume_from=STATE, shuffle_seed=SEED, order="lancedb")
    with pytest.raises(ConfigError, match="evaluation=True"):
        lance_stream(table, resume_from=STATE, evaluation=True, **options)
