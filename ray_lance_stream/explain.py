"""Which rows a global step holds, and their digest: for finding the batch behind a loss spike, without reading data."""

from __future__ import annotations

from typing import Any

import numpy as np

from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.cursor import CycleRange, without
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.row_lists import driver_lists
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.state import skipped_in


def step_size(plan: ReadPlan, config: StreamConfig, global_batch_size: int | None) -> int:
    """Rows of a global step: as asked for, as the stream has them, or by default.

    Raises:
        ConfigError: the number of splits is not known before there are workers.
    """
    if plan.num_splits is None:
        raise ConfigError("the rows of a step depend on num_splits: pass lance_stream(..., num_splits=S)")
    if global_batch_size is not None:
        at_least("global_batch_size", global_batch_size, 1)
        return global_batch_size
    return config.global_batch_size or plan.grid.default_global_batch_size


def step_cycles(plan: ReadPlan, config: StreamConfig, step: int, global_batch_size: int | None) -> CycleRange:
    """The cycles of global step `step` of any epoch, counted from the start of the epoch, skipped steps included.

    Raises:
        ConfigError: no number of splits, or a step outside of the epoch.
    """
    size, grid = step_size(plan, config, global_batch_size), plan.grid
    num_steps = grid.num_steps(size)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < num_steps:
        raise ConfigError(f"step must be an int in [0, {num_steps}), the steps of an epoch, got {step!r}")
    per_step = grid.cycles_per_step(size)
    return step * per_step, min((step + 1) * per_step, grid.num_cycles)


def step_rows(plan: ReadPlan, epoch: int, cycles: CycleRange) -> np.ndarray:
    """int64 [rows]: offsets of the rows of some cycles in the pinned table, in the order of one worker."""
    return driver_lists.plan_of(plan, epoch).resolve().rows(epoch, SplitBlock(0, plan.grid.num_splits), *cycles)


def step_digest(plan: ReadPlan, config: StreamConfig, epoch: int, cycles: CycleRange) -> int:
    """The digest of the cycles of a step that are not skipped; 0 where all of them are. See StreamPlan.digest."""
    delivered = without([cycles], skipped_in(config.skipped, epoch))
    if not delivered:
        return 0
    resolved, block = driver_lists.plan_of(plan, epoch).resolve(), SplitBlock(0, plan.grid.num_splits)
    return sum(resolved.digest(epoch, block, lo, hi) for lo, hi in delivered) % 2**64


def column_values(plan: ReadPlan, rows: np.ndarray, column: str) -> list[Any]:
    """The values of a column in these rows, in their order. Reads them.

    Raises:
        ConfigError: no such column.
    """
    names = plan.table.open().schema.names
    if column not in names:
        raise ConfigError(f"column must be one of {names}, got {column!r}")
    return plan.table.take(rows, [column])[column].to_pylist()


def skip_entries(
    plan: ReadPlan, config: StreamConfig, epoch: int, steps: range, global_batch_size: int | None
) -> tuple[tuple[int, int, int], ...]:
    """(epoch, first cycle, end cycle) of the steps to leave out, those that follow each other as one."""
    at_least("epoch", epoch, 0)
    if not isinstance(steps, range) or not len(steps):
        raise ConfigError(f"steps must be a range of at least one step, got {steps!r}")
    first, last = (step_cycles(plan, config, step, global_batch_size) for step in (min(steps), max(steps)))
    if abs(steps.step) == 1:
        return ((epoch, first[0], last[1]),)
    return tuple((epoch, *step_cycles(plan, config, step, global_batch_size)) for step in steps)
