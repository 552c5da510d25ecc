"""StreamState: JSON, strict reading, comparison, merge (B16, B39)."""

from __future__ import annotations

import json
import pickle
import traceback
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream import train
from ray_lance_stream.errors import StateError, StateMismatchError
from ray_lance_stream.state import (
    ListedEpoch,
    PartialCycle,
    StreamIdentity,
    StreamState,
    check_fits,
    dump_states,
    merge_state_dicts,
    parse_states,
    union,
)
from ray_lance_stream.train import resume_states

IDENTITY = StreamIdentity(
    "/data/t.lance", 3, 480, "id > 3", "feistel-1", True, 7, None, 48, True, 1, table_content="c1", table_files="f1"
)
FINGERPRINTS = ("table_content", "table_files")
STATE = StreamState(IDENTITY, epoch=2, samples_consumed_per_split=5, global_batch_size=96)


def test_round_trip_through_json():
    changes = (
        {},
        {"partial": PartialCycle(3, 2)},
        {"skipped": ((1, 0, 4),)},
        {"listed": ListedEpoch(2, "0123456789abcdef", "lancedb 0.40.0")},
    )
    for state in (replace(STATE, **change) for change in changes):
        assert StreamState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
        assert len(json.dumps(state.to_dict())) < 2048


def test_the_scalar_stands_in_the_open():
    data = STATE.to_dict()
    assert (data["epoch"], data["samples_consumed_per_split"]) == (2, 5)


OTHER = {
    "table_uri": "/data/u.lance",
    "num_rows": 481,
    "filter": None,
    "order": "feistel-2",
    "shuffle": False,
    "shuffle_seed": 8,
    "shuffle_clump_size": 4,
    "num_splits": 24,
    "drop_remainder": False,
    "replicas": 2,
    "table_content": "c2",
    "table_files": "f2",
}


@pytest.mark.parametrize("name", OTHER)
def test_each_field_that_fixes_the_order_must_agree(name):
    current = replace(IDENTITY, **{name: OTHER[name]})
    with pytest.raises(StateMismatchError) as error:
        check_fits(STATE, current)
    assert error.value.differences == [(name, getattr(IDENTITY, name), OTHER[name])]
    text = str(pickle.loads(pickle.dumps(error.value)))
    assert name in text
    assert repr(getattr(IDENTITY, name)) in text
    assert repr(OTHER[name]) in text


def test_every_identity_field_but_the_version_is_compared():
    assert {f.name for f in fields(StreamIdentity)} == {*OTHER, "table_version"}
    check_fits(STATE, replace(IDENTITY, table_version=9))


@pytest.mark.parametrize("name", OTHER)
def test_a_moved_table_may_have_another_uri_and_other_files(name):
    current = replace(IDENTITY, **{name: OTHER[name]})
    if name in ("table_uri", "table_files"):
        check_fits(STATE, current, allow_moved=True)
        with pytest.raises(StateMismatchError, match="allow_moved=True"):
            check_fits(STATE, current)
    else:
        with pytest.raises(StateMismatchError, match="make the stream with the saved values"):
            check_fits(STATE, current, allow_moved=True)


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_fingerprint_that_one_side_does_not_know_is_not_compared(name):
    unknown = replace(IDENTITY, **{name: None})
    check_fits(replace(STATE, identity=unknown), IDENTITY)
    check_fits(STATE, unknown)


def format_1() -> dict:
    """The state as release 0.1.0 wrote it before there were fingerprints."""
    data = STATE.to_dict()
    return {"format": 1, **{key: data[key] for key in data if key not in ("format", "listed", *FINGERPRINTS)}}


def test_a_state_of_format_1_is_read_and_written_as_format_2():
    state = StreamState.from_dict(format_1())
    assert state == replace(STATE, identity=replace(IDENTITY, table_content=None, table_files=None))
    check_fits(state, IDENTITY)
    assert state.to_dict()["format"] == 2
    assert StreamState.from_dict(state.to_dict()) == state
    assert merge_state_dicts([format_1(), format_1()]) == state.to_dict()


@pytest.mark.parametrize("name", [*format_1()])
def test_a_missing_field_of_format_1_is_an_error(name):
    data = format_1()
    del data[name]
    with pytest.raises(StateError, match=name):
        StreamState.from_dict(data)


def test_all_differences_are_named_at_once():
    with pytest.raises(StateMismatchError, match=r"shuffle_seed.*num_splits"):
        check_fits(STATE, replace(IDENTITY, shuffle_seed=1, num_splits=12))


