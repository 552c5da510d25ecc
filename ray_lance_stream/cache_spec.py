"""`cache_dir=` and `cache_bytes=`: CacheSpec, what travels to the readers of them, and what is checked on the driver."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_lance_stream.cache_parts import cached_parts
from ray_lance_stream.errors import ConfigError

if TYPE_CHECKING:
    import lance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSpec:
    """Where a node keeps data files of tables in an object store.

    Attributes:
        folder: absolute path of a folder, the same on each node.
        max_bytes: of the data files of all tables; None: as many as leave a tenth of the disk free.
    """

    folder: str
    max_bytes: int | None = None


def cache_spec(cache_dir: object, cache_bytes: object) -> CacheSpec | None:
    """The arguments of the user, checked; None: no cache.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if cache_bytes is not None:
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 1:
            raise ConfigError(f"cache_bytes must be an int >= 1 or None, got {cache_bytes!r}; 100 GiB are 100 * 2**30")
        if cache_dir is None:
            raise ConfigError(f"cache_bytes needs a folder, got cache_bytes={cache_bytes} alone; pass cache_dir too")
    if cache_dir is None:
        return None
    folder = os.fspath(cache_dir) if isinstance(cache_dir, (str, os.PathLike)) else None
    if not isinstance(folder, str) or not os.path.isabs(folder):
        raise ConfigError(
            f"cache_dir must be the absolute path of a folder, got {cache_dir!r}: readers on other nodes run in other "
            "folders"
        )
    return CacheSpec(folder, cache_bytes)


def tell_of_cache(spec: CacheSpec, dataset: lance.LanceDataset, columns: list[str], where: str) -> None:
    """Warn of data files that the cache will not hold."""
    parts = cached_parts(dataset, columns)
    size = parts.size_bytes
    if not parts.files:
        logger.warning("cache_dir is of no use for %s: %s", where, parts.why_not)
    elif spec.max_bytes is not None and size > spec.max_bytes:
        logger.warning(
            "cache_bytes=%d is less than the %d bytes of the data files of %s: each epoch reads the rest from the object "
            "store",
            spec.max_bytes,
            size,
            where,
        )
