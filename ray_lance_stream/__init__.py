"""Stream Lance and LanceDB tables into Ray Train, with the same global steps on any number of workers.

Names resolve on first use, so that importing the package does not import ray, lance and torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_lance_stream.errors import (
        ConfigError,
        IterationError,
        ReadError,
        StateError,
        StateMismatchError,
        StreamError,
        TableError,
        TransformError,
        VersionNotFoundError,
    )
    from ray_lance_stream.factory import lance_stream
    from ray_lance_stream.lancedb_state import to_lancedb_state
    from ray_lance_stream.loader import StreamDataLoader
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.state import merge_state_dicts
    from ray_lance_stream.stream import LanceStream
    from ray_lance_stream.torch_dataset import StreamDataset
    from ray_lance_stream.train import report

__version__ = "0.1.0"

_ERRORS = (
    "ConfigError",
    "IterationError",
    "ReadError",
    "StateError",
    "StateMismatchError",
    "StreamError",
    "TableError",
    "TransformError",
    "VersionNotFoundError",
)
_HOME = {
    **dict.fromkeys(_ERRORS, "errors"),
    "LanceStream": "stream",
    "lance_stream": "factory",
    "StreamDataLoader": "loader",
    "StreamDataset": "torch_dataset",
    "StreamShard": "shard",
    "merge_state_dicts": "state",
    "report": "train",
    "to_lancedb_state": "lancedb_state",
}

__all__ = [
    "ConfigError",
    "IterationError",
    "LanceStream",
    "ReadError",
    "StateError",
    "StateMismatchError",
    "StreamDataLoader",
    "StreamDataset",
    "StreamError",
    "StreamShard",
    "TableError",
    "TransformError",
    "VersionNotFoundError",
    "lance_stream",
    "merge_state_dicts",
    "report",
    "to_lancedb_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
