"""States that are not as the library wrote them: a typed error, or the rows that the state names. Never other rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ray.train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_lance_stream import LanceStream, StreamError, StreamShard, lance_stream, merge_state_dicts, to_lancedb_state
from ray_lance_stream.cursor import EpochWalk, Position
from ray_lance_stream.errors import StateError
from ray_lance_stream.lancedb_state import from_lancedb_state
from ray_lance_stream.splits import SplitGrid, split_block
from ray_lance_stream.state import StreamState, dump_states, parse_states
from ray_lance_stream.train import STATE_FILE, read_states
from tests.fake_ray import Cluster
from tests.support import Oracle, make_table, scan_ids

pytestmark = pytest.mark.timeout(300)

ROWS, S, G = 113, 12, 24
LOOKED_AT = 40  # rows after a load

fuzz = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A table, and no cluster."""
    with pytest.MonkeyPatch.context() as patch:
        Cluster(patch)
        yield make_table(tmp_path_factory.mktemp("fuzz") / "t", ROWS)


@pytest.fixture(scope="module")
def stream(path: str) -> LanceStream:
    return lance_stream(path, num_splits=S, global_batch_size=G, read_batch_size=1)


@pytest.fixture(scope="module")
def states(stream: LanceStream) -> list[dict[str, Any]]:
    """As the library writes them: at the start, in an epoch, inside a cycle, with skipped steps, at an edge; of format 1."""
    found: list[dict[str, Any]] = []
    shard = stream.skip(epoch=0, steps=range(1, 2)).shard(1, 2)
    found.append(shard.state_dict())
    batches = iter(shard.iter_batches())
    next(batches)
    found.append(shard.state_dict())
    batches.close()
    rows = shard.iter_rows()
    for number, _ in enumerate(rows, start=1):
        if number in (4, 6, 17):
            found.append(shard.state_dict())
    found.append(shard.state_dict())
    old = {key: value for key, value in found[1].items() if key not in ("table_content", "table_files", "listed")}
    return [*found, {**old, "format": 1}]


def oracle_rows(path: str, state: StreamState, rank: int, world: int) -> Iterator[int]:
    """The ids that a rank receives from a state on, by the plan of one worker; of its epoch."""
    steps = Oracle(scan_ids(path), S, 1).epoch(state.epoch)
    block = split_block(S, world, rank)
    skipped = {c for e, lo, hi in state.skipped if e == state.epoch for c in range(lo, min(hi, len(steps)))}
    first, partial = state.samples_consumed_per_split, state.partial
    for cycle in range(first, len(steps)):
        if cycle not in skipped:
            ids = steps[cycle][block.lo : block.hi].tolist()
            is_open = cycle == first and partial is not None and partial.world_size == world
            yield from ids[partial.rows if is_open and partial is not None else 0 :]


def rows_of(shard: StreamShard) -> list[int]:
    """The next ids."""
    with_end = iter(shard.iter_rows())
    return [int(row["id"]) for row in islice(with_end, LOOKED_AT)]


# What JSON may hold, and some of what it may not but a pickled state could.

numbers = st.one_of(
    st.integers(-3, 200),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 10**4000, -(10**4000)]),
    st.floats(allow_nan=True, allow_infinity=True),
)
texts = st.one_of(st.text(max_size=8), st.sampled_from(["", "\ud800", "é\u202e", "0", "null", "x" * 5000]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3),
        st.fixed_dictionaries({"rows": inner, "world_size": inner}),
        st.fixed_dictionaries({"epoch": inner, "fingerprint": texts, "made_by": texts}),
        st.lists(st.tuples(st.integers(0, 3), inner, inner).map(list), max_size=3),
    ),
    max_leaves=6,
)


