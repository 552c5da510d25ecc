"""Transforms without Ray: what functions are given and must return, which row fails, and which row stands in for it."""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.data import DataContext

from ray_lance_stream import ConfigError, LanceStream, TransformError, lance_stream
from ray_lance_stream._ray import within_context
from ray_lance_stream.chain import Chain
from ray_lance_stream.coordinator import SPARE_STAGE_S
from ray_lance_stream.cursor import ChunkSpan
from ray_lance_stream.error_transport import Failure, answered
from ray_lance_stream.errors import UnpicklableError
from ray_lance_stream.line import LEASE_S, StageActors, share_of, with_chunks_for_stages
from ray_lance_stream.reader import ChunkInfo, ReadRequest
from ray_lance_stream.replaced import WINDOW_POSITIONS, Replaced, ReplacedRows, stand_ins
from ray_lance_stream.shelf import Owner, StageShelf
from ray_lance_stream.splits import SplitBlock, split_block
from ray_lance_stream.stage_board import FRESH_S, StageBoard
from tests.fake_ray import Store
from tests.support import make_table, scan_ids

NUM_ROWS, NUM_SPLITS = 483, 4  # 120 positions, two windows, and 3 rows left over
WHOLE = SplitBlock(0, NUM_SPLITS)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("transforms") / "t", NUM_ROWS)


@pytest.fixture(scope="module")
def stream(path) -> LanceStream:
    return lance_stream(path, num_splits=NUM_SPLITS, drop_remainder=False)


def chunk(stream: LanceStream, start: int = 0, stop: int = 5, block: SplitBlock = WHOLE) -> tuple[pa.Table, ChunkInfo]:
    """A chunk of epoch 0, as the processes of a run make it."""
    plan = stream._plan
    rows = plan.grid.block_rows(block, start, stop)
    request = ReadRequest(plan, 0, block, ChunkSpan(start, stop, 0, rows, rows), "stream 't', rank 1")
    table = request.take(request.rows(plan.resolve()))
    info = ChunkInfo(len(table), table.nbytes, table.nbytes)
    for stage in stream._config.stages:
        table, info = Chain(pickle.loads(pickle.dumps(stage))).run(table, info, request)
    return table, info


def ids_of(table: pa.Table) -> list[int]:
    return table["id"].to_pylist()


