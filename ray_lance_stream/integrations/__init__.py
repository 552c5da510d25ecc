"""Frameworks that run the training loop themselves. Nothing of the library imports this package, or what it needs."""

from __future__ import annotations

from ray_lance_stream.integrations.tracked import TrackedBatches

__all__ = ["TrackedBatches"]
