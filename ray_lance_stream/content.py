"""TableContent: tells whether two table versions hold the same rows, from the manifest alone. Reads no data.

Goes into saved states, so what it hashes does not depend on the release of Lance or pyarrow that opens the table, nor on
the extension types that a process happens to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True)
class TableContent:
    """Fingerprints of a table version.

    Attributes:
        content: of the schema, the number of rows, and the ids and sizes of the fragments: the same in a copy that was
            written anew with the same fragments.
        files: of the names of the files, which no two writers choose alike: the same in a copy of the files only.
    """

    content: str
    files: str


def content_of(dataset: lance.LanceDataset) -> TableContent:
    """The fingerprints of an open version; some microseconds per fragment."""
    sizes: list[str] = [field_text(field) for field in dataset.schema]
    names: list[str] = []
    num_rows = 0
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        deleted = metadata.deletion_file
        num_deleted = (deleted.num_deleted_rows or 0) if deleted is not None else 0
        num_rows += metadata.physical_rows - num_deleted
        sizes.append(f"{metadata.id} {metadata.physical_rows} {num_deleted}")
        names += [file.path for file in metadata.files]
        names += [layer.data_file.path for layer in metadata.overlays]
        if deleted is not None:
            names.append(f"{deleted.read_version} {deleted.id}")
    return TableContent(_hashed([str(num_rows), *sizes]), _hashed(names))


def field_text(field: pa.Field) -> str:
    """Name and type of a field, with storage types in place of extension types, which only some processes know."""
    kind: Any = field.type
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if not kind.num_fields:
        text = str(kind)
    else:
        size = f" {kind.list_size}" if pa.types.is_fixed_size_list(kind) else ""
        inner = ", ".join(field_text(kind.field(i)) for i in range(kind.num_fields))
        text = f"{type(kind).__name__}{size} <{inner}>"
    return f"{field.name}: {text}"


def _hashed(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=12).hexdigest()
