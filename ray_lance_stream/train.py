"""Checkpoints of a Ray Train run: reports save the position, the state file, and where an attempt started from."""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.train
from pyarrow import fs as pafs
from ray.train import CheckpointUploadMode

from ray_lance_stream._ray import attempt_context, change_reports, in_train_worker, local_run, persist
from ray_lance_stream.errors import ConfigError, IterationError, StateError
from ray_lance_stream.failures import redact, secrets_of
from ray_lance_stream.state import StreamState, dump_states, parse_states
from ray_lance_stream.table import public_uri

if TYPE_CHECKING:
    from ray_lance_stream.attempts import Attempt
    from ray_lance_stream.integrations.tracked import TrackedBatches
    from ray_lance_stream.shard import StreamShard

logger = logging.getLogger(__name__)

STATE_FILE = "ray_lance_stream.json"
HOW_TO_SAVE = (
    "save checkpoints with ray.train.report in a worker that has asked for its shard, with ray_lance_stream.report(metrics, "
    "checkpoint=...), or with shard.save_state(directory)"
)

# Frameworks that hold batches which they have not trained, by their modules.
FETCH_AHEAD = {
    "lightning": ("lightning.pytorch", "pytorch_lightning"),
    "transformers": ("transformers.trainer",),
}
FETCHED_AHEAD = (
    "%s fetches batches of stream %r before it trains them, so the position in its checkpoints may be ahead of the model, and "
    "a resume leave rows out: give it TrackedBatches(shard) and the StreamReportCallback of ray_lance_stream.integrations.%s"
)
UNTOLD = (
    "stream %r: batches of its TrackedBatches were handed out and none was told to be trained, so the saved position is that "
    "before them: give the framework the callback of ray_lance_stream.integrations with these batches"
)

_shards: weakref.WeakValueDictionary[str, StreamShard] = weakref.WeakValueDictionary()  # the newest of each name
_tracked: weakref.WeakValueDictionary[str, TrackedBatches] = weakref.WeakValueDictionary()  # by name of the stream
_saved: deque[tuple[str, StreamState]] = deque(maxlen=100)  # by `save_state`, and in no reported checkpoint yet
_attempt: RunAttempt | None = None
_beginning = threading.Lock()


