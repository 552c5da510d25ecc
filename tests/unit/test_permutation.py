"""permutation=: the splits of a permutation table are those that LanceDB's own Permutation reads."""

from __future__ import annotations

from datetime import timedelta

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.permutation import Permutation, permutation_builder

from ray_lance_stream import ConfigError, StateMismatchError, TableError, VersionNotFoundError, lance_stream
from ray_lance_stream.state import StreamState, check_fits
from tests.lancedb_support import ids_from, make_lancedb_table, planned_ids, streaming


@pytest.fixture
def table(tmp_path):
    table = make_lancedb_table(tmp_path / "db", 441)
    table.delete("id in (0, 29, 30, 100) or (id > 300 and id % 3 = 0)")
    return table


def random_splits(builder):
    return builder.split_random(ratios=[0.5, 0.3, 0.2], seed=4, split_names=["a", "b", "c"])


KINDS = {
    "random": random_splits,
    "hash": lambda builder: builder.split_hash(["id"], [1, 2, 1], discard_weight=1),
    "hash, shuffled": lambda builder: builder.split_hash(["id"], [1, 1], discard_weight=0).shuffle(seed=3),
    "calculated": lambda builder: builder.split_calculated("id % 3"),
    "sequential": lambda builder: builder.split_sequential(counts=[50, 100, 70]),
    "fixed, clumps": lambda builder: builder.split_random(fixed=6, seed=1, clump_size=8),
    "filter": lambda builder: builder.split_random(fixed=4, seed=1).filter("id > 200"),
    "one split": lambda builder: builder,
}


def read_by_lancedb(table, permutation) -> list[list[int]]:
    """The ids of each split."""
    splits = []
    for split in range(len(set(permutation.to_arrow()["split_id"].to_pylist()))):
        places = range(permutation.count_rows(f"split_id = {split}"))
        rows = Permutation.from_tables(table, permutation, split).take_offsets(places)
        splits.append([row["id"] for row in rows])
    return splits


@pytest.mark.parametrize("kind", [*KINDS, "in any order"])
def test_splits_are_those_that_lancedb_reads(table, tmp_path, kind):
    """Split by split and position by position, also where the table is not sorted by split."""
    if kind == "in any order":
        arrow = random_splits(permutation_builder(table)).execute().to_arrow()
        mixed = arrow.take(np.random.default_rng(0).permutation(len(arrow)))
        permutation = lancedb.connect(tmp_path / "db").create_table("mixed", mixed)
    else:
        permutation = KINDS[kind](permutation_builder(table)).execute()
    splits = read_by_lancedb(table, permutation)
    stream = lance_stream(table, permutation=permutation)
    assert stream._plan.num_splits == len(splits)
    cycles = np.array([split[: min(map(len, splits))] for split in splits]).T
    assert planned_ids(stream, 0) == planned_ids(stream, 7) == cycles.reshape(-1).tolist()


def test_cut_rows_are_counted(table, caplog):
    lance_stream(table, permutation=random_splits(permutation_builder(table)).execute())
    assert "157 of 391 rows of the permutation are left out" in caplog.text
    assert "(a: 196, b: 117, c: 78 rows)" in caplog.text
    caplog.clear()
    lance_stream(table, permutation=permutation_builder(table).split_random(fixed=6, seed=1).execute())
    assert "left out" not in caplog.text


def test_the_recorded_version_is_read(table, caplog):
    permutation = permutation_builder(table).split_random(fixed=4, seed=1).execute()
    base = table.version
    before = planned_ids(lance_stream(table, permutation=permutation), 0)
    table.delete("id < 200")
    table.optimize()
    stream = lance_stream(table, permutation=permutation)
    assert planned_ids(stream, 0) == before
    assert stream._plan.table.version == base
    assert stream.state_dict()["table_version"] == base


def test_columns_are_those_of_the_recorded_version(table):
    permutation = permutation_builder(table).split_random(fixed=4, seed=1).execute()
    before = planned_ids(lance_stream(table, permutation=permutation), 0)
    table.add_columns({"twice": "id * 2"})
    table.drop_columns(["value"])
    stream = lance_stream(table, permutation=permutation)
    assert stream._plan.columns == ("id", "value", "vec")
    assert planned_ids(stream, 0) == before
    assert lance_stream(table, permutation=permutation, columns=["value"])._plan.columns == ("value",)
    with pytest.raises(
        ConfigError, match=r"columns must exist in table .*unknown \['twice'\].*available are \['id', 'v"
    ):
        lance_stream(table, permutation=permutation, columns=["id", "twice"])


@pytest.mark.filterwarnings("ignore:optimize")
def test_a_version_that_is_gone_is_an_error(table):
    permutation = permutation_builder(table).split_random(fixed=4, seed=1).execute()
    table.delete("id < 200")
    table.optimize(cleanup_older_than=timedelta(0))
    with pytest.raises(VersionNotFoundError):
        lance_stream(table, permutation=permutation)


