"""StreamPosition: where one shard is, where it started from, and what a saved state means on its world size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray_lance_stream import train
from ray_lance_stream.attempts import PassStart, StepSize
from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.cursor import Cursor, EpochWalk, Position
from ray_lance_stream.epoch_plans import EpochPlans
from ray_lance_stream.errors import IterationError, StateMismatchError
from ray_lance_stream.lancedb_order import made_by
from ray_lance_stream.lancedb_state import from_lancedb_state, is_lancedb_state
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.listed_plans import ListedPlans
from ray_lance_stream.rank_passes import RankPasses
from ray_lance_stream.recorded import opens_an_epoch, recorded_plan, refuse_evaluation
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.state import ListedEpoch, PartialCycle, StreamIdentity, StreamState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """What the rows that the loop has received are of: a table version, and the newest list that some came from."""

    identity: StreamIdentity
    listed: ListedEpoch | None = None


class StreamPosition:
    """The position of a shard, restored on first use; a loaded state, or an epoch, may move the plan to another version.

    Attributes:
        plan: what the newest pass reads; before the first one, what the open epoch does as far as is known.
        config: how it is delivered, with the skips of a loaded state.
        lists: what the newest passes read, with the lists of their epochs.
        handed_out: tells one pass that a plain DataLoader with workers delivers from another one; None: there is none, and
            the position is known.

    Args:
        name: stream name.
        plan: the driver's plan.
        config: the driver's config.
        world_size: data ranks.
        link: to the coordinator.
    """

    def __init__(self, name: str, plan: ReadPlan, config: StreamConfig, world_size: int, link: CoordinatorLink) -> None:
        self.plan = plan
        self.config = config
        self._pinned = plan
        self._epochs = EpochPlans(plan, config, link)
        self._fresh_epoch: int | None = None  # begun with the pinned version
        self._name = name
        self._world_size = world_size
        self._link = link
        self.lists = ListedPlans(name, link, then_next=not (config.evaluation or config.takes_up_versions))
        self._cursor: Cursor | None = None
        self._passes = RankPasses()
        self.handed_out: object = None

    def cursor(self) -> Cursor:
        """The cursor; on first use set to where this shard starts.

        Raises:
            StateError: the attempt's checkpoint holds no stream state, or one that does not fit.
        """
        if self._cursor is None:
            saved = saved_start(self._name, self.config)
            if saved is None:
                self._fresh_epoch = self.config.epoch
                self._cursor = Cursor(Position(self.config.epoch), _Source(self._identity(self.plan)))
            else:
                self.load(saved)
                logger.info(
                    "stream %r continues at epoch %d, samples_consumed_per_split %d",
                    self._name,
                    saved.epoch,
                    saved.samples_consumed_per_split,
                )
            self.tell()
        assert self._cursor is not None
        return self._cursor

    def state(self) -> StreamState:
        """What a checkpoint records: where the loop is.

        Raises:
            IterationError: that is not known.
        """
        self.check_is_known()
        position, source = self.cursor().where
        return StreamState(
            identity=source.identity,
            epoch=position.epoch,
            samples_consumed_per_split=position.cycle,
            global_batch_size=self.config.global_batch_size,
            partial=PartialCycle(position.partial_rows, self._world_size) if position.partial_rows else None,
            skipped=self.config.skipped,
            listed=source.listed,
        )

    @property
    def has_delivered(self) -> bool:
        """Whether the loop has received rows since the place was last set."""
        progress = None if self._cursor is None else self._cursor.progress
        return progress is not None and progress[0] > 0

    def plan_from(self, start: Position) -> ReadPlan:
        """What a pass reads that begins at `start`; an epoch that takes up a version is asked for, and planned.

        Raises:
            ConfigError: the stream cannot be served at that version.
        """
        if not self.config.takes_up_versions:
            return self.plan
        return self._epochs.of(start.epoch, first=start.epoch == self._fresh_epoch)

    def plan_ahead(self, epoch: int) -> ReadPlan | None:
        """What the next epoch will read, where that is known; waits for nothing."""
        plan = self._epochs.ahead(epoch) if self.config.takes_up_versions else self.plan
        return None if plan is None else self.lists.soon(plan, epoch)

    def begin(
        self, plan: ReadPlan, walk: EpochWalk, batch_size: int | None, drop_last: bool, step_rows: int | None = None
    ) -> None:
        """Begin a pass, once it goes together with those of the other ranks.

        Args:
            plan: with the list of its epoch.
            walk: the pass.
            batch_size: rows per batch; None: it does not step.
            drop_last: leave out a last batch that is not whole.
            step_rows: rows after which all ranks are at the same step; None: there are no such.

        Raises:
            ConfigError: another rank reads other rows, steps differently, or begins elsewhere.
        """
        source = self._agreed(plan, walk, batch_size, drop_last, step_rows)
        self.plan = plan.unlisted()
        self.cursor().begin(walk, source)

    def leave(self, *, is_left: bool) -> None:
        """The running pass has ended.

        Args:
            is_left: whether the loop has left it, if that is before its last row; False: it has failed, which other ranks
                must not be blamed for.
        """
        if self.cursor().leave():
            self._passes.take_back()
        else:
            self._note(is_left)
        self.tell()

    def hand_out(self, plan: ReadPlan, walk: EpochWalk, batch_size: int, drop_last: bool) -> None:
        """A pass is delivered where this shard does not see it; arguments and errors as `begin`."""
        self._agreed(plan, walk, batch_size, drop_last, None)
        self.handed_out = object()

    def set_epoch(self, epoch: int, *, restart: bool) -> None:
        """See Cursor.set_epoch."""
        self.cursor().set_epoch(epoch, restart=restart)
        self.handed_out = None
        self._moved()

    def resume_epoch(self) -> None:
        """See Cursor.resume.

        Raises:
            StateError: an evaluation stream.
        """
        refuse_evaluation(self.config)
        self.check_is_known()
        self.cursor().resume()
        self._moved()

    def _moved(self) -> None:
        """The place was set: a rank that has looked at rows and goes back says so."""
        if self._passes.go_to(self.cursor().next_start):
            self.tell()

    def _agreed(
        self, plan: ReadPlan, walk: EpochWalk, batch_size: int | None, drop_last: bool, step_rows: int | None
    ) -> _Source:
        self.check_is_known()
        identity, listed = self._identity(plan), None
        if plan.listed is not None and plan.listed.epoch is not None:
            listed = ListedEpoch(walk.start.epoch, plan.listed.fingerprint, made_by())
        step = None if batch_size is None else StepSize.of(batch_size, drop_last, walk.block)
        begun = self._passes.next(walk.start, walk.block.size, has_batches=step is not None, step=step)
        self._passes.close()
        fingerprint = None if listed is None else listed.fingerprint
        start = PassStart(identity, step, fingerprint)
        if not self.config.evaluation:
            start = replace(start, begun=begun, before=self._passes.reported)
        self._link.agree_on_pass((walk.start.epoch, begun.number, begun.again), start)
        self._passes.begin(begun, step_rows)
        return _Source(identity, listed)

    def check_is_known(self) -> None:
        """Raises IterationError where the position cannot be known here."""
        if self.handed_out is not None and not self.config.evaluation:
            raise IterationError(
                f"where the loop over stream {self._name!r} is cannot be known here, since a plain DataLoader with workers "
                "delivers its batches: use StreamDataLoader, which counts them, or num_workers=0; set_epoch(epoch) and "
                "load_state_dict(state) say where the next pass begins"
            )

    def with_list(self, plan: ReadPlan, epoch: int) -> ReadPlan:
        """What a pass reads, with the list of its epoch, where the order is listed; waits until it is made.

        Raises:
            StreamError: it cannot be made.
        """
        return self.lists.of(plan, epoch)

    def digest(self, block: SplitBlock) -> int:
        """The digest of the rows of a block that the newest pass has delivered, in whole cycles; errors as `state`."""
        self.check_is_known()
        epoch, ranges = self.cursor().done
        if not ranges:
            return 0
        plan = self.lists.of(self.plan, epoch).resolve()
        return sum(plan.digest(epoch, block, lo, hi) for lo, hi in ranges) % 2**64

    def read(self, state: Mapping[str, Any]) -> StreamState:
        """A state of this library, or of a StreamingDataset; errors as `load`."""
        if is_lancedb_state(state):
            return from_lancedb_state(state, self._identity(self.plan), self.config.global_batch_size)
        return StreamState.from_dict(state)

    def tell(self) -> None:
        """Report to the coordinator where this shard is, if that is known; waits for nothing."""
        if self.handed_out is None:
            if self.cursor().live:
                self._note(is_left=False)
            self._link.tell(self.state(), () if self.config.evaluation else self._passes.reported)

    def _note(self, is_left: bool) -> None:
        if (progress := self.cursor().progress) is not None:
            rows, place, is_complete = progress
            self._passes.note(rows, place, "complete" if is_complete else "left" if is_left else "running")

    def load(self, saved: StreamState) -> None:
        """Continue from a state, at the table version that it records, or at an epoch that takes up one.

        Raises:
            IterationError: a pass is running.
            StateError: an evaluation stream.
            StateMismatchError: another row order.
            VersionNotFoundError: the recorded version is gone.
        """
        refuse_evaluation(self.config)
        cursor = self._cursor or Cursor(Position(0))
        cursor.check_not_live()
        plan = recorded_plan(self._pinned, saved, self.config, self._plan_at)
        self._check_list(plan, saved)
        if not opens_an_epoch(saved):
            self._epochs.load(saved.epoch, plan)
        self._fresh_epoch = None
        self.plan, self.config = plan, self.config.with_skipped(saved.skipped)
        cursor.load(self._position_of(saved), _Source(self._source_of(saved, plan), saved.listed))
        self._cursor = cursor
        self.handed_out = None
        self._moved()

    def _plan_at(self, version: int) -> ReadPlan:
        if version == self._pinned.table.version:
            return self._pinned
        return self._link.plan_at(self._pinned, version, self.config.pinned_as)

    def _identity(self, plan: ReadPlan) -> StreamIdentity:
        return plan.identity(self.config.replicas)

    def _source_of(self, saved: StreamState, plan: ReadPlan) -> StreamIdentity:
        """What the rows before a loaded position were of."""
        is_here = saved.identity.table_uri == plan.table.identity
        is_behind = self.config.takes_up_versions and opens_an_epoch(saved) and is_here
        return saved.identity if is_behind else self._identity(plan)

    def _check_list(self, plan: ReadPlan, saved: StreamState) -> None:
        """Refuse to go on in a list that is not the one in which the run began."""
        listed = saved.listed
        recorded = (saved.identity.table_uri, saved.identity.table_version)
        is_elsewhere = recorded != (plan.table.identity, plan.table.version)
        is_over = self.config.takes_up_versions and opens_an_epoch(saved) and is_elsewhere
        if listed is None or is_over or not plan.order.is_listed:
            return
        now = self.lists.of(plan, listed.epoch).listed
        assert now is not None
        if now.fingerprint != listed.fingerprint:
            found = (f"{listed.fingerprint} by {listed.made_by}", f"{now.fingerprint} by {made_by()}")
            raise StateMismatchError(
                [(f"list of epoch {listed.epoch}", *found)],
                "LanceDB orders the rows in another way now, so this run cannot go on in its order: install the release that "
                "made the list, or start anew",
            )

    def _position_of(self, saved: StreamState) -> Position:
        """The position that a state means here: exact at a cycle boundary, and inside a cycle on the same world size."""
        name, partial, size = self._name, saved.partial, self.config.global_batch_size
        if saved.global_batch_size != size:
            logger.warning(
                "stream %r: global_batch_size was %s when the state was saved and is %s now; steps are regrouped from here",
                name,
                saved.global_batch_size,
                size,
            )
        partial_rows = 0
        if partial is not None and partial.world_size == self._world_size:
            partial_rows = partial.rows
        elif partial is not None:
            logger.warning(
                "stream %r: the state was saved inside a cycle on %d workers and is loaded on %d: %d rows are delivered "
                "again; save at steps whose global batch is a multiple of num_splits=%d",
                name,
                partial.world_size,
                self._world_size,
                partial.rows * partial.world_size,
                self.plan.grid.num_splits,
            )
        if saved.samples_consumed_per_split >= self.plan.grid.num_cycles:
            return Position(saved.epoch + 1)
        return Position(saved.epoch, saved.samples_consumed_per_split, partial_rows)


def saved_start(name: str, config: StreamConfig) -> StreamState | None:
    """The state that stream `name` continues from on first use; None: it starts at the beginning.

    The checkpoint that this attempt started from comes first, then `resume_from`. A stream that the checkpoint does not
    mention, while it mentions others, starts fresh.

    Raises:
        StateError: the checkpoint holds no stream state at all.
    """
    if config.evaluation:
        return None
    attempt = train.current_attempt() if config.resume == "auto" else None
    if attempt is None or attempt.started_from is None:
        return config.resume_state(name)
    saved = attempt.start_of(name)
    if saved is None:
        logger.warning("the checkpoint %s does not mention stream %r: it starts fresh", attempt.started_from, name)
    return saved
