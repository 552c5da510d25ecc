"""Words of other loaders that are written here, and what to write instead.

Of LanceDB's StreamingDataset and Permutation, Ray Data, MosaicML Streaming, PyTorch's DataLoader and Hugging Face Datasets:
their arguments, their methods, and their objects as tables.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any, NoReturn, ParamSpec, TypeVar

from ray_lance_stream.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class NotIterableError(ConfigError, TypeError):
    """A stream or a shard was used as a list, an iterator or a DataLoader. A TypeError, as iter() and len() raise."""


class NoSuchNameError(ConfigError, AttributeError):
    """A stream or a shard has no such method. An AttributeError, so hasattr() is False."""


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: way for names, way in table.items() for name in names.split()}


_RANKS = (
    "Ray Train gives each worker its share with ray.train.get_dataset_shard(name); without it call "
    "stream.shard(rank, world_size)"
)
_TRANSFORM = "call stream.map_batches(fn), which has concurrency=, on_transform_error= and resources"
_PACKING = (
    "packing of sequences is not available: it must not depend on the number of workers, so tokenize and pack into a table "
    "beforehand, and stream that one (docs/migrating-from-streamingdataset.md)"
)
_AHEAD = (
    "bytes in flight are bounded by prefetch_bytes= and prefetch_chunks=; prefetch_batches= is one of the iter_* calls"
)
_BATCH = (
    "pass global_batch_size=G, the rows of a step over all workers, or batch_size= to the iter_* call of a shard, such as "
    "shard.iter_torch_batches(batch_size=b)"
)
_LOADER = "pass it to the DataLoader of shard.to_torch_dataset() (docs/pytorch.md)"
_ITERATION = "pass it to the iter_* call of a shard, such as shard.iter_torch_batches()"
_TABLE = "the table comes first: lance_stream(table), a LanceDB table, a lance.LanceDataset, or a path or URI"
_ORDER = "rows are permuted by shuffle=True, shuffle_seed= and shuffle_clump_size=, as docs/order.md says"
_READERS = "readers are actors without CPUs: readers_per_worker= says how many; stages of map_batches() take resources"
_SCAN = "pass columns= and filter=, an SQL condition; reads are sized by prefetch_bytes="
_PART = "take a part with filter=, an SQL condition, or permutation=, a permutation table of LanceDB"
_CACHE = "files are kept on disk by cache_dir= and cache_bytes="
_NO_END = "each iter() of an iter_* call is one epoch: write for epoch in range(shard.epoch, num_epochs)"

ARGUMENTS = _by_name(
    {
        "rank world_size num_replicas num_shards shard_index dp_rank dp_world_size worker_info_override": _RANKS,
        "replication": "pass replicas=r, for ranks that share their rows",
        "transform transforms map_fn fn transform_parallelism transform_queue_depth on_transform_error": _TRANSFORM,
        "pack_sequences eos_id pad_id blocks_per_epoch": _PACKING,
        "prefetch_batches io_queue_depth predownload batch_readahead prefetch buffer_size": _AHEAD,
        "batch_size local_batch_size per_device_batch_size device_batch_size": _BATCH,
        "batch_format dtypes device drop_last collate_fn pin_memory": _ITERATION,
        "num_workers persistent_workers prefetch_factor worker_init_fn multiprocessing_context timeout": _LOADER,
        "pin_memory_device in_order": _LOADER,
        "sampler batch_sampler generator batching_method sampling_method sampling_granularity epoch_size": _PART,
        "limit offset split samples": _PART,
        "seed random_seed sampler_seed": "pass shuffle_seed=, an int",
        "shuffle_algo shuffle_block_size partition_algo num_canonical_nodes": _ORDER,
        "local_shuffle_buffer_size local_shuffle_seed": _ORDER,
        "concurrency parallelism override_num_blocks num_cpus num_gpus memory resources accelerator_type": _READERS,
        "ray_remote_args runtime_env label_selector fallback_strategy max_calls": _READERS,
        "scanner_options where with_row_id to_tensor_fn": _SCAN,
        "version branch tag": "give the table at that version: lance.dataset(uri, version=n), or table.checkout(n) of LanceDB",
        "connection_factory api_key client_config": "pass the opened table, and storage_options=, a dict or a function",
        "uri path dataset remote ds streams table_name": _TABLE,
        "local cache_limit cache keep_zip download_retry download_timeout validate_hash": _CACHE,
        "num_epochs epochs repeat": _NO_END,
        "checkpoint resume_from_checkpoint state state_dict": "pass resume_from=, a checkpoint, its path or a state dict",
    }
)

_TO_DATASET = "stream.to_dataset(epoch) is an epoch as a ray.data.Dataset"
_SIZES = (
    "stream.plan.epoch_rows counts the rows of an epoch over all workers, stream.plan.matched_rows those of the filter"
)
_LOOK = "stream.to_dataset().take(n) or shard.peek(n) shows rows, stream.row_ids(epoch, step) those of one; no position moves"
_MAP = "stream.map_batches(fn), with as many rows out as in, before the stream is split"
_FILTER = "pass lance_stream(..., filter=...), an SQL condition; how many rows come must be known beforehand"
_COLUMNS = "pass lance_stream(..., columns=[...]); stream.plan.columns names them"
_SPLIT = (
    "stream.streaming_split(n) and stream.shard(rank, world_size) are shares of ranks; for parts such as train and test make "
    "two streams, with filter= or permutation="
)
_SHUFFLE = "pass lance_stream(..., shuffle=True, shuffle_seed=...): the order is another one in each epoch"
_BATCHES = "pass lance_stream(..., global_batch_size=G), or batch_size= to an iter_* call"
_FIGURES = "stats() and stream.progress() have what was read and waited for"
_IN_FACTORY = "pass it to lance_stream()"
_OF_TABLE = "ask the table itself; stream.plan says which version is read"

METHODS = _by_name(
    {
        "count count_rows num_samples size length shape": _SIZES,
        "take show take_all take_batch head sample first get_sample take_offsets with_take": _LOOK,
        "limit": f"{_PART}, where fewer rows are wanted; {_LOOK}",
        "map flat_map with_transform add_column with_column with_columns rename_column rename_columns apply": _MAP,
        "filter where": _FILTER,
        "select select_columns remove_columns drop_columns columns column_names num_columns flatten": _COLUMNS,
        "split split_at_indices split_proportionately train_test_split streaming_train_test_split random_split": _SPLIT,
        "shuffle random_shuffle randomize_block_order sort order_by": _SHUFFLE,
        "batch with_batch_size unbatch rebatch batch_size": _BATCHES,
        "repartition num_blocks coalesce": "chunks are sized by prefetch_bytes; num_splits is fixed for a run",
        "iter_epochs iter repeat window with_repeat cycle": _NO_END,
        "prefetch cache prefetch_batches": "lance_stream() has prefetch_bytes=, prefetch_chunks= and cache_dir=",
        "with_skip": "stream.skip(epoch, steps) leaves out steps",
        "with_format set_format to_numpy": "iter_batches(batch_format=...) and iter_torch_batches() have formats",
        "bytes_loaded fetch_time transform_time unscanned_rows rows_skipped consumed_rows": _FIGURES,
        "prefetch_queue_depth raw_queue_depth": _FIGURES,
        "merge_state_dicts": "ray_lance_stream.merge_state_dicts(states) merges states",
        "with_connection_factory storage_options": f"{_IN_FACTORY} as storage_options=",
        "num_splits shuffle_seed global_batch_size version uri table_version replicas": "stream.plan has it",
        "to_table to_arrow to_batches scanner search to_lance to_polars checkout versions list_versions": _OF_TABLE,
        "size_bytes": "stream.plan.row_bytes times stream.plan.epoch_rows",
        "dataset sampler num_workers to_iterable_dataset to_torch_data_loader": "shard.to_torch_dataset() is for a DataLoader",
    }
)

_ITS_TABLE = "pass the lance.LanceDataset that it reads, with columns= and filter="
_BOTH_TABLES = "pass the base table, and the permutation table: lance_stream(table, permutation=builder.execute())"
_WRITTEN = "write what it holds as a Lance table, lance.write_dataset(data, uri), and pass the uri"

# By package and class, or one of its bases.
TABLES = {
    ("lancedb", "Permutation"): _BOTH_TABLES,
    ("lancedb", "PermutationBuilder"): _BOTH_TABLES,
    ("lancedb", "StreamingDataset"): 'pass its table, with order="lancedb" and its state as resume_from=',
    ("lancedb", "DBConnection"): "pass one of its tables: db.open_table(name)",
    ("lancedb", "LanceQueryBuilder"): "pass the table, with columns= and filter= in place of a query",
    ("lance", "LanceDataset"): _ITS_TABLE,  # that of lance.torch
    ("lance", "LanceScanner"): _ITS_TABLE,
    ("lance", "LanceFragment"): _ITS_TABLE,
    ("ray", "Dataset"): "write it as a Lance table, ds.write_lance(uri), and pass the uri",
    ("ray", "DataIterator"): "pass the table: a stream is made of it on the driver, and shards of the stream",
    ("ray_lance_stream", "LanceStream"): "it is a stream already; pass the table to make another one",
    ("ray_lance_stream", "StreamDataset"): "pass the table, or this dataset to a DataLoader",
    ("torch", "DataLoader"): "pass the Lance table; a DataLoader takes shard.to_torch_dataset() of a stream",
    ("torch", "Dataset"): _WRITTEN,
    ("datasets", "Dataset"): _WRITTEN,
    ("datasets", "IterableDataset"): _WRITTEN,
    ("streaming", "StreamingDataset"): _WRITTEN,
    ("builtins", "dict"): "make a stream of each table, TorchTrainer(datasets={name: lance_stream(table)}); arrays are "
    "written as a table first, with lance.write_dataset(data, uri)",
}


def way_for_table(table: Any) -> str | None:
    """What to pass to `lance_stream` in place of this object; None where nothing is known of its kind."""
    for kind in type(table).__mro__:
        way = TABLES.get((kind.__module__.partition(".")[0], kind.__qualname__))
        if way is not None:
            return way
    return None


def refuses_other_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments but the first are given by name, and that says what to write in place of others.

    The signature stays as it is, for editors and type checkers.
    """
    known = list(inspect.signature(function).parameters)
    name = function.__name__

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [word for word in kwargs if word not in known]
        if unknown:
            raise ConfigError(f"{name}() has no argument " + "; nor ".join(_ways(unknown, known)))
        if len(args) > 1:
            raise ConfigError(
                f"{name}() takes one table, and all else by name, got {len(args)} arguments without a name"
            )
        return function(*args, **kwargs)

    return checked


