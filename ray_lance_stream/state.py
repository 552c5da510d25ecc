"""StreamState: the position of a stream as small JSON, and the rules by which one is compared, merged and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ray_lance_stream.cursor import CycleRange, Position
from ray_lance_stream.errors import StateError, StateMismatchError, shown
from ray_lance_stream.state_fields import check_fields, is_lancedb_state, is_whole

STATE_FORMAT = 2
# Format 1 had no fingerprint of the table: where a state does not tell it, it is not compared.
_SINCE_FORMAT_2 = ("table_content", "table_files")
# What a table that was moved or made anew has of its own.
_OF_THE_PLACE = ("table_uri", "table_files")

SkippedCycles = tuple[tuple[int, int, int], ...]  # (epoch, first cycle, end cycle), sorted


@dataclass(frozen=True)
class StreamIdentity:
    """Everything that fixes the row order. `table_uri` holds no secrets; for the last two see `TableContent`."""

    table_uri: str
    table_version: int
    num_rows: int
    filter: str | None
    order: str
    shuffle: bool
    shuffle_seed: int
    shuffle_clump_size: int | None
    num_splits: int
    drop_remainder: bool
    replicas: int
    table_content: str | None = None
    table_files: str | None = None

    def differences(self, current: StreamIdentity, *, allow_moved: bool = False) -> list[tuple[str, Any, Any]]:
        """(field, saved, current) of each field that must agree and does not.

        The table version may differ. A fingerprint that one side does not know is not compared, and with `allow_moved`
        neither is what a copy of the table has of its own.
        """
        ignored = {"table_version", *(_OF_THE_PLACE if allow_moved else ())}
        ignored |= {name for name in _SINCE_FORMAT_2 if None in (getattr(self, name), getattr(current, name))}
        names = [f.name for f in fields(self) if f.name not in ignored]
        pairs = [(name, getattr(self, name), getattr(current, name)) for name in names]
        return [(name, saved, now) for name, saved, now in pairs if saved != now]

    def unlike(self, other: StreamIdentity) -> list[str]:
        """Names of the fields that differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]

    def at(self, saved: StreamIdentity, **changes: Any) -> StreamIdentity:
        """This identity at the table version of `saved`, of which no more is known before it is planned."""
        known = ("table_version", "num_rows", *_SINCE_FORMAT_2)
        return replace(self, **{name: getattr(saved, name) for name in known}, **changes)


@dataclass(frozen=True)
class PartialCycle:
    """Rows of the open cycle that each rank of a world of `world_size` has received beyond the last cycle boundary."""

    rows: int
    world_size: int


@dataclass(frozen=True)
class ListedEpoch:
    """The list that an epoch's rows came from, where the order is LanceDB's: another release may make another one."""

    epoch: int
    fingerprint: str
    made_by: str


@dataclass(frozen=True)
class StreamState:
    """A position in a stream, with all that is needed to tell whether another stream may continue from it.

    Attributes:
        identity: what fixes the order.
        epoch: the open epoch; a finished epoch e is written as (e + 1, 0).
        samples_consumed_per_split: cycles of that epoch that are done.
        global_batch_size: G where the stream was made with one; steps are regrouped when it changes.
        partial: rows received beyond the last cycle boundary; None at a boundary.
        skipped: cycles that the user took out of an epoch.
        listed: the newest list that rows came from; None where the order is computed, or no row came yet.
    """

    identity: StreamIdentity
    epoch: int
    samples_consumed_per_split: int
    global_batch_size: int | None = None
    partial: PartialCycle | None = None
    skipped: SkippedCycles = ()
    listed: ListedEpoch | None = None

    def position(self) -> Position:
        """The position at the last cycle boundary."""
        return Position(self.epoch, self.samples_consumed_per_split)

    def to_dict(self) -> dict[str, Any]:
        """A flat dict of JSON values."""
        return {
            "format": STATE_FORMAT,
            **asdict(self.identity),
            "epoch": self.epoch,
            "samples_consumed_per_split": self.samples_consumed_per_split,
            "global_batch_size": self.global_batch_size,
            "partial": asdict(self.partial) if self.partial else None,
            "skipped": [list(entry) for entry in self.skipped],
            "listed": asdict(self.listed) if self.listed else None,
        }

    @classmethod
    def from_dict(cls, data: Any) -> StreamState:
        """Read what `to_dict` wrote.

        Raises:
            StateError: no dict, another format, a missing or unknown field, or a value of the wrong kind.
        """
        if not isinstance(data, Mapping):
            raise StateError(f"a stream state is a dict as state_dict() returns it, got {type(data).__name__}")
        if is_lancedb_state(data):
            raise StateError(
                "this is a state of LanceDB's StreamingDataset: merge those of all its ranks with "
                "lancedb.streaming.StreamingDataset.merge_state_dicts(states), and continue from the result with "
                'lance_stream(..., order="lancedb", resume_from=merged)'
            )
        if not is_whole(1)(data.get("format")) or data["format"] > STATE_FORMAT:
            raise StateError(
                f"this release reads stream states of format 1 to {STATE_FORMAT}, got format={shown(data.get('format'))}; "
                "load it with the release that wrote it"
            )
        if data["format"] == 1:
            data = {**dict.fromkeys((*_SINCE_FORMAT_2, "listed")), **data}
        check_fields(data)
        identity = StreamIdentity(**{f.name: data[f.name] for f in fields(StreamIdentity)})
        partial = data["partial"]
        return cls(
            identity=identity,
            epoch=data["epoch"],
            samples_consumed_per_split=data["samples_consumed_per_split"],
            global_batch_size=data["global_batch_size"],
            partial=PartialCycle(partial["rows"], partial["world_size"]) if partial else None,
            skipped=tuple(tuple(entry) for entry in data["skipped"]),
            listed=ListedEpoch(**data["listed"]) if data["listed"] else None,
        )


