"""Forked processes: threads of Lance and Ray are not there any more, so what uses either would hang or crash.

An object that is sent to another process by pickle belongs to that one; a fork copies all memory and asks nobody. So the
process as a whole knows that it was forked, and from what.
"""

from __future__ import annotations

import os
import sys

from ray_lance_stream.errors import ConfigError

_uses_lance = False  # this process has opened a table
_without: set[str] = set()  # what was in use when this process, or one before it, was forked


def use_lance() -> None:
    """Comes before each use of Lance.

    Raises:
        ConfigError: this process was forked from one that had used Lance.
    """
    global _uses_lance
    _refuse("Lance")
    _uses_lance = True


def use_ray() -> None:
    """Comes before each use of Ray by what may be a copy of a stream, a shard or an iterator.

    Raises:
        ConfigError: this process was forked from one that was connected to Ray.
    """
    _refuse("Ray")


def is_cut_off() -> bool:
    """Whether this process was forked from one that was connected to Ray: what it copied is not to be ended by it."""
    return "Ray" in _without


def _refuse(library: str) -> None:
    if library in _without:
        raise ConfigError(
            f"a forked process must not use {library}, which its parent used before the fork and which hangs or crashes in "
            f'the copy, got process {os.getpid()}: start it with the method "spawn" or "forkserver", as in '
            'multiprocessing.get_context("spawn") and DataLoader(..., multiprocessing_context="spawn"), and send the stream '
            "or the shard to it"
        )


def _note_fork() -> None:
    ray = sys.modules.get("ray")
    if _uses_lance:
        _without.add("Lance")
    if ray is not None and ray.is_initialized():
        _without.add("Ray")


os.register_at_fork(after_in_child=_note_fork)
