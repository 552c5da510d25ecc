"""Exception tree.

Every error says the rule that was broken, the actual value and the remedy, and can be pickled: it is often raised in a
Ray actor and shown on the driver. Messages never hold storage options.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

MAX_SHOWN_CHARS = 1000


def shown(value: Any) -> str:
    """A value in a message: cut, and of any kind, since what is refused may be anything."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more than 4300 digits, or lists in lists
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def text_of(failure: BaseException | None) -> str:
    """Type and text of what was raised."""
    return f"{type(failure).__name__}: {failure}"


class StreamError(Exception):
    """Base of every error that ray_lance_stream raises on purpose."""


class ConfigError(StreamError, ValueError):
    """An argument of `lance_stream`, of an `iter_*` call or of the trainer cannot be served."""


class TableError(StreamError, RuntimeError):
    """A table cannot be opened, or is not one that a worker on another machine could read."""


class VersionNotFoundError(TableError):
    """The pinned or recorded version of the table no longer exists."""


class ReadError(StreamError, RuntimeError):
    """Rows could not be read, after the allowed number of attempts."""


class TransformError(StreamError, RuntimeError):
    """A function of `map_batches` failed on a row, or broke the rules for what it returns.

    Args:
        text: what failed, on which row and rank, and why.
        cause: what the function raised.
    """

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        """With its cause, which exceptions otherwise leave behind, or with what stands for it."""
        cause = self.__cause__
        if cause is not None:
            try:
                pickle.loads(pickle.dumps(cause))
            except Exception:
                cause = UnpicklableError(text_of(cause))
        return type(self), (str(self), cause)


class UnpicklableError(Exception):
    """Stands for an exception of users' code that cannot go to another process: its type and text."""


def is_failing() -> bool:
    """Whether an error is being handled in this thread, other than one that ends an iterator."""
    error = sys.exc_info()[1]
    while isinstance(error, (GeneratorExit, StopIteration)):
        error = error.__context__
    return error is not None


class IterationError(StreamError, RuntimeError):
    """An iterator was used in a way that has no right answer, or ended before all its rows were delivered."""


class StateError(StreamError, ValueError):
    """A saved position is missing, malformed or of an unknown format."""


class StateMismatchError(StateError):
    """A saved position belongs to another row order than this stream's.

    Attributes:
        differences: one (field, saved value, current value) per field that must agree and does not.
    """

    def __init__(self, differences: list[tuple[str, Any, Any]], remedy: str = "") -> None:
        super().__init__(differences, remedy)
        self.differences = differences
        self.remedy = remedy

    def __str__(self) -> str:
        fields = "; ".join(
            f"{name}: saved {shown(saved)}, current {shown(now)}" for name, saved, now in self.differences
        )
        text = f"the saved stream state does not fit this stream ({fields})"
        return f"{text}. {self.remedy}" if self.remedy else text
