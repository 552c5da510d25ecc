"""Planning with I/O: the count, the filter scan and the row size of a pinned table version, on driver or coordinator."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from ray_lance_stream.config import ReadPlan, Shared
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.source import count_rows, match_rows, resolve_columns, sample_row_bytes, validate_filter

KEPT_PLANS = 4


def plan_table(plan: ReadPlan, share: Callable[..., Shared] = Shared) -> ReadPlan:
    """`plan` with the rows counted and, with a filter, matched at its table version.

    The only step of planning that can grow with the table: one scan of the filter's columns, none without a filter. The
    rows of a listed order are counted only: who makes the list finds them.

    Args:
        plan: at its version.
        share: how matched rows are held.

    Raises:
        ConfigError: no row, or fewer rows than splits.
        VersionNotFoundError: the version is gone.
    """
    table = plan.table
    where = f"table {table.identity} version {table.version}"
    matched = None
    if plan.listed is not None:
        num_rows = plan.order.num_rows
    elif plan.filter is None or plan.order.is_listed:
        num_rows = count_rows(table, plan.filter)
    else:
        rows = match_rows(table, plan.filter)
        num_rows, matched = len(rows), share(rows)
    if num_rows == 0:
        raise ConfigError(
            f"a stream needs at least one row, but {where} has none"
            + (f" that matches filter={plan.filter!r}; use one that does" if plan.filter else "; write rows first")
        )
    if plan.num_splits and num_rows < plan.num_splits:
        raise ConfigError(
            f"each split needs at least one row, got {num_rows} rows for num_splits={plan.num_splits} in {where}"
            + (f" with filter={plan.filter!r}" if plan.filter else "")
            + f"; use num_splits <= {num_rows}"
        )
    return replace(
        plan,
        order=replace(plan.order, num_rows=num_rows),
        matched=matched,
        content=table.content(),
        row_bytes=sample_row_bytes(table, list(plan.columns), num_rows),
    )


def plan_version(plan: ReadPlan, version: int, share: Callable[..., Shared] = Shared) -> ReadPlan:
    """The plan of the same stream at another table version, whose columns may be others.

    Raises:
        ConfigError: it lacks a column that is read or filtered by, or see `plan_table`.
        VersionNotFoundError: the version is gone.
    """
    plan = plan.at(version)
    table = plan.table
    table.open(fresh=True)  # one that this process has open still answers when its version is gone
    columns = resolve_columns(table, None if plan.every_column else plan.columns)
    if plan.filter is not None:
        validate_filter(table, plan.filter)
    return plan_table(replace(plan, columns=tuple(columns)), share)


class PlanBook:
    """The plans of other versions than the driver's, each made once, whoever asks.

    Of a run that goes from version to version the newest ones are kept: with a filter a plan has 8 bytes per match.

    Args:
        share: how matched rows are held; with `Shared.put` in the object store alone, where those who read need them.
    """

    def __init__(self, share: Callable[..., Shared] = Shared) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._plans: OrderedDict[ReadPlan, ReadPlan] = OrderedDict()
        self._held: set[tuple[int, PinnedAs]] = set()

    def at(self, plan: ReadPlan, version: int, pinned_as: PinnedAs | None = None) -> ReadPlan:
        """See `plan_version`; where the stream is pinned, the version is kept from here on."""
        wanted = plan.at(version)
        with self._lock:
            if pinned_as is not None and (version, pinned_as) not in self._held:
                pinned_as.hold(wanted.table)
                self._held.add((version, pinned_as))
            if wanted not in self._plans:
                self._plans[wanted] = plan_version(plan, version, self._share)
            self._plans.move_to_end(wanted)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
            return self._plans[wanted]