def _ways(unknown: list[str], known: list[str]) -> Iterator[str]:
    """What to write in place of arguments, without their values, which may be secrets."""
    ways: dict[str, list[str]] = {}
    for word in unknown:
        close = get_close_matches(word, known, n=1)
        way = ARGUMENTS.get(word) or (f"did you mean {close[0]}=" if close else f"there are {', '.join(known)}")
        ways.setdefault(way, []).append(f"{word}=")
    for way, words in ways.items():
        yield f"{', '.join(words)}: {way}"


class NoLoader:
    """What LanceStream and StreamShard are not: a list of rows, an iterator or a DataLoader. Each use names the way."""

    def __iter__(self) -> NoReturn:
        raise NotIterableError(f"{self._kind} is not iterated itself: {_iterated(self)}")

    def __next__(self) -> NoReturn:
        raise NotIterableError(f"{self._kind} is no iterator: {_iterated(self)}")

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotIterableError(f"{self._kind} has no rows by index: {_LOOK}")

    def __contains__(self, row: object) -> bool:
        return self.__iter__()

    def __len__(self) -> int:
        raise NotIterableError(
            f"{self._kind} has no len(): shard.num_rows and shard.num_batches() count those of a rank, {_SIZES}"
        )

    def __bool__(self) -> bool:
        return True  # else truth would be the length

    @property
    def _kind(self) -> str:
        return f"a {type(self).__name__}"


