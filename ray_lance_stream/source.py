"""Tables: pinning a version, opening it in any process, and what is read from it.

A `TableRef` is small and picklable: it names a table version, and each process opens it for itself. Storage options
travel with it but are no part of its identity, and neither they nor secrets in the URI show in any text.

Lance is not fork-safe: a process forked after a table was opened must not use Lance. Ray workers are spawned.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import ConfigError, ReadError, TableError, VersionNotFoundError
from ray_lance_stream.take import (
    KEEP_VERSION_REMEDY,
    attempt,
    chained,
    check_columns,
    check_filter,
    guarded,
    redact,
    scan_offsets,
    secrets_of,
    take_rows,
)

if TYPE_CHECKING:
    import lance

__all__ = [
    "StorageOptions",
    "TableRef",
    "count_rows",
    "match_rows",
    "projected_schema",
    "resolve_columns",
    "sample_row_bytes",
    "table_ref",
    "take_rows",
    "validate_filter",
]

StorageOptions: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]] | None

# Azure puts the name of the container, which is no secret, where other URIs have user and password.
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
_SAMPLED_ROWS = 16
_MAX_OPEN_TABLES = 16
_EXPIRY_MARGIN_S = 60.0
_ACCEPTED = "pass a LanceDB table, a lance.LanceDataset, or the path or URI of a Lance dataset"


def _public_uri(uri: str) -> str:
    """`uri` without secrets: no user info, query or fragment. Local paths absolute and normalised."""
    scheme, is_uri, rest = uri.partition("://")
    if not is_uri or scheme == "file":
        # A `?name=` in a path is taken for a signed URL gone wrong rather than for a file name, to be safe.
        path = re.split(r"\?[\w.-]+=", unquote(rest) if is_uri else uri)[0]
        return os.path.abspath(os.path.expanduser(path))
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user_info, at, host = authority.rpartition("@")
    if at and scheme in _CONTAINER_SCHEMES:
        host = f"{user_info.partition(':')[0]}@{host}"
    return f"{scheme}://{host}{slash}{path}".rstrip("/")


@dataclass(frozen=True)
class TableRef:
    """A table at one version.

    Attributes:
        uri: where the Lance dataset is; may hold secrets.
        version: the version that every read sees.
        storage_options: for Lance's object store, or a callable that returns them, called each time the table is
            really opened. Options with `expires_at_millis` are renewed before that time.
    """

    uri: str
    version: int
    storage_options: StorageOptions = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.uri, str) or not self.uri:
            raise ConfigError(f"uri must be a non-empty string, got {type(self.uri).__name__}")
        if not isinstance(self.version, int) or isinstance(self.version, bool) or self.version < 1:
            raise ConfigError(f"version must be an integer >= 1, got {self.version!r} for table {self.identity}")
        if not callable(self.storage_options):
            _check_options(self.storage_options)

    def __repr__(self) -> str:
        return f"TableRef({self.identity!r}, version={self.version})"

    @property
    def identity(self) -> str:
        """What names the table in states and messages: the URI without secrets."""
        return _public_uri(self.uri)

    def at(self, version: int) -> TableRef:
        """The same table at another version."""
        return replace(self, version=version)

    def open(self, *, fresh: bool = False) -> lance.LanceDataset:
        """The dataset, from this process's cache unless `fresh`.

        Raises:
            TableError: no such table, or it cannot be reached.
            VersionNotFoundError: the table is there, the version is gone.
        """
        return _open_tables.get(self, fresh)


def _check_options(options: Any) -> None:
    """Refuse what is not a mapping of strings, without showing any value."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            "storage_options must be a mapping of strings, or a callable that returns one, got "
            f"{type(options).__name__}"
        )
    for key, value in (options or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"storage_options must map strings to strings, got {type(value).__name__} for {key!r}")


def _current_options(options: StorageOptions) -> dict[str, str]:
    """Today's storage options. An error of the callable shows where it arose, not its text, which may hold a secret."""
    if not callable(options):
        return dict(options or {})
    result, failure = attempt(options)
    if failure is not None:
        frame = failure.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
        raise TableError(
            f"the storage_options callable raised {type(failure).__name__}{where}; its message is withheld, as it may "
            f"hold credentials: call it on its own to see it"
        )
    _check_options(result)
    return dict(result or {})


@dataclass(frozen=True)
class _OpenTable:
    dataset: lance.LanceDataset
    options: Mapping[str, str] | None  # None: from a callable
    renew_at_s: float


