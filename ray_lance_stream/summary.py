"""PlanSummary: what a stream is going to do, as data and as text, known before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from ray_lance_stream.config import ReadPlan, StreamConfig
from ray_lance_stream.sizer import largest_chunk_cycles
from ray_lance_stream.source import count_rows
from ray_lance_stream.splits import RankShare, data_rank, divisors
from ray_lance_stream.state import SkippedCycles

_MAX_NAMES = 12
_LABEL_CHARS = 16


@dataclass(frozen=True)
class PlanSummary:
    """What a stream is going to do. Sizes that depend on splits are None where num_splits is None.

    Attributes:
        table: path or URI, without secrets.
        version: the pinned version.
        table_rows: live rows of that version.
        filter: SQL prefilter, or None.
        matched_rows: rows that match it, N; all rows without a filter.
        left_out_rows: rows that each epoch leaves out: N % num_splits, with drop_remainder.
        epoch_rows: rows that an epoch delivers over all workers, skipped steps included.
        order: id of the row order.
        shuffle: whether it is a permutation, another one in each epoch.
        shuffle_seed: its seed.
        shuffle_clump_size: rows that stay together, or None.
        num_splits: S; None: the number of workers.
        cycles_per_epoch: cycles of an epoch; each has one row of every split.
        drop_remainder: whether the N % S rows are left out; else they are one more, shorter cycle.
        global_batch_size: G; None: calls that name no batch size have the default, others choose it.
        default_global_batch_size: rows of a global step where neither is given: the smallest multiple of S that is at least
            256, at most the largest one that an epoch holds. None with G.
        cycles_per_step: cycles of a global step of G rows, or by default.
        steps_per_epoch: such steps of an epoch, a shorter last one included.
        worker_counts: numbers of workers that have equal shares. Others up to max_workers are served too.
        max_workers: no run can have more workers.
        replicas: consecutive workers that share their rows.
        columns: what is read.
        row_bytes: estimated Arrow bytes of a row.
        chunk_bytes: estimated bytes of the largest chunk of a worker, where one worker has all splits.
        prefetch_bytes: bytes that a worker may have in flight before it asks for no more.
        in_flight_bytes: the most that it has in flight: prefetch_bytes and one chunk.
        transforms: calls of map_batches, in order.
        epoch: the epoch that a new run starts in.
        samples_consumed_per_split: the cycle of that epoch where it starts; not 0 only with resume_from.
        skipped: (epoch, first cycle, end cycle) of what `skip` leaves out.
    """

    table: str
    version: int
    table_rows: int
    filter: str | None
    matched_rows: int
    left_out_rows: int | None
    epoch_rows: int | None
    order: str
    shuffle: bool
    shuffle_seed: int
    shuffle_clump_size: int | None
    num_splits: int | None
    cycles_per_epoch: int | None
    drop_remainder: bool
    global_batch_size: int | None
    default_global_batch_size: int | None
    cycles_per_step: int | None
    steps_per_epoch: int | None
    worker_counts: tuple[int, ...] | None
    max_workers: int
    replicas: int
    columns: tuple[str, ...]
    row_bytes: int
    chunk_bytes: int
    prefetch_bytes: int
    in_flight_bytes: int
    transforms: tuple[str, ...]
    epoch: int
    samples_consumed_per_split: int
    skipped: SkippedCycles

    def __str__(self) -> str:
        return "\n".join(f"{label:<{_LABEL_CHARS}}{text}" for label, text in _lines(self))


@dataclass(frozen=True)
class WorkerShare:
    """What each worker of a run has, as (least, most) over its workers.

    Attributes:
        workers: W.
        splits: splits of a worker.
        step_rows: rows of a worker in a global step, of G rows or the default; None without both.
        chunk_bytes: estimated bytes of the largest chunk.
    """

    workers: int
    splits: tuple[int, int]
    step_rows: tuple[int, int] | None
    chunk_bytes: tuple[int, int]


def summarize(plan: ReadPlan, config: StreamConfig, name: str) -> PlanSummary:
    """The summary of a stream. With a filter it counts the rows of the table, which reads no rows."""
    order, size = plan.order, _step_rows(plan, config)
    grid = plan.grid if plan.num_splits else None
    splits = grid.num_splits if grid else 1  # of one worker with the largest block
    saved = config.resume_state(name)
    skipped = config.with_skipped(saved.skipped).skipped if saved else config.skipped
    chunk_bytes = _chunk_bytes(plan, config, splits)
    return PlanSummary(
        table=plan.table.identity,
        version=plan.table.version,
        table_rows=order.num_rows if plan.filter is None else count_rows(plan.table),
        filter=plan.filter,
        matched_rows=order.num_rows,
        left_out_rows=grid.num_left_out if grid else None,
        epoch_rows=grid.epoch_rows if grid else None,
        order=order.order_id,
        shuffle=order.shuffle,
        shuffle_seed=order.seed,
        shuffle_clump_size=order.clump_size,
        num_splits=plan.num_splits,
        cycles_per_epoch=grid.num_cycles if grid else None,
        drop_remainder=plan.drop_remainder,
        global_batch_size=config.global_batch_size,
        default_global_batch_size=None if config.global_batch_size else size,
        cycles_per_step=grid.cycles_per_step(size) if grid and size else None,
        steps_per_epoch=grid.num_steps(size) if grid and size else None,
        worker_counts=tuple(w * config.replicas for w in divisors(splits)) if grid else None,
        max_workers=(grid.num_splits if grid else order.num_rows) * config.replicas,
        replicas=config.replicas,
        columns=plan.columns,
        row_bytes=plan.row_bytes,
        chunk_bytes=chunk_bytes,
        prefetch_bytes=config.prefetch_bytes,
        in_flight_bytes=config.prefetch_bytes + chunk_bytes,
        transforms=tuple(str(stage) for stage in config.stages),
        epoch=saved.epoch if saved else config.epoch,
        samples_consumed_per_split=saved.samples_consumed_per_split if saved else 0,
        skipped=skipped,
    )


def worker_share(plan: ReadPlan, config: StreamConfig, workers: int) -> WorkerShare:
    """What each of so many workers has.

    Raises:
        ConfigError: more workers than splits, or a count that is no multiple of replicas.
    """
    _, data_workers = data_rank(workers, 0, config.replicas)
    fixed = plan.with_splits(data_workers)
    ends = [RankShare.of(fixed.grid, workers, rank, config.replicas) for rank in (0, workers - 1)]
    blocks = sorted({ends[0].block.size, ends[1].block.size})
    size = _step_rows(plan, config)
    rows = [fixed.grid.cycles_per_step(size) * k for k in blocks] if size else None
    chunks = [_chunk_bytes(fixed, config, k) for k in blocks]
    return WorkerShare(
        workers, (blocks[0], blocks[-1]), (rows[0], rows[-1]) if rows else None, (min(chunks), max(chunks))
    )


def _step_rows(plan: ReadPlan, config: StreamConfig) -> int | None:
    """Rows of a global step, where no call names a batch size; None where that depends on the number of workers."""
    return config.global_batch_size or (plan.grid.default_global_batch_size if plan.num_splits else None)


def _chunk_bytes(plan: ReadPlan, config: StreamConfig, block_size: int) -> int:
    cycle_bytes = max(1, plan.row_bytes * block_size)
    return min(largest_chunk_cycles(config, block_size, cycle_bytes), plan.grid.num_cycles) * cycle_bytes


def _lines(plan: PlanSummary) -> list[tuple[str, str]]:
    """(label, text) of each line of the text."""
    lines = [("table", f"{plan.table}, version {plan.version}"), ("rows", f"{plan.table_rows:,}")]
    if plan.filter is not None:
        lines.append(("matched", f"{plan.matched_rows:,} by the filter {plan.filter!r}"))
    lines += [*_split_lines(plan), ("order", _order(plan))]
    lines += [
        ("columns", f"{names(plan.columns)}; about {size_text(plan.row_bytes)} a row"),
        ("chunk", f"up to {size_text(plan.chunk_bytes)}"),
        ("in flight", f"up to {size_text(plan.in_flight_bytes)} a worker: prefetch_bytes and one chunk"),
        ("starts at", f"epoch {plan.epoch}, cycle {plan.samples_consumed_per_split:,}"),
    ]
    lines += [("transform", stage) for stage in plan.transforms]
    lines += [("skipped", f"cycles {lo:,} to {hi - 1:,} of epoch {epoch}") for epoch, lo, hi in plan.skipped]
    return lines


def _split_lines(plan: PlanSummary) -> list[tuple[str, str]]:
    if plan.num_splits is None or plan.cycles_per_epoch is None or plan.worker_counts is None:
        return [
            ("splits", "as many as workers: a run cannot go on with another number of them; pass num_splits"),
            ("workers", f"up to {plan.max_workers:,}"),
        ]
    left = f"{plan.left_out_rows:,} of each epoch" if plan.left_out_rows else "none"
    others = ", others in each" if plan.left_out_rows and plan.shuffle else ""
    lines = [
        ("left out", left + others),
        ("splits", f"{plan.num_splits:,} of {plan.matched_rows // plan.num_splits:,} rows"),
        ("cycles", f"{plan.cycles_per_epoch:,} an epoch, a row of each split in every one"),
    ]
    lines.append(("steps", _steps(plan)))
    shares = f"equal shares with {names(plan.worker_counts)}; others up to {plan.max_workers:,} are served too"
    return [*lines, ("workers", shares if plan.max_workers > 1 else "1")]


def _steps(plan: PlanSummary) -> str:
    steps, size = plan.steps_per_epoch, plan.global_batch_size or plan.default_global_batch_size
    assert None not in (steps, size, plan.cycles_per_epoch, plan.cycles_per_step)  # of a plan with splits
    short = plan.cycles_per_epoch % plan.cycles_per_step  # type: ignore[operator]
    return (
        f"{steps:,} an epoch, of {size:,} rows, {plan.cycles_per_step:,} cycles"
        + ("" if plan.global_batch_size else ", where no batch size is given")
        + (f"; the last one of {short:,} cycles" if short else "")
        + f"; global_batch_size can be any multiple of {plan.num_splits:,}"
    )


def _order(plan: PlanSummary) -> str:
    if not plan.shuffle:
        return f"{plan.order}, not shuffled"
    clumps = f", clumps of {plan.shuffle_clump_size:,} rows" if plan.shuffle_clump_size else ""
    return f"{plan.order}, shuffled with seed {plan.shuffle_seed}{clumps}"


def names(values: tuple[object, ...]) -> str:
    """Values with commas between them, the middle ones left out of many."""
    texts = [str(value) for value in values]
    if len(texts) > _MAX_NAMES:
        texts = [*texts[: _MAX_NAMES - 2], "...", texts[-1]]
    return ", ".join(texts)


def size_text(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"