def fail_on(ids: Iterable[int]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that raises for some ids and doubles `value`."""
    bad = set(ids)

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        for each in batch["id"].tolist():
            if each in bad:
                raise ValueError(f"bad row {each}")
        return {**batch, "value": 2 * batch["value"]}

    return decode


# ---- what a function is given and returns


def numpy_sum(batch: dict[str, np.ndarray], by: int) -> dict[str, Any]:
    assert batch["vec"].shape == (len(batch["id"]), 4)
    return {"id": batch["id"], "sum": batch["vec"].sum(axis=1) + by}


def pandas_sum(batch: pd.DataFrame, by: int) -> pd.DataFrame:
    return pd.DataFrame({"id": batch["id"], "sum": [float(np.asarray(v).sum()) + by for v in batch["vec"]]})


def arrow_sum(batch: pa.Table, by: int) -> pa.Table:
    vec = batch["vec"].combine_chunks().flatten().to_numpy().reshape(len(batch), -1)
    return pa.table({"id": batch["id"], "sum": vec.sum(axis=1) + by})


@pytest.mark.parametrize(("batch_format", "fn"), [("numpy", numpy_sum), ("pandas", pandas_sum), ("pyarrow", arrow_sum)])
@pytest.mark.parametrize("batch_size", [None, 1, 7, 1000])
def test_formats_and_batch_sizes(stream, batch_format, fn, batch_size):
    plain, _ = chunk(stream)
    sums = [sum(vec) + 10 for vec in plain["vec"].to_pylist()]
    mapped = stream.map_batches(fn, batch_format=batch_format, batch_size=batch_size, fn_kwargs={"by": 10})
    table, info = chunk(mapped)
    assert ids_of(table) == ids_of(plain)
    assert table["sum"].to_pylist() == pytest.approx(sums)
    assert info.num_rows == len(table)
    assert info.size_bytes == table.nbytes < info.largest_bytes == plain.nbytes


def test_a_function_gets_no_more_than_batch_size_rows(stream):
    seen: list[int] = []
    chain = Chain(stream.map_batches(lambda batch: batch, batch_size=7)._config.stages[0])
    loaded = chain.loaded(0)
    loaded._fn = lambda batch: (seen.append(len(batch["id"])), batch)[1]
    plain, info = chunk(stream)
    chain.run(plain, info, ReadRequest(stream._plan, 0, WHOLE, ChunkSpan(0, 5, 0, 20, 20)))
    assert seen == [7, 7, 6]


class Offset:
    def __init__(self, by: int, twice: bool = False) -> None:
        self.by = by * 2 if twice else by
        self.calls = 0

    def __call__(self, batch: dict[str, Any], column: str) -> dict[str, Any]:
        self.calls += 1
        return {**batch, column: batch[column] + self.by, "calls": np.full(len(batch["id"]), self.calls)}


def test_a_class_is_made_once_with_its_arguments(stream):
    mapped = stream.map_batches(
        Offset, fn_constructor_args=[5], fn_constructor_kwargs={"twice": True}, fn_args=["value"], batch_size=10
    )
    plain, _ = chunk(stream)
    table, _ = chunk(mapped)
    assert table["value"].to_pylist() == [value + 10 for value in plain["value"].to_pylist()]
    assert table["calls"].to_pylist() == [1] * 10 + [2] * 10


def test_new_tensors_and_objects_come_out_as_ray_data_gives_them(stream):
    def images(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"], "image": np.stack([np.full((2, 3), i) for i in batch["id"]])}

    table, _ = chunk(stream.map_batches(images, batch_size=3))
    assert table["image"].combine_chunks().to_numpy_ndarray().shape == (20, 2, 3)


def test_nulls_that_change_the_type_of_a_part_change_no_value(tmp_path):
    """Ray Data makes a float column of integers with a null: the parts of a chunk may differ."""
    values = [None if i == 5 else i for i in range(48)]
    lance.write_dataset(pa.table({"id": range(48), "x": pa.array(values, pa.int64())}), str(tmp_path / "t"))
    stream = lance_stream(str(tmp_path / "t"), num_splits=NUM_SPLITS, shuffle=False)
    for batch_size in (None, 4):
        table, _ = chunk(stream.map_batches(lambda batch: batch, batch_size=batch_size), 0, 12)
        assert [None if x is None or np.isnan(x) else x for x in table["x"].to_pylist()] == [
            values[i] for i in ids_of(table)
        ]


class Reuses:
    """Fills the same array at each call."""

    def __init__(self) -> None:
        self._ids = np.empty(4, np.int64)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._ids[:] = batch["id"]
        return {"id": self._ids}


def test_an_instance_may_reuse_its_output(stream):
    assert ids_of(chunk(stream.map_batches(Reuses, batch_size=4))[0]) == ids_of(chunk(stream)[0])


def test_a_function_cannot_write_to_what_the_one_before_has_made(stream):
    """Rows that are tried again must be what they were."""

    def decode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"id": batch["id"], "x": np.stack([batch["id"], batch["id"]], axis=1).astype(np.float32)}

    def halve(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        batch["x"] /= 2
        return batch

    with pytest.raises(TransformError, match=r"halve failed on row .*read-only"):
        chunk(stream.map_batches(decode).map_batches(halve))


# ---- what it must not do


def drop_one(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: column[1:] for key, column in batch.items()}


def raises(error: BaseException, batch: Any) -> Any:
    raise error


@pytest.mark.parametrize("how", ["raise", "replace"])
@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (drop_one, "drop_one must return as many rows as it is given, got 19 rows for 20"),
        (lambda batch: {"id": batch["id"], "x": [1]}, "got 1 and 20 rows for 20"),
        (lambda batch: {}, "got 0 rows for 20"),
        (lambda batch: {"id": batch["id"], "k": 1}, "one value for each row, got {'id': 'ndarray', 'k': 'int'}"),
        (lambda batch: None, "must return a dict of arrays, a pyarrow.Table or a pandas.DataFrame, got NoneType"),
        (partial(raises, GeneratorExit()), "raises raised GeneratorExit: , which is no error"),
    ],
)
def test_what_breaks_the_rules_is_told_and_never_replaced(stream, fn, text, how):
    with pytest.raises(TransformError, match="stream 't', rank 1: ") as told:
        chunk(stream.map_batches(fn, on_transform_error=how))
    assert text in str(told.value)


def test_batches_of_other_types_are_told(stream):
    def mixed(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["id"] if batch["id"][0] % 2 else [str(i) for i in batch["id"]]}

    with pytest.raises(TransformError, match=r"mixed must return the same types for all rows.*incompatible types"):
        chunk(stream.map_batches(mixed, batch_size=1))


class Panic(BaseException):
    """What Rust code raises."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [StopIteration("over"), Panic("in Rust")])
def test_errors_that_would_end_a_loop_or_a_thread_are_errors_of_a_row(stream, error):
    with pytest.raises(TransformError, match=f"raises failed on row .*{type(error).__name__}: {error}"):
        chunk(stream.map_batches(partial(raises, error)))


# ---- "raise"


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_error_names_the_first_failing_row(stream, path, batch_size):
    plain, _ = chunk(stream)
    bad = ids_of(plain)[7], ids_of(plain)[11]
    with pytest.raises(TransformError) as told:
        chunk(stream.map_batches(fail_on(bad), batch_size=batch_size))
    offset = scan_ids(path).tolist().index(bad[0])
    text = f"stream 't', rank 1: fail_on.<locals>.decode failed on row {offset} of table {path} version "
    assert text in str(told.value)
    assert f"(id={bad[0]}): ValueError: bad row {bad[0]}; mend the row or the function" in str(told.value)
    assert isinstance(told.value.__cause__, ValueError)
    copied = pickle.loads(pickle.dumps(told.value))
    assert str(copied) == str(told.value)
    assert repr(copied.__cause__) == repr(told.value.__cause__)


def test_finding_the_row_costs_few_calls(stream):
    calls: list[int] = []
    mapped = stream.map_batches(fail_on(ids_of(chunk(stream, 0, 120)[0])[-1:]))
    chain = Chain(mapped._config.stages[0])
    fn = chain.loaded(0)._fn
    chain.loaded(0)._fn = lambda batch: (calls.append(len(batch["id"])), fn(batch))[1]
    table, info = chunk(stream, 0, 120)
    with pytest.raises(TransformError, match="bad row"):
        chain.run(table, info, ReadRequest(stream._plan, 0, WHOLE, ChunkSpan(0, 120, 0, 480, 480)))
    assert len(calls) < 25
    assert sum(calls) < 3 * 480


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def test_a_cause_that_cannot_be_pickled_stays_in_the_text(stream):
    with pytest.raises(TransformError, match="Unpicklable: holds a lock") as told:
        chunk(stream.map_batches(lambda batch: raises(Unpicklable(), batch)))
    assert isinstance(told.value.__cause__, Unpicklable)
    copied = pickle.loads(pickle.dumps(told.value))
    assert str(copied) == str(told.value)
    assert type(copied.__cause__) is UnpicklableError
    assert str(copied.__cause__).startswith("Unpicklable: ")


def test_a_failure_of_rows_together_is_told(stream):
    def few(batch: dict[str, Any]) -> dict[str, Any]:
        if len(batch["id"]) > 4:
            raise MemoryError("too many")
        return batch

    with pytest.raises(
        TransformError, match=r"failed on 20 rows of .*, but on none of them alone: MemoryError: too many"
    ):
        chunk(stream.map_batches(few))
    assert ids_of(chunk(stream.map_batches(few, on_transform_error="replace"))[0]) == ids_of(chunk(stream)[0])


def test_a_constructor_that_fails_is_told(stream):
    with pytest.raises(TransformError, match=r"the constructor of Offset failed: TypeError"):
        chunk(stream.map_batches(Offset))


class Exits:
    def __init__(self) -> None:
        raise SystemExit("no token")

    def __call__(self, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_ends_the_program_is_passed_on_as_it_is(stream, error):
    """By a function, whatever is to be done about rows that fail, by a constructor and by what decides about a row."""
    with pytest.raises(SystemExit, match="no token"):
        chunk(stream.map_batches(Exits))
    bad = ids_of(chunk(stream)[0])[:1]
    for mapped in (
        stream.map_batches(partial(raises, error)),
        stream.map_batches(partial(raises, error), on_transform_error="replace"),
        stream.map_batches(fail_on(bad), on_transform_error=lambda failure, row: raises(error, row)),
    ):
        with pytest.raises(type(error)):
            chunk(mapped)
        table, failure = answered(lambda mapped=mapped: chunk(mapped))
        assert table is None
        assert failure.to_error().args == error.args


class NotHere(Exception):
    """Can be pickled where it was raised, but not be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_here, (ray.cloudpickle.dumps(os.getpid()),)


def _load_here(pid: bytes) -> NotHere:
    if _elsewhere:
        raise ModuleNotFoundError("no such module")
    return NotHere("cold")


_elsewhere: list[int] = []


class Kept(Exception):
    """With an argument that cannot be pickled."""


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: KeyError("x"), KeyError, "'x'"),
        (lambda: Kept(threading.Lock()), UnpicklableError, "Kept: <unlocked _thread.lock"),
        (lambda: NotHere("cold"), UnpicklableError, "NotHere: cold"),
    ],
)
def test_an_error_arrives_with_what_the_function_raised(stream, make, kind, text):
    """The remote traceback is told once, by the cause, and not in the text of the error."""
    _elsewhere.clear()
    _, failure = answered(lambda: chunk(stream.map_batches(lambda batch: raises(make(), batch))))
    failure = pickle.loads(pickle.dumps(failure))
    _elsewhere.append(1)
    error = failure.to_error()
    assert type(error) is TransformError
    assert f"{type(make()).__name__}: " in str(error)
    assert "Traceback" not in str(error)
    assert type(error.__cause__) is kind
    assert str(error.__cause__).startswith(text)
    shown = "".join(traceback.format_exception(error))
    assert shown.count("in raises") == 1
    assert f"in process {os.getpid()}" in shown
    again = pickle.loads(pickle.dumps(error))  # as Ray Train passes it on to the driver
    assert (str(again), str(again.__cause__)) == (str(error), str(error.__cause__))


def test_what_cannot_be_pickled_and_ends_the_program_still_does():
    error = Failure.of(SystemExit(threading.Lock())).to_error()
    assert type(error) is SystemExit
    assert "lock" in error.args[0]


def test_a_function_whose_module_is_missing_is_told(stream, monkeypatch):
    mapped = stream.map_batches(numpy_sum, fn_args=[1])
    monkeypatch.setattr("ray_lance_stream.loaded.pickle.loads", partial(raises, ModuleNotFoundError("no such module")))
    with pytest.raises(TransformError, match=r"numpy_sum cannot be loaded where it is to run: ModuleNotFoundError"):
        Chain(mapped._config.stages[0]).load()


# ---- settings of the driver


def who() -> str:
    return str(DataContext.get_current().get_config("who", "nobody"))


class Says:
    def __init__(self) -> None:
        self.made_by = who()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            **batch,
            "made": np.array([self.made_by] * len(batch["id"])),
            "called": np.array([who()] * len(batch["id"])),
        }


def test_functions_find_the_data_context_of_their_stream(path):
    """Also where it was changed on the driver afterwards; and it does not stay behind in the process."""
    stream = lance_stream(path, num_splits=NUM_SPLITS)
    stream.context.set_config("who", "driver")
    answers = {"on_transform_error": lambda error, row: "replace" if who() == "driver" else "raise"}
    mapped = stream.map_batches(Says).map_batches(fail_on(ids_of(chunk(stream)[0])[:1]), **answers)
    assert len(mapped._config.stages[0].transforms[0].call.get()) < 20_000  # once for each process, not with each read
    before = DataContext.get_current()
    table, _ = chunk(mapped)
    assert set(table["made"].to_pylist()) == set(table["called"].to_pylist()) == {"driver"}
    assert DataContext.get_current() is before
    assert who() == "nobody"


def test_overlapping_functions_leave_the_data_context_as_it_was():
    before, own = DataContext.get_current(), DataContext.get_current().copy()
    first, second = within_context(own), within_context(own)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert DataContext.get_current() is own
    second.__exit__(None, None, None)
    assert DataContext.get_current() is before


# ---- "replace"


def test_stand_ins_are_near_and_inside_the_window():
    assert list(stand_ins(0, 100))[:3] == [1, 2, 3]
    assert list(stand_ins(66, 70)) == [65, 64, 67, 68, 69]
    assert list(stand_ins(64, 65)) == []
    assert list(stand_ins(70, 70)) == [69, 68, 67, 66, 65, 64]  # of the short last cycle
    assert list(stand_ins(64, 64))[:2] == [63, 62]
    assert len(list(stand_ins(200, 10_000))) == WINDOW_POSITIONS - 1


def by_position(stream: LanceStream) -> np.ndarray:
    """int64 [split, position]: ids of epoch 0, without the short last cycle."""
    table, _ = chunk(stream, 0, 120)
    return np.array(ids_of(table)).reshape(120, NUM_SPLITS).T


def oracle(plain: np.ndarray, bad: set[int]) -> np.ndarray:
    """The ids after replacement; -1 where no row can stand in."""
    out = plain.copy()
    for split, position in np.argwhere(np.isin(plain, list(bad))):
        first = position // WINDOW_POSITIONS * WINDOW_POSITIONS
        good = [p for p in range(first, min(first + WINDOW_POSITIONS, 120)) if plain[split, p] not in bad]
        earlier, later = [p for p in good if p < position], [p for p in good if p > position]
        out[split, position] = plain[split, earlier[-1]] if earlier else plain[split, later[0]] if later else -1
    return out


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_replacement_does_not_depend_on_chunks_or_workers(stream, data):
    plain = by_position(stream)
    bad = set(data.draw(st.lists(st.sampled_from(sorted(plain.reshape(-1).tolist())), max_size=30), "bad"))
    cuts = data.draw(st.lists(st.integers(1, 119), max_size=6, unique=True), "cuts")
    world = data.draw(st.sampled_from([1, 2, 3, 4]), "workers")
    size = data.draw(st.sampled_from([None, 1, 5]), "batch_size")
    mapped = stream.map_batches(fail_on(bad), batch_size=size, on_transform_error="replace")
    found, replaced = np.full_like(plain, -2), []
    for rank in range(world):
        block = split_block(NUM_SPLITS, world, rank)
        for start, stop in pairwise([0, *sorted(cuts), 120]):
            table, info = chunk(mapped, start, stop, block)
            found[block.lo : block.hi, start:stop] = np.array(ids_of(table)).reshape(-1, block.size).T
            replaced += info.replaced
            assert table["value"].to_pylist() == [2 * (3 * i + 1) for i in ids_of(table)]
    expected = oracle(plain, bad)
    assert np.array_equal(found, expected)
    changed = plain != expected
    assert sorted((each.row, each.by) for each in replaced) == sorted(
        zip(plain[changed].tolist(), expected[changed].tolist(), strict=True)
    )


def test_the_short_last_cycle_is_replaced_too(stream):
    tail = ids_of(chunk(stream, 120, 121)[0])
    assert len(tail) == 3
    table, info = chunk(stream.map_batches(fail_on(tail), on_transform_error="replace"), 120, 121)
    assert ids_of(table) == by_position(stream)[:3, 119].tolist()
    assert len(info.replaced) == 3


def test_a_stand_in_passes_all_transforms_before(stream):
    """Also those of other stages; a row that was replaced itself is none."""
    plain = by_position(stream)
    bad_before, bad = int(plain[0, 1]), int(plain[0, 2])
    for options in ({}, {"concurrency": 2}):
        first = stream.map_batches(fail_on([bad_before]), on_transform_error="replace", **options)
        both = first.map_batches(fail_on([bad]), on_transform_error="replace")
        table, info = chunk(both if options else both.map_batches(lambda batch: batch, concurrency=1))
        ids = np.array(ids_of(table)).reshape(-1, NUM_SPLITS).T[0]
        assert ids[:4].tolist() == [plain[0, 0], plain[0, 0], plain[0, 0], plain[0, 3]]
        assert table["value"].to_pylist() == [4 * (3 * i + 1) for i in ids_of(table)]
        assert [each.row for each in info.replaced] == [bad_before, bad]
    staged = stream.map_batches(fail_on([bad_before]), on_transform_error="replace").map_batches(
        fail_on([bad]), on_transform_error="replace", concurrency=2
    )
    assert len(staged._config.stages) == 2
    assert np.array(ids_of(chunk(staged)[0])).reshape(-1, NUM_SPLITS).T[0][:4].tolist() == ids[:4].tolist()


def test_a_stand_in_that_fails_later_is_told_as_such(stream):
    ids = ids_of(chunk(stream)[0])
    bad = ids[NUM_SPLITS]  # of the second cycle: the first row of its split stands in
    mapped = stream.map_batches(fail_on([bad]), on_transform_error="replace")
    with pytest.raises(
        TransformError, match=rf"failed on row \d+, in place of which comes row \d+, .*bad row {ids[0]}"
    ):
        chunk(mapped.map_batches(fail_on([ids[0]])), 1, 2)
    _, info = chunk(mapped.map_batches(fail_on([ids[0]]), on_transform_error="replace"), 1, 2)
    counted = ReplacedRows(mapped._config.stages, "t", 1, lambda rows: None)
    counted._transforms = {each.key: mapped._config.stages[0].transforms[0] for each in info.replaced}
    counted.add(info.replaced)
    assert "Rows replaced in this pass: 1 (" in str(counted)


def test_a_window_without_a_good_row_is_an_error(stream):
    """All rows of a split."""
    plain = by_position(stream)
    with pytest.raises(TransformError, match=r"position 0 of split 2, and no row can stand in") as told:
        chunk(stream.map_batches(fail_on(plain[2].tolist()), on_transform_error="replace"))
    assert f"(id={plain[2, 0]})" in str(told.value)


def test_a_handler_decides_by_exception_and_row(stream):
    plain = by_position(stream)
    bad = [int(plain[0, 1]), int(plain[1, 3])]

    def handler(error: BaseException, row: dict[str, Any]) -> str:
        assert str(error) == f"bad row {row['id']}"
        assert row["value"] == 3 * row["id"] + 1
        return "replace" if row["id"] != unwanted else "raise"

    unwanted = -1
    _, info = chunk(stream.map_batches(fail_on(bad), on_transform_error=handler))
    assert [each.row for each in info.replaced] == bad
    unwanted = bad[1]
    with pytest.raises(TransformError, match=f"bad row {unwanted}"):
        chunk(stream.map_batches(fail_on(bad), on_transform_error=handler))
    with pytest.raises(TransformError, match=r'must return "raise" or "replace" for row .*, but: returned None'):
        chunk(stream.map_batches(fail_on(bad), on_transform_error=lambda error, row: None))
    with pytest.raises(TransformError, match=r"but: ZeroDivisionError"):
        chunk(stream.map_batches(fail_on(bad), on_transform_error=lambda error, row: 1 / 0))


def test_replaced_rows_are_counted_and_limited(stream):
    told: list[int] = []
    mapped = stream.map_batches(fail_on([]), on_transform_error="replace", max_replaced_rows=3)
    stages = mapped._config.stages
    key = stages[0].transforms[0].key
    rows = ReplacedRows(stages, "t", 1, told.append)
    assert str(rows) == ""
    rows.add(())
    rows.add([Replaced(key, 5, 4), Replaced(key, 17, 16)])
    rows.add([Replaced(key, 9, 4)])
    assert "3 (row -> stands in): 5 -> 4, 17 -> 16, 9 -> 4" in str(rows)
    with pytest.raises(
        TransformError, match=r"stream 't', rank 1: .*failed on 4 rows.*max_replaced_rows=3: 5 -> 4, 17"
    ):
        rows.add([Replaced(key, 33, 32)])
    assert told == [2, 1, 1]
    unlimited_stages = stream.map_batches(fail_on([]), on_transform_error="replace")._config.stages
    unlimited = ReplacedRows(unlimited_stages, "t", 1, told.append)
    unlimited._transforms[key] = next(iter(unlimited._transforms.values()))
    unlimited.add([Replaced(key, row, row + 1) for row in range(150)])
    assert str(unlimited).endswith("99 -> 100, ...\n")


# ---- stages


def test_calls_join_where_they_can(stream):
    def names(mapped: LanceStream) -> list[tuple[str, bool, bool]]:
        return [(str(stage), stage.processes is not None, stage.is_pool) for stage in mapped._config.stages]

    light = stream.map_batches(numpy_sum).map_batches(drop_one)
    assert names(light) == [("numpy_sum -> drop_one", False, False)]
    assert names(light.map_batches(raises, concurrency=2).map_batches(drop_one, concurrency=2)) == [
        ("numpy_sum -> drop_one", False, False),
        ("raises -> drop_one", True, False),
    ]
    pool = stream.map_batches(drop_one, concurrency=2).map_batches(Offset, concurrency=2)
    assert names(pool) == [("drop_one -> Offset", True, True)]
    assert names(pool.map_batches(Offset, concurrency=2)) == [
        ("drop_one -> Offset", True, True),
        ("Offset", True, True),
    ]
    assert names(pool.map_batches(raises)) == [("drop_one -> Offset -> raises", True, True)]
    assert names(stream.map_batches(drop_one, concurrency=2).map_batches(raises, concurrency=3)) == [
        ("drop_one", True, False),
        ("raises", True, False),
    ]
    assert names(stream.map_batches(drop_one, num_cpus=0.5)) == [("drop_one", True, False)]
    assert names(stream) == []
    assert "transforms=drop_one -> Offset" in repr(pool)
    assert len(repr(pool).splitlines()) == 1
    assert pool.skip(0, range(1), global_batch_size=4)._config.stages == pool._config.stages


def test_processes_have_a_cpu_each_unless_said_otherwise(stream):
    def options(**given: Any) -> dict[str, Any]:
        processes = stream.map_batches(drop_one, **given)._config.stages[0].processes
        return dict(processes.options)

    assert options(concurrency=2) == {"num_cpus": 1}
    assert options(num_cpus=0.5, resources={"x": 1}) == {"num_cpus": 0.5, "resources": {"x": 1}}
    assert options(num_gpus=1, batch_size=4) == {"num_cpus": 1, "num_gpus": 1}
    secret = stream.map_batches(drop_one, num_cpus=2, runtime_env={"env_vars": {"KEY": "hunter2"}})
    assert str(secret._config.stages[0].processes) == "concurrency=None, num_cpus=2 each"
    assert "hunter2" not in repr(secret)
    assert stream.map_batches(Offset, concurrency=(1, 3))._config.stages[0].processes.concurrency == 3


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_rank_has_its_share_of_the_processes(stream, count, world):
    mapped = stream.map_batches(Offset, concurrency=count)
    stage = mapped._config.stages[0]
    shares = [share_of(stage, rank, world) for rank in range(world)]
    assert {number for share in shares for number in share} == set(range(count))
    assert all(shares)
    config = with_chunks_for_stages(mapped._config, world)
    assert config.prefetch_chunks >= max(4, max(map(len, shares)) + 2)
    assert config.prefetch_bytes == mapped._config.prefetch_bytes


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no function": ({"fn": 3}, ("a function or a class with a __call__ method", "3")),
    "a class that cannot be called": ({"fn": Panic}, ("__call__", "Panic")),
    "a generator": ({"fn": lambda batch: (yield batch)}, ("must return one batch", "generator")),
    "constructor arguments of a function": ({"fn_constructor_args": [1]}, ("drop_one", "use fn_args")),
    "a format": ({"batch_format": "torch"}, ("'torch'", "['numpy', 'pyarrow', 'pandas']")),
    "a batch size": ({"batch_size": 0}, ("batch_size must be an int >= 1", "0")),
    "no processes": ({"concurrency": 0}, ("concurrency must be an int >= 1", "0")),
    "a turned pair": ({"fn": Offset, "concurrency": (3, 2)}, ("concurrency=(min, max)", ">= 3", "2")),
    "a triple": ({"fn": Offset, "concurrency": (1, 2, 3)}, ("concurrency=(min, max)",)),
    "a GPU without a batch size": ({"num_gpus": 1, "concurrency": 1}, ("num_gpus", "pass batch_size")),
    "a class without a number": ({"fn": Offset, "num_cpus": 2}, ("Offset", "needs concurrency")),
    "an unknown option": ({"compute": 1}, ("drop_one", "Invalid option keyword compute")),
    "a wrong amount": ({"num_cpus": -1}, ("num_cpus cannot be negative",)),
    "an option of the stage": ({"max_retries": 3, "num_cpus": 1}, ("sets ['max_retries'] itself",)),
    "what cannot be pickled": (
        {"fn_args": [threading.Lock()]},
        ("drop_one and its arguments must be picklable", "lock"),
    ),
    "a wrong policy": ({"on_transform_error": "skip"}, ("'skip'", '"raise", "replace"')),
    "a limit without replacement": ({"max_replaced_rows": 3}, ("max_replaced_rows", 'on_transform_error="replace"')),
    "a negative limit": (
        {"max_replaced_rows": -1, "on_transform_error": "replace"},
        ("max_replaced_rows", ">= 0", "-1"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_on_the_driver(stream, case):
    arguments, texts = REFUSED[case]
    with pytest.raises(ConfigError) as told:
        stream.map_batches(**{"fn": drop_one, **arguments})
    assert all(text in str(told.value) for text in texts), told.value
    assert not ray.is_initialized()


def test_rows_are_not_replaced_behind_a_pool(stream):
    pool = stream.map_batches(Offset, concurrency=2)
    with pytest.raises(ConfigError, match="drop_one cannot replace rows after a class with processes of its own"):
        pool.map_batches(drop_one, concurrency=1, on_transform_error="replace")
    pool.map_batches(drop_one, concurrency=2, on_transform_error="replace")
    pool.map_batches(drop_one, on_transform_error="replace")


# ---- the actors that the coordinator keeps


def test_actors_are_shared_by_number_replaced_once_and_forgotten_in_time(stream):
    now_s, started = 0.0, iter(range(100))
    shelf = StageShelf(lambda stage: next(started), keep_s=10.0, spare_s=5.0, clock=lambda: now_s)
    stage = stream.map_batches(Offset, concurrency=2)._config.stages[0]
    other = stream.map_batches(Offset, concurrency=2)._config.stages[0]

    def owner(attempt: str, rank: int, number: int) -> Owner:
        return Owner("run", attempt, rank, number)

    first = shelf.claim(owner("a", 0, 0), stage, None)
    assert shelf.claim(owner("a", 2, 0), stage, None) == first
    assert shelf.claim(owner("a", 1, 1), stage, None) != first
    assert shelf.claim(owner("a", 1, 1), other, None) not in (0, 1)
    assert shelf.claim(owner("b", 0, 0), stage, None) == first  # the next worker group
    second = shelf.claim(owner("b", 0, 0), stage, first)
    assert second != first
    assert shelf.claim(owner("b", 2, 0), stage, first) == second  # the other rank that noticed
    now_s = 8.0
    shelf.touch("b", 0)
    now_s = 12.0
    assert len(shelf.sweep()) == 2  # to be ended
    assert len(shelf) == 1
    assert shelf.claim(owner("c", 0, 0), stage, None) == second
    now_s = 18.0
    shelf.touch("c", 0)
    now_s = 22.0
    assert shelf.sweep(is_short=True) == []
    now_s = 24.0
    assert shelf.sweep() == []
    assert shelf.sweep(is_short=True) == [second]
    third = shelf.claim(owner("c", 0, 0), stage, None)
    shelf.release("c", 0)
    assert shelf.sweep() == [third]
    assert len(shelf) == 0


class Handle:
    """An actor of a stage, as a rank sees it."""

    def __init__(self) -> None:
        self.ready = self.apply = self
        self.chunks = 0

    def remote(self, *chunk: Any) -> tuple[str, str]:
        self.chunks += bool(chunk)
        return "block", "info"


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.wait", lambda refs, timeout: (refs, []))


def test_after_a_pause_the_coordinator_is_asked_again_and_else_it_hears_that_actors_are_in_use(stream, ready):
    """It gives idle ones back, and must not give back what is in use."""
    now_s, told = 0.0, []
    given = [Handle()]
    stage = stream.map_batches(Offset, concurrency=1)._config.stages[0]
    actors = StageActors(stage, [0], lambda *_: given[-1], lambda: told.append(now_s), lambda: now_s)

    def send() -> Any:
        return actors.send("block", "info", None)[0]

    for at_s in (0.0, 1.0, 1.9, 3.0, 4.5, 6.0):
        now_s = at_s
        assert send() is given[0]
    assert told == [3.0, 6.0]
    given.append(Handle())
    assert send() is given[0]
    now_s = 6.0 + LEASE_S + 0.1
    assert send() is given[1]
    assert SPARE_STAGE_S >= 2 * LEASE_S


def test_nobody_waits_while_the_coordinator_is_asked_for_an_actor(stream, ready):
    asked, answer = Event(), Event()
    stage = stream.map_batches(Offset, concurrency=1)._config.stages[0]

    def claim(*_: Any) -> Handle:
        asked.set()
        assert answer.wait(10)
        return Handle()

    actors = StageActors(stage, [0], claim, lambda: None)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(actors.send, "block", "info", None)
        assert asked.wait(10)
        actors.drop(None)
        actors.clear()
        assert not sent.done()
        answer.set()
        assert sent.result(10)[1:] == ("block", "info")


def test_a_stream_with_idle_actors_learns_that_another_one_waits():
    store, now_s = Store(), 100.0
    val, train = (StageBoard(name, store, lambda: now_s) for name in ("a", "b"))
    val.post("val", ["1 x Offset"], waits=False)
    train.post("train", ["2 x Offset"], waits=True)
    assert [(note.stream, note.holds, note.waits) for note in val.others()] == [("train", ["2 x Offset"], True)]
    assert [note.stream for note in train.others()] == ["val"]
    train.post("train", (), waits=False)
    assert val.others() == []
    train.post("train", ["2 x Offset"], waits=True)
    now_s += FRESH_S  # its coordinator was killed
    assert val.others() == []
