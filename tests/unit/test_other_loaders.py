"""Words of other loaders: each is an error that says what to write here, and what asks whether it is there is told no."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import lance.torch.data
import lancedb
import numpy as np
import pyarrow as pa
import pytest
import ray.data
import torch
from lancedb.permutation import Permutation, permutation_builder
from lancedb.streaming import StreamingDataset

from ray_lance_stream import ConfigError, LanceStream, StreamShard, lance_stream
from ray_lance_stream.other_loaders import ARGUMENTS, METHODS, TABLES
from ray_lance_stream.stream import SHARD_METHODS
from tests.fake_ray import without_coordinator

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tables")
    return lancedb.connect(folder).create_table("rows", pa.table({"id": np.arange(96)}))


@pytest.fixture(scope="module")
def objects(table: Any) -> Iterator[list[LanceStream | StreamShard]]:
    """A stream and a shard, without Ray."""
    with pytest.MonkeyPatch.context() as patch:
        without_coordinator(patch)
        stream = lance_stream(table, num_splits=4)
        yield [stream, stream.shard(0, 2)]


def parameters(function: Callable[..., Any]) -> set[str]:
    found = inspect.signature(function).parameters.values()
    return {each.name for each in found if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)} - {"self"}


OURS = parameters(lance_stream)
THEIRS = {
    "StreamingDataset": parameters(StreamingDataset.__init__),
    "read_lance": parameters(ray.data.read_lance),
    "DataLoader": parameters(torch.utils.data.DataLoader.__init__),
    "DistributedSampler": parameters(torch.utils.data.DistributedSampler.__init__),
    "iter_torch_batches": parameters(ray.data.DataIterator.iter_torch_batches),
    "lance.torch": {"dataset", "batch_size", "samples", "with_row_id", "to_tensor_fn", "batch_readahead", "cache"},
    "MosaicML": {
        *("streams", "remote", "local", "split", "download_retry", "download_timeout", "validate_hash", "keep_zip"),
        *("epoch_size", "predownload", "cache_limit", "sampling_method", "sampling_granularity", "partition_algo"),
        *("num_canonical_nodes", "batch_size", "shuffle_algo", "shuffle_block_size", "batching_method", "replication"),
    },
}


@pytest.mark.parametrize("loader", THEIRS)
def test_every_argument_of_other_loaders_has_a_way(loader: str) -> None:
    assert THEIRS[loader] - OURS - set(ARGUMENTS) - {"table"} == set()
    assert set(ARGUMENTS) & OURS == set(), "what is an argument here is not foreign"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("rank", "stream.shard(rank, world_size)"),
        ("world_size", "get_dataset_shard"),
        ("transform", "stream.map_batches(fn)"),
        ("prefetch_batches", "prefetch_bytes="),
        ("pack_sequences", "tokenize and pack into a table beforehand"),
        ("batch_size", "global_batch_size=G"),
        ("num_workers", "shard.to_torch_dataset()"),
        ("concurrency", "readers_per_worker="),
        ("seed", "shuffle_seed="),
        ("num_split", "did you mean num_splits="),
        ("storage_option", "did you mean storage_options="),
        ("xyz", "there are table, num_splits"),
    ],
)
def test_an_argument_from_elsewhere_names_the_way_here(table: Any, name: str, way: str) -> None:
    secret = "hunter2"
    with pytest.raises(ConfigError, match=re.escape(f"lance_stream() has no argument {name}=: ")) as error:
        lance_stream(table, num_splits=4, **{name: secret})
    assert way in str(error.value)
    assert secret not in str(error.value)


def test_several_arguments_are_named_at_once(table: Any) -> None:
    with pytest.raises(ConfigError, match=r"rank=, world_size=: Ray Train .*; nor transform=: call stream.map_batches"):
        lance_stream(table, rank=0, transform=len, world_size=2)
    with pytest.raises(ConfigError, match="takes one table, and all else by name, got 2"):
        lance_stream(table, 48)


def test_a_seed_that_is_drawn_for_each_run_is_refused(table: Any) -> None:
    with pytest.raises(ConfigError, match=r"shuffle_seed must be an int, got None.*shuffle=False"):
        lance_stream(table, num_splits=4, shuffle_seed=None)


# ---- streams and shards that are taken for loaders

USES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "for": (list, "iter_torch_batches()"),
    "iter": (iter, "iter_torch_batches()"),
    "in": (lambda it: 3 in it, "iter_torch_batches()"),
    "next": (next, "iter_torch_batches()"),
    "len": (len, "stream.plan.epoch_rows"),
    "index": (lambda it: it[0], "stream.to_dataset().take(n)"),
    "slice": (lambda it: it[:3], "stream.to_dataset().take(n)"),
    "enumerate": (lambda it: list(enumerate(it)), "iter_torch_batches()"),
    "DataLoader": (lambda it: list(torch.utils.data.DataLoader(it)), "num_batches()"),
}


@pytest.mark.parametrize("use", USES)
def test_streams_and_shards_are_no_loaders(objects: list[Any], use: str) -> None:
    action, way = USES[use]
    for it in objects:
        with pytest.raises(ConfigError, match=f"a {type(it).__name__} ") as error:
            action(it)
        assert isinstance(error.value, TypeError), "what tries it out finds that it does not work"
        assert way in str(error.value)
        assert pickle.loads(pickle.dumps(error.value)).args == error.value.args


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("count", "stream.plan.epoch_rows"),
        ("take", "stream.to_dataset().take(n)"),
        ("map", "stream.map_batches(fn)"),
        ("filter", "lance_stream(..., filter=...)"),
        ("limit", "filter="),
        ("split", "stream.streaming_split(n)"),
        ("iter_epochs", "one epoch"),
        ("shuffle", "shuffle=True"),
        ("random_shuffle", "shuffle=True"),
        ("repartition", "prefetch_bytes"),
        ("select_columns", "columns=[...]"),
        ("show", "stream.to_dataset().take(n)"),
        ("batch", "global_batch_size=G"),
        ("write_parquet", "stream.to_dataset().write_parquet"),
        ("groupby", "stream.to_dataset().groupby"),
        ("stat", "did you mean stats"),
    ],
)
def test_a_method_from_elsewhere_names_the_way_here(objects: list[Any], name: str, way: str) -> None:
    for it in objects:
        assert not hasattr(it, name)
        assert getattr(it, name, 7) == 7
        with pytest.raises(AttributeError, match=f"{type(it).__name__!r} object has no attribute {name!r}") as error:
            getattr(it, name)
        assert isinstance(error.value, ConfigError)
        assert way in str(error.value)
        assert pickle.loads(pickle.dumps(error.value)).args == error.value.args


def test_every_method_of_a_dataset_has_a_way(objects: list[Any]) -> None:
    for it in objects:
        for name in {*dir(ray.data.Dataset), *dir(Permutation)} - {"from_tables", "identity"}:  # which make them
            if not name.startswith("_") and not hasattr(it, name):
                with pytest.raises(AttributeError, match=": "):
                    getattr(it, name)


def test_what_is_there_is_not_called_foreign(objects: list[Any]) -> None:
    assert [name for name in METHODS if hasattr(LanceStream, name) or name in SHARD_METHODS] == []
    with pytest.raises(AttributeError, match=r"the stream has it, write stream\.explain on the driver"):
        _ = objects[1].explain
    assert hasattr(LanceStream, "map_batches")


def test_what_libraries_ask_of_an_object_works(objects: list[Any]) -> None:
    for it in objects:
        assert it
        assert bool(it) is True
        assert not callable(it)
        assert repr(it).startswith(type(it).__name__)
        assert repr(copy.copy(it)) == repr(it)
        assert it in [it]
        with pytest.raises(AttributeError, match=r"has no attribute '_repr_html_'$"):
            _ = it._repr_html_
        assert type(pickle.loads(pickle.dumps(it))) is type(it)


def test_an_error_in_a_property_is_not_taken_for_a_missing_name(objects: list[Any], monkeypatch: Any) -> None:
    def broken(self: Any) -> None:
        raise AttributeError("of something else")

    for it, name in zip(objects, ("plan", "num_rows"), strict=True):
        monkeypatch.setattr(type(it), name, property(broken))
        with pytest.raises(AttributeError, match="of something else"):
            getattr(it, name)


# ---- objects that are given as tables


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (Permutation.identity, "lance_stream(table, permutation=builder.execute())"),
        (permutation_builder, "lance_stream(table, permutation=builder.execute())"),
        (lambda table: StreamingDataset(table, num_splits=4), "resume_from="),
        (lambda table: table.search(), "columns= and filter="),
        (lambda table: lancedb.connect(Path(table.uri).parent), "db.open_table(name)"),
        (lambda table: table.to_lance().scanner(), "pass the lance.LanceDataset"),
        (lambda table: table.to_lance().get_fragments()[0], "pass the lance.LanceDataset"),
        (lambda table: lance.torch.data.LanceDataset(table.to_lance(), 4), "pass the lance.LanceDataset"),
        (lambda table: {"train": table}, "TorchTrainer(datasets={name: lance_stream(table)})"),
        (lambda table: lance_stream(table, num_splits=4), "it is a stream already"),
        (lambda table: torch.utils.data.TensorDataset(torch.arange(3)), "lance.write_dataset(data, uri)"),
        (lambda table: torch.utils.data.DataLoader([1]), "shard.to_torch_dataset()"),
        (lambda table: table.to_arrow(), "lance.write_dataset(data, uri)"),
        (lambda table: table.to_pandas(), "lance.write_dataset(data, uri)"),
    ],
)
def test_what_is_no_table_names_the_way(table: Any, make: Callable[[Any], Any], way: str) -> None:
    with pytest.raises(ConfigError, match="table must be") as error:
        lance_stream(make(table), num_splits=4)
    assert way in str(error.value)


def test_datasets_of_ray_and_hugging_face_name_the_way() -> None:
    """By the names of their classes: one takes a cluster, the other one is not installed."""
    for module, name, way in (
        ("ray.data.dataset", "MaterializedDataset", "ds.write_lance(uri)"),
        ("datasets.arrow_dataset", "Dataset", "lance.write_dataset(data, uri)"),
    ):
        base = ray.data.Dataset if name.startswith("M") else object
        kind = type(name, (base,), {"__module__": module, "__del__": lambda self: None})
        with pytest.raises(ConfigError, match="table must be one Lance table") as error:
            lance_stream(kind.__new__(kind), num_splits=4)
        assert way in str(error.value)


def test_every_kind_of_table_has_words() -> None:
    assert all(TABLES.values())
    assert all(re.fullmatch(r"[a-z_0-9]+", word) for word in (*ARGUMENTS, *METHODS))