class _OpenTables:
    """Least recently used open tables of this process. Opened one at a time: a second caller gets the first's."""

    def __init__(self) -> None:
        self._tables: dict[int, OrderedDict[tuple[str, int], _OpenTable]] = {}  # by process id
        self._lock = threading.RLock()
        # A lock held by another thread when the process forks would stay locked for ever in the child. What the parent
        # opened stays where it is: closing it would run Lance code.
        os.register_at_fork(after_in_child=lambda: setattr(self, "_lock", threading.RLock()))

    def get(self, ref: TableRef, fresh: bool) -> lance.LanceDataset:
        with self._lock:
            tables = self._tables.setdefault(os.getpid(), OrderedDict())
            key = (ref.uri, ref.version)
            found = tables.get(key)
            given = None if callable(ref.storage_options) else dict(ref.storage_options or {})
            if fresh or found is None or found.options != given or time.time() >= found.renew_at_s:
                options = _current_options(ref.storage_options)
                found = _OpenTable(_open(ref, options), given, _renewal_time_s(options) if given is None else np.inf)
                tables[key] = found
            tables.move_to_end(key)
            while len(tables) > _MAX_OPEN_TABLES:
                tables.popitem(last=False)
            return found.dataset


_open_tables = _OpenTables()


def _renewal_time_s(options: Mapping[str, str]) -> float:
    """When to ask for new options: a minute, or a quarter of their life, before they expire."""
    text = options.get("expires_at_millis", "")
    if not text.isdigit():
        return np.inf
    expires_s, now_s = int(text) / 1000, time.time()
    return expires_s - min(_EXPIRY_MARGIN_S, (expires_s - now_s) / 4)


def _open(ref: TableRef, options: dict[str, str]) -> lance.LanceDataset:
    """Open a version, and where that fails find out whether the table or just the version is missing."""
    import lance

    dataset, failure = attempt(lambda: lance.dataset(ref.uri, version=ref.version, storage_options=options or None))
    if dataset is not None:
        return dataset
    assert failure is not None
    if "not found" in str(failure).lower():
        newest = _open_newest(ref.uri, options)
        raise VersionNotFoundError(
            f"version {ref.version} of table {ref.identity} no longer exists: its newest version is {newest.version}. "
            f"{KEEP_VERSION_REMEDY}"
        )
    secrets = secrets_of(ref.uri, options)
    message = f"table {ref.identity} cannot be opened at version {ref.version}: {redact(str(failure), secrets)}"
    raise chained(TableError(message), failure, secrets)


def _open_newest(uri: str, options: Mapping[str, str]) -> lance.LanceDataset:
    import lance

    return guarded(
        lambda: lance.dataset(uri, storage_options=dict(options) or None),
        f"no Lance dataset can be opened at {_public_uri(uri)}; for a LanceDB table pass the table, or its folder "
        f"<database>/<name>.lance rather than the database's",
        TableError,
        secrets_of(uri, options),
    )


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
        _check_options(storage_options)
    library = type(table).__module__.partition(".")[0]
    if isinstance(table, (str, os.PathLike)):
        return _ref_from_uri(table, storage_options)
    if library == "lance":
        return _ref_from_dataset(table, storage_options)
    if library == "lancedb":
        return _ref_from_lancedb(table, storage_options)
    if isinstance(table, (list, tuple)):
        hint = "one stream reads one table: make a stream per table, or write them as one"
    elif table is None:
        hint = _ACCEPTED
    else:
        hint = f"{_ACCEPTED}; other data is written as one with lance.write_dataset(data, uri)"
    raise ConfigError(f"table must be one Lance table, got {type(table).__module__}.{type(table).__qualname__}: {hint}")


def _ref_from_uri(table: str | os.PathLike[str], storage_options: StorageOptions) -> TableRef:
    uri = _checked_uri(os.fspath(table))
    newest = _open_newest(uri, _current_options(storage_options))
    return TableRef(uri, newest.version, storage_options)


def _checked_uri(uri: Any) -> str:
    """A URI that means the same in every process."""
    if not isinstance(uri, str) or not uri:
        raise ConfigError(f"the path of a table must be a non-empty string, got {type(uri).__name__}: {_ACCEPTED}")
    scheme, is_uri, _ = uri.partition("://")
    if scheme == "memory" and is_uri:
        raise ConfigError(
            f"a table must be readable from other processes, got the in-memory table {_public_uri(uri)}: "
            "create it with lancedb.connect(<path or object store URI>)"
        )
    if scheme == "db" and is_uri:
        raise ConfigError(
            f"remote LanceDB tables are not supported yet, got {_public_uri(uri)}: pass the URI of the Lance dataset "
            "in your object store"
        )
    # Workers run in other folders.
    return uri if is_uri else os.path.abspath(os.path.expanduser(uri))


