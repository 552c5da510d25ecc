"""Storage options: what is checked, when they are asked for again, and the retries of Lance's object store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ray_lance_stream.errors import ConfigError, TableError
from ray_lance_stream.failures import attempt

StorageOptions: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]] | None

_EXPIRY_MARGIN_S = 60.0
# Lance's own retries of a request, with backoff and jitter. Its default of three attempts gives up within a second; here the
# time is the bound. A read makes four such series, which ends before its reader is taken for one that hangs
# (read_timeout_s). Not with the rate limit that Lance puts around them: it slows down to a request a second, so that a
# read of a thousand ranges from a store that is gone would go on for as many seconds.
_RETRIES = {"client_max_retries": "1000", "client_retry_timeout": "20", "lance_aimd_max_retries": "0"}
_RETRYING_SCHEMES = ("s3", "s3+ddb", "gs", "az", "abfs", "abfss")


def check_options(options: Any) -> None:
    """Refuse what is not a mapping of strings, without showing any value."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            "storage_options must be a mapping of strings, or a callable that returns one, got "
            f"{type(options).__name__}"
        )
    for key, value in (options or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"storage_options must map strings to strings, got {type(value).__name__} for {key!r}")


def current_options(options: StorageOptions) -> dict[str, str]:
    """Today's storage options. An error of the callable shows where it arose, not its text, which may hold a secret."""
    if not callable(options):
        return dict(options or {})
    result, failure = attempt(options)
    if failure is not None:
        frame = failure.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
        raise TableError(
            f"the storage_options callable raised {type(failure).__name__}{where}; its message is withheld, as it may "
            f"hold credentials: call it on its own to see it"
        )
    check_options(result)
    return dict(result or {})


def renewal_time_s(options: Mapping[str, str]) -> float:
    """When to ask for new options: a minute, or a quarter of their life, before they expire."""
    text = options.get("expires_at_millis", "")
    if not text.isdigit():
        return np.inf
    expires_s, now_s = int(text) / 1000, time.time()
    return expires_s - min(_EXPIRY_MARGIN_S, (expires_s - now_s) / 4)


def with_retries(uri: str, options: Mapping[str, str]) -> dict[str, str]:
    """The options for an object store, with the retries of `_RETRIES` unless they or the environment say otherwise."""
    if uri.partition("://")[0] not in _RETRYING_SCHEMES:
        return dict(options)
    said = {key.upper() for key in options} | {key.removeprefix("OBJECT_STORE_") for key in os.environ}
    return {**{key: value for key, value in _RETRIES.items() if key.upper() not in said}, **options}
