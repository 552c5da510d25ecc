"""TableRef: a table at one version, which each process opens for itself.

Storage options travel with it but are no part of its identity, and neither they nor secrets in the URI show in any text.

Lance is not fork-safe: a process forked after a table was opened must not use Lance (forked.py). Ray workers are spawned.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np

from ray_lance_stream.cache_spec import CacheSpec
from ray_lance_stream.content import TableContent, content_of
from ray_lance_stream.errors import ConfigError, ReadError, TableError, VersionNotFoundError
from ray_lance_stream.failures import attempt, chained, guarded, is_cut_listing, is_refusal, redact, secrets_of
from ray_lance_stream.forked import use_lance
from ray_lance_stream.manifest import is_same_version
from ray_lance_stream.storage_options import (
    StorageOptions,
    check_options,
    current_options,
    renewal_time_s,
    with_retries,
)
from ray_lance_stream.take import KEEP_VERSION_REMEDY, take_rows

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

logger = logging.getLogger(__name__)

# Azure puts the name of the container, which is no secret, where other URIs have user and password.
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
_MAX_OPEN_TABLES = 16
_LISTINGS = 4  # the answer to a listing that is cut in the middle is the one thing that Lance does not ask for again
# Lance's second reader of local files. It is asked for many small reads at once with few system calls.
_URING = "file+uring://"


def public_uri(uri: str) -> str:
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
        cache: where a node keeps data files, for reads through it (data_cache.py).
    """

    uri: str
    version: int
    storage_options: StorageOptions = field(default=None, repr=False, compare=False)
    cache: CacheSpec | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.uri, str) or not self.uri:
            raise ConfigError(f"uri must be a non-empty string, got {type(self.uri).__name__}")
        if not isinstance(self.version, int) or isinstance(self.version, bool) or self.version < 1:
            raise ConfigError(f"version must be an integer >= 1, got {self.version!r} for table {self.identity}")
        if not callable(self.storage_options):
            check_options(self.storage_options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity!r}, version={self.version})"

    @property
    def is_local(self) -> bool:
        """Whether the table lies in the file system."""
        scheme, is_uri, _ = self.uri.partition("://")
        return not is_uri or scheme == "file"

    @property
    def identity(self) -> str:
        """What names the table in states and messages: the URI without secrets."""
        return public_uri(self.uri)

    def at(self, version: int) -> TableRef:
        """The same table at another version."""
        return replace(self, version=version)

    def open(self, *, fresh: bool = False) -> lance.LanceDataset:
        """The dataset, from this process's cache unless `fresh`.

        Raises:
            TableError: no such table, or it cannot be reached.
            VersionNotFoundError: the table is there, the version is gone.
        """
        return open_tables.get(self, fresh)

    def open_uring(self) -> lance.LanceDataset | None:
        """The dataset as Lance reads it through io_uring, from this process's cache.

        None where the table is no local path, or a first read fails: many containers forbid io_uring.
        """
        return open_tables.get_uring(self)

    def newest_version(self) -> int:
        """The newest version of the table.

        Raises:
            TableError: there is no table any more, or it cannot be reached.
        """
        return int(open_newest(self.uri, current_options(self.storage_options)).version)

    def content(self) -> TableContent | None:
        """The fingerprints of the version; None where they cannot be had."""
        return content_of(self.open())

    def take(self, rows: np.ndarray, columns: list[str]) -> pa.Table:
        """The rows at int64[n] offsets, in the given order; see take_rows.

        Options from a callable are asked for again, once, where the object store refuses those in use.
        """
        dataset = self.open()
        try:
            return take_rows(dataset, rows, columns, self.open_uring)
        except ReadError as error:
            if not callable(self.storage_options) or not is_refusal(str(error)):
                raise
        logger.info("table %s: the object store refuses the storage options in use, the callable is asked again", self)
        return take_rows(self.open(fresh=self.open() is dataset), rows, columns)  # unless another thread was first


@dataclass(frozen=True)
class OpenTable:
    dataset: lance.LanceDataset | None  # None: io_uring does not work here
    options: Mapping[str, str] | None  # None: from a callable
    renew_at_s: float


