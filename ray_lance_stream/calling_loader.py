"""Which DataLoader asks a dataset for its items, and how it batches them.

torch says nothing of it to a dataset of its own accord, and what it makes of the items would be wrong in silence. So the
stack is looked at, once for each pass.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

CALLER_OF_ITER = 2  # frames up from here


def fetches_lists() -> bool | None:
    """Whether a DataLoader makes batches of lists of items, asked by the `__iter__` that it calls; None: no DataLoader does.

    False: it hands out each item, as with `batch_size=None`.
    """
    fetcher = sys._getframe(CALLER_OF_ITER).f_locals.get("self")
    found = getattr(fetcher, "auto_collation", None)
    return None if found is None else bool(found)


def calling_loader(dataset: Any) -> DataLoader[Any] | None:
    """The DataLoader that begins to iterate a dataset, or sends it to its workers, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        loader = frame.f_locals.get("self")
        if isinstance(loader, DataLoader) and getattr(loader, "dataset", None) is dataset:
            return loader
        frame = frame.f_back
    return None
