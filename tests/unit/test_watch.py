"""When a pass that waits says what it waits for, and when it gives a read up."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from ray_lance_stream import ConfigError, LanceStream, ReadError, TransformError, awaited, lance_stream, reader
from ray_lance_stream.attempts import Attempt
from ray_lance_stream.awaited import Block, ChunkOnItsWay
from ray_lance_stream.config import DEFAULT_READ_TIMEOUT_S, StreamConfig
from ray_lance_stream.cursor import ChunkSpan, EpochWalk, Position
from ray_lance_stream.doing import LOOKING_UP, QUEUED, READING, TRANSFORMING, Desk, Doing
from ray_lance_stream.line import ChunkLine, Sent
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.reader import ReadRequest, SplitReader, read_chunk
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.storage_options import _RETRIES
from ray_lance_stream.supply import PassReads
from ray_lance_stream.table import TableRef
from ray_lance_stream.watch import ANSWER_S, TELL_AGAIN_S, NoProgressError, ReadWatch
from tests.support import make_table


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Chunk:
    """What is waited for; its reader answers at once with `doing`, with silence or with its death."""

    def __init__(self, doing: Doing | None = None, limit: bool = True, dead: bool = False) -> None:
        self.doing, self.limit, self.dead = doing, limit, dead
        self.alive_calls = 0
        self.questions = 0

    def alive(self) -> None:
        self.alive_calls += 1

    def ask(self) -> Future[Doing] | None:
        self.questions += 1
        if not self.limit:
            return None
        answer: Future[Doing] = Future()
        if self.dead:
            answer.set_exception(ray.exceptions.RayActorError())
        elif self.doing is not None:
            answer.set_result(self.doing)
        return answer

    def has_limit(self) -> bool:
        return self.limit

    def text(self, doing: Doing | None) -> str:
        return f"a chunk ({doing})"


def config(**seconds: Any) -> StreamConfig:
    return StreamConfig(**{"read_timeout_s": 100.0, "stall_warn_s": 30.0, **seconds})


def wait(watch: ReadWatch, clock: Clock, until_s: float) -> list[tuple[float, str]]:
    """Look ten times a second; the text with which the read is given up, and when, if it is."""
    start_s = clock.now_s
    while clock.now_s < 1000.0 + until_s:
        clock.now_s = round(clock.now_s + 0.1, 1)
        try:
            watch.look()
        except NoProgressError as error:
            return [(round(clock.now_s - start_s, 1), str(error))]
    return []


def test_it_says_once_a_minute_what_it_waits_for(caplog):
    clock, chunk = Clock(), Chunk(Doing(TRANSFORMING, 3.0, False))
    watch = ReadWatch(chunk, config(), clock)
    assert wait(watch, clock, 29.9) == []
    assert caplog.messages == []
    assert chunk.questions == 0
    assert wait(watch, clock, 30 + 2 * TELL_AGAIN_S - 1) == []
    assert caplog.messages == [
        f"still waiting after {at} s for a chunk (has been transforming for 3 s)" for at in (30, 90)
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_the_coordinator_hears_that_the_rank_lives():
    clock, chunk = Clock(), Chunk()
    wait(ReadWatch(chunk, config(), clock), clock, 21)
    assert chunk.alive_calls == 4


@pytest.mark.parametrize(
    ("chunk", "at_s", "text"),
    [
        (Chunk(Doing(READING, 101.0, True)), 100.0, "no progress for 101 s of a chunk (has been reading for 101 s)"),
        (Chunk(None), 100.0 + ANSWER_S, "no progress for 105 s of a chunk (None)"),
        (Chunk(dead=True), 100.0, "no progress for 100 s of a chunk (None)"),
        (
            Chunk(Doing(QUEUED, 300.0, True)),
            100.0,
            "no progress for 300 s of a chunk (has not begun it, and has got on with",
        ),
    ],
    ids=["reads", "is silent", "is dead", "waits for reads that hang"],
)
def test_a_read_without_progress_is_given_up(chunk, at_s, text):
    clock = Clock()
    [(given_up_s, said)] = wait(ReadWatch(chunk, config(stall_warn_s=None), clock), clock, 500)
    assert given_up_s == at_s
    assert said.startswith(text)


@pytest.mark.parametrize(
    "doing",
    [Doing(TRANSFORMING, 900.0, False), Doing(LOOKING_UP, 900.0, False), Doing(QUEUED, 900.0, False), None],
    ids=["transforms", "scans", "waits for a transform", "is in a stage"],
)
def test_what_has_no_limit_is_waited_for(doing):
    clock = Clock()
    chunk = Chunk(doing, limit=doing is not None)
    assert wait(ReadWatch(chunk, config(), clock), clock, 500) == []
    assert chunk.questions > 3


def test_a_read_that_began_late_has_its_time():
    """Of 100 s, the read was 90 s in the queue of its reader: it is looked at again when its own time is over."""
    clock, chunk = Clock(), Chunk(Doing(READING, 10.0, True))
    watch = ReadWatch(chunk, config(stall_warn_s=None), clock)
    assert wait(watch, clock, 189) == []
    assert chunk.questions == 1
    chunk.doing = Doing(READING, 100.0, True)
    assert wait(watch, clock, 191) != []


def test_none_switches_off(caplog):
    clock, chunk = Clock(), Chunk(Doing(READING, 1e6, True))
    assert wait(ReadWatch(chunk, config(read_timeout_s=None, stall_warn_s=None), clock), clock, 1000) == []
    assert caplog.messages == []
    assert chunk.questions == 0


def test_the_default_leaves_lance_its_retries():
    """A read makes four series of requests, opening the table six (docs/object-storage.md)."""
    retry_s = float(_RETRIES["client_retry_timeout"])
    assert (4 + 6) * retry_s < DEFAULT_READ_TIMEOUT_S < 600


@pytest.mark.parametrize("name", ["read_timeout_s", "stall_warn_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "60", True, [1]], ids=repr)
def test_times_are_checked_on_the_driver(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be a number of seconds > 0, or None for no limit, got "):
        StreamConfig(**{name: value})


@pytest.mark.parametrize("value", [None, 1, 0.25])
def test_times_may_be_numbers_or_none(value):
    assert StreamConfig(read_timeout_s=value, stall_warn_s=value).read_timeout_s == value


# What a reader says


def test_a_desk_tells_the_step_of_each_read():
    clock = Clock()
    desk = Desk(clock)
    with desk.at("a") as tell:
        tell(LOOKING_UP)
        clock.now_s += 1
        tell(READING)
        clock.now_s += 5
        assert desk.doing("a") == Doing(READING, 5.0, True)
        assert desk.doing("b") == Doing(QUEUED, 5.0, True)
        tell(TRANSFORMING)
        clock.now_s += 2
        assert desk.doing("a") == Doing(TRANSFORMING, 2.0, False)
        assert desk.doing("b") == Doing(QUEUED, 2.0, False)
    clock.now_s += 3
    assert desk.doing("a") == desk.doing("b") == Doing(QUEUED, 3.0, True)


def test_a_desk_forgets_a_read_that_fails():
    desk = Desk()

    def fail() -> None:
        with desk.at("a") as tell:
            tell(READING)
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail()
    assert desk.doing("a").step == QUEUED


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> LanceStream:
    return lance_stream(make_table(tmp_path_factory.mktemp("watch") / "t", 48), num_splits=4, shuffle=False)


SPAN = ChunkSpan(0, 3, 0, 12, 12)


def test_reads_of_the_same_rows_do_not_hide_each_other(stream, monkeypatch):
    """Of a pass that was left and the next one over the same epoch, or of two runs on one reader."""
    plan = stream._plan
    walk = EpochWalk(plan.grid, SplitBlock(0, 4), Position(0))
    lists: Any = SimpleNamespace(again=lambda plan, epoch: plan)
    reads = PassReads(plan, walk, "stream 'eval', rank 0", None, lists)
    first, second, third = reads(SPAN), reads(SPAN), reads.again(SPAN)
    assert len({each.send_id for each in (first, second, third)}) == 3
    assert first == second == third
    assert len({hash(each) for each in (first, second, third)}) == len({str(first), str(second), str(third)}) == 1
    monkeypatch.setattr(reader, "keep_freed_memory", lambda: None)
    actor = SplitReader("t", plan.table)
    said: list[Doing] = []

    def doing(send_id: str) -> Any:
        said.append(actor.doing(send_id))
        return SimpleNamespace(future=Future)

    def read(request: ReadRequest, plan: Any, tell: Any) -> Any:
        tell(TRANSFORMING)
        if request is first:
            actor.read(second)
            sent: Any = SimpleNamespace(reader=SimpleNamespace(doing=SimpleNamespace(remote=doing)), steps_done=int)
            ChunkOnItsWay(ChunkLine(None, (), int), sent, first, "attempt 1 of 4").ask()  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "read_chunk", read)
    actor.read(first)
    assert [(each.step, each.has_limit) for each in said] == [(TRANSFORMING, False)]


def fail(batch: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    if np.isin(ids, batch["id"]).any():
        raise ValueError("bad row")
    return batch


@pytest.mark.parametrize("bad", [[5, 17], list(range(48))], ids=["replaced", "none stands in"])
def test_a_row_that_stands_in_is_read_under_the_limit_of_reads(stream, monkeypatch, bad):
    """In the reader, where what users write has none; so is the id that an error names."""
    told: list[str] = []
    read_at: list[str] = []
    take = TableRef.take

    def watched(self: TableRef, *args: Any) -> pa.Table:
        read_at.append(told[-1])
        return take(self, *args)

    monkeypatch.setattr(TableRef, "take", watched)
    mapped = stream.map_batches(fail, fn_args=[bad], on_transform_error="replace")
    request = ReadRequest(
        stream._plan, 0, SplitBlock(0, 4), ChunkSpan(0, 12, 0, 48, 48), stage=mapped._config.stages[0]
    )
    if len(bad) == 2:
        _, info = read_chunk(request, stream._plan.resolve(), told.append)
        assert [each.row for each in info.replaced] == bad
        assert len(read_at) == 3
    else:
        with pytest.raises(TransformError, match=r"\(id=0\), .* no row can stand in"):
            read_chunk(request, stream._plan.resolve(), told.append)
        assert len(read_at) == 13
    assert set(read_at) == {READING}
    assert told[1::2] == [TRANSFORMING] * len(read_at)


def test_the_first_import_of_ray_data_is_no_reading(stream, monkeypatch):
    """It takes seconds in a fresh reader, on a busy machine more than a short limit."""
    told: list[str] = []

    class Imported:
        @property
        def kept_chains(self) -> Any:
            imported_at.append(told[-1])
            return SimpleNamespace(of=lambda stage: SimpleNamespace(run=lambda table, info, *args: (table, info)))

    imported_at: list[str] = []
    monkeypatch.setitem(sys.modules, "ray_lance_stream.chain", Imported())
    stage = stream.map_batches(fail, fn_args=[[]])._config.stages[0]
    request = ReadRequest(stream._plan, 0, SplitBlock(0, 4), SPAN, stage=stage)
    read_chunk(request, stream._plan.resolve(), told.append)
    assert imported_at == [TRANSFORMING]


@pytest.mark.parametrize(
    ("workers", "made_by"),
    [
        ((), "actor reader"),
        ((None,), "a task of resize"),
        (("decoder", None), "a task of resize"),
        ((None, "decoder"), "actor decoder"),
    ],
)
def test_a_block_is_told_with_what_made_it(monkeypatch, workers, made_by):
    """The process of the last stage; that of a task is not known."""
    monkeypatch.setattr(awaited, "where_is", lambda actor: f"actor {actor}")
    stages: Any = [SimpleNamespace(stage="decode"), SimpleNamespace(stage="resize")][-len(workers) or 2 :]
    sent: Any = Sent("reader", workers, tuple(range(1 + len(workers))), "block")
    request: Any = "rows"
    block = Block(ChunkLine(None, stages, int), sent, request, "attempt 1 of 4")  # type: ignore[arg-type]
    assert block.text(None) == f"a block to come from another node, made by {made_by}: rows, attempt 1 of 4"


# The coordinator


class Slow:
    """A coordinator that answers after some seconds, by the clock of the test."""

    class plan_at:
        remote = staticmethod(lambda *args: "asked")

    reader = plan_at


@pytest.fixture
def link(monkeypatch) -> Any:
    """(answer after so many seconds, stall_warn_s) -> link to a coordinator; no time passes."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)

    def made(answers_s: float, stall_warn_s: float | None) -> CoordinatorLink:
        def get(ref: str, timeout: float | None) -> str:
            left_s = 1000.0 + answers_s - clock.now_s
            if timeout is None or left_s <= timeout:
                clock.now_s += left_s
                return "answer"
            clock.now_s += timeout
            raise ray.exceptions.GetTimeoutError

        monkeypatch.setattr(ray, "get", get)
        return CoordinatorLink("train", Slow(), Attempt("a", "", 1), 0, None, stall_warn_s)

    return made


def test_a_coordinator_that_takes_long_is_told(link, caplog):
    assert link(150, 30)._ask("plan_at", timeout_s=None) == "answer"
    text = "still waiting after {} s for the coordinator of stream 'train' (plan_at)"
    assert caplog.messages == [text.format(30), text.format(90)]
    caplog.clear()
    assert link(1e5, None)._ask("plan_at", timeout_s=None) == "answer"
    assert caplog.messages == []


@pytest.mark.parametrize("stall_warn_s", [None, 30, 90])
def test_a_coordinator_that_does_not_answer_is_an_error(link, stall_warn_s):
    with pytest.raises(ReadError, match=r"no answer for 60 s from the coordinator of stream 'train' \(reader\)"):
        link(61, stall_warn_s)._ask("reader")
