"""order="lancedb" is row for row that of the StreamingDataset of the installed lancedb; how its lists are made and kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import lance
import lancedb.streaming
import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream import ConfigError, ReadError, TableError, lance_stream, row_lists
from ray_lance_stream.config import RowList, Shared
from ray_lance_stream.lancedb_order import DEFAULT_LIMIT_BYTES, EPOCH_FACTOR, MEMORY_LIMIT, build_list, list_key
from ray_lance_stream.list_cache import FOLDER_VARIABLE, ListCache, cache_folder
from ray_lance_stream.order import Order
from ray_lance_stream.plan import StreamPlan, fingerprint_of
from ray_lance_stream.row_ids import offsets_of
from ray_lance_stream.row_lists import MAX_AWAITED, DriverLists, RowLists, driver_lists, make_list
from ray_lance_stream.splits import SplitBlock, SplitGrid
from tests.lancedb_support import ids_from, make_lancedb_table, planned_ids, streaming
from tests.support import make_table

S = 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """LanceDB tables by how their row ids and offsets differ."""
    folder = tmp_path_factory.mktemp("lancedb")
    plain, deleted, compacted, stable = (
        make_lancedb_table(
            folder, 441, name, **({"new_table_enable_stable_row_ids": "true"} if name == "stable" else {})
        )
        for name in ("plain", "deleted", "compacted", "stable")
    )
    for table in (deleted, compacted, stable):
        table.delete("id in (0, 29, 30, 40, 47, 48, 100, 440) or (id > 300 and id % 3 = 0)")
    for table in (compacted, stable):
        table.update(where="id % 50 = 7", values={"value": 3})
        table.optimize()
    return {"plain": plain, "deleted": deleted, "compacted": compacted, "stable": stable}


OPTIONS = {
    "shuffled": {},
    "other seed": {"shuffle_seed": 2**40},
    "filter": {"filter": "id % 5 != 2"},
    "clumps": {"shuffle_clump_size": 7},
    "clumps of a filter": {"shuffle_clump_size": 16, "filter": "id > 20"},
    "not shuffled": {"shuffle": False},
    "not shuffled, filter": {"shuffle": False, "filter": "id % 5 != 2"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["plain", "deleted", "compacted", "stable"])
def test_rows_are_those_of_streaming_dataset(tables, kind, options):
    """Every rank of 4, 2 and 1, in the order of delivery, each in another epoch."""
    table = tables[kind]
    stream = lance_stream(table, num_splits=S, order="lancedb", **options)
    for epoch, world in ((0, 4), (1, 2), (9, 1)):
        for rank in range(world):
            theirs = streaming(table, num_splits=S, epoch=epoch, rank=rank, world_size=world, **options)
            assert planned_ids(stream, epoch, rank, world) == ids_from(theirs), f"epoch {epoch}, rank {rank} of {world}"


def test_a_pinned_version_is_ordered_as_it_was(tables, tmp_path):
    table = make_lancedb_table(tmp_path, 100)
    stream = lance_stream(table, num_splits=S, order="lancedb")
    expected = ids_from(streaming(table, num_splits=S, epoch=2))
    table.delete("id < 50")
    table.optimize()
    assert planned_ids(stream, 2) == expected


def test_a_dataset_that_is_no_lancedb_table_by_name(tmp_path):
    """Any Lance dataset: LanceDB is told where it is."""
    path = make_table(tmp_path / "data", 200)
    assert sorted(planned_ids(lance_stream(path, num_splits=S, order="lancedb"), 0)) == list(range(200))


def test_the_seed_of_an_epoch_is_lancedbs():
    assert EPOCH_FACTOR == lancedb.streaming._EPOCH_PRIME


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop_remainder": False}, "drop_remainder=False cannot be served"),
        ({"shuffle_seed": -1}, r"\[0, 2\*\*64\).*shuffle_seed=-1"),
        ({"shuffle_seed": 2**64 - 1, "epoch": 1}, "epoch=1"),
        ({"order": "lancedb-2"}, "'feistel-1', 'lancedb'"),
        ({"order": "permutation:0", "shuffle": False}, "permutation=<table>"),
        ({"num_splits": 1000}, "num_splits=1000"),
    ],
)
def test_what_cannot_be_served_is_refused_on_the_driver(tables, options, says):
    with pytest.raises(ConfigError, match=says):
        lance_stream(tables["plain"], **{"num_splits": S, "order": "lancedb", **options})


def test_the_memory_limit_of_the_builder_is_an_error_that_says_how_to_raise_it(tmp_path, monkeypatch):
    data = pa.table({"id": np.arange(200_000)})
    stream = lance_stream(lance.write_dataset(data, tmp_path / "t.lance"), num_splits=S, order="lancedb")
    monkeypatch.setenv(MEMORY_LIMIT, "100000")
    with pytest.raises(ConfigError, match=rf"may use 100000 bytes.*200000 rows.*set {MEMORY_LIMIT} to \d+ or more"):
        planned_ids(stream, 0)
    found = []
    for limit in (DEFAULT_LIMIT_BYTES, 17_500_000):  # 32 bytes per row and 10 MB are needed
        monkeypatch.setenv(MEMORY_LIMIT, str(limit))
        found.append(build_list(stream._plan, 0))
    assert np.array_equal(*found)
    assert np.array_equal(np.sort(found[0]), np.arange(200_000))


# How row ids become offsets


def test_a_row_that_is_not_there_is_an_error(tables):
    dataset = tables["deleted"].to_lance()
    with pytest.raises(TableError, match=r"1 of 2 rows are not in here, the first one has row id 0"):
        offsets_of(dataset, np.array([1, 0], np.uint64), "here")
    with pytest.raises(TableError, match=r"row id 99999999999999"):
        offsets_of(dataset, np.array([99999999999999], np.uint64), "here")
    assert offsets_of(dataset, np.empty(0, np.uint64), "here").tolist() == []


# Lists in plans


def test_a_list_is_used_for_its_epoch_only():
    rows = np.array([5, 1, 0, 3, 2, 4])
    plan = StreamPlan(Order(7, order_id="lancedb"), SplitGrid(7, 3), listed=rows, listed_epoch=2)
    assert plan.rows(2, SplitBlock(0, 3), 0, 2).tolist() == [5, 0, 2, 1, 3, 4]
    assert plan.rows(2, SplitBlock(1, 2), 1, 2).tolist() == [3]
    with pytest.raises(ConfigError, match="list of epoch 2 must not be used for epoch 3"):
        plan.rows(3, SplitBlock(0, 3), 0, 1)
    assert replace(plan, listed_epoch=None).rows(3, SplitBlock(0, 3), 0, 1).tolist() == [5, 0, 2]
    with pytest.raises(ConfigError, match="6 rows of an epoch, got 5"):
        replace(plan, listed=rows[:5])
    with pytest.raises(ConfigError, match="listed, not computed"):
        replace(plan, listed=None).rows(2, SplitBlock(0, 3), 0, 1)


def test_fingerprints_tell_lists_apart():
    rows = np.arange(12)
    swapped = rows.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    found = {fingerprint_of(rows, 3), fingerprint_of(rows, 4), fingerprint_of(rows[:-1], 3), fingerprint_of(swapped, 3)}
    assert len(found) == 4
    assert fingerprint_of(rows.astype(np.uint64), 3) in found


# Lists on disk


@pytest.fixture
def stream(tables):
    return lance_stream(tables["plain"], num_splits=S, order="lancedb")


def test_a_list_is_built_once(stream, monkeypatch):
    first = make_list(stream._plan, 0)
    monkeypatch.setattr(row_lists, "build_list", None)
    again = make_list(stream._plan, 0)
    assert np.array_equal(first.rows.get(), again.rows.get())
    assert first == again
    with pytest.raises(TypeError):
        make_list(stream._plan, 1)


def test_a_damaged_file_is_made_again(stream, cache, caplog):
    first = make_list(stream._plan, 0)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    swapped = bytearray(whole)
    start = whole.index(first.rows.get().tobytes())
    swapped[start : start + 16] = whole[start + 8 : start + 16] + whole[start : start + 8]
    for damaged in (whole[:-10], whole[:100], b"", bytes(swapped)):
        path.write_bytes(damaged)
        caplog.clear()
        assert np.array_equal(make_list(stream._plan, 0).rows.get(), first.rows.get())
        assert "of no use" in caplog.text
        assert path.read_bytes() == whole


def test_what_a_list_follows_from_is_in_its_name(tables, stream, monkeypatch):
    plan = stream._plan

    def other(**options):
        return lance_stream(tables["plain"], **{"num_splits": S, "order": "lancedb", **options})._plan

    plans = [
        plan,
        other(num_splits=4),
        other(filter="id > 3"),
        other(shuffle_clump_size=4),
        other(shuffle_seed=1),
        lance_stream(tables["deleted"], num_splits=S, order="lancedb")._plan,
        plan.at(plan.table.version - 1),
    ]
    keys = [list_key(each, epoch) for each in plans for epoch in (0, 1)]
    monkeypatch.setattr("ray_lance_stream.lancedb_order.version", lambda name: "0.99")
    keys.append(list_key(plan, 0))
    assert len(set(keys)) == len(keys)
    assert list_key(other(columns=["id"], filter=None), 0) == list_key(plan, 0)


def test_a_table_made_anew_in_the_same_place_has_lists_of_its_own(tmp_path):
    keys = []
    for rows in (range(40), range(40, 80)):
        uri = str(tmp_path / f"{rows[0]}" / "t")
        lance.write_dataset(pa.table({"id": list(rows)}), uri)
        stream = lance_stream(uri, num_splits=2, order="lancedb")
        table = replace(stream._plan.table, uri=str(tmp_path / "t"))
        (tmp_path / "t").unlink(missing_ok=True)
        (tmp_path / "t").symlink_to(uri)
        table.open(fresh=True)
        keys.append(list_key(replace(stream._plan, table=table), 0))
    assert keys[0] != keys[1]


def test_the_cache_lets_the_lists_go_that_were_not_used_for_longest(tmp_path):
    size = ListCache(tmp_path / "a", 10**6)
    size.store("x", np.arange(1000), 2)
    (file,) = (tmp_path / "a").iterdir()
    cache = ListCache(tmp_path / "b", 3 * file.stat().st_size)
    for number in range(3):
        cache.store(f"k{number}", np.arange(1000) + number, 2)
        time.sleep(0.02)
    assert cache.load("k0") is not None  # used now
    cache.store("k3", np.arange(1000), 2)
    assert sorted(path.stem for path in (tmp_path / "b").iterdir()) == ["k0", "k2", "k3"]
    rows, fingerprint = cache.load("k2")
    assert rows.tolist() == list(range(2, 1002))
    assert fingerprint == fingerprint_of(rows, 2)
    cache.store("huge", np.arange(10_000), 2)
    assert cache.load("huge") is None


def test_the_cache_lets_the_files_of_others_alone(tmp_path):
    """The folder may be one of the user's, full of old Arrow files; what an ended process left half written goes."""
    foreign = [tmp_path / name for name in ("a.arrow", "b.part", "c.1234.part", "d.ray-lance-stream-list.bak", "e")]
    abandoned = tmp_path / "k.1234.ray-lance-stream-list.part"
    for path in (*foreign, abandoned):
        path.write_bytes(bytes(10_000))
        os.utime(path, (0, 0))
    cache = ListCache(tmp_path, 10_000)
    for number in range(3):
        cache.store(f"k.{number}", np.arange(1000), 2)
    assert all(path.exists() for path in foreign)
    assert not abandoned.exists()
    assert [cache.load(f"k.{number}") is None for number in range(3)] == [True, True, False]


