"""What a command gives back, and what it tells meanwhile."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Attributes:
        text: for people.
        data: the same for programs.
        fine: False where a check says no.
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    fine: bool = True


def say(text: str) -> None:
    """Progress and errors, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def as_json(value: Any) -> Any:
    """A value of a table, or of containers, as one that JSON has: bytes in base64, what has no JSON form as its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [as_json(item) for item in value]
    return str(value)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text in columns, the first row a heading; the first column to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
