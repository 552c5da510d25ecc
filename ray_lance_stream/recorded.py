"""Which table version a saved state continues on: the recorded one, also of a table that has moved on or was moved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.epoch_versions import newest_version
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError, VersionNotFoundError
from ray_lance_stream.lancedb_state import from_lancedb_state, is_lancedb_state
from ray_lance_stream.planner import PlanBook
from ray_lance_stream.state import StreamIdentity, StreamState, check_fits

logger = logging.getLogger(__name__)


def recorded_plan(
    plan: ReadPlan, saved: StreamState, config: StreamConfig, plan_at: Callable[[int], ReadPlan]
) -> ReadPlan:
    """The plan that a stream continues with from a state.

    Args:
        plan: of the version that the driver has pinned.
        saved: the state.
        config: of the stream.
        plan_at: plans another version.

    Raises:
        StateMismatchError: another row order, or other rows under the recorded version.
        TableError: the table is gone.
        VersionNotFoundError: the recorded version is gone.
    """

    def check(identity: StreamIdentity) -> None:
        if plan.num_splits is None:  # the world size, which only workers know
            identity = replace(identity, num_splits=saved.identity.num_splits)
        check_fits(saved, identity, allow_moved=config.allow_moved)

    now = plan.identity(config.replicas)
    check(now.at(saved.identity))
    is_moved = saved.identity.table_uri != now.table_uri
    if opens_an_epoch(saved) and config.takes_up_versions:
        if is_moved:
            logger.warning(
                "the table of the saved state, %s, was moved: epoch %d takes up the newest version of %s",
                saved.identity.table_uri,
                saved.epoch,
                now.table_uri,
            )
        elif not config.allow_moved:
            _check_not_made_anew(plan, saved)
        return plan_at(plan.table.version)  # the recorded one has been read to its end
    found = _recorded_or_alike(plan.table.version, saved, config, plan_at)
    check(found.identity(config.replicas))
    if is_moved:
        logger.warning(
            "the table of the saved state, %s version %d, was moved: it is read at %s version %d%s",
            saved.identity.table_uri,
            saved.identity.table_version,
            found.table.identity,
            found.table.version,
            ""
            if saved.identity.table_content
            else "; the state is of an older release and tells no more of it than its number of rows",
        )
    return found


def plan_to_resume(plan: ReadPlan, state: Mapping[str, Any], config: StreamConfig) -> tuple[ReadPlan, StreamState]:
    """What the driver's stream continues with from a state that it is given: the plan, and the state.

    Args:
        plan: of the driver, at any version.
        state: of this library, or of a StreamingDataset.
        config: of the stream.

    Raises:
        StateError: malformed, or this is an evaluation stream; see also `recorded_plan`.
    """
    refuse_evaluation(config)
    if is_lancedb_state(state):
        saved = from_lancedb_state(state, plan.identity(config.replicas), config.global_batch_size)
    else:
        saved = StreamState.from_dict(state)
    plans = PlanBook()

    def plan_at(version: int) -> ReadPlan:
        return plan if version == plan.table.version else plans.at(plan, version)

    return recorded_plan(plan, saved, config, plan_at), saved


def refuse_evaluation(config: StreamConfig) -> None:
    """Raises StateError for a stream that is never resumed."""
    if config.evaluation:
        raise StateError("a stream with evaluation=True is never resumed; make it without evaluation=True")


def opens_an_epoch(saved: StreamState) -> bool:
    """Whether no row of the open epoch has been received: the recorded version is that of the epoch before."""
    return saved.samples_consumed_per_split == 0 and saved.partial is None


def _check_not_made_anew(plan: ReadPlan, saved: StreamState) -> None:
    """Refuse a table whose versions end before the recorded one. The pinned one may be older: epochs go on without it."""
    recorded = saved.identity.table_version
    if plan.table.version >= recorded:
        return
    newest = newest_version(plan.table)
    if newest < recorded:
        raise StateMismatchError(
            [("table_version", recorded, newest)],
            "Versions only rise, so the table was made anew: pass the table that the state names, allow_moved=True if this "
            "one takes its place, or start anew",
        )


def _recorded_or_alike(
    pinned: int, saved: StreamState, config: StreamConfig, plan_at: Callable[[int], ReadPlan]
) -> ReadPlan:
    """The recorded version; of a table that was written anew elsewhere, the pinned one where that holds its rows."""
    recorded = saved.identity.table_version
    if not config.allow_moved:
        return plan_at(recorded)
    try:
        found = plan_at(recorded)
    except (VersionNotFoundError, ConfigError):
        alike = plan_at(pinned)
        if _holds_other_rows(alike, saved):
            raise
        return alike
    if not _holds_other_rows(found, saved):
        return found
    alike = plan_at(pinned)
    return found if _holds_other_rows(alike, saved) else alike


def _holds_other_rows(plan: ReadPlan, saved: StreamState) -> bool:
    """Whether a version differs from what a state tells of its own; one of format 1 tells the number of rows alone."""
    identity = saved.identity
    found = plan.content.content if plan.content else None
    return plan.order.num_rows != identity.num_rows or identity.table_content not in (None, found)
