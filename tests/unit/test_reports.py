"""`ray.train.report` in a worker that has a shard, on Ray's own contexts without a cluster: what it saves, and where."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.execution import context as ray_context
from ray.train.v2._internal.execution import train_fn_utils
from ray.train.v2._internal.execution.storage import StorageContext

import ray_lance_stream
from ray_lance_stream import IterationError, StateError, train
from ray_lance_stream.state import StreamState
from tests.unit.test_state import STATE

SYNC, ASYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD


class Shard:
    """What reports need of a shard."""

    def __init__(self, name: str = "train", cycle: int = 5, resume: str = "auto", evaluation: bool = False) -> None:
        self.name, self.cycle, self.resume, self.evaluation = name, cycle, resume, evaluation
        self.is_known = True

    def state(self) -> StreamState:
        if not self.is_known:
            raise IterationError("where the loop is cannot be known")
        return at(self.cycle)


def at(cycle: int) -> StreamState:
    return replace(STATE, epoch=0, samples_consumed_per_split=cycle, partial=None)


class Worker:
    """One attempt of a run in this process: Ray's own context, with nobody to synchronise with."""

    def __init__(self, folder: Path, checkpoint: Checkpoint | None = None) -> None:
        self.folder = folder
        self._names = iter(f"checkpoint-{number}" for number in range(100))
        self.storage = folder / "runs" / "run"
        self.results: Queue[Any] = Queue()
        self.context = ray_context.TrainContext(
            train_run_context=SimpleNamespace(run_config=SimpleNamespace(name="run")),  # type: ignore[arg-type]
            distributed_context=ray_context.DistributedContext(0, 1, 0, 1, 0),
            execution_context=ray_context.ExecutionContext(None, self.results, None, []),  # type: ignore[arg-type]
            storage_context=StorageContext(str(folder / "runs"), "run"),
            preemption_context=None,  # type: ignore[arg-type]
            controller_actor=None,  # type: ignore[arg-type]
            dataset_shard_provider=None,  # type: ignore[arg-type]
            checkpoint=checkpoint,
        )
        self.context._sync_checkpoint_dir_name_across_ranks = lambda name=None: (  # type: ignore[method-assign]
            name or f"{folder.name}-{next(self._names)}"
        )
        train_fn_utils.set_train_fn_utils(train_fn_utils.DistributedTrainFnUtils())
        ray_context.set_train_context(self.context)

    def reported(self) -> Checkpoint:
        """The next checkpoint that the controller is told of."""
        checkpoint = self.results.get(timeout=30).checkpoint
        assert Path(checkpoint.path).is_relative_to(self.storage)
        return checkpoint


