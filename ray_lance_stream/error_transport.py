"""How an error travels from the process that raised it to the training loop, and arrives as what it was."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import ray

from ray_lance_stream.errors import TransformError, UnpicklableError, text_of

T = TypeVar("T")

PASSING = (KeyboardInterrupt, SystemExit)  # users' code ends the program with them: they reach the loop as they are


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the cause of the error that it belongs to."""


@dataclass(frozen=True)
class Failure:
    """What was raised in another process, as the value that it answers with.

    Ray would wrap what is raised in an error with the remote traceback as its text, log it again for every chunk that was
    read ahead, and end the process at a SystemExit.

    Attributes:
        error: pickled.
        cause: what users' code raised, pickled, where that is the cause of the error.
        cause_text: type and text of the cause, for a process that cannot load it.
        traceback: of the cause, or else of the error.
    """

    error: bytes
    cause: bytes | None
    cause_text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An error as it was raised."""
        cause = error.__cause__ if isinstance(error, TransformError) else None
        lines = "".join(traceback.format_exception(cause or error))
        return cls(
            error=_pickled(error if cause is None else TransformError(str(error))),
            cause=None if cause is None else _pickled(cause),
            cause_text=text_of(cause),
            traceback=f"in process {os.getpid()} on {socket.gethostname()}:\n{lines}",
        )

    def to_error(self) -> BaseException:
        """The error, to be raised: its cause is what users' code raised, if that did, and then the remote traceback."""
        error: BaseException = pickle.loads(self.error)
        origin = error
        if self.cause is not None:
            try:
                origin = pickle.loads(self.cause)
            except Exception:  # its module may be missing here
                origin = UnpicklableError(self.cause_text)
            error.__cause__ = origin
        origin.__cause__ = RemoteTraceback(self.traceback)
        return error


def answered(call: Callable[[], T]) -> T | tuple[None, Failure]:
    """What a call returns; (None, failure) for whatever it raises."""
    try:
        return call()
    except BaseException as error:
        return None, Failure.of(error)


def raise_original(error: ray.exceptions.RayTaskError) -> NoReturn:
    """Raise what an actor or task has raised as it was, with the remote traceback as its cause."""
    original = error.cause
    if not isinstance(original, Exception):
        raise error
    raise original from RemoteTraceback(str(error))


def _pickled(error: BaseException) -> bytes:
    """As cloudpickle has it, which knows the classes of the user's script; else what stands for the error."""
    try:
        pickled: bytes = ray.cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        passing = next((kind for kind in PASSING if isinstance(error, kind)), None)
        return pickle.dumps(UnpicklableError(text_of(error)) if passing is None else passing(str(error)))
    return pickled
