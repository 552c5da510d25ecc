"""What keeps the threads of Ray's batching in bounds: how far they run ahead, and that none ends in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ray_lance_stream.error_transport import PASSING
from ray_lance_stream.errors import IterationError

POLL_S = 1.0


class PassedOn(Exception):
    """Carries a KeyboardInterrupt or a SystemExit through Ray's threads, which hand on Exceptions only, to the loop."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(repr(original))
        self.original = original


def contained(call: Callable[..., Any] | None, what: str) -> Callable[..., Any] | None:
    """`call`, with what would end a thread of Ray's batching in silence raised as an Exception."""
    if call is None:
        return None

    def guarded(*args: Any) -> Any:
        try:
            return call(*args)
        except StopIteration as error:
            cause: BaseException = error
        except Exception:
            raise
        except PASSING as error:
            raise PassedOn(error) from None
        except BaseException as error:
            cause = error
        raise IterationError(
            f"{what} raised {type(cause).__name__}({cause}), which is no error that Ray Data passes on; raise an Exception"
        ) from cause

    return guarded


class Gate:
    """Keeps the batches that are being formatted close to the next one in order.

    Ray puts batches back in order in a buffer without bound: while one batch takes long, its other threads would fill it
    with the rest of the epoch.

    Args:
        ahead: a batch is formatted once fewer than this many before it are not.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._next = 0
        self._formatted_by: dict[int, threading.Thread] = {}
        self._closed = False
        self._changed = threading.Condition()

    def enter(self, batch_idx: int) -> None:
        """Wait until a batch may be formatted, by the calling thread.

        Raises:
            IterationError: the thread that was to format the next batch has died.
        """
        with self._changed:
            self._formatted_by[batch_idx] = threading.current_thread()
            while batch_idx >= self._next + self._ahead and not self._closed:
                if not self._changed.wait(POLL_S) and not self._formatted_by[self._next].is_alive():
                    raise IterationError("a thread of Ray's batching has died; see the log for its cause")

    def passed(self) -> None:
        """The next batch in order is formatted."""
        with self._changed:
            self._formatted_by.pop(self._next, None)
            self._next += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody through."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
