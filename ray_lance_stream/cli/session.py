"""Ray for the commands that read through readers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ray_lance_stream.cli.answer import say


@contextmanager
def ray_session(address: str) -> Iterator[None]:
    """A running Ray: the one that this process has already, else one that ends with the block.

    Workers' output stays off stdout, which holds the result alone.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    say("starting Ray ..." if address == "local" else "connecting to Ray ...")
    with warnings.catch_warnings():
        # Lance warns of forks. Those that start Ray run another program at once.
        warnings.filterwarnings("ignore", "lance is not fork-safe")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