class RunAttempt:
    """The attempt, or local run, whose training function this process runs: what it started from, and its reports.

    Attributes:
        is_hooked: whether plain `ray.train.report` saves states.
        started_from: path of the checkpoint that it started from; None: it started anew.
        persisted: paths of checkpoints that lie in storage, as far as this process knows them.

    Args:
        run: what Ray has for it; lives as long.
    """

    def __init__(self, run: Any) -> None:
        self._run = weakref.ref(run)
        self._states: dict[str, StreamState] | None = None
        self._error: Exception | None = None
        self._warned: set[str] = set()
        checkpoint = None if local_run() is not None else ray.train.get_checkpoint()
        self.started_from = None if checkpoint is None else checkpoint.path
        self.persisted: set[str] = set()
        if checkpoint is not None:
            self.persisted.add(checkpoint.path)
            self._read(checkpoint)
        self.is_hooked = change_reports(with_states)
        if not self.is_hooked:
            logger.warning(
                "plain ray.train.report of Ray %s does not save the positions of streams: call ray_lance_stream.report in its "
                "place, or put them into the checkpoint with shard.save_state(directory)",
                ray.__version__,
            )

    def is_of(self, run: Any) -> bool:
        """Whether this is the attempt that Ray has `run` for."""
        return self._run() is run

    def _read(self, checkpoint: ray.train.Checkpoint) -> None:
        """Read the states once, since Ray may delete the checkpoint while the attempt runs (`num_to_keep`)."""
        try:
            self._states = read_states(checkpoint)
        except Exception as error:  # for who needs a state; streams with resume="manual" need none
            self._error = error
            logger.warning("the stream states in the checkpoint %s cannot be read", checkpoint.path)

    @property
    def states(self) -> dict[str, StreamState]:
        """The states in the checkpoint that the attempt started from, by stream name; empty where there are none."""
        return dict(self._states or {})

    def start_of(self, name: str) -> StreamState | None:
        """Where stream `name` starts; None where the checkpoint holds only states of other streams.

        Raises:
            StateError: the checkpoint holds no stream state at all.
        """
        if self._error is not None:
            raise self._error
        if self._states is None:
            raise _no_state_in(self.started_from)
        return self._states.get(name)

    def warn_once(self, message: str, *args: Any) -> None:
        """Log a warning that every report would repeat."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *args)


def register(shard: StreamShard) -> bool:
    """Have reports save the state of a shard that arrived in this process; returns whether a training function runs."""
    attempt = current_attempt()
    _shards[shard.name] = shard
    return attempt is not None and local_run() is None


def track(batches: TrackedBatches) -> None:
    """Have reports save the position of what was trained of a shard, where a framework receives more than that."""
    _tracked[batches.shard.name] = batches


def current_attempt() -> RunAttempt | None:
    """The attempt, or local run, whose training function this process runs; None outside of one.

    It begins when this is first asked: when the first shard arrives, or at the first `ray_lance_stream.report`.
    `ray.train.get_checkpoint()` would name what the attempt itself has reported later.
    """
    global _attempt
    run = local_run()
    run = attempt_context() if run is None else run
    if run is None:
        return None
    with _beginning:
        if _attempt is None or not _attempt.is_of(run):
            _shards.clear()  # of the local run before
            _attempt = RunAttempt(run)
        return _attempt


def check_worker_group(attempt: Attempt, rank: int) -> None:
    """Refuse a shard that was split for other workers than those of this group.

    Ray Train's TorchFT replacements split the stream anew over the replaced workers alone.

    Raises:
        ConfigError: names both worlds.
    """
    if not attempt.split_for_train or attempt_context() is None:
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
    """`ray.train.report`, which saves the position of every stream into the checkpoint.

    Plain `ray.train.report` does the same in a worker that has a shard.

    Call it where you would call `ray.train.report`: on every rank, with a checkpoint on those that save one.

    Args:
        metrics: as `ray.train.report`.
        checkpoint: as `ray.train.report`; what is persisted of it holds the file ray_lance_stream.json.
        kwargs: as `ray.train.report`.
    """
    attempt = current_attempt()
    arguments = {"metrics": metrics, "checkpoint": checkpoint, **kwargs}
    ray.train.report(**(with_states(arguments) if attempt is not None and not attempt.is_hooked else arguments))


def with_states(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a report whose checkpoint holds the states of this worker's streams, as they are now.

    Ray persists a copy of what is reported, and the copy gets the states: the original may be a checkpoint that was
    restored, or anybody's. Where Ray makes none, the checkpoint itself gets them, unless it was reported before.
    """
    attempt, checkpoint = current_attempt(), arguments["checkpoint"]
    if attempt is None or checkpoint is None:
        return arguments
    kept = _kept_states(checkpoint)
    states = _states_to_save(attempt, kept)
    if not states:
        return arguments
    if local_run() is not None:
        return {**arguments, "checkpoint": _with_state_file(checkpoint, states, is_new=bool(kept))}
    changed, upload = dict(arguments), arguments.get("checkpoint_upload_fn") or persist
    is_persisted = checkpoint.path in attempt.persisted
    if is_persisted:
        changed["delete_local_checkpoint_after_upload"] = False
    if arguments.get("checkpoint_upload_mode") == CheckpointUploadMode.NO_UPLOAD:
        found = {} if kept else _states_in(checkpoint)
        if not is_persisted and found in ({}, states):  # another rank may have put its states there
            attempt.persisted.add(checkpoint.path)
            write_states(checkpoint, states)
            return arguments
        changed["checkpoint_upload_mode"], upload = CheckpointUploadMode.SYNC, persist

    def upload_with_states(given: ray.train.Checkpoint, directory_name: str) -> ray.train.Checkpoint:
        persisted = upload(given, directory_name)
        if isinstance(persisted, ray.train.Checkpoint):  # else Ray says what it must be
            attempt.persisted.add(persisted.path)
            write_states(persisted, states)
        return persisted

    changed["checkpoint_upload_fn"] = upload_with_states
    return changed


