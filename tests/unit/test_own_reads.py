"""What DataLoader workers make of a pass, in this process and without Ray: which rows, in which batches, within which bounds.

`tests/integration/test_torch_dataset.py` has real workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn
from torch.utils.data import default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from ray_lance_stream import (
    ConfigError,
    IterationError,
    LanceStream,
    ReadError,
    TransformError,
    feed,
    lance_stream,
    own_read,
    watch,
)
from ray_lance_stream.columns import TensorCollateFn
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.cursor import Position
from ray_lance_stream.doing import READING, TRANSFORMING
from ray_lance_stream.feed import Feed, Told
from ray_lance_stream.own_reads import NumpyFunction, OwnReads, PassSpec
from ray_lance_stream.reader import ChunkInfo
from ray_lance_stream.row_lists import driver_lists
from ray_lance_stream.sendable import sendable
from ray_lance_stream.splits import RankShare
from ray_lance_stream.torch_dataset import StreamDataset
from ray_lance_stream.transform import in_one_process
from tests.support import make_table, scan_ids

NUM_ROWS, NUM_SPLITS = 483, 12


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("own_reads") / "t", NUM_ROWS)


def spec_of(
    stream: LanceStream,
    batch_size: int,
    *,
    rank: int = 0,
    world: int = 1,
    drop_last: bool = False,
    collate_fn: Any = None,
    **config: Any,
) -> PassSpec:
    """As a shard makes it."""
    plan = stream._plan
    return PassSpec(
        "train",
        rank,
        plan,
        RankShare.of(plan.grid, world, rank, 1).block,
        stream._config.skipped,
        batch_size,
        drop_last,
        collate_fn or TensorCollateFn(),
        in_one_process(stream._config.stages),
        StreamConfig(**config),
    )


def in_order(workers: list[Any]) -> Iterator[Any]:
    """What a DataLoader hands out."""
    end = object()
    for turn in zip_longest(*workers, fillvalue=end):
        yield from (batch for batch in turn if batch is not end)


def batches_of(spec: PassSpec, start: Position, num_workers: int) -> list[Any]:
    """The batches of a pass."""
    return [
        batch for batch, _ in in_order([OwnReads(spec, start, worker, num_workers) for worker in range(num_workers)])
    ]


def expected(stream: LanceStream, spec: PassSpec, start: Position) -> list[list[int]]:
    """Ids of the batches, by the plan over a plain scan."""
    walk = spec.walk(start)
    rows: list[int] = []
    span = walk.next_span(None, 10**6)
    while span is not None:
        found = stream._plan.resolve().rows(start.epoch, spec.block, span.start, span.stop)
        rows += found[span.skip_rows : span.skip_rows + span.num_rows].tolist()
        span = walk.next_span(span, 10**6)
    ids = scan_ids(stream._plan.table.uri)[rows].tolist()
    return [ids[at : at + spec.batch_size] for at in range(0, len(ids), spec.batch_size)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_workers_together_make_the_batches_of_the_pass(path, data):
    options = data.draw(
        st.sampled_from([{}, {"drop_remainder": False}, {"filter": "id % 3 != 0"}, {"shuffle": False}]), "options"
    )
    stream = lance_stream(path, num_splits=NUM_SPLITS, **options)
    if data.draw(st.booleans(), "skip"):
        stream = stream.skip(epoch=1, steps=range(2, 4), global_batch_size=24)
    world = data.draw(st.integers(1, 5), "world")
    rank = data.draw(st.integers(0, world - 1), "rank")
    block = RankShare.of(stream._plan.grid, world, rank, 1).block
    start = Position(
        data.draw(st.integers(0, 2)), data.draw(st.integers(0, 25)), data.draw(st.integers(0, block.size - 1))
    )
    spec = spec_of(
        stream,
        data.draw(st.integers(1, 100), "batch_size"),
        rank=rank,
        world=world,
        drop_last=data.draw(st.booleans(), "drop_last"),
        read_batch_size=data.draw(st.sampled_from([None, 1, 7, 1000]), "read_batch_size"),
    )
    found = batches_of(spec, start, data.draw(st.integers(1, 9), "num_workers"))
    assert [batch["id"].tolist() for batch in found] == expected(stream, spec, start)
    for batch in found:
        assert torch.equal(batch["value"], 3 * batch["id"] + 1)
        assert torch.equal(batch["vec"][:, 0], batch["id"].float())


def test_what_a_collate_fn_gets(path):
    stream = lance_stream(path, num_splits=NUM_SPLITS)

    class Arrow(ArrowBatchCollateFn):
        def __call__(self, batch):
            return type(batch)

    class Pandas(PandasBatchCollateFn):
        def __call__(self, batch):
            return type(batch).__name__

    for given_fn, kind in (
        (Arrow(), pa.Table),
        (Pandas(), "DataFrame"),
        (NumpyFunction(lambda b: b["vec"].shape), (24, 4)),
    ):
        assert batches_of(spec_of(stream, 24, collate_fn=given_fn), Position(0), 2)[0] == kind


def test_chunks_hold_several_batches_within_the_bytes_of_the_rank(path, monkeypatch):
    """What all workers hold together is bounded, however many there are."""
    held: dict[int, int] = {}

    def watched(request, plan, tell):
        table, info = read(request, plan, tell)
        held[int(request.who[-1])] = max(held.get(int(request.who[-1]), 0), info.size_bytes)
        return table, info

    read = own_read.read_chunk
    monkeypatch.setattr(own_read, "read_chunk", watched)
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    batch_bytes = NUM_SPLITS * stream._plan.row_bytes
    for num_workers in (1, 2, 4):
        held.clear()
        bound = 12 * batch_bytes
        spec = spec_of(stream, NUM_SPLITS, prefetch_bytes=bound)
        assert len(batches_of(spec, Position(0), num_workers)) == NUM_ROWS // NUM_SPLITS
        assert 2 * sum(held.values()) <= bound
        assert max(held.values()) > batch_bytes or num_workers == 4
    spec = spec_of(stream, NUM_SPLITS, prefetch_bytes=1)
    assert len(batches_of(spec, Position(0), 2)) == NUM_ROWS // NUM_SPLITS  # a batch is made in any case
    assert max(held.values()) == pytest.approx(batch_bytes, rel=0.2)


def test_each_chunk_is_told_with_its_first_batch(path):
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    infos = [info for _, info in OwnReads(spec_of(stream, NUM_SPLITS, read_batch_size=5), Position(0), 0, 1)]
    assert [info.num_rows for info in infos if info is not None] == [5 * NUM_SPLITS] * 8
    assert [number for number, info in enumerate(infos) if info is not None] == list(range(0, 40, 5))


def test_the_next_chunk_is_read_while_one_is_handed_out(path, monkeypatch):
    calls, is_second = [], threading.Event()
    read = own_read.read_chunk

    def watched(*args):
        calls.append(args)
        if len(calls) == 2:
            is_second.set()
        return read(*args)

    monkeypatch.setattr(own_read, "read_chunk", watched)
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    reads = iter(OwnReads(spec_of(stream, NUM_SPLITS, read_batch_size=5), Position(0), 0, 1))
    next(reads)
    assert is_second.wait(10)
    next(reads)
    assert len(calls) == 2  # and no further
    reads.close()


# ---- transforms


def halve(batch: dict[str, Any]) -> dict[str, Any]:
    if (batch["id"] == 100).any():
        raise ValueError("bad row 100")
    return {**batch, "half": batch["id"] / 2}


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "half": batch["half"] + self.by}


def test_transforms_run_in_the_worker_and_rows_are_replaced_as_anywhere(path):
    """The row that stands in does not depend on how batches were read."""
    stream = lance_stream(path, num_splits=NUM_SPLITS).map_batches(halve, on_transform_error="replace")
    stream = stream.map_batches(Adder, fn_constructor_args=[7], concurrency=2)
    seen = []
    for num_workers, world in ((1, 1), (3, 1), (2, 2)):
        found: dict[int, float] = {}
        replaced = []
        for rank in range(world):
            spec = spec_of(stream, 24 // world, rank=rank, world=world)
            for worker in range(num_workers):
                for batch, info in OwnReads(spec, Position(0), worker, num_workers):
                    assert torch.equal(batch["half"], batch["id"] / 2 + 7)
                    found |= dict(zip(batch["id"].tolist(), batch["half"].tolist(), strict=True))
                    replaced += info.replaced if info is not None else []
        seen.append((found, [(each.row, each.by) for each in replaced]))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1][0][0] == 100
    assert len(seen[0][1]) == 1


def test_a_row_that_fails_is_named(path):
    stream = lance_stream(path, num_splits=NUM_SPLITS).map_batches(halve)
    with pytest.raises(TransformError, match=r"rank 0, DataLoader worker [01]: halve failed on row 100 .*bad row 100"):
        batches_of(spec_of(stream, 24), Position(0), 2)


def test_a_null_is_named_with_its_row(tmp_path):
    values = [None if i == 77 else float(i) for i in range(120)]
    lance.write_dataset(pa.table({"x": pa.array(values)}), tmp_path / "t")
    stream = lance_stream(str(tmp_path / "t"), num_splits=NUM_SPLITS)
    with pytest.raises(ReadError, match=r"stream 'train': column 'x'.* holds a null.* in row 77 of table"):
        batches_of(spec_of(stream, 24), Position(0), 2)


def test_a_read_that_fails_is_told_with_what_was_read(path):
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    spec = spec_of(stream, 24)
    spec = replace(spec, plan=replace(spec.plan, columns=("nope",)))
    with pytest.raises(ReadError):
        batches_of(spec, Position(0), 1)


# ---- the feed


@pytest.fixture
def as_worker(monkeypatch):
    """Be a worker: (id, number of workers)."""

    def become(worker: int, num_workers: int) -> None:
        monkeypatch.setattr(feed, "get_worker_info", lambda: SimpleNamespace(id=worker, num_workers=num_workers))

    return become


@pytest.mark.parametrize(
    "options", [{"filter": "id % 3 != 0"}, {"order": "lancedb"}, {"filter": "id > 5", "order": "lancedb"}]
)
def test_lists_of_rows_come_along_in_shared_memory(path, options, as_worker, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_LANCE_STREAM_CACHE", str(tmp_path))
    stream = lance_stream(path, num_splits=NUM_SPLITS, **options)
    spec = spec_of(stream, 24)
    spec = replace(spec, plan=driver_lists.plan_of(spec.plan, 1))
    stream._plan = spec.plan
    made = Feed(spec, Position(1), told=False, once=False)
    assert made._lists
    assert all(rows.is_shared() for rows in made._lists.values())
    assert len(made._spec) < 5000
    found = []
    for worker in range(2):
        as_worker(worker, 2)
        found.append([batch["id"].tolist() for batch in copy(made).batches()])
    assert list(in_order(found)) == expected(stream, spec, Position(1))


def test_a_pass_of_a_plain_loader_is_delivered_once(path, as_worker):
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    made = Feed(spec_of(stream, 24), Position(0), told=False, once=True)
    for worker in (1, 0):
        as_worker(worker, 2)
        assert len(list(copy(made).batches())) == 10
    again = copy(made).batches()  # raises nothing yet: a worker that goes on would end without a word
    with pytest.raises(
        IterationError, match=r"begun before.*set_epoch\(epoch\) before each pass.*or use StreamDataLoader"
    ):
        next(again)


def test_workers_of_a_plain_loader_that_persist_deliver_one_pass(path, as_worker):
    """Of an evaluation stream too: they do not hear of its epoch."""
    made = Feed(spec_of(lance_stream(path, num_splits=NUM_SPLITS), 24), Position(0), told=False, once=False)
    as_worker(1, 2)
    assert len(list(copy(made).batches())) == len(list(copy(made).batches())) == 10  # in processes of their own
    made_again = copy(made)
    list(made_again.batches())
    with pytest.raises(IterationError, match="leave persistent_workers=True out, since such workers do not hear of it"):
        next(made_again.batches())


def test_a_stream_data_loader_is_told_what_came_and_what_failed(path, as_worker):
    stream = lance_stream(path, num_splits=NUM_SPLITS).map_batches(halve)
    as_worker(0, 1)
    *batches, last = Feed(spec_of(stream, 24, read_batch_size=1), Position(0), told=True, once=False).batches()
    assert all(told.failure is None and told.info.num_rows == 24 for told in batches)
    error, text = last.failure
    assert isinstance(error, TransformError)
    assert "halve" in text


def test_what_comes_with_a_batch_is_left_alone_by_torch():
    class Pinnable:
        def pin_memory(self):
            return "pinned"

    told = Told(Pinnable(), ChunkInfo(1, 2, 3), (ValueError("x"), "text"))
    assert tuple(pin_memory(told)) == ("pinned", told.info, told.failure)
    assert default_convert(Told({"x": np.zeros(2)}, told.info)).batch["x"].shape == torch.Size([2])
    assert default_convert(told).info is told.info
    assert list(default_convert(told).failure) == list(told.failure)


def test_workers_that_persist_are_told_where_to_begin(path, as_worker):
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    spec = spec_of(stream, 24)
    made = Feed(spec, Position(0), told=True, once=False)
    as_worker(0, 1)
    for start in (Position(0), Position(2, 7), Position(1, 3, partial_rows=5)):
        made.begin_at(start)
        assert [told.batch["id"].tolist() for told in made.batches()] == expected(stream, spec, start)


def test_a_dataset_in_a_worker_has_no_position(path):
    """A StatefulDataLoader asks for it, and has the error raised in the loop."""
    dataset = StreamDataset.__new__(StreamDataset)
    made = Feed(spec_of(lance_stream(path, num_splits=NUM_SPLITS), 24), Position(0), told=False, once=True)
    dataset.__dict__.update(_shard=None, _feed=made)
    for ask in (dataset.state_dict, lambda: dataset.load_state_dict({}), lambda: dataset.epoch, lambda: len(dataset)):
        with pytest.raises(IterationError, match=r"its own batches and no position.*use StreamDataLoader"):
            ask()
    assert sum(1 for _ in dataset) == 20  # without a DataLoader: the only worker


class Unpicklable(Exception):
    def __init__(self, text: str, more: int) -> None:
        super().__init__(text)


def test_an_error_that_cannot_be_pickled_is_left_to_torch(path, as_worker):
    """In a queue between processes it would be lost, and the loop wait for ever."""

    def fail(batch):
        raise Unpicklable("no way", 3)

    stream = lance_stream(path, num_splits=NUM_SPLITS)
    as_worker(0, 1)
    with pytest.raises(Unpicklable, match="no way"):
        list(Feed(spec_of(stream, 24, collate_fn=NumpyFunction(fail)), Position(0), told=True, once=False).batches())


class Sent:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("told", [True, False])
def test_a_batch_that_cannot_be_pickled_is_an_error_and_no_hang(path, as_worker, told):
    """torch's queue would drop it. Any batch, not only the first one; tensors and arrays cost nothing."""
    kind = type("Sent", (), {})  # as a class of a script comes into a worker: another one than its module has
    kind.__module__ = __name__

    def collate(batch: dict[str, np.ndarray]) -> Any:
        values = {"id": torch.tensor(batch["id"]), "array": batch["vec"]}
        return kind() if 100 in batch["id"] else Sent(values)

    stream = lance_stream(path, num_splits=NUM_SPLITS, shuffle=False)
    as_worker(0, 1)
    batches = Feed(spec_of(stream, 24, collate_fn=NumpyFunction(collate)), Position(0), told=told, once=False).batches()
    found: list[Any] = []
    text = (
        r"picklable to leave a DataLoader worker, which this Sent .* not the same object.*in a module that is imported"
    )

    def collect() -> None:
        for each in batches:
            if told and each.failure is not None:
                raise each.failure[0]
            found.append(each.batch if told else each)

    with pytest.raises(ConfigError, match=text):
        collect()
    assert found
    assert all(isinstance(each.value["id"], torch.Tensor) for each in found)