def skipped_in(skipped: SkippedCycles, epoch: int) -> tuple[CycleRange, ...]:
    """The cycle ranges of `skipped` that belong to one epoch, ascending and disjoint."""
    return union((lo, hi) for e, lo, hi in skipped if e == epoch)


def join_skipped(*skipped: SkippedCycles) -> SkippedCycles:
    """All cycles that any of `skipped` leaves out, with as few entries as possible."""
    epochs = sorted({epoch for entries in skipped for epoch, _, _ in entries})
    entries = tuple(entry for some in skipped for entry in some)
    return tuple((epoch, lo, hi) for epoch in epochs for lo, hi in skipped_in(entries, epoch))


def union(ranges: Iterable[CycleRange]) -> tuple[CycleRange, ...]:
    """Ascending, disjoint ranges that cover the same cycles."""
    merged: list[CycleRange] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def check_fits(saved: StreamState, current: StreamIdentity, *, allow_moved: bool = False) -> None:
    """Raise unless a stream with identity `current` may continue from `saved`.

    Raises:
        StateMismatchError: names each field that must agree, with the saved and the current value.
    """
    differences = saved.identity.differences(current, allow_moved=allow_moved)
    if differences:
        raise StateMismatchError(differences, remedy_for(differences))


def remedy_for(differences: Sequence[tuple[str, Any, Any]]) -> str:
    """What to do about fields that must agree and do not."""
    names = {name for name, _, _ in differences}
    if names <= set(_OF_THE_PLACE):
        return (
            "If this is the same table, moved or written anew with the same rows in the same order, pass "
            "lance_stream(..., allow_moved=True); otherwise make the stream of the table that the state names"
        )
    return (
        "These fields fix the row order: make the stream with the saved values, or start anew (a new run name, or "
        'resume="manual")'
    )


def merge_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state out of the states of several ranks, taken at the same step.

    At a cycle boundary all ranks have the same state, so one of them is enough; this checks that they agree.

    Raises:
        StateError: no state, or states of different steps.
        StateMismatchError: states of different streams.
    """
    if isinstance(states, Mapping) or not isinstance(states, Iterable):
        raise StateError(f"merge_state_dicts takes a list of states, got {type(states).__name__}")
    parsed = [StreamState.from_dict(state) for state in states]
    if not parsed:
        raise StateError("merge_state_dicts needs at least one state, got none")
    first = parsed[0]
    for other in parsed[1:]:
        versions = (other.identity.table_version, first.identity.table_version)
        if versions[0] != versions[1]:
            raise StateMismatchError([("table_version", *versions)], "Save all ranks at the same step")
        check_fits(other, first.identity)
        if other.position() != first.position() or other.partial != first.partial:
            raise StateError(
                "the states belong to different steps: "
                + ", ".join(f"({s.epoch}, {s.samples_consumed_per_split}, {s.partial})" for s in parsed)
                + "; save all ranks at the same step"
            )
    return replace(first, skipped=join_skipped(*(state.skipped for state in parsed))).to_dict()


def dump_states(states: Mapping[str, StreamState]) -> str:
    """The text of a state file: the states of several streams by name."""
    streams = {name: state.to_dict() for name, state in sorted(states.items())}
    return json.dumps({"format": STATE_FORMAT, "streams": streams}, indent=1)


def parse_states(text: str) -> dict[str, StreamState]:
    """Read what `dump_states` wrote.

    Raises:
        StateError: no JSON (a truncated file), or another layout.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"a stream state file holds JSON, got {text[:60]!r}... ({error}); is it truncated?") from None
    streams = data.get("streams") if isinstance(data, dict) else None
    if not isinstance(streams, dict):
        raise StateError(f"a stream state file holds a dict 'streams', got {text[:60]!r}")
    return {str(name): StreamState.from_dict(state) for name, state in streams.items()}