@pytest.mark.parametrize("name", [*STATE.to_dict()])
def test_a_missing_field_is_an_error(name):
    data = STATE.to_dict()
    del data[name]
    with pytest.raises(StateError, match=name):
        StreamState.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 3),
        ("format", 0),
        ("format", True),
        ("format", None),
        ("extra", 1),
        ("epoch", -1),
        ("epoch", True),
        ("epoch", "1"),
        ("samples_consumed_per_split", -1),
        ("samples_consumed_per_split", 11),
        ("samples_consumed_per_split", 2.0),
        ("partial", {"rows": 0, "world_size": 2}),
        ("partial", {"rows": 3}),
        ("partial", 3),
        ("listed", "0123456789abcdef"),
        ("listed", {"epoch": 1, "fingerprint": "0123456789abcdef"}),
        ("listed", {"epoch": -1, "fingerprint": "0123456789abcdef", "made_by": "lancedb 0.40.0"}),
        ("listed", {"epoch": 1, "fingerprint": 7, "made_by": "lancedb 0.40.0"}),
        ("skipped", [[1, 2]]),
        ("skipped", [[0, 4, 4]]),
        ("skipped", None),
        ("num_splits", 0),
        ("filter", 3),
        ("table_content", 3),
        ("table_files", ["f"]),
        ("shuffle", 1),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(name, value):
    with pytest.raises(StateError, match=name):
        StreamState.from_dict({**STATE.to_dict(), name: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_arbitrary_json_is_a_typed_error(data):
    with pytest.raises(StateError):
        StreamState.from_dict(data)


@given(st.sampled_from(sorted(STATE.to_dict())), JSON)
def test_one_arbitrary_field_is_a_state_or_a_typed_error(name, value):
    try:
        state = StreamState.from_dict({**STATE.to_dict(), name: value})
    except StateError:
        return
    assert StreamState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_state_files_hold_several_streams():
    states = {"train": STATE, "aux": replace(STATE, epoch=0)}
    assert parse_states(dump_states(states)) == states


@pytest.mark.parametrize("text", ["", "{", dump_states({"train": STATE})[:-40], "[]", '{"streams": 3}'])
def test_a_truncated_or_foreign_state_file_is_a_typed_error(text):
    with pytest.raises(StateError):
        parse_states(text)


def test_merge_takes_states_of_one_step_only():
    data = STATE.to_dict()
    assert merge_state_dicts([data, data, data]) == data
    with pytest.raises(StateError, match="different steps"):
        merge_state_dicts([data, replace(STATE, samples_consumed_per_split=6).to_dict()])
    with pytest.raises(StateError, match="different steps"):
        merge_state_dicts([data, replace(STATE, partial=PartialCycle(1, 2)).to_dict()])
    with pytest.raises(StateMismatchError):
        merge_state_dicts([data, replace(STATE, identity=replace(IDENTITY, shuffle_seed=0)).to_dict()])
    with pytest.raises(StateMismatchError, match="table_version: saved 4, current 3"):
        merge_state_dicts([data, replace(STATE, identity=replace(IDENTITY, table_version=4)).to_dict()])
    with pytest.raises(StateError, match="at least one"):
        merge_state_dicts([])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)).map(lambda t: (t[0], t[0] + t[1]))))
def test_union_covers_the_same_cycles(ranges):
    merged = union(ranges)
    assert {c for lo, hi in merged for c in range(lo, hi)} == {c for lo, hi in ranges for c in range(lo, hi)}
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://AKIA:topsecret@bucket/path?secret_key=topsecret", "at s3://bucket/path: Unexpected query parameter"),
        ("nope://AKIA:topsecret@bucket/path?key=topsecret", "at nope://bucket/path: Unrecognized filesystem type"),
        ("s3://AKIA:top secret@bucket/path", "at s3://bucket/path: Cannot parse URI"),
    ],
)
def test_an_uri_to_resume_from_shows_no_secret(uri, says):
    with pytest.raises(StateError) as error:
        resume_states(uri)
    assert says in str(error.value)
    shown = "".join(traceback.format_exception(error.value))
    assert "topsecret" not in shown
    assert "top secret" not in shown


def test_a_store_that_cannot_be_reached_is_a_typed_error(monkeypatch):
    def fail(uri):
        raise OSError(f"When resolving region for {uri}: AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr("ray.train.Checkpoint", fail)
    with pytest.raises(
        StateError, match=r"at s3://bucket/path: When resolving region for s3://\*\*\*@bucket/path: AWS"
    ):
        train._checkpoint_at("s3://AKIA:topsecret@bucket/path")
