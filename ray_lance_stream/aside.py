"""Calls of Ray that are made while Ray pickles something else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[[], T]) -> T:
    """`function()`, in a thread of its own.

    Ray notes by thread which references the value has that it pickles. A call in its middle pickles something itself, and
    ends that note: Ray would keep what is pickled after it for as long as this process lives.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="aside") as pool:
        return pool.submit(function).result()
