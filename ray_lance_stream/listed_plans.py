"""ListedPlans: the plan of an epoch with its list, where the order is listed, as one shard asks for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import ray

from ray_lance_stream.config import ReadPlan, RowList
from ray_lance_stream.errors import ReadError
from ray_lance_stream.link import ONE_RELEASE, CoordinatorLink

logger = logging.getLogger(__name__)

KEPT_PLANS = 2  # the running pass and the next one
FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.4
ASK_AGAIN_S = 0.5
TELL_WAITING_S = 30.0


@dataclass
class _Question:
    key: tuple[ReadPlan, int]
    ref: ray.ObjectRef
    asked_s: float = field(default_factory=time.monotonic)
    is_answered: bool = False

    def answer(self) -> RowList | None:
        """The list, if it is made and the answer is there."""
        if self.is_answered or not ray.wait([self.ref], timeout=0)[0]:
            return None
        self.is_answered = True
        with suppress(ray.exceptions.RayError):
            return cast("RowList | None", ray.get(self.ref))
        return None

    def is_due(self) -> bool:
        """Whether it is time to ask again."""
        return self.is_answered and time.monotonic() - self.asked_s > ASK_AGAIN_S


class ListedPlans:
    """Lists come from the coordinator, by reference: whoever reads fetches one once a node.

    Args:
        name: of the stream.
        link: to the coordinator.
        then_next: whether a pass is followed by one of the next epoch.
    """

    def __init__(self, name: str, link: CoordinatorLink, then_next: bool) -> None:
        self._name = name
        self._link = link
        self._then_next = then_next
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[ReadPlan, int], ReadPlan] = OrderedDict()
        self._question: _Question | None = None

    def of(self, plan: ReadPlan, epoch: int) -> ReadPlan:
        """The plan of an epoch; waits until its list is made, and has that of the next one made meanwhile.

        Raises:
            StreamError: it cannot be made.
        """
        started_s = told_s = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while (found := self._ask(plan, epoch)) is None:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            self._link.alive()
            now_s = time.monotonic()
            if now_s - told_s > TELL_WAITING_S:
                logger.warning("stream %r: epoch %d is being listed for %.0f s", self._name, epoch, now_s - started_s)
                told_s = now_s
        if self._then_next:
            self.soon(plan, epoch + 1)
        return found

    def soon(self, plan: ReadPlan, epoch: int) -> ReadPlan | None:
        """The plan of an epoch where its list is known to be made; asks now and then, and waits for nothing.

        A list that cannot be made is an error of the pass that needs it, not of the one before it: None.
        """
        known = self._known(plan, epoch)
        if known is not None:
            return known
        asked = self._question
        if asked is None or asked.key != (plan, epoch) or asked.is_due():
            asked = self._question = _Question((plan, epoch), self._link.row_list_soon(plan, epoch))
        listed = asked.answer()
        return None if listed is None else self._keep(plan, epoch, listed)

    def again(self, plan: ReadPlan, epoch: int) -> ReadPlan:
        """The plan of an epoch whose list may have been lost with the coordinator that made it.

        Raises:
            ReadError: it was made again, and is another one.
            StreamError: it cannot be made.
        """
        if plan.listed is None or plan.listed.epoch is None:
            return plan
        with self._lock:
            self._plans.pop((plan.unlisted(), epoch), None)
        found = self.of(plan.unlisted(), epoch)
        assert found.listed is not None
        if found.listed.fingerprint != plan.listed.fingerprint:
            with self._lock:
                self._plans.pop((plan.unlisted(), epoch), None)
            raise ReadError(
                f"the list of rows of epoch {epoch} of stream {self._name!r} was lost and is another one now, "
                f"{found.listed.fingerprint} in place of {plan.listed.fingerprint}; {ONE_RELEASE}"
            )
        return found

    def _known(self, plan: ReadPlan, epoch: int) -> ReadPlan | None:
        if not plan.lacks_list(epoch):
            return plan
        with self._lock:
            return self._plans.get((plan, epoch))

    def _ask(self, plan: ReadPlan, epoch: int) -> ReadPlan | None:
        known = self._known(plan, epoch)
        if known is not None:
            return known
        listed = self._link.row_list(plan, epoch)
        return None if listed is None else self._keep(plan, epoch, listed)

    def _keep(self, plan: ReadPlan, epoch: int, listed: RowList) -> ReadPlan:
        with self._lock:
            found = self._plans[plan, epoch] = replace(plan, listed=listed)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        return found
