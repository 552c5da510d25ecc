"""ClusterStore: small values in the key-value store of the Ray cluster, which outlive the process that puts them.

Apart from `_ray.py`, whose imports of Ray Data take a second and 60 MB: every coordinator writes here, and most do without
Ray Data.
"""

from __future__ import annotations

from typing import Any

from ray.experimental.internal_kv import internal_kv_get_gcs_client


class ClusterStore:
    """Text values by key.

    Args:
        namespace: keeps these keys apart from those of others in the cluster.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def get(self, key: str) -> str | None:
        """The value, if there is one."""
        value = _client().internal_kv_get(key.encode(), self._namespace)
        return None if value is None else value.decode()

    def put(self, key: str, value: str) -> None:
        """Keep a value in place of any that there is."""
        _client().internal_kv_put(key.encode(), value.encode(), True, self._namespace)

    def put_if_absent(self, key: str, value: str) -> str:
        """Keep a value unless there is one already; returns the one that is kept."""
        _client().internal_kv_put(key.encode(), value.encode(), False, self._namespace)
        kept = self.get(key)
        assert kept is not None
        return kept

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with a prefix."""
        return [key.decode() for key in _client().internal_kv_keys(prefix.encode(), self._namespace)]

    def delete(self, prefix: str) -> None:
        """Forget all values whose keys begin with a prefix."""
        _client().internal_kv_del(prefix.encode(), True, self._namespace)


def _client() -> Any:
    return internal_kv_get_gcs_client()
