"""Whether a batch can leave the DataLoader worker that has made it.

torch's queue pickles it in a thread, which prints an error and drops the batch; the loop would wait for it for ever.
"""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from ray_lance_stream.errors import ConfigError


def sendable(batch: Any) -> Any:
    """The batch.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        _WithoutValues(io.BytesIO()).dump(batch)
    except Exception as error:
        raise ConfigError(
            f"a batch must be picklable to leave a DataLoader worker, which this {type(batch).__name__} of the collate_fn is "
            f"not: {type(error).__name__}: {error}; return dicts, tuples and tensors, or instances of a class in a module "
            "that is imported, not in the script"
        ) from error
    return batch


class _WithoutValues(ForkingPickler):
    """As the queue pickles, but for tensors and arrays: these can go, and are most of a batch."""

    def reducer_override(self, value: Any) -> Any:
        """How a value is pickled that is of no type of pickle's own."""
        is_tensor = isinstance(value, torch.Tensor) and (value.is_leaf or not value.requires_grad)
        if is_tensor or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
            return int, ()
        return NotImplemented
