"""TableRef: a table at one version, which each process opens for itself.

Storage options travel with it but are no part of its identity, and neither they nor secrets in the URI show in any text.

Lance is not fork-safe: a process forked after a table was opened must not use Lance. Ray workers are spawned.
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
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote

import numpy as np

from ray_lance_stream.errors import ConfigError, ReadError, TableError, VersionNotFoundError
from ray_lance_stream.failures import attempt, chained, guarded, redact, secrets_of
from ray_lance_stream.take import KEEP_VERSION_REMEDY

if TYPE_CHECKING:
    import lance

logger = logging.getLogger(__name__)

StorageOptions: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]] | None

# Azure puts the name of the container, which is no secret, where other URIs have user and password.
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
_MAX_OPEN_TABLES = 16
# Lance's second reader of local files. It is asked for many small reads at once with few system calls.
_URING = "file+uring://"
_EXPIRY_MARGIN_S = 60.0


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
            check_options(self.storage_options)

    def __repr__(self) -> str:
        return f"TableRef({self.identity!r}, version={self.version})"

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
        return _open_tables.get(self, fresh)

    def open_uring(self) -> lance.LanceDataset | None:
        """The dataset as Lance reads it through io_uring, from this process's cache.

        None where the table is no local path, or a first read fails: many containers forbid io_uring.
        """
        return _open_tables.get_uring(self)


def check_options(options: Any) -> None:
    """Refuse what is not a mapping of strings, without showing any value."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            "storage_options must be a mapping of strings, or a callable that returns one, got "
            f"{type(options).__name__}"
        )
    for key, value in (options or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"storage_options must map strings to strings, got {type(value).__name__} for {key!r}")


def current_options(options: StorageOptions) -> dict[str, str]:
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
    check_options(result)
    return dict(result or {})


@dataclass(frozen=True)
class _OpenTable:
    dataset: lance.LanceDataset | None  # None: io_uring does not work here
    options: Mapping[str, str] | None  # None: from a callable
    renew_at_s: float


class _OpenTables:
    """Least recently used open tables of this process. Opened one at a time: a second caller gets the first's."""

    def __init__(self) -> None:
        # By process id, then by (uri, version, whether through io_uring).
        self._tables: dict[int, OrderedDict[tuple[str, int, bool], _OpenTable]] = {}
        self._lock = threading.RLock()
        # A lock held by another thread when the process forks would stay locked for ever in the child. What the parent
        # opened stays where it is: closing it would run Lance code.
        os.register_at_fork(after_in_child=lambda: setattr(self, "_lock", threading.RLock()))

    def get(self, ref: TableRef, fresh: bool) -> lance.LanceDataset:
        given = None if callable(ref.storage_options) else dict(ref.storage_options or {})

        def is_usable(found: _OpenTable) -> bool:
            return not fresh and found.options == given and time.time() < found.renew_at_s

        def open_table() -> _OpenTable:
            options = current_options(ref.storage_options)
            renew_at_s = _renewal_time_s(options) if given is None else np.inf
            return _OpenTable(_open(ref, options), given, renew_at_s)

        return self._get((ref.uri, ref.version, False), is_usable, open_table)

    def get_uring(self, ref: TableRef) -> lance.LanceDataset | None:
        return self._get(
            (ref.uri, ref.version, True), lambda _: True, lambda: _OpenTable(_open_uring(ref), None, np.inf)
        )

    def _get(
        self,
        key: tuple[str, int, bool],
        is_usable: Callable[[_OpenTable], bool],
        open_table: Callable[[], _OpenTable],
    ) -> Any:
        with self._lock:
            tables = self._tables.setdefault(os.getpid(), OrderedDict())
            found = tables.get(key)
            if found is None or not is_usable(found):
                found = tables[key] = open_table()
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


def _open_uring(ref: TableRef) -> lance.LanceDataset | None:
    import lance

    if not ref.is_local:
        return None
    _, is_uri, path = ref.uri.partition("://")

    def open_and_read() -> lance.LanceDataset:
        dataset = lance.dataset(
            _URING + quote(unquote(path) if is_uri else os.path.abspath(ref.uri)), version=ref.version
        )
        if dataset._ds.serialized_manifest() != ref.open()._ds.serialized_manifest():
            raise ReadError("this path leads to another table")
        dataset.take([0])
        return dataset

    dataset, failure = attempt(open_and_read)
    if dataset is None:
        logger.info("table %s is read without io_uring: %s", ref.identity, redact(str(failure), ()))
    return dataset


def _open(ref: TableRef, options: dict[str, str]) -> lance.LanceDataset:
    """Open a version, and where that fails find out whether the table or just the version is missing."""
    import lance

    dataset, failure = attempt(lambda: lance.dataset(ref.uri, version=ref.version, storage_options=options or None))
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


def open_newest(uri: str, options: Mapping[str, str]) -> lance.LanceDataset:
    import lance

    return guarded(
        lambda: lance.dataset(uri, storage_options=dict(options) or None),
        f"no Lance dataset can be opened at {public_uri(uri)}; for a LanceDB table pass the table, or its folder "
        f"<database>/<name>.lance rather than the database's",
        TableError,
        secrets_of(uri, options),
    )