def deep(levels: int) -> Any:
    """Lists in lists."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


@st.composite
def mutated(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A state with one to three things wrong, or not so wrong."""
    state = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(["drop", "put", "put", "near", "near", "add", "inner", "likely", "deep"]))
        name = draw(st.sampled_from(sorted(good)))
        if how == "drop":
            state.pop(name, None)
        elif how == "put":
            state[name] = draw(values)
        elif how == "near" and isinstance(state.get(name), int):
            state[name] = state[name] + draw(st.integers(-3, 3))
        elif how == "add":
            state[draw(texts)] = draw(values)
        elif how == "inner":
            state["partial"] = {"rows": draw(st.integers(-1, 14)), "world_size": draw(st.integers(-1, 14))}
            state["samples_consumed_per_split"] = draw(st.integers(-1, 11))
        elif how == "likely":
            state["epoch"] = draw(st.integers(0, 5))
            state["samples_consumed_per_split"] = draw(st.integers(0, 10))
            ranges = st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 12)).map(list)
            state["skipped"] = draw(st.lists(ranges, max_size=3))
        elif how == "deep":
            state[name] = deep(draw(st.sampled_from([10, 5000])))
    return state


def is_told(action: Callable[[], Any]) -> Any:
    """What the action returns; None where it raises an error of the library, which can be shown, logged and sent."""
    try:
        return action()
    except StreamError as error:
        check_text(error)
        return None


def check_text(error: StreamError) -> None:
    assert 0 < len(str(error)) < 20_000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@given(data=st.data())
@fuzz
def test_a_shard_takes_a_state_as_it_is_or_refuses_it(path, stream, states, data):
    state = data.draw(mutated(data.draw(st.sampled_from(states))))
    rank, world = data.draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 5), (1, 5), (4, 5), (11, 12)]))
    shard = stream.shard(rank, world)
    before = shard.state_dict()
    is_loaded = is_told(lambda: (shard.load_state_dict(state), True)) is not None
    if is_loaded:
        meant = StreamState.from_dict(state)
        expected = list(islice(oracle_rows(path, meant, rank, world), LOOKED_AT))
        assert rows_of(shard) == expected
    else:
        assert shard.state_dict() == before
        assert rows_of(shard) == list(islice(oracle_rows(path, StreamState.from_dict(before), rank, world), LOOKED_AT))
    shard.close()


@given(data=st.data())
@fuzz
def test_the_driver_takes_a_state_as_it_is_or_refuses_it(path, states, data):
    state = data.draw(mutated(data.draw(st.sampled_from(states))))
    options = {"num_splits": S, "global_batch_size": G, "read_batch_size": 1}
    stream = is_told(lambda: lance_stream(path, resume_from=state, **options))
    if stream is not None:
        shard = stream.shard()
        expected = list(islice(oracle_rows(path, StreamState.from_dict(state), 0, 1), LOOKED_AT))
        assert rows_of(shard) == expected
        shard.close()


@given(state=values)
@fuzz
def test_arbitrary_json_is_refused(path, stream, state):
    for action in (
        lambda: stream.shard().load_state_dict(state),
        lambda: lance_stream(path, num_splits=S, resume_from=state),
        lambda: merge_state_dicts([state]),
        lambda: merge_state_dicts(state),
        lambda: to_lancedb_state(state),
        lambda: StreamState.from_dict(state),
    ):
        if state is not None:
            with pytest.raises(StateError) as told:
                action()
            check_text(told.value)


HUGE = 10**5000  # more digits than Python prints


@pytest.mark.parametrize(
    "name", ["epoch", "shuffle_seed", "samples_consumed_per_split", "format", "filter", "num_splits"]
)
@pytest.mark.parametrize("value", [HUGE, -HUGE, [HUGE], {HUGE: HUGE}, deep(100_000)], ids=range(5))
def test_what_cannot_be_shown_is_refused(stream, states, name, value):
    for state in ({**states[1], name: value}, {**states[1], "listed": {name: value}}, {name: value, HUGE: 1}):
        for action in (StreamState.from_dict, stream.shard().load_state_dict):
            with pytest.raises(StateError) as told:
                action(state)
            check_text(told.value)
    lancedb = {"shuffle_seed": 0, "num_splits": S, "epoch": 1, "samples_consumed_per_split": [3] * S}
    for state in ({**lancedb, HUGE: 1}, {**lancedb, "epoch": value}, {**lancedb, "samples_consumed_per_split": value}):
        with pytest.raises(StateError) as told:
            from_lancedb_state(state, replace(stream.shard().state().identity, order="lancedb"), None)
        check_text(told.value)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("cycle", [0, 8, 9, 10])
