"""The manifest of an open table version, as bytes that are the same whenever and wherever the version is opened.

Lance serialises a manifest from maps without an order (metadata of schema, fields and table, the config, the base paths),
so that two openings of one version differ in their bytes. Entries of maps are sorted here. A manifest without two entries
in one map stays as Lance serialises it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lance

# Numbers in Lance's table.proto of what has an order: the fields of the schema, and the fragments. All else that is repeated
# at the top of a manifest is a map.
_FIELDS, _FRAGMENTS = 1, 2
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


def manifest_bytes(dataset: lance.LanceDataset) -> bytes:
    """The manifest of a version: the same bytes for the same version, and others for every other one."""
    entries = []
    for number, entry, value_start in _entries(dataset._ds.serialized_manifest()):
        if number == _FIELDS:
            inner = sorted((inner_number, text) for inner_number, text, _ in _entries(entry[value_start:]))
            entry = entry[:value_start] + b"".join(text for _, text in inner)
        entries.append((number, b"" if number in (_FIELDS, _FRAGMENTS) else entry, entry))
    return b"".join(entry for *_, entry in sorted(entries, key=lambda each: each[:2]))


def is_same_version(one: lance.LanceDataset, other: lance.LanceDataset) -> bool:
    """Whether two datasets are open at the same version of the same table, or of copies of its files."""
    if one._ds.serialized_manifest() == other._ds.serialized_manifest():
        return True
    return manifest_bytes(one) == manifest_bytes(other)


def _entries(message: bytes) -> Iterator[tuple[int, bytes, int]]:
    """The fields of a protobuf message: (number, bytes of the whole entry, where in them its value begins)."""
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        kind = key & 7
        value_start = at
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _LENGTH:
            size, value_start = _varint(message, at)
            at = value_start + size
        elif kind in (_FIXED_64, _FIXED_32):
            at += 8 if kind == _FIXED_64 else 4
        else:
            raise ValueError(f"a manifest must be a protobuf message, got an entry of kind {kind}")
        yield key >> 3, message[start:at], value_start - start


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(number, where it ends)."""
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
