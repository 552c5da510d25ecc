"""EpochPlans: what each epoch of a shard reads, where epochs take up new versions of the table."""

from __future__ import annotations

from concurrent.futures import Future

from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.link import CoordinatorLink

KEPT_EPOCHS = 2  # the open one and the next: with a filter a plan has 8 bytes per match


class EpochPlans:
    """The plans of epochs, each asked for once.

    Args:
        pinned: the plan of the version that the driver has pinned.
        config: of the stream.
        link: to the coordinator, which chooses for all ranks.
    """

    def __init__(self, pinned: ReadPlan, config: StreamConfig, link: CoordinatorLink) -> None:
        self._pinned = pinned
        self._config = config
        self._link = link
        self._known: dict[int, ReadPlan] = {}
        self._asked: dict[int, Future[ReadPlan]] = {}
        self._loaded: dict[int, ReadPlan] = {}

    def load(self, epoch: int, plan: ReadPlan) -> None:
        """An epoch has begun in an attempt before, and goes on with this plan."""
        self._known.clear()
        self._asked.clear()
        self._loaded = {epoch: plan}

    def of(self, epoch: int, *, first: bool = False) -> ReadPlan:
        """The plan of an epoch; may wait until it is made.

        Args:
            epoch: which epoch.
            first: whether the run begins with it, and so with the pinned version.

        Raises:
            ConfigError: the stream cannot be served at the version that the epoch takes up.
        """
        plan = self.ready(epoch)
        if plan is None:
            plan = self._link.plan_of_epoch(epoch, self._pinned, first, self._config.pinned_as)
            self._know(epoch, plan)
        return plan

    def ahead(self, epoch: int) -> ReadPlan | None:
        """The plan of an epoch that comes, where it is known already; asks for it, and waits for nothing.

        What goes wrong is told when the epoch begins.
        """
        plan = self.ready(epoch)
        if plan is None and epoch not in self._asked:
            self._asked = {epoch: self._link.ask_plan_of_epoch(epoch, self._pinned, self._config.pinned_as)}
        return plan

    def ready(self, epoch: int) -> ReadPlan | None:
        """The plan of an epoch, if it is known or its answer has come."""
        if epoch in self._loaded:
            return self._loaded[epoch]
        asked = self._asked.get(epoch)
        if epoch not in self._known and asked is not None and asked.done() and asked.exception() is None:
            self._know(epoch, asked.result())
        return self._known.get(epoch)

    def _know(self, epoch: int, plan: ReadPlan) -> None:
        self._known[epoch] = plan
        while len(self._known) > KEPT_EPOCHS:
            del self._known[next(iter(self._known))]