@pytest.fixture(autouse=True)
def _no_run(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(train, "_attempt", None)
    train._shards.clear()
    train._saved.clear()
    yield
    _alive.clear()
    train_fn_utils.set_train_fn_utils(None)
    ray_context.set_train_context(None)


@pytest.fixture
def worker(tmp_path) -> Worker:
    return Worker(tmp_path)


_alive: list[Shard] = []  # as in a worker, where Ray keeps them


def arrived(*shards: Shard) -> Any:
    for shard in shards:
        _alive.append(shard)
        train.register(shard)  # type: ignore[arg-type]
    return shards[0]


def model(folder: Path, text: str = "weights") -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").write_text(text)
    return Checkpoint.from_directory(str(folder))


def cycles(checkpoint: Checkpoint) -> dict[str, int]:
    states = train.read_states(checkpoint)
    assert states is not None
    return {name: state.samples_consumed_per_split for name, state in states.items()}


def persisted_before(tmp_path: Path, **states: int) -> Checkpoint:
    """A checkpoint of an attempt before."""
    checkpoint = model(tmp_path / "runs" / "run" / "before", "old weights")
    if states:
        train.write_states(checkpoint, {name: at(cycle) for name, cycle in states.items()})
    return checkpoint


def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """A `checkpoint_upload_fn`."""
    folder = ray.train.get_context().get_storage().experiment_fs_path + "/mine-" + name
    return Checkpoint.from_directory(shutil.copytree(checkpoint.path, folder))


# ---- any report saves the position


@pytest.mark.parametrize("report", [ray.train.report, ray_lance_stream.report])
@pytest.mark.parametrize("options", [{}, {"checkpoint_upload_mode": ASYNC}, {"checkpoint_upload_fn": upload}])
def test_each_kind_of_upload_holds_the_position_of_the_call(worker, tmp_path, monkeypatch, report, options) -> None:
    shard = arrived(Shard(cycle=5), Shard("val", evaluation=True), Shard("own", cycle=2, resume="manual"))
    writes, may_upload = [], threading.Event()
    write = train.write_states
    monkeypatch.setattr(train, "write_states", lambda *args: writes.append(args) or write(*args))
    persist = worker.context.storage_context.persist_current_checkpoint
    monkeypatch.setattr(
        worker.context.storage_context,
        "persist_current_checkpoint",
        lambda *args: may_upload.wait(30) and persist(*args),
    )
    if options.get("checkpoint_upload_mode") != ASYNC:
        may_upload.set()
    given = model(tmp_path / "given")
    report({"loss": 1.0}, checkpoint=given, **options)
    shard.cycle = 7
    may_upload.set()
    checkpoint = worker.reported()
    assert cycles(checkpoint) == {"train": 5, "own": 2}
    assert Path(checkpoint.path, "model").read_text() == "weights"
    assert len(writes) == 1
    assert not (tmp_path / "given" / train.STATE_FILE).exists()
    assert (tmp_path / "given").exists() == (options.get("checkpoint_upload_mode") != ASYNC)  # Ray deletes it then


def test_a_checkpoint_that_its_owner_has_uploaded(worker) -> None:
    arrived(Shard(cycle=5))
    given = model(worker.storage / "uploaded")
    ray.train.report({}, checkpoint=given, checkpoint_upload_mode=NO_UPLOAD)
    checkpoint = worker.reported()
    assert checkpoint.path == given.path
    assert cycles(checkpoint) == {"train": 5}


def test_an_old_checkpoint_is_uploaded_after_all(worker, tmp_path) -> None:
    """Of an attempt before the last, which this one knows nothing of but that it holds another position."""
    arrived(Shard(cycle=5))
    old = persisted_before(tmp_path, train=3)
    ray.train.report({}, checkpoint=old, checkpoint_upload_mode=NO_UPLOAD)
    checkpoint = worker.reported()
    assert checkpoint.path != old.path
    assert (cycles(checkpoint), cycles(old)) == ({"train": 5}, {"train": 3})
    shared = persisted_before(tmp_path, train=5)  # by another rank, in this report
    ray.train.report({}, checkpoint=shared, checkpoint_upload_mode=NO_UPLOAD)
    assert worker.reported().path == shared.path


def test_a_report_without_a_checkpoint_asks_no_shard(worker) -> None:
    arrived(Shard()).is_known = False
    ray.train.report({"loss": 1.0})
    assert worker.results.get(timeout=30).checkpoint is None


def test_a_position_that_cannot_be_known(worker, tmp_path, caplog) -> None:
    """An error, unless its owner has said that he takes care of it: then nothing old is saved either."""
    worker = Worker(tmp_path, persisted_before(tmp_path, train=3, own=4))
    shard, own = Shard(), Shard("own", resume="manual")
    arrived(shard, own)
    own.is_known = False
    with caplog.at_level(logging.WARNING, "ray_lance_stream"):
        for number in range(2):
            ray.train.report({}, checkpoint=model(tmp_path / f"given-{number}"))
    assert cycles(worker.reported()) == {"train": 5}
    assert caplog.text.count('no state of a stream with resume="manual" is saved: where the loop is cannot') == 1
    shard.is_known = False
    with pytest.raises(IterationError, match="where the loop is cannot be known"):
        ray.train.report({}, checkpoint=model(tmp_path / "given"))


def test_the_next_attempt_has_a_hook_of_its_own(worker, tmp_path) -> None:
    arrived(Shard(cycle=1), Shard("aux", cycle=2))
    report = worker.context.report
    arrived(Shard("more"))
    assert worker.context.report is report
    second = Worker(tmp_path)
    assert "report" not in vars(second.context)
    arrived(Shard(cycle=3))
    ray.train.report({}, checkpoint=model(tmp_path / "given"))
    assert cycles(second.reported()) == {"train": 3}


@pytest.mark.parametrize("how", ["other arguments", "no such method"])
def test_another_ray_is_told(worker, tmp_path, monkeypatch, caplog, how) -> None:
    """No error: plain reports go through, and our own saves the position."""
    original = ray_context.TrainContext.report
    if how == "other arguments":
        monkeypatch.setattr(ray_context.TrainContext, "report", lambda self, *args: original(self, *args))
    else:
        monkeypatch.delattr(ray_context.TrainContext, "report")
        monkeypatch.setattr(
            train_fn_utils.DistributedTrainFnUtils, "report", lambda self, **kwargs: original(worker.context, **kwargs)
        )
    with caplog.at_level(logging.WARNING, "ray_lance_stream"):
        alive = arrived(Shard(cycle=5))
    assert f"plain ray.train.report of Ray {ray.__version__} does not save the positions of streams" in caplog.text
    ray.train.report({}, checkpoint=model(tmp_path / "plain"))
    assert train.read_states(worker.reported()) is None
    ray_lance_stream.report({}, checkpoint=model(tmp_path / "ours"))
    assert cycles(worker.reported()) == {"train": alive.cycle}


# ---- where an attempt started from


def test_what_an_attempt_started_from_may_be_deleted(tmp_path) -> None:
    """B53: `num_to_keep=1`; streams that are asked for later still start there, and stay in each new checkpoint."""
    before = persisted_before(tmp_path, train=3, aux=4)
    worker = Worker(tmp_path, before)
    train_shard = arrived(Shard(cycle=5))
    shutil.rmtree(before.path)
    for number in range(2):
        ray.train.report({}, checkpoint=model(tmp_path / f"given-{number}"))
        assert cycles(worker.reported()) == {"train": 5, "aux": 4}
    attempt = train.current_attempt()
    assert attempt is not None
    assert attempt.start_of("aux") == at(4)
    assert attempt.start_of("other") is None
    aux = arrived(Shard("aux", cycle=9))
    ray.train.report({}, checkpoint=model(tmp_path / "given"))
    assert cycles(worker.reported()) == {"train": train_shard.cycle, "aux": aux.cycle}


@pytest.mark.parametrize("text", [None, "{"])
def test_a_start_without_states_stops_who_needs_one(tmp_path, text) -> None:
    before = persisted_before(tmp_path)
    if text is not None:
        Path(before.path, train.STATE_FILE).write_text(text)
    worker = Worker(tmp_path, before)
    own = arrived(Shard("own", cycle=2, resume="manual"))
    attempt = train.current_attempt()
    assert attempt is not None
    with pytest.raises(StateError, match=r"holds no stream state.*resume=\"manual\"|is it truncated"):
        attempt.start_of("train")
    ray.train.report({}, checkpoint=model(tmp_path / "given"))
    assert cycles(worker.reported()) == {"own": own.cycle}


# ---- checkpoints that have a state, or a life of their own


@pytest.mark.parametrize("options", [{}, {"checkpoint_upload_mode": ASYNC}, {"checkpoint_upload_mode": NO_UPLOAD}])
@pytest.mark.parametrize("again", [lambda c: c, lambda c: Checkpoint.from_directory(c.path)])
def test_a_checkpoint_that_is_reported_again_is_copied(
    tmp_path, again: Callable[[Checkpoint], Checkpoint], options: dict[str, Any]
) -> None:
    """B58: both the one that was restored, and one that this attempt has reported itself."""
    before = persisted_before(tmp_path, train=3)
    worker = Worker(tmp_path, before)
    shard = arrived(Shard(cycle=5))
    for cycle in (5, 6, 7):
        shard.cycle = cycle
        old = ray.train.get_checkpoint()
        files = {path: path.read_bytes() for path in Path(old.path).iterdir()}
        ray.train.report({}, checkpoint=again(old), **options)
        new = worker.reported()
        assert new.path != old.path
        assert cycles(new) == {"train": cycle}
        assert Path(new.path, "model").read_text() == "old weights"
        assert {path: path.read_bytes() for path in Path(old.path).iterdir()} == files


def test_a_copy_of_an_old_checkpoint_gets_the_new_position(tmp_path) -> None:
    before = persisted_before(tmp_path, train=3, gone=1)
    worker = Worker(tmp_path)
    arrived(Shard(cycle=5))
    given = Path(shutil.copytree(before.path, tmp_path / "given"))
    ray.train.report({}, checkpoint=model(given, "new weights"))
    assert cycles(worker.reported()) == {"train": 5}
    assert cycles(before) == {"train": 3, "gone": 1}


@pytest.mark.parametrize("mode", [SYNC, NO_UPLOAD])
def test_a_state_that_was_put_there_is_kept(worker, tmp_path, mode) -> None:
    """Until it is reported once more: then the position is that of the report. The others are those of the report, too."""
    shard = arrived(Shard(cycle=5), Shard("aux", cycle=2))
    model(tmp_path / "given")
    train.save_state_file(tmp_path / "given", "train", shard.state())
    given = Checkpoint.from_directory(shutil.copytree(tmp_path / "given", worker.storage / "sent"))
    shard.cycle = 8
    ray.train.report({}, checkpoint=given, checkpoint_upload_mode=mode)
    checkpoint = worker.reported()
    assert cycles(checkpoint) == {"train": 5, "aux": 2}
    ray.train.report({}, checkpoint=checkpoint)
    assert cycles(worker.reported()) == {"train": 8, "aux": 2}


# ---- local runs


def local_run() -> Any:
    run = train_fn_utils.LocalTrainFnUtils("run")
    train_fn_utils.set_train_fn_utils(run)
    return run


def test_a_local_run_saves_too(tmp_path) -> None:
    """Nothing is persisted there: a folder that is written again is reported as it is, an old checkpoint as a copy."""
    local_run()
    shard = arrived(Shard(cycle=5))
    for cycle in (5, 6):
        shard.cycle = cycle
        given = model(tmp_path / "given", f"weights {cycle}")
        ray.train.report({}, checkpoint=given)
        assert ray.train.get_checkpoint().path == given.path
        assert cycles(given) == {"train": cycle}
    other = local_run()
    shard = arrived(Shard(cycle=9))
    assert train.live_states() == {"train": at(9)}
    ray_lance_stream.report({}, checkpoint=given)
    assert other.get_checkpoint().path != given.path
    assert cycles(other.get_checkpoint()) == {"train": shard.cycle}
    assert Path(other.get_checkpoint().path, "model").read_text() == "weights 6"
    assert cycles(given) == {"train": 6}
    folder = tmp_path / "saved"
    model(folder)
    train.save_state_file(folder, "train", at(4))
    ray.train.report({}, checkpoint=Checkpoint.from_directory(str(folder)))
    assert other.get_checkpoint().path == str(folder)
    assert cycles(other.get_checkpoint()) == {"train": 4}


# ---- frameworks


def called_from(module: str, function: Callable[[], None]) -> None:
    """Call a function from a module of this name."""
    names: dict[str, Any] = {"__name__": module}
    exec("def call(function):\n    function()", names)
    names["call"](function)


@pytest.mark.parametrize(
    ("module", "framework"),
    [
        ("pytorch_lightning.trainer.call", "lightning"),
        ("lightning.pytorch.loops.fit_loop", "lightning"),
        ("transformers.trainer", "transformers"),
        ("lightning.fabric.fabric", None),
        ("transformers.trainer_utils", None),
    ],
)
def test_batches_that_a_framework_fetches_ahead_are_told_once(worker, tmp_path, caplog, module, framework) -> None:
    shard = arrived(Shard(cycle=0))
    with caplog.at_level(logging.WARNING, "ray_lance_stream"):
        called_from(module, lambda: ray.train.report({}, checkpoint=model(tmp_path / "given")))
        assert caplog.text == ""
        for _ in range(2):
            shard.cycle += 5
            called_from(module, lambda: ray.train.report({}, checkpoint=model(tmp_path / "given")))
    told = f"{framework} fetches batches of stream 'train' before it trains them"
    assert caplog.text.count("fetches batches of") == (framework is not None)
    assert framework is None or told in caplog.text


def test_batches_that_nobody_tells_of_are_told_once(worker, tmp_path, caplog) -> None:
    shard = arrived(Shard(cycle=5))
    batches = SimpleNamespaceWithWeakref(shard=shard, is_untold=True, state=lambda: at(0))
    train.track(batches)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "ray_lance_stream"):
        for number in range(2):
            called_from(
                "transformers.trainer", lambda n=number: ray.train.report({}, checkpoint=model(tmp_path / f"given-{n}"))
            )
    assert caplog.text.count("of its TrackedBatches were handed out and none was told to be trained") == 1
    assert "fetches batches of" not in caplog.text
    assert cycles(worker.reported()) == {"train": 0}


class SimpleNamespaceWithWeakref(SimpleNamespace):
    """A SimpleNamespace that a weak dictionary can hold."""
