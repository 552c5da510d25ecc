"""States of `lancedb.streaming.StreamingDataset`, as states of a stream with order="lancedb" and back. Pure.

Both count samples per split in the same order of rows, and both deal splits out in contiguous blocks, so at the end of a
cycle the one number of this library is every entry of the other's list. A StreamingDataset records neither its table nor
filter, clump size or shuffle: that these are the same is up to who hands its state over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_lance_stream.errors import StateError, StateMismatchError, shown
from ray_lance_stream.order import LANCEDB
from ray_lance_stream.state import StreamIdentity, StreamState, skipped_in
from ray_lance_stream.state_fields import LANCEDB_SAMPLES as SAMPLES
from ray_lance_stream.state_fields import is_lancedb_state, is_whole

__all__ = ["from_lancedb_state", "is_lancedb_state", "to_lancedb_state"]

POSITIONS = "positions_consumed_per_split"
_PACKED = ("pack_buffers", "pack_sequences", "blocks_emitted_per_split")
_FIELDS = {"shuffle_seed", "num_splits", "epoch", SAMPLES}


def from_lancedb_state(state: Mapping[str, Any], current: StreamIdentity, global_batch_size: int | None) -> StreamState:
    """The state of a StreamingDataset as one of the stream that is to continue its run.

    Args:
        state: merged over all ranks, or of a run on one rank; taken at the end of a cycle.
        current: of the stream.
        global_batch_size: of the stream.

    Raises:
        StateMismatchError: the stream has another order, number of splits or seed.
        StateError: an unmerged state, one within a cycle, with skipped rows or packed sequences, or a malformed one.
    """
    if any(name in state for name in _PACKED):
        raise StateError(
            "the state of a StreamingDataset with pack_sequences counts blocks of tokens and holds half-filled ones, which "
            "are no rows: end the epoch with the StreamingDataset, and start this stream at the next one with "
            "lance_stream(..., epoch=...)"
        )
    _check_fields(state)
    now = {"order": current.order, "num_splits": current.num_splits, "shuffle_seed": current.shuffle_seed}
    saved = {"order": LANCEDB, "num_splits": state["num_splits"], "shuffle_seed": state["shuffle_seed"]}
    differences = [(name, saved[name], now[name]) for name in now if saved[name] != now[name]]
    if differences:
        raise StateMismatchError(
            differences,
            'A StreamingDataset is continued by lance_stream(..., order="lancedb") with its num_splits and seed',
        )
    counts = _per_split(state, SAMPLES)
    positions = _per_split(state, POSITIONS) if state.get(POSITIONS) is not None else counts
    if positions != counts:
        skipped = sum(positions) - sum(counts)
        raise StateError(
            f"the state of the StreamingDataset says that on_transform_error skipped {skipped} rows of this epoch, so its "
            "splits are at different rows, which one number cannot say: end the epoch with the StreamingDataset, and start "
            "this stream at the next one with lance_stream(..., epoch=...)"
        )
    if len(set(counts)) > 1:
        raise StateError(
            f"the splits of the StreamingDataset are at {min(counts)} to {max(counts)} samples: merge the states of all ranks "
            "with StreamingDataset.merge_state_dicts(states), and take them at the end of a step whose global batch is a "
            "multiple of num_splits"
        )
    rows_per_split = current.num_rows // current.num_splits
    if counts[0] > rows_per_split:
        raise StateError(
            f"the StreamingDataset has consumed {counts[0]} samples of each split, but a split of this stream has "
            f"{rows_per_split}: its table, version or filter was another one; make the stream with the same"
        )
    return StreamState(current, state["epoch"], counts[0], global_batch_size)


def to_lancedb_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a stream with order="lancedb" as one that a StreamingDataset continues exactly.

    Load it into `StreamingDataset(table, num_splits=..., shuffle_seed=..., epoch=state["epoch"], ...)`, on every rank, with
    the table checked out at the version of the stream, and with its filter, shuffle and clump size.

    Args:
        state: what `state_dict()` of a shard or stream returned, or what is in a checkpoint.

    Returns:
        What `StreamingDataset.load_state_dict` takes.

    Raises:
        StateError: malformed, taken within a cycle, or of a stream that skips steps which are still to come.
        StateMismatchError: of a stream with another order.
    """
    parsed = StreamState.from_dict(state)
    identity, cycle = parsed.identity, parsed.samples_consumed_per_split
    if identity.order != LANCEDB:
        raise StateMismatchError(
            [("order", identity.order, LANCEDB)],
            'A StreamingDataset has the order "lancedb" only: make the stream with it from its first step on',
        )
    if parsed.partial is not None:
        raise StateError(
            f"the state was taken {parsed.partial.rows} rows into a cycle: take it at a step whose global batch is a multiple "
            f"of num_splits={identity.num_splits}"
        )
    if any(hi > cycle for _, hi in skipped_in(parsed.skipped, parsed.epoch)) or any(
        epoch > parsed.epoch for epoch, _, _ in parsed.skipped
    ):
        raise StateError(
            "the stream skips steps that are still to come, which a StreamingDataset would deliver: take the state behind the "
            "last skipped step"
        )
    return {
        "shuffle_seed": identity.shuffle_seed,
        "num_splits": identity.num_splits,
        "epoch": parsed.epoch,
        SAMPLES: [cycle] * identity.num_splits,
        POSITIONS: [cycle] * identity.num_splits,
    }


def _check_fields(state: Mapping[str, Any]) -> None:
    missing = sorted(_FIELDS - set(state))
    unknown = sorted(shown(name) for name in set(state) - _FIELDS - {POSITIONS})
    if missing or unknown:
        raise StateError(
            f"the state of a StreamingDataset has the fields {sorted(_FIELDS)}; missing {missing}, "
            f"unknown [{', '.join(unknown)}]"
        )
    for name in ("shuffle_seed", "num_splits", "epoch"):
        if not _is_count(state[name]):
            raise StateError(
                f"field {name!r} of the state of a StreamingDataset must be an int >= 0, got {shown(state[name])}"
            )


def _per_split(state: Mapping[str, Any], name: str) -> list[int]:
    """One count per split; older releases wrote one number for all."""
    value = state[name]
    counts = [value] * state["num_splits"] if _is_count(value) else value
    is_list = isinstance(counts, Sequence) and not isinstance(counts, str)
    if not is_list or len(counts) != state["num_splits"] or not counts or not all(map(_is_count, counts)):
        raise StateError(
            f"field {name!r} of the state of a StreamingDataset must hold one int >= 0 for each of its "
            f"{state['num_splits']} splits, got {shown(value)[:80]}"
        )
    return list(counts)


def _is_count(value: object) -> bool:
    return bool(is_whole(0)(value))