def test_rows_of_an_open_cycle(path, stream, states, world, cycle):
    """Fewer than the largest block has, in a cycle that there is. A rank with a smaller block may have had all of it."""
    for rank in {0, world - 1}:
        for rows in (0, 1, 2, 3, 5, 6, 11, 12, 13):
            partial = {"rows": rows, "world_size": world} if rows else None
            state = {**states[0], "samples_consumed_per_split": cycle, "partial": partial}
            shard = stream.shard(rank, world)
            if cycle > 9 or (rows and (cycle == 9 or rows >= -(-S // world))):
                with pytest.raises(StateError, match=r"must be rows of an open cycle|at most the 9 cycles"):
                    shard.load_state_dict(state)
            else:
                shard.load_state_dict(state)
                meant = StreamState.from_dict(state if cycle < 9 else {**states[0], "epoch": 1})
                expected = [*oracle_rows(path, meant, rank, world)][:LOOKED_AT]
                assert rows_of(shard) == expected
            shard.close()


@pytest.mark.parametrize("rows", [2, 3])
def test_no_read_is_empty(rows):
    """Functions of `map_batches` would be given no rows."""
    walk = EpochWalk(SplitGrid(ROWS, S), split_block(S, 5, 0), Position(0, 3, rows))
    span = walk.next_span(None, 1)
    assert span is not None
    assert (span.start, span.skip_rows, span.num_rows, walk.num_rows) == (4, 0, 2, 10)


@given(data=st.data())
@fuzz
def test_merged_states_agree_or_are_refused(states, data):
    good = data.draw(st.sampled_from(states))
    other = data.draw(mutated(good))
    merged = is_told(lambda: merge_state_dicts([good, other]))
    if merged is not None:
        mine, theirs = StreamState.from_dict(good), StreamState.from_dict(other)
        found = StreamState.from_dict(merged)
        assert found.position() == mine.position() == theirs.position()
        assert found.partial == mine.partial == theirs.partial


@given(data=st.data())
@fuzz
def test_states_of_a_streaming_dataset(stream, data):
    good = {"shuffle_seed": 0, "num_splits": S, "epoch": 1, "samples_consumed_per_split": [3] * S}
    good["positions_consumed_per_split"] = [3] * S
    state = data.draw(mutated(good))
    identity = stream.shard().state().identity
    listed = replace(identity, order="lancedb")
    if "format" not in state and isinstance(state, dict):
        found = is_told(lambda: from_lancedb_state(state, listed, None))
        if found is not None:
            assert StreamState.from_dict(found.to_dict()) == found
            assert to_lancedb_state(found.to_dict())["epoch"] == state["epoch"]
            counts = state["samples_consumed_per_split"]
            assert counts in (found.samples_consumed_per_split, [found.samples_consumed_per_split] * S)


# Files


@given(data=st.data())
@fuzz
def test_state_files_that_are_cut_or_changed(states, data):
    text = dump_states({"train": StreamState.from_dict(states[1]), "more": StreamState.from_dict(states[3])})
    cut = data.draw(st.integers(0, len(text)))
    more = data.draw(st.text(max_size=5))
    found = is_told(lambda: parse_states(text[:cut] + more + text[cut + data.draw(st.integers(0, 9)) :]))
    for state in (found or {}).values():
        assert StreamState.from_dict(state.to_dict()) == state


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"streams": ' + b"[" * 100_000,
        b'{"streams": {"train": {"format": ' + b"9" * 5000 + b"}}}",
        b'{"streams": {"train": NaN}}',
        b'{"streams": {"train": {"format": NaN}}}',
        b'{"streams": [1]}',
        b"null",
    ],
    ids=lambda content: str(content[:24]),
)
def test_files_that_hold_something_else(tmp_path: Path, content: bytes):
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(StateError):
        read_states(ray.train.Checkpoint.from_directory(str(tmp_path)))


def test_the_mutations_reach_both_ends(path, stream, states):
    """Some are taken and some are refused, or the tests above would say little."""
    taken = {True: 0, False: 0}

    @given(data=st.data())
    @fuzz
    def count(data: Any) -> None:
        state = data.draw(mutated(data.draw(st.sampled_from(states))))
        taken[is_told(lambda: (stream.shard(0, 2).load_state_dict(state), True)) is not None] += 1

    count()
    assert min(taken.values()) > 10
