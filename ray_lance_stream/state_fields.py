"""The fields of a saved state, and what each may hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_lance_stream.errors import StateError, shown
from ray_lance_stream.order import MAX_SEED_BITS

LANCEDB_SAMPLES = "samples_consumed_per_split"
MAX_WHOLE = 2**63 - 1  # what counts or numbers anything fits into 64 bits


def is_lancedb_state(state: Any) -> bool:
    """Whether this is the state of LanceDB's StreamingDataset, of whatever kind, rather than one of this library."""
    return (
        isinstance(state, Mapping)
        and not {"format", "table_uri"} & set(state)
        and {"shuffle_seed", "num_splits", LANCEDB_SAMPLES} <= set(state)
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole(minimum: int) -> Any:
    """A check for ints of at least `minimum`."""
    return lambda value: _is_int(value) and minimum <= value <= MAX_WHOLE


def _optional(check: Any) -> Any:
    return lambda value: value is None or check(value)


def _is(kind: type) -> Any:
    return lambda value: isinstance(value, kind)


def _is_partial(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"rows", "world_size"}
        and is_whole(1)(value["rows"])
        and is_whole(1)(value["world_size"])
    )


def _is_skipped(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(entry, list | tuple)
        and len(entry) == 3
        and all(is_whole(0)(n) for n in entry)
        and entry[1] < entry[2]
        for entry in value
    )


def _is_listed(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"epoch", "fingerprint", "made_by"}
        and is_whole(0)(value["epoch"])
        and isinstance(value["fingerprint"], str)
        and isinstance(value["made_by"], str)
    )


_CHECKS: dict[str, tuple[str, Any]] = {
    "format": ("an int", is_whole(1)),
    "table_uri": ("text", _is(str)),
    "table_version": ("an int in [1, 2**63)", is_whole(1)),
    "num_rows": ("an int in [1, 2**63)", is_whole(1)),
    "filter": ("text or null", _optional(_is(str))),
    "order": ("text", _is(str)),
    "shuffle": ("a bool", _is(bool)),
    "shuffle_seed": ("an int", lambda value: _is_int(value) and value.bit_length() <= MAX_SEED_BITS),
    "shuffle_clump_size": ("an int in [1, 2**63) or null", _optional(is_whole(1))),
    "num_splits": ("an int in [1, 2**63)", is_whole(1)),
    "drop_remainder": ("a bool", _is(bool)),
    "replicas": ("an int in [1, 2**63)", is_whole(1)),
    "table_content": ("text or null", _optional(_is(str))),
    "table_files": ("text or null", _optional(_is(str))),
    "epoch": ("an int in [0, 2**63)", is_whole(0)),
    "samples_consumed_per_split": ("an int in [0, 2**63)", is_whole(0)),
    "global_batch_size": ("an int in [1, 2**63) or null", _optional(is_whole(1))),
    "partial": ("null or {rows, world_size}", _optional(_is_partial)),
    "skipped": ("a list of [epoch, first cycle, end cycle]", _is_skipped),
    "listed": ("null or {epoch, fingerprint, made_by}", _optional(_is_listed)),
}


def check_fields(data: Mapping[str, Any]) -> None:
    """Raise unless a state has all fields and no others, each of its kind.

    Raises:
        StateError: names the field.
    """
    missing = sorted(set(_CHECKS) - set(data))
    unknown = sorted(shown(name) for name in set(data) - set(_CHECKS))
    if missing or unknown:
        raise StateError(
            f"a stream state of format {data['format']} has fixed fields; missing {missing}, unknown [{', '.join(unknown)}]"
        )
    for name, (kind, check) in _CHECKS.items():
        if not check(data[name]):
            raise StateError(f"field {name!r} of a stream state must be {kind}, got {shown(data[name])}")
    _check_position(data)


def _check_position(data: Mapping[str, Any]) -> None:
    rows, splits, cycle, partial = (
        data[name] for name in ("num_rows", "num_splits", "samples_consumed_per_split", "partial")
    )
    if splits > rows:
        raise StateError(f"num_splits of a stream state must be at most num_rows={rows}, got {splits}")
    cycles = rows // splits if data["drop_remainder"] else -(-rows // splits)
    if cycle > cycles:
        raise StateError(f"samples_consumed_per_split must be at most the {cycles} cycles of an epoch, got {cycle}")
    if partial is None:
        return
    world = partial["world_size"]
    if world > splits or partial["rows"] >= -(-splits // world) or cycle == cycles:
        raise StateError(
            f"field 'partial' of a stream state must be rows of an open cycle, fewer than a rank has in one, got {partial} "
            f"after {cycle} of {cycles} cycles of num_splits={splits}"
        )
