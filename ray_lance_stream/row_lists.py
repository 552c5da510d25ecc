"""The lists of a listed order: made once per epoch, in the background, or from disk where they were kept."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ray_lance_stream.config import ReadPlan, RowList, Shared
from ray_lance_stream.lancedb_order import build_list, list_key
from ray_lance_stream.list_cache import ListCache, cache_folder
from ray_lance_stream.plan import fingerprint_of

logger = logging.getLogger(__name__)

KEPT_LISTS = 3  # the running epoch, the next one, and one of another run
MAX_AWAITED = 16
KEPT_ON_DRIVER = 2


def make_list(plan: ReadPlan, epoch: int, share: Callable[..., Shared] = Shared.put) -> RowList:
    """The list of an epoch, from disk or from LanceDB.

    Args:
        plan: with a listed order.
        epoch: from 0.
        share: how its rows are held.

    Raises:
        ConfigError: LanceDB cannot list so many rows within its memory limit.
        ReadError: LanceDB failed.
    """
    cache, key = ListCache(cache_folder()), list_key(plan, epoch)
    kept = cache.load(key)
    if kept is not None:
        rows, fingerprint = kept
    else:
        started_s = time.monotonic()
        rows = build_list(plan, epoch)
        fingerprint = fingerprint_of(rows, plan.grid.num_splits)
        cache.store(key, rows, plan.grid.num_splits)
        logger.info("LanceDB listed the %d rows of epoch %d in %.1f s", len(rows), epoch, time.monotonic() - started_s)
    return RowList(epoch, fingerprint, share(rows))


@dataclass
class _Entry:
    made: Future[RowList]
    is_awaited: bool = False  # somebody was told to ask again


class RowLists:
    """Lists by stream and epoch, each made once, one at a time, in a thread. Nobody who asks waits in here.

    Args:
        make: (plan, epoch) -> list.
        kept: how many; more, while as many are awaited.
    """

    def __init__(self, make: Callable[[ReadPlan, int], RowList] = make_list, kept: int = KEPT_LISTS) -> None:
        self._make = make
        self._kept = kept
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # a list takes memory while it is made
        self._lists: OrderedDict[tuple[ReadPlan, int], _Entry] = OrderedDict()

    def ask(self, plan: ReadPlan, epoch: int) -> RowList | None:
        """The list, or None while it is made: ask again.

        Args:
            plan: without a list.
            epoch: from 0.

        Raises:
            StreamError: it cannot be made; the next one who asks has it tried again.
        """
        with self._lock:
            entry = self._started(plan, epoch)
            entry.is_awaited = not entry.made.done()
            if entry.is_awaited:
                return None
            if entry.made.exception() is not None:
                del self._lists[plan, epoch]
        return entry.made.result()

    def _started(self, plan: ReadPlan, epoch: int) -> _Entry:
        key = plan, epoch
        if key not in self._lists:
            entry = self._lists[key] = _Entry(Future())
            args = (entry.made, plan, epoch)
            threading.Thread(target=self._run, args=args, name=f"list epoch {epoch}", daemon=True).start()
        self._lists.move_to_end(key)
        for old in list(self._lists)[:-1]:
            surplus = len(self._lists) - self._kept
            # One that is awaited for ever by somebody who has gone is let go in the end.
            if surplus > MAX_AWAITED or (surplus > 0 and not self._lists[old].is_awaited):
                del self._lists[old]
        return self._lists[key]

    def _run(self, made: Future[RowList], plan: ReadPlan, epoch: int) -> None:
        with self._one_at_a_time:
            try:
                made.set_result(self._make(plan, epoch))
            except BaseException as error:
                made.set_exception(error)


class DriverLists:
    """The lists that this process has used last, for questions that are asked without a coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[ReadPlan, int], ReadPlan] = OrderedDict()

    def plan_of(self, plan: ReadPlan, epoch: int) -> ReadPlan:
        """The plan with what an epoch needs; errors as `make_list`."""
        if not plan.lacks_list(epoch):
            return plan
        key = plan.unlisted(), epoch
        with self._lock:
            if key not in self._plans:
                self._plans[key] = replace(plan, listed=make_list(plan, epoch, Shared))
            self._plans.move_to_end(key)
            while len(self._plans) > KEPT_ON_DRIVER:
                self._plans.popitem(last=False)
            return self._plans[key]


driver_lists = DriverLists()