def test_a_branch_by_its_own_uri(table, tmp_path):
    branch = table.branches.create("dev")
    branch.delete("id > 200")
    permutation = permutation_builder(branch).split_random(fixed=4, seed=1).execute()
    assert b"base_branch" in permutation.schema.metadata
    uri = f"{table.uri}/tree/dev"
    stream = lance_stream(uri, permutation=permutation)
    splits = read_by_lancedb(branch, permutation)
    assert planned_ids(stream, 0) == np.array(splits).T.reshape(-1).tolist()
    ordered = lance_stream(uri, num_splits=4, order="lancedb")
    assert planned_ids(ordered, 3) == ids_from(streaming(branch, num_splits=4, epoch=3))
    with pytest.raises(ConfigError, match="of branch 'dev'"):
        lance_stream(table, permutation=permutation)


def test_other_forms_of_the_table(table, tmp_path):
    permutation = permutation_builder(table).split_random(fixed=4, seed=1).execute()
    expected = planned_ids(lance_stream(table, permutation=permutation), 0)
    arrow = permutation.to_arrow()
    kept = lancedb.connect(tmp_path / "db").create_table("kept", arrow)
    dataset = lance.write_dataset(arrow, tmp_path / "dataset")
    for other in (arrow, kept, dataset):
        stream = lance_stream(table, permutation=other, num_splits=4)
        assert planned_ids(stream, 0) == expected
        assert stream._plan.table.version == table.version


def test_a_table_without_a_version_is_looked_up_in_the_pinned_one(table, caplog):
    arrow = permutation_builder(table).split_random(fixed=4, seed=1).execute().to_arrow()
    expected = planned_ids(lance_stream(table, permutation=arrow), 0)
    stream = lance_stream(table, permutation=arrow.replace_schema_metadata(None))
    assert planned_ids(stream, 0) == expected
    assert "names no base version" in caplog.text
    table.delete("id < 200")
    with pytest.raises(TableError, match=r"rows are not in .* build the permutation again"):
        lance_stream(table, permutation=arrow.replace_schema_metadata(None))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"order": "lancedb"}, "order=lancedb must not be given"),
        ({"shuffle": False}, "shuffle=False"),
        ({"shuffle_seed": 3, "shuffle_clump_size": 2}, "shuffle_seed=3, shuffle_clump_size=2"),
        ({"filter": "id > 3"}, "filter=id > 3"),
        ({"drop_remainder": False}, "drop_remainder=False"),
        ({"on_new_version": "next_epoch"}, "on_new_version=next_epoch"),
        ({"num_splits": 5}, "4 splits, got num_splits=5"),
    ],
)
def test_what_the_table_fixes_must_not_be_given(table, options, says):
    permutation = permutation_builder(table).split_random(fixed=4, seed=1).execute()
    with pytest.raises(ConfigError, match=says):
        lance_stream(table, permutation=permutation, **options)


def listing(rows, splits, metadata=None) -> pa.Table:
    return pa.table({"row_id": rows, "split_id": splits}).replace_schema_metadata(metadata)


@pytest.mark.parametrize(
    ("permutation", "says"),
    [
        (3, "got builtins.int"),
        ("perm.lance", "got builtins.str"),
        (pa.table({"row": [1]}), r"got \['row'\]"),
        (listing([], []), "must list rows"),
        (listing([1, 2], [0, 2]), "split 1 of 3 has none"),
        (listing([1, 2], [1, 2]), "split 0 of 3 has none"),
        (listing([1, 2], [0, 0], {"split_names": '["a", "b"]'}), r"split 1 \('b'\) of 2 has none"),
        (listing([1, 2], ["0", "0"]), "split_id of a permutation table must hold integers, got string"),
        (listing([1, None], [0, 0]), "row_id of a permutation table must hold integers, got int64 with 1 nulls"),
        (
            listing([1], [0], {"base_version": "1", "base_branch": "dev"}),
            "of branch 'dev', got table .*t.lance/tree/dev",
        ),
    ],
)
def test_what_is_no_permutation_table(table, permutation, says):
    with pytest.raises(ConfigError, match=says):
        lance_stream(table, permutation=permutation)


def test_a_state_names_the_permutation(table):
    """Another list is another order; how the table came about is no matter."""
    build = permutation_builder
    one = lance_stream(table, permutation=build(table).split_random(fixed=4, seed=1).execute())
    same = lance_stream(table, permutation=build(table).split_random(fixed=4, seed=1).execute().to_arrow())
    other = lance_stream(table, permutation=build(table).split_random(fixed=4, seed=2).execute())
    state = StreamState.from_dict(one.state_dict())
    assert len(state.identity.order) == len("permutation:") + 16
    check_fits(state, same._plan.identity(1))
    with pytest.raises(StateMismatchError, match=r"order: saved 'permutation:\w+', current 'permutation:\w+'"):
        check_fits(state, other._plan.identity(1))
    with pytest.raises(StateMismatchError, match="order"):
        lance_stream(table, num_splits=4, shuffle=False, resume_from=one.state_dict())


def test_rows_of_a_step(table):
    permutation = permutation_builder(table).split_random(fixed=4, seed=1).execute()
    stream = lance_stream(table, permutation=permutation, global_batch_size=8)
    assert stream.row_ids(5, 3, column="id") == planned_ids(stream, 0)[24:32]
