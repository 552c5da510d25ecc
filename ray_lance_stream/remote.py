"""RemoteTableRef: a version of a table of LanceDB's remote service (`db://`), read by offset through lancedb's client.

The service is asked for rows by a condition on their offset. It promises no order, so the offsets come along and the rows
are put in place here. What a connection holds, its API key first of all, travels as storage options do: it is no part of
the identity and shows in no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ray_lance_stream.blobs import blob_fields
from ray_lance_stream.errors import ConfigError, ReadError, StreamError, TableError, VersionNotFoundError
from ray_lance_stream.failures import MIN_SECRET_CHARS, attempt, chained, guarded, redact
from ray_lance_stream.filters import check_filter_text, check_what_is_read
from ray_lance_stream.forked import use_lance
from ray_lance_stream.order import FEISTEL_1
from ray_lance_stream.read_parts import in_parts
from ray_lance_stream.selection import META_COLUMNS, check_columns
from ray_lance_stream.table import OpenTable, TableRef, open_tables
from ray_lance_stream.take import KEEP_VERSION_REMEDY, arranged

_OFFSET = "_rowoffset"
_BAD_REQUEST = (400, 422)
# Of a connection: these say where and how, and would garble a message if cut out of it.
_HARMLESS = ("connection_type", "db_url", "region", "host_override", "sql_host_override", "user_agent", "id_delimiter")


@dataclass(frozen=True, repr=False)
class RemoteTableRef(TableRef):
    """A table of the remote service at one version.

    Attributes:
        uri: `db://<database>/<namespace>/<name>`.
        version: the version that every read sees.
        connection: the connection as lancedb writes it, with its API key.
        path: namespace and name of the table.
    """

    connection: str = field(default="", compare=False)
    path: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_local(self) -> bool:
        """Never."""
        return False

    def open(self, *, fresh: bool = False) -> Any:  # a RemoteTable
        """The lancedb table at the version, from this process's cache unless `fresh`; errors as TableRef.open."""
        given = {"connection": self.connection}

        def is_usable(found: OpenTable) -> bool:
            return not fresh and found.options == given

        return open_tables.find(
            (self.uri, self.version, False), is_usable, lambda: OpenTable(_open(self), given, np.inf)
        )

    def open_uring(self) -> None:
        """Only local tables are read through io_uring."""

    def newest_version(self) -> int:
        """See TableRef.newest_version."""
        use_lance()
        action = f"remote table {self.identity} cannot be opened"
        return int(guarded(lambda: _open_table(self, None).version, action, TableError, self._secrets()))

    def content(self) -> None:
        """The service tells nothing of fragments and files."""

    def take(self, rows: np.ndarray, columns: list[str]) -> pa.Table:
        """See TableRef.take. A field of a struct, `a.b`, costs the whole struct."""
        return in_parts(lambda part: self._take(part, columns), rows, (self.identity, self.version, tuple(columns)))

    def _take(self, rows: np.ndarray, columns: list[str]) -> pa.Table:
        if not len(rows):
            return self._take(np.zeros(1, np.int64), columns)[:0]  # the types are the service's
        wanted, place = np.unique(rows, return_inverse=True)
        roots = list(dict.fromkeys(name.partition(".")[0] for name in columns))
        table = self.open()
        found, failure = attempt(table.take_offsets(wanted.tolist()).select([*roots, _OFFSET]).to_arrow)
        if found is None:
            assert failure is not None
            raise self._read_error(failure, len(rows))
        offsets = found[_OFFSET].to_numpy().astype(np.int64)
        by_offset = np.argsort(offsets)
        if not np.array_equal(offsets[by_offset], wanted):
            raise ReadError(f"the service answered {len(offsets)} rows for {len(wanted)} offsets of {self!r}")
        return arranged(found, by_offset[place], columns)

    def check_columns(self, columns: Sequence[str] | None) -> list[str]:
        """See source.resolve_columns."""
        table, where = self.open(), f"table {self.identity}"
        found = self._guarded(lambda: check_columns(table, columns, where), f"the columns of {where} cannot be found")
        blobs = {*blob_fields(table.schema, found), *(set(found) & set(table.blob_columns()))}
        refused = sorted(blobs | (set(found) & set(META_COLUMNS)))
        if refused:
            raise ConfigError(
                f"columns of a remote table must be neither blobs nor meta columns, got {refused} of {where}: leave them "
                "out with columns=[...], or pass the URI of the Lance dataset in your object store"
            )
        return found

    def check_filter(self, filter: str) -> None:
        """See source.validate_filter. The service judges the filter by counting what matches."""
        check_filter_text(filter)
        _, failure = attempt(lambda: self.open().count_rows(filter))
        if failure is None:
            return check_what_is_read(self.open().schema, filter, f"table {self.identity}")
        is_refused = getattr(failure, "status_code", None) in _BAD_REQUEST
        rule = f"filter must be an SQL condition on columns of table {self.identity}, got {filter!r}"
        action = rule if is_refused else f"the rows of {self!r} that match filter={filter!r} cannot be counted"
        secrets = self._secrets()
        error = (ConfigError if is_refused else ReadError)(f"{action}: {redact(str(failure), secrets)}")
        raise chained(error, failure, secrets)

    def count_rows(self, filter: str | None = None) -> int:
        """See source.count_rows; with a filter, the rows that match."""
        table = self.open()
        return int(self._guarded(lambda: table.count_rows(filter), f"the rows of {self!r} cannot be counted"))

    def match_rows(self, filter: str) -> np.ndarray:
        """See source.match_rows. Counted besides, since a service that limits its answers would shorten the epoch."""
        query = self.open().search().where(filter).select([_OFFSET]).limit(None)
        action = f"the rows of {self!r} that match filter={filter!r} cannot be found"
        rows = np.unique(self._guarded(query.to_arrow, action)[_OFFSET].to_numpy().astype(np.int64))
        expected = self.count_rows(filter)
        if len(rows) != expected:
            raise ReadError(f"{action}: the service counts {expected} rows, but answers {len(rows)}")
        return rows

    def _guarded(self, function: Any, action: str) -> Any:
        return guarded(function, action, ReadError, self._secrets())

    def _secrets(self) -> set[str]:
        return {text for text in _texts(json.loads(self.connection)) if len(text) >= MIN_SECRET_CHARS}

    def _read_error(self, failure: BaseException, num_rows: int) -> StreamError:
        secrets = self._secrets()
        text = redact(str(failure), secrets)
        message = f"{num_rows} rows of table {self.identity} version {self.version} could not be read: {text}"
        error: type[StreamError] = ReadError
        if "was not found" in text:
            error, message = VersionNotFoundError, f"{message}. {KEEP_VERSION_REMEDY}"
        return chained(error(message), failure, secrets)


