"""Checkpoints of a Ray Train run: `report()`, the state file inside a checkpoint, and where an attempt started from."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray.train
from pyarrow import fs as pafs

from ray_lance_stream._ray import attempt_key, in_train_worker
from ray_lance_stream.errors import ConfigError, StateError
from ray_lance_stream.failures import redact, secrets_of
from ray_lance_stream.state import StreamState, dump_states, parse_states
from ray_lance_stream.table import public_uri

if TYPE_CHECKING:
    from ray_lance_stream.attempts import Attempt
    from ray_lance_stream.integrations.tracked import TrackedBatches
    from ray_lance_stream.shard import StreamShard

STATE_FILE = "ray_lance_stream.json"

_shards: weakref.WeakValueDictionary[str, StreamShard] = weakref.WeakValueDictionary()  # the newest of each name
_tracked: weakref.WeakValueDictionary[str, TrackedBatches] = weakref.WeakValueDictionary()  # by name of the stream
_started_from: dict[int, ray.train.Checkpoint | None] = {}


def register(shard: StreamShard) -> bool:
    """Let `report` save the state of a shard that arrived in this process; returns whether a training function runs."""
    _shards[shard.name] = shard
    attempt_checkpoint()
    return attempt_key() is not None


def track(batches: TrackedBatches) -> None:
    """Let `report` save the position of what was trained of a shard, where a framework receives more than that."""
    _tracked[batches.shard.name] = batches


def attempt_checkpoint() -> ray.train.Checkpoint | None:
    """The checkpoint that this attempt started from, never one that it reported itself; None outside of an attempt.

    `ray.train.get_checkpoint()` moves on with each report, so the first answer in an attempt is kept. It is asked when
    the first shard arrives and before the first report.
    """
    key = attempt_key()
    if key is None:
        return None
    if key not in _started_from:
        _started_from[key] = ray.train.get_checkpoint()
    return _started_from[key]


def check_worker_group(attempt: Attempt, rank: int) -> None:
    """Refuse a shard that was split for other workers than those of this group.

    Ray Train's TorchFT replacements split the stream anew over the replaced workers alone.

    Raises:
        ConfigError: names both worlds.
    """
    if not attempt.split_for_train or attempt_key() is None:
        return
    context = ray.train.get_context()
    here = (context.get_world_rank(), context.get_world_size())
    if here != (rank, attempt.world_size):
        raise ConfigError(
            f"a stream is split over all workers of a group, but rank {here[0]} of {here[1]} got the share of rank {rank} of "
            f"{attempt.world_size}: replacing some workers of a running group (TorchFT) is not supported; let the group "
            "restart from its checkpoint, and name ranks that share rows with lance_stream(..., replicas=r)"
        )


def run_name() -> str:
    """Name of the Ray Train run that this process works for; "" outside of one."""
    return str(ray.train.get_context().get_experiment_name() or "") if in_train_worker() else ""


def report(metrics: dict[str, Any], checkpoint: ray.train.Checkpoint | None = None, **kwargs: Any) -> None:
    """`ray.train.report`, with the state of every shard of this worker saved into the checkpoint.

    Call it where you would call `ray.train.report`: on every rank, with a checkpoint on those that save one.

    Args:
        metrics: as `ray.train.report`.
        checkpoint: as `ray.train.report`; the file ray_lance_stream.json is written into it.
        kwargs: as `ray.train.report`.
    """
    started_from = attempt_checkpoint()
    if checkpoint is not None:
        states = {} if started_from is None else dict(read_states(started_from) or {})
        states.update(live_states())
        write_states(checkpoint, states)
    ray.train.report(metrics, checkpoint=checkpoint, **kwargs)


def live_states() -> dict[str, StreamState]:
    """The state of each shard of this process that can be resumed, by stream name."""
    return {shard.name: _trained_state(shard) for shard in list(_shards.values()) if not shard.evaluation}


def _trained_state(shard: StreamShard) -> StreamState:
    batches = _tracked.get(shard.name)
    return shard.state() if batches is None or batches.shard is not shard else batches.state()


def write_states(checkpoint: ray.train.Checkpoint, states: Mapping[str, StreamState]) -> None:
    """Write the state file into a checkpoint; nothing where there is no state."""
    if not states:
        return
    with _filesystem(checkpoint).open_output_stream(_state_path(checkpoint)) as stream:
        stream.write(dump_states(states).encode())


def read_states(checkpoint: ray.train.Checkpoint) -> dict[str, StreamState] | None:
    """The states in a checkpoint by stream name; None where it holds no state file. Reads that file only.

    Raises:
        StateError: the file is truncated or malformed.
    """
    path = _state_path(checkpoint)
    if _filesystem(checkpoint).get_file_info(path).type == pafs.FileType.NotFound:
        return None
    with _filesystem(checkpoint).open_input_stream(path) as stream:
        return parse_states(stream.read().decode(errors="replace"))  # what is no text is no JSON either, and said so


def save_state_file(directory: str | os.PathLike[str], name: str, state: StreamState) -> None:
    """Write a state into a directory that is to become a checkpoint, beside those of other streams."""
    checkpoint = ray.train.Checkpoint.from_directory(os.fspath(directory))
    write_states(checkpoint, {**(read_states(checkpoint) or {}), name: state})


def state_in(checkpoint: ray.train.Checkpoint, name: str) -> StreamState | None:
    """The state of stream `name` in a checkpoint; None where it holds only states of other streams.

    Raises:
        StateError: the checkpoint holds no stream state at all.
    """
    states = read_states(checkpoint)
    if states is None:
        raise StateError(
            f"the checkpoint {checkpoint.path} holds no stream state ({STATE_FILE}), so the rows that its model has seen "
            "are unknown; save checkpoints with ray_lance_stream.report(metrics, checkpoint=...) or put the state in with "
            'shard.save_state(directory), or pass resume="manual" to lance_stream to start from the beginning'
        )
    return states.get(name)


def resume_states(source: Any) -> dict[str, StreamState]:
    """What `resume_from=` names (a state dict, a `ray.train.Checkpoint` or its path) by stream name; "": any stream.

    Raises:
        StateError: no state there.
    """
    if isinstance(source, Mapping):
        return {"": StreamState.from_dict(source)}
    if not isinstance(source, ray.train.Checkpoint) and isinstance(source, (str, os.PathLike)):
        source = _checkpoint_at(os.fspath(source))
    if not isinstance(source, ray.train.Checkpoint):
        raise StateError(
            f"resume_from must be a ray.train.Checkpoint, its path or a state dict, got {type(source).__name__}"
        )
    states = read_states(source)
    if not states:
        raise StateError(
            f"resume_from: {source.path} holds no stream state ({STATE_FILE}); save checkpoints with "
            "ray_lance_stream.report(metrics, checkpoint=...) or shard.save_state(directory)"
        )
    return states


def _checkpoint_at(path: Any) -> ray.train.Checkpoint:
    """The checkpoint at a path, which may be relative, or at a URI."""
    if not path or not isinstance(path, str):
        raise StateError(f"resume_from must be the path of a checkpoint, got {path!r}; pass None to start anew")
    if "://" not in path:
        return ray.train.Checkpoint.from_directory(os.path.abspath(os.path.expanduser(path)))
    try:
        return ray.train.Checkpoint(path)
    except (pa.ArrowInvalid, OSError) as error:
        why = redact(str(error), secrets_of(path, None))
        raise StateError(f"resume_from: no checkpoint can be opened at {public_uri(path)}: {why}") from None


def _state_path(checkpoint: ray.train.Checkpoint) -> str:
    return f"{checkpoint.path.rstrip('/')}/{STATE_FILE}"


def _filesystem(checkpoint: ray.train.Checkpoint) -> pafs.FileSystem:
    assert checkpoint.filesystem is not None  # set by Checkpoint itself
    return checkpoint.filesystem