HALF = """
import sys, time
import numpy as np
import pyarrow as pa
from pathlib import Path
from ray_lance_stream.list_cache import ListCache

class Half(pa.ipc.RecordBatchFileWriter):
    def write_table(self, table):
        super().write_table(table.slice(0, 10))
        print("half", flush=True)
        time.sleep(60)

pa.ipc.new_file = Half
ListCache(Path(sys.argv[1])).store("half", np.arange(1000), 2)
"""


def test_what_a_killed_process_has_left_half_written_goes_with_the_next_list_that_is_kept(tmp_path):
    """And not while it writes."""
    cache = ListCache(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HALF, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"half\n"
        cache.store("a", np.arange(1000), 2)
        assert len(list(tmp_path.glob("half.*.part"))) == 1
        writer.kill()
    cache.store("b", np.arange(1000), 2)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "b"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert cache_folder() is None
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ray_lance_stream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ray_lance_stream"


def test_without_a_folder_lists_are_made_all_the_same(stream, tmp_path, monkeypatch, caplog):
    first = make_list(stream._plan, 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    assert make_list(stream._plan, 0) == first
    assert f"is not kept in {tmp_path / 'file'}" in caplog.text
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert make_list(stream._plan, 0) == first


# Lists in the coordinator


class Maker:
    """Counts lists, holds them up, and fails on request."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False

    def __call__(self, plan, epoch):
        assert self.may_go_on.wait(10)
        self.made.append(epoch)
        if self.fails:
            raise ReadError("no such thing")
        return RowList(epoch, f"{epoch}", Shared(np.arange(4)))


def until(condition) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def asked(lists: RowLists, plan, epoch: int) -> RowList:
    """As a shard asks: until it is there."""
    end_s = time.monotonic() + 10
    while (found := lists.ask(plan, epoch)) is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return found


def test_a_list_is_made_once_for_all_who_ask(stream):
    make = Maker()
    lists = RowLists(make)
    make.may_go_on.clear()
    assert [lists.ask(stream._plan, epoch) for epoch in (3, 3, 4, 3, 4)] == [None] * 5
    make.may_go_on.set()
    found = [asked(lists, stream._plan, epoch) for epoch in (3, 4, 3)]
    assert [each.epoch for each in found] == [3, 4, 3]
    assert found[0] is found[2]
    assert sorted(make.made) == [3, 4]


def test_a_failure_is_told_and_tried_again(stream):
    make = Maker()
    lists = RowLists(make)
    make.fails = True
    for _ in range(2):
        with pytest.raises(ReadError, match="no such thing"):
            asked(lists, stream._plan, 0)
    make.fails = False
    assert asked(lists, stream._plan, 0).epoch == 0
    assert make.made == [0, 0, 0]


def test_few_lists_are_kept(stream):
    make = Maker()
    lists = RowLists(make, kept=2)
    for epoch in (0, 1, 2, 1, 0):
        asked(lists, stream._plan, epoch)
    assert make.made == [0, 1, 2, 0]


def test_a_list_that_somebody_awaits_is_kept(stream):
    """Else runs at many epochs would push out each other's lists before they are fetched."""
    make = Maker()
    lists = RowLists(make, kept=1)
    make.may_go_on.clear()
    assert [lists.ask(stream._plan, epoch) for epoch in range(5)] == [None] * 5
    make.may_go_on.set()
    until(lambda: len(make.made) == 5)
    assert [asked(lists, stream._plan, epoch).epoch for epoch in range(5)] == [0, 1, 2, 3, 4]
    assert len(make.made) == 5
    make.may_go_on.clear()
    for epoch in range(100, 200):
        lists.ask(stream._plan, epoch)
    assert len(lists._lists) == 1 + MAX_AWAITED
    make.may_go_on.set()


def test_lists_of_different_streams_are_kept_apart(stream):
    lists = RowLists(Maker())
    other = replace(stream._plan, num_splits=4)
    assert asked(lists, stream._plan, 0) is not asked(lists, other, 0)


def test_the_driver_keeps_what_it_asked_for_last(stream, monkeypatch):
    plan = driver_lists.plan_of(stream._plan, 5)
    assert not plan.lacks_list(5)
    assert plan.lacks_list(6)
    made = []
    monkeypatch.setattr(row_lists, "make_list", lambda plan, epoch, share: made.append(epoch) or Maker()(plan, epoch))
    lists = DriverLists()
    for epoch in (0, 1, 0, 2, 0, 1):
        lists.plan_of(stream._plan, epoch)
    assert made == [0, 1, 2, 1]


def test_rows_and_digests_of_steps_come_from_the_list(stream, tables):
    theirs = ids_from(streaming(tables["plain"], num_splits=S, epoch=3))
    for step in (0, 5):
        rows = stream.row_ids(3, step, column="id", global_batch_size=2 * S)
        assert rows == theirs[step * 2 * S : (step + 1) * 2 * S]
    digests = {stream.step_digest(epoch, step, global_batch_size=2 * S) for epoch in (3, 4) for step in (0, 1)}
    assert len(digests) == 4