def _iterated(what: NoLoader) -> str:
    shard = "stream" if type(what).__name__ == "LanceStream" else "shard"
    return (
        f"write for batch in {shard}.iter_torch_batches(), or iter_batches() or iter_rows(), once for each epoch; a DataLoader "
        f"takes {shard}.to_torch_dataset()"
    )


def no_such_name(kind: type, name: str, names: Iterable[str], of_stream: Iterable[str] = ()) -> AttributeError:
    """The error for a name that a stream or a shard does not have.

    Args:
        kind: LanceStream or StreamShard.
        name: what was asked for. Many libraries ask whether something is there, so this is quick.
        names: those that it has.
        of_stream: those that the stream of a shard has.
    """
    text = f"{kind.__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    if name in of_stream:
        return NoSuchNameError(f"{text}: the stream has it, write stream.{name} on the driver")
    if name in METHODS:
        return NoSuchNameError(f"{text}: {METHODS[name]}")
    if hasattr(_ray_dataset(), name):
        return NoSuchNameError(f"{text}: {_TO_DATASET}, so write stream.to_dataset().{name}")
    close = get_close_matches(name, [each for each in names if not each.startswith("_")], n=1)
    return NoSuchNameError(text + (f"; did you mean {close[0]}" if close else ""))


def _ray_dataset() -> type:
    from ray.data import Dataset

    return Dataset
