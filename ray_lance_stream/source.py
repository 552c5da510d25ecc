"""Pinning a table version, and what is read from it: schema, count, matching rows, row sizes."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from ray_lance_stream.cache_spec import CacheSpec, tell_of_cache
from ray_lance_stream.errors import ConfigError, ReadError, TableError
from ray_lance_stream.failures import attempt, guarded, secrets_of
from ray_lance_stream.filters import check_filter
from ray_lance_stream.manifest import is_same_version
from ray_lance_stream.other_loaders import way_for_table
from ray_lance_stream.remote import RemoteTableRef, remote_ref
from ray_lance_stream.selection import check_columns, scan_offsets
from ray_lance_stream.storage_options import StorageOptions, check_options, current_options
from ray_lance_stream.table import TableRef, open_newest, public_uri

logger = logging.getLogger(__name__)

_SAMPLED_ROWS = 16
_ACCEPTED = "pass a LanceDB table, a lance.LanceDataset, or the path or URI of a Lance dataset"


def table_ref(table: Any, storage_options: StorageOptions = None) -> TableRef:
    """Pin the current (or checked-out) version of a table.

    Args:
        table: LanceDB table, lance.LanceDataset, or path or URI of a Lance dataset.
        storage_options: how to reach it from any process; default: what the table was opened with.

    Raises:
        ConfigError: something that a worker could not open, or no table at all.
        TableError: no such table.
    """
    if not callable(storage_options):
        check_options(storage_options)
    library = type(table).__module__.partition(".")[0]
    if isinstance(table, (str, os.PathLike)):
        return _ref_from_uri(table, storage_options)
    if library == "lance":
        return _ref_from_dataset(table, storage_options)
    if library == "lancedb":
        return _ref_from_lancedb(table, storage_options)
    if (way := way_for_table(table)) is not None:
        hint = way
    elif isinstance(table, (list, tuple)):
        hint = "one stream reads one table: make a stream per table, or write them as one"
    elif table is None:
        hint = _ACCEPTED
    else:
        hint = f"{_ACCEPTED}; other data is written as one with lance.write_dataset(data, uri)"
    raise ConfigError(f"table must be one Lance table, got {type(table).__module__}.{type(table).__qualname__}: {hint}")


def _ref_from_uri(table: str | os.PathLike[str], storage_options: StorageOptions) -> TableRef:
    uri = _checked_uri(os.fspath(table))
    newest = open_newest(uri, current_options(storage_options))
    ref = TableRef(uri, newest.version, storage_options)
    ref.open(fresh=True)  # this process may have opened one that lay here before
    return ref


def _checked_uri(uri: Any) -> str:
    """A URI that means the same in every process."""
    if not isinstance(uri, str) or not uri:
        raise ConfigError(f"the path of a table must be a non-empty string, got {type(uri).__name__}: {_ACCEPTED}")
    scheme, is_uri, _ = uri.partition("://")
    if scheme == "memory" and is_uri:
        raise ConfigError(
            f"a table must be readable from other processes, got the in-memory table {public_uri(uri)}: "
            "create it with lancedb.connect(<path or object store URI>)"
        )
    if scheme == "db" and is_uri:
        raise ConfigError(
            f"a remote LanceDB table must be given as the table itself, which holds its connection, got "
            f"{public_uri(uri)}: pass lancedb.connect(<db:// URI>, api_key=...).open_table(<name>), or the URI of the "
            "Lance dataset in your object store"
        )
    # Workers run in other folders.
    return uri if is_uri else os.path.abspath(os.path.expanduser(uri))


def _ref_from_dataset(table: Any, storage_options: StorageOptions) -> TableRef:
    import lance

    if not isinstance(table, lance.LanceDataset):
        kind = type(table).__qualname__
        raise ConfigError(f"table must be a dataset, got lance's {kind}: {way_for_table(table) or _ACCEPTED}")
    uri = _checked_uri(str(table.uri))
    options = storage_options if storage_options is not None else table.initial_storage_options
    ref = TableRef(uri, table.version, options)
    # The same URI and version may name other rows: of a branch, since its dataset has the URI of the main one if it was
    # checked out from there, or of a table made anew in the same place.
    found, failure = attempt(lambda: ref.open(fresh=True))
    if found is not None and is_same_version(found, table):
        return ref
    secrets = secrets_of(uri, table.initial_storage_options)
    for branch in guarded(table.branches.list, f"the branches of {ref!r} cannot be listed", TableError, secrets):
        on_branch = TableRef(_branch_uri(uri, branch), table.version, options)
        found, _ = attempt(lambda ref=on_branch: ref.open(fresh=True))  # type: ignore[misc]
        if found is not None and is_same_version(found, table):
            return on_branch
    if failure is not None:
        raise failure
    raise TableError(
        f"the dataset given is not what other processes find at {ref!r}, nor on one of its branches: the table was made "
        "anew; open it again"
    )


def _branch_uri(uri: str, branch: str) -> str:
    """Where Lance keeps a branch, as a dataset that can be opened on its own."""
    return f"{uri.rstrip('/')}/tree/{branch}"


def _ref_from_lancedb(table: Any, storage_options: StorageOptions) -> TableRef:
    from lancedb.remote.table import RemoteTable
    from lancedb.table import LanceTable

    kind = type(table).__qualname__
    if isinstance(table, RemoteTable):
        if storage_options is not None:
            raise ConfigError(
                "storage_options must not be given with a remote table: its connection holds what it takes"
            )
        return remote_ref(table)
    if not isinstance(table, LanceTable):
        way = way_for_table(table) or "open it with lancedb.connect()"
        raise ConfigError(f"table must be a synchronous LanceDB table, got {kind}: {way}")
    uri, version, branch = guarded(
        lambda: (table.uri, table.version, table.current_branch()),
        f"the LanceDB table {table.name!r} cannot be used",
        TableError,
        (),
    )
    uri = _checked_uri(uri)
    if branch is not None:
        uri = _branch_uri(uri, branch)
    if storage_options is None:
        storage_options = table.latest_storage_options() or dict(table._conn.storage_options or {}) or None
    ref = TableRef(uri, version, storage_options)
    ref.open(fresh=True)  # a dropped table still answers from memory
    return ref


def with_cache(ref: TableRef, spec: CacheSpec, columns: list[str]) -> TableRef:
    """The table, read through a disk cache; as it is where it lies in the file system.

    Raises:
        ConfigError: its data files cannot be reached.
    """
    if isinstance(ref, RemoteTableRef):
        raise ConfigError(
            f"cache_dir needs a table whose files Lance reads, got the remote table {ref.identity}; leave cache_dir out"
        )
    if ref.is_local:
        logger.info("table %s is read in place: cache_dir is for object stores", ref.identity)
        return ref
    tell_of_cache(spec, ref.open(), columns, f"table {ref.identity}")
    return replace(ref, cache=spec)


def resolve_columns(ref: TableRef, columns: Sequence[str] | None) -> list[str]:
    """The columns to read; None: all. `a.b` is one field of a struct column.

    Raises:
        ConfigError: an unknown or repeated column, or none.
    """
    if isinstance(ref, RemoteTableRef):
        return ref.check_columns(columns)
    return check_columns(ref.open(), columns, f"table {ref.identity}")


def validate_filter(ref: TableRef, filter: str) -> None:
    """Refuse a filter that Lance cannot plan, or whose matches change from scan to scan; reads no rows.

    Raises:
        ConfigError: with Lance's reason.
    """
    if isinstance(ref, RemoteTableRef):
        return ref.check_filter(filter)
    return check_filter(ref.open(), filter, f"table {ref.identity}")


def count_rows(ref: TableRef, filter: str | None = None) -> int:
    """Live rows of the version, those that match the filter: deleted rows do not count."""
    if isinstance(ref, RemoteTableRef):
        return ref.count_rows(filter)
    action = f"the rows of {ref!r} cannot be counted"
    return int(guarded(lambda: ref.open().count_rows(filter), action, ReadError, _secrets(ref)))


def match_rows(ref: TableRef, filter: str, *, progress: bool = True) -> np.ndarray:
    """int64[m] sorted offsets of the rows for which the filter is true; NULL is not true.

    One scan of the filter's columns, with a progress bar if it takes more than a moment.
    """
    if isinstance(ref, RemoteTableRef):
        return ref.match_rows(filter)
    dataset = ref.open()
    action = f"the rows of {ref!r} that match filter={filter!r} cannot be found"
    return guarded(lambda: scan_offsets(dataset, filter, progress), action, ReadError, _secrets(ref))


def projected_schema(ref: TableRef, columns: list[str]) -> pa.Schema:
    """Schema of what `take_rows` returns."""
    return ref.take(np.empty(0, np.int64), columns).schema


def sample_row_bytes(ref: TableRef, columns: list[str], num_rows: int) -> int:
    """Estimated Arrow bytes of one row, at least 1, from a few rows spread over the first `num_rows` of the table."""
    num_rows = min(num_rows, count_rows(ref))
    if num_rows < 1:
        return 1
    rows = np.unique(np.linspace(0, num_rows - 1, _SAMPLED_ROWS).astype(np.int64))
    num_bytes: int = ref.take(rows, columns).nbytes
    return max(1, math.ceil(num_bytes / len(rows)))


def _secrets(ref: TableRef) -> set[str]:
    return secrets_of(ref.uri, ref.open().initial_storage_options)