def test_what_a_batch_may_hold():
    rows = np.zeros((1000, 1000))
    batch = {"a": rows, "b": [torch.zeros(3), "text", None], "c": Sent(torch.ones(2))}
    assert sendable(batch) is batch
    for value in (threading.Lock(), np.array([threading.Lock()]), torch.ones(1, requires_grad=True) * 2):
        with pytest.raises(ConfigError, match="must be picklable to leave a DataLoader worker"):
            sendable({"x": value})


# ---- waiting for a read


@pytest.fixture
def stuck(monkeypatch) -> Iterator[threading.Event]:
    """Reads that end when it is set."""
    goes_on = threading.Event()
    read = own_read.read_chunk

    def slow(request, plan, tell):
        tell(READING)
        goes_on.wait(60)
        return read(request, plan, tell)

    monkeypatch.setattr(own_read, "read_chunk", slow)
    monkeypatch.setattr(own_read, "LOOK_S", 0.01)
    yield goes_on
    goes_on.set()


def test_a_read_that_hangs_is_told_and_given_up(path, stuck, caplog):
    spec = spec_of(lance_stream(path, num_splits=NUM_SPLITS), 24, stall_warn_s=0.1, read_timeout_s=0.4)
    text = r"rank 0, DataLoader worker 1: no progress for . s of a read, which has been reading for .*: batches .* version \d+$"
    with pytest.raises(ReadError, match=text):
        next(iter(OwnReads(spec, Position(0), 1, 2)))
    told = [record.message for record in caplog.records if record.name == watch.__name__]
    assert len(told) == 1
    assert told[0].startswith(
        "still waiting after 0 s for a read, which has been reading for 0 s: batches of a DataLoader"
    )