class OpenTables:
    """Least recently used open tables of this process. Opened one at a time: a second caller gets the first's."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, int, bool], OpenTable] = OrderedDict()  # by uri, version, through io_uring
        self._lock = threading.RLock()

    def get(self, ref: TableRef, fresh: bool) -> lance.LanceDataset:
        given = None if callable(ref.storage_options) else dict(ref.storage_options or {})

        def is_usable(found: OpenTable) -> bool:
            return not fresh and found.options == given and time.time() < found.renew_at_s

        def open_table() -> OpenTable:
            options = current_options(ref.storage_options)
            renew_at_s = renewal_time_s(options) if given is None else np.inf
            return OpenTable(_open(ref, options), given, renew_at_s)

        return self.find((ref.uri, ref.version, False), is_usable, open_table)

    def get_uring(self, ref: TableRef) -> lance.LanceDataset | None:
        return self.find(
            (ref.uri, ref.version, True), lambda _: True, lambda: OpenTable(_open_uring(ref), None, np.inf)
        )

    def find(
        self,
        key: tuple[str, int, bool],
        is_usable: Callable[[OpenTable], bool],
        open_table: Callable[[], OpenTable],
    ) -> Any:
        """The table that is open under a key and usable, or one opened now."""
        use_lance()
        with self._lock:
            found = self._tables.get(key)
            if found is None or not is_usable(found):
                found = self._tables[key] = open_table()
            self._tables.move_to_end(key)
            while len(self._tables) > _MAX_OPEN_TABLES:
                self._tables.popitem(last=False)
            return found.dataset


open_tables = OpenTables()


def _open_uring(ref: TableRef) -> lance.LanceDataset | None:
    import lance

    if not ref.is_local:
        return None
    _, is_uri, path = ref.uri.partition("://")

    def open_and_read() -> lance.LanceDataset:
        dataset = lance.dataset(
            _URING + quote(unquote(path) if is_uri else os.path.abspath(ref.uri)), version=ref.version
        )
        if not is_same_version(dataset, ref.open()):
            raise ReadError("this path leads to another table")
        dataset.take([0], columns=dataset.schema.names[:1])  # of thousands each costs
        return dataset

    dataset, failure = attempt(open_and_read)
    if dataset is None:
        logger.info("table %s is read without io_uring: %s", ref.identity, redact(str(failure), ()))
    return dataset


def _open(ref: TableRef, options: dict[str, str]) -> lance.LanceDataset:
    """Open a version, and where that fails find out whether the table or just the version is missing."""
    dataset, failure = attempt(lambda: _opened(ref.uri, options, ref.version))
    if dataset is not None:
        return dataset
    assert failure is not None
    if "not found" in str(failure).lower():
        newest = open_newest(ref.uri, options)
        raise VersionNotFoundError(
            f"version {ref.version} of table {ref.identity} no longer exists: its newest version is {newest.version}. "
            f"{KEEP_VERSION_REMEDY}"
        )
    secrets = secrets_of(ref.uri, options)
    message = f"table {ref.identity} cannot be opened at version {ref.version}: {redact(str(failure), secrets)}"
    raise chained(TableError(message), failure, secrets)


def _opened(uri: str, options: Mapping[str, str], version: int | None = None) -> lance.LanceDataset:
    import lance

    options = with_retries(uri, options)
    failure: BaseException | None = None
    for _ in range(_LISTINGS):
        dataset, failure = attempt(lambda: lance.dataset(uri, version=version, storage_options=options or None))
        if dataset is not None:
            return dataset
        if not is_cut_listing(str(failure)):
            break
    assert failure is not None
    raise failure


def open_newest(uri: str, options: Mapping[str, str]) -> lance.LanceDataset:
    """The newest version.

    Raises:
        TableError: there is no table, or it cannot be reached.
    """
    use_lance()
    return guarded(
        lambda: _opened(uri, options),
        f"no Lance dataset can be opened at {public_uri(uri)}; for a LanceDB table pass the table, or its folder "
        f"<database>/<name>.lance rather than the database's",
        TableError,
        secrets_of(uri, options),
    )