def _ref_from_dataset(table: Any, storage_options: StorageOptions) -> TableRef:
    import lance

    if not isinstance(table, lance.LanceDataset):
        raise ConfigError(f"table must be a dataset, got lance's {type(table).__qualname__}: {_ACCEPTED}")
    uri = _checked_uri(str(table.uri))
    options = storage_options if storage_options is not None else table.initial_storage_options
    ref = TableRef(uri, table.version, options)
    # The same URI and version may name other rows: of another branch, or of a table made anew in the same place.
    if table._ds.serialized_manifest() != ref.open(fresh=True)._ds.serialized_manifest():
        raise TableError(
            f"the dataset given is not what other processes find at {ref!r}: the table was made anew, or this is "
            "another branch; open it again by its own URI (of a branch: <uri>/tree/<branch>)"
        )
    return ref


def _ref_from_lancedb(table: Any, storage_options: StorageOptions) -> TableRef:
    from lancedb.table import LanceTable

    kind = type(table).__qualname__
    if not isinstance(table, LanceTable):
        if "Remote" in kind:
            raise ConfigError(
                f"remote LanceDB tables are not supported yet, got {kind}: pass the URI of the Lance dataset in your "
                "object store"
            )
        raise ConfigError(f"table must be a synchronous LanceDB table, got {kind}: open it with lancedb.connect()")
    uri, version, branch = guarded(
        lambda: (table.uri, table.version, table.current_branch()),
        f"the LanceDB table {table.name!r} cannot be used",
        TableError,
        (),
    )
    uri = _checked_uri(uri)
    if branch is not None:
        raise ConfigError(
            f"table must be on the main branch, got branch {branch!r} of {_public_uri(uri)}: pass the branch's own "
            f"URI, {_public_uri(uri)}/tree/{branch}"
        )
    if storage_options is None:
        storage_options = table.latest_storage_options() or dict(table._conn.storage_options or {}) or None
    ref = TableRef(uri, version, storage_options)
    ref.open(fresh=True)  # a dropped table still answers from memory
    return ref


def resolve_columns(ref: TableRef, columns: Sequence[str] | None) -> list[str]:
    """The columns to read; None: all. `a.b` is one field of a struct column.

    Raises:
        ConfigError: an unknown or repeated column, or none.
    """
    return check_columns(ref.open(), columns, f"table {ref.identity}")


def validate_filter(ref: TableRef, filter: str) -> None:
    """Refuse a filter that Lance cannot plan, or whose matches change from scan to scan; reads no rows.

    Raises:
        ConfigError: with Lance's reason.
    """
    check_filter(ref.open(), filter, f"table {ref.identity}")


def count_rows(ref: TableRef) -> int:
    """Live rows of the version: deleted rows do not count."""
    return int(guarded(ref.open().count_rows, f"the rows of {ref!r} cannot be counted", ReadError, _secrets(ref)))


def match_rows(ref: TableRef, filter: str, *, progress: bool = True) -> np.ndarray:
    """int64[m] sorted offsets of the rows for which the filter is true; NULL is not true.

    One scan of the filter's columns, with a progress bar if it takes more than a moment.
    """
    dataset = ref.open()
    action = f"the rows of {ref!r} that match filter={filter!r} cannot be found"
    return guarded(lambda: scan_offsets(dataset, filter, progress), action, ReadError, _secrets(ref))


def projected_schema(ref: TableRef, columns: list[str]) -> pa.Schema:
    """Schema of what `take_rows` returns."""
    return take_rows(ref.open(), np.empty(0, np.int64), columns).schema


def sample_row_bytes(ref: TableRef, columns: list[str], num_rows: int) -> int:
    """Estimated Arrow bytes of one row, at least 1, from a few rows spread over the first `num_rows` of the table."""
    num_rows = min(num_rows, count_rows(ref))
    if num_rows < 1:
        return 1
    rows = np.unique(np.linspace(0, num_rows - 1, _SAMPLED_ROWS).astype(np.int64))
    num_bytes: int = take_rows(ref.open(), rows, columns).nbytes
    return max(1, math.ceil(num_bytes / len(rows)))


def _secrets(ref: TableRef) -> set[str]:
    return secrets_of(ref.uri, ref.open().initial_storage_options)