def remote_ref(table: Any) -> RemoteTableRef:
    """Pin the current (or checked-out) version of a remote table.

    Raises:
        ConfigError: a branch, or a connection that other processes cannot open.
        TableError: the service does not answer.
    """
    uri = "db://" + "/".join([table.db_name, *table._namespace_path, table.name])
    state, failure = attempt(table.__getstate__)
    if state is None:
        raise ConfigError(
            f"a remote table must have a connection that other processes can open, got {uri}: {failure}; connect with "
            "lancedb.connect(uri, api_key=...)"
        )
    if table.current_branch() is not None:
        raise ConfigError(f"a remote table must be on its main branch, got branch {table.current_branch()!r} of {uri}")
    path = (*state["namespace_path"], state["name"])
    ref = RemoteTableRef(uri, 1, connection=state["connection_state"], path=path)
    action = f"the remote table {uri} cannot be used"
    return replace(ref, version=guarded(lambda: table.version, action, TableError, ref._secrets()))


def check_remote_order(ref: TableRef, order: str, permutation: Any) -> None:
    """Refuse a remote table for an order that is a list of rows, which is made from the table itself.

    Raises:
        ConfigError: with what to do.
    """
    if isinstance(ref, RemoteTableRef) and (order != FEISTEL_1 or permutation is not None):
        raise ConfigError(
            f"the order of a remote table must be a computed one, got order={order!r} for {ref!r}: use the default order "
            "without permutation, or pass the URI of the Lance dataset in your object store"
        )


def _open_table(ref: RemoteTableRef, version: int | None) -> Any:
    import lance.arrow  # noqa: F401  # makes the type of bfloat16 columns known
    import lancedb

    *namespace, name = ref.path
    return lancedb.deserialize_conn(ref.connection).open_table(name, namespace_path=namespace, version=version)


def _open(ref: RemoteTableRef) -> Any:
    table, failure = attempt(lambda: _open_table(ref, ref.version))
    if table is not None:
        return table
    assert failure is not None
    secrets = ref._secrets()
    if "was not found" in str(failure):
        newest = ref.newest_version()
        raise VersionNotFoundError(
            f"version {ref.version} of remote table {ref.identity} no longer exists: its newest version is {newest}. "
            f"{KEEP_VERSION_REMEDY}"
        )
    text = redact(str(failure), secrets)
    raise chained(
        TableError(f"remote table {ref.identity} cannot be opened at version {ref.version}: {text}"), failure, secrets
    )


def _texts(value: Any) -> Iterator[str]:
    """The texts in a connection that may be secrets: all but those that say where it leads."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _HARMLESS:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