def _kept_states(checkpoint: ray.train.Checkpoint) -> dict[str, StreamState]:
    """The states that `save_state` has put into a checkpoint; others there are of checkpoints that this is a copy of."""
    found = _states_in(checkpoint) if _saved else {}
    kept = {name: state for name, state in found.items() if (name, state) in _saved}
    for saved in kept.items():
        _saved.remove(saved)  # when it is reported once more, its model is not that of this position
    return kept


def _states_in(checkpoint: ray.train.Checkpoint) -> dict[str, StreamState]:
    """The states in a checkpoint; none where its file is malformed, since a rank may be about to write it."""
    try:
        return read_states(checkpoint) or {}
    except StateError:
        return {}


def _with_state_file(checkpoint: ray.train.Checkpoint, states: Mapping[str, StreamState], is_new: bool) -> Any:
    """The checkpoint with these states, or a copy where it was reported as it is before: nothing in it is newer than its state.

    For local runs, which persist nothing.
    """
    if not is_new:
        files = _filesystem(checkpoint).get_file_info(pafs.FileSelector(checkpoint.path, recursive=True))
        saved_ns = [file.mtime_ns for file in files if file.base_name == STATE_FILE]
        if saved_ns and max(file.mtime_ns for file in files if file.type == pafs.FileType.File) <= max(saved_ns):
            directory = tempfile.mkdtemp(prefix="ray-lance-stream-")
            checkpoint = ray.train.Checkpoint.from_directory(checkpoint.to_directory(directory))
    write_states(checkpoint, states)
    return checkpoint


def live_states() -> dict[str, StreamState]:
    """The state of each shard of this process that can be resumed, by stream name."""
    return {shard.name: _trained_state(shard) for shard in list(_shards.values()) if not shard.evaluation}


def _trained_state(shard: StreamShard) -> StreamState:
    batches = _batches_of(shard)
    return shard.state() if batches is None else batches.state()


def _batches_of(shard: StreamShard) -> TrackedBatches | None:
    batches = _tracked.get(shard.name)
    return None if batches is None or batches.shard is not shard else batches


def _states_to_save(attempt: RunAttempt, kept: Mapping[str, StreamState]) -> dict[str, StreamState]:
    """What a checkpoint records now: streams that this attempt has not used yet keep the state that they had."""
    states, framework = {**attempt.states, **kept}, _framework()
    for shard in list(_shards.values()):
        if shard.evaluation or shard.name in kept:
            continue
        batches = _batches_of(shard)
        if batches is not None and batches.is_untold:
            attempt.warn_once(UNTOLD, shard.name)
        try:
            state = states[shard.name] = _trained_state(shard)
        except IterationError as error:
            if shard.resume == "auto":
                raise
            states.pop(shard.name, None)
            attempt.warn_once('no state of a stream with resume="manual" is saved: %s', error)
            continue
        if batches is None and framework is not None and (state.epoch or state.samples_consumed_per_split):
            attempt.warn_once(FETCHED_AHEAD, framework, shard.name, framework)
    return states


def _framework() -> str | None:
    """The framework that runs the training loop which this call comes from, if it fetches batches ahead."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        for framework, modules in FETCH_AHEAD.items():
            if any(module == name or module.startswith(f"{name}.") for name in modules):
                return framework
        frame = frame.f_back
    return None


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
    _saved.append((name, state))


def _no_state_in(path: str | None) -> StateError:
    return StateError(
        f"the checkpoint {path} holds no stream state ({STATE_FILE}), so the rows that its model has seen are unknown; "
        f'{HOW_TO_SAVE}, or pass resume="manual" to lance_stream to start from the beginning'
    )


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
        raise StateError(f"resume_from: {source.path} holds no stream state ({STATE_FILE}); {HOW_TO_SAVE}")
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
