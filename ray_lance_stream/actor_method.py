"""`ray.method`, in a process that is a Ray Client too."""

from __future__ import annotations

import inspect
from typing import Any

import ray

# In a process connected to "ray://...", `ray.method` is the client's own, which refuses all options but one. The options
# are read where the actor runs, which is not a client.
actor_method: Any = inspect.unwrap(ray.method)