def test_the_time_of_transforms_is_no_limit(path, monkeypatch):
    def slow(request, plan, tell):
        found = read(request, plan, tell)
        tell(TRANSFORMING)
        time.sleep(0.6)
        return found

    read = own_read.read_chunk
    monkeypatch.setattr(own_read, "read_chunk", slow)
    monkeypatch.setattr(own_read, "LOOK_S", 0.01)
    spec = spec_of(lance_stream(path, num_splits=NUM_SPLITS), 480, read_timeout_s=0.3)
    assert len(list(OwnReads(spec, Position(0), 0, 1))) == 1


def test_a_worker_does_not_wait_for_a_read_that_nobody_wants(path, stuck, as_worker):
    made = Feed(spec_of(lance_stream(path, num_splits=NUM_SPLITS), 24), Position(0), told=True, once=False)
    as_worker(0, 1)
    batches = made.batches()
    threading.Timer(0.1, made.end).start()
    assert list(batches) == []
    assert list(made.batches()) == []  # begun too late
    made.begin_at(Position(0))
    stuck.set()
    assert len(list(made.batches())) == 20


def test_a_worker_that_waits_ends_with_its_parent(path, stuck, monkeypatch):
    class GoneError(Exception):
        pass

    def leave(code: int) -> None:
        assert code == 1
        raise GoneError

    monkeypatch.setattr(watch, "ALIVE_S", 0.05)
    monkeypatch.setattr(own_read.os, "_exit", leave)
    monkeypatch.setattr(own_read.multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    spec = spec_of(lance_stream(path, num_splits=NUM_SPLITS), 24)
    with pytest.raises(GoneError):
        next(iter(OwnReads(spec, Position(0), 0, 1)))


def test_a_process_ends_while_a_read_hangs(stuck, monkeypatch):
    """Lance would abort it where Python ends below a read."""
    left: list[int] = []
    monkeypatch.setattr(own_read.os, "_exit", left.append)
    monkeypatch.setattr(own_read, "EXIT_S", 0.01)
    read = own_read.OwnRead(SimpleNamespace(send_id="a read"), None)
    own_read._leave_reads()
    assert left == []  # no worker of a DataLoader
    monkeypatch.setattr(own_read.multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: True))
    own_read._leave_reads()
    assert left == [0]
    assert not read.ends_within(0)


def test_what_cannot_travel_is_refused(path):
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    lock = threading.Lock()
    unpicklable = spec_of(stream, 24, collate_fn=NumpyFunction(lambda batch: lock))
    with pytest.raises(ConfigError, match=r"must be picklable, which it is not: TypeError: .*lock"):
        Feed(unpicklable, Position(0), told=True, once=False)
