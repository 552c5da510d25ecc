"""Planning with I/O: the count, the filter scan and the row size of a pinned table version, on driver or coordinator."""

from __future__ import annotations

from dataclasses import replace

from ray_lance_stream.config import ReadPlan, Shared
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.source import count_rows, match_rows, sample_row_bytes


def plan_table(plan: ReadPlan) -> ReadPlan:
    """`plan` with the rows counted and, with a filter, matched at its table version.

    The only step of planning that can grow with the table: one scan of the filter's columns, none without a filter.

    Raises:
        ConfigError: no row, or fewer rows than splits.
        VersionNotFoundError: the version is gone.
    """
    table = plan.table
    where = f"table {table.identity} version {table.version}"
    matched = None
    if plan.filter is None:
        num_rows = count_rows(table)
    else:
        rows = match_rows(table, plan.filter)
        num_rows, matched = len(rows), Shared(rows)
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
        row_bytes=sample_row_bytes(table, list(plan.columns), num_rows),
    )
