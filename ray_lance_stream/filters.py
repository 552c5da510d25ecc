"""Checks of a filter: that it is a condition on columns, the same whenever it is scanned, and that Lance reads them rightly."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.failures import attempt, guarded, secrets_of
from ray_lance_stream.packed_structs import packed_paths
from ray_lance_stream.selection import field_paths

if TYPE_CHECKING:
    import lance

_QUOTED = re.compile(r"'(?:[^']|'')*'|`[^`]*`|\"[^\"]*\"|--[^\n]*")
# Functions whose value changes from scan to scan, looked for outside of quotes.
_VOLATILE = re.compile(r"\b(?:(?:random|rand|uuid|now|today)\s*\(|current_(?:date|timestamp|time)\b)", re.I)
_NO_COLUMNS = pa.schema([("ray_lance_stream_no_column", pa.int8())])
# What a scan knows of a row besides its columns.
_META_COLUMN = re.compile(r"\b_(?:rowid|rowaddr|rowoffset|row_(?:created_at|last_updated_at)_version)\b", re.I)
# A text that is compared with another one, or with a number.
_COMPARED_TEXT = re.compile(r"'([^']*)'\s*(?:=|!=|<>|<=?|>=?|\blike\b|\bin\b)\s*\(?\s*['\"\d]", re.I)
_READ_COLUMNS = re.compile(r"\bprojection=\[(.*?)\], ")
_BACKTICKS = "a column is written without quotes or in backticks, as `Name`, and a text in single quotes"


def check_filter_text(filter: str) -> None:
    """The part of `validate_filter` that takes no table."""
    if not isinstance(filter, str) or not filter.strip():
        raise ConfigError(f"filter must be an SQL condition such as 'id > 3', got {filter!r}: pass None for all rows")
    volatile = _VOLATILE.search(_QUOTED.sub("''", filter))
    if volatile:
        raise ConfigError(
            f"filter must match the same rows whenever it is scanned, got {filter!r} with {volatile[0]!r}: write the "
            "value as a literal, or select the rows into a column first"
        )


def check_filter(dataset: lance.LanceDataset, filter: str, where: str) -> None:
    """See `validate_filter`."""
    check_filter_text(filter)
    plan = guarded(
        lambda: _plan(dataset, filter),
        f"filter must be an SQL condition on columns of {where}, got {filter!r}",
        ConfigError,
        secrets_of(dataset.uri, dataset.initial_storage_options),
    )
    check_what_is_read(dataset.schema, filter, where, plan)


def check_what_is_read(schema: pa.Schema, filter: str, where: str, plan: str | None = None) -> None:
    """Refuse a filter that is the same for every row, or that Lance would read the wrong values for.

    Args:
        schema: of the table.
        filter: one that can be planned.
        where: the table, for messages.
        plan: how Lance scans it; None: as it would scan a table of this schema.

    Raises:
        ConfigError: with what to write instead.
    """
    _refuse_quoted_names(schema, filter, where)
    packed = packed_paths(schema)
    if plan is None and packed:
        plan, _ = attempt(lambda: _plan(_empty(schema), filter))
    is_meta = _META_COLUMN.search(
        _QUOTED.sub(lambda token: token[0].strip("`") if token[0][0] == "`" else "''", filter)
    )
    # Lance's own parser says that it reads no column: it can be planned on a table that has none of them.
    if not is_meta and attempt(lambda: _plan(_empty(_NO_COLUMNS), filter))[0] is not None:
        raise ConfigError(
            f"filter must tell the rows of {where} apart, got {filter!r}, which is the same for each of them: a column is "
            "written without quotes or in backticks, as `Name`, and a text in single quotes; pass None for all rows"
        )
    for path in packed:
        _refuse_parts(schema, path, plan or "", filter, where)


def _refuse_quoted_names(schema: pa.Schema, filter: str, where: str) -> None:
    texts = {token[0][1:-1].lower() for token in _QUOTED.finditer(filter) if token[0].startswith('"')}
    texts |= {text.lower() for text in _COMPARED_TEXT.findall(filter)}
    named = [path for path in field_paths(schema) if path.lower() in texts] if texts else []
    if named:
        raise ConfigError(
            f"filter must name columns without quotes or in backticks, got {filter!r}: quotes, also double ones, make a text "
            f"of a name; write `{named[0]}` for the column of {where}, or '{named[0]}' for the text"
        )


def _plan(dataset: lance.LanceDataset, filter: str) -> str:
    """How Lance scans for a filter; reads no rows."""
    plan: str = dataset.scanner(columns=["_rowoffset"], filter=filter, limit=0).explain_plan()
    return plan


def _empty(schema: pa.Schema) -> lance.LanceDataset:
    import lance

    return lance.write_dataset(schema.empty_table(), "memory://")


def _refuse_parts(schema: pa.Schema, path: str, plan: str, filter: str, where: str) -> None:
    """Refuse a filter for which Lance would read some fields of a packed struct without the others."""
    found = _READ_COLUMNS.search(plan)
    read = found[1].split(", ") if found else []
    parts = [name for name in read if name.startswith(f"{path}.")]
    if parts and not set(_leaves(schema, path)) <= set(read):
        raise ConfigError(
            f"filter must not read some fields of a packed struct without the others, which Lance mixes up, got {filter!r} "
            f"that reads {parts} of {where}: have the whole struct read, as in {f'{path} IS NOT NULL AND ({filter})'!r}"
        )


def _leaves(schema: pa.Schema, path: str) -> list[str]:
    """The paths of the fields of a struct that are no structs themselves."""
    root, *names = path.split(".")
    field = schema.field(root)
    for name in names:
        field = field.type.field(name)
    leaves = []
    for child in field.type:
        below = f"{path}.{child.name}"
        leaves += _leaves(schema, below) if pa.types.is_struct(child.type) else [below]
    return leaves
