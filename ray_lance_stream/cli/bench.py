"""Measures rows per second of your table as a stream's batches, beside bare `take` of the same rows in the same run, and
tries a few settings one at a time: clumps, chunks, readers. One worker in this process. Starts Ray.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ray_lance_stream.cli.answer import Answer, grid, say
from ray_lance_stream.cli.options import add_delivery, add_order, add_ray, add_table, at_least_one, make_stream
from ray_lance_stream.cli.session import ray_session

if TYPE_CHECKING:
    from ray_lance_stream.cli.trials import Trial
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.stream import LanceStream

NAME = "bench"
HELP = "measure your table, and which settings suit it"

CLUMPS = (16, 64, 256)
MIN_CLUMPS = 100  # fewer of them make no shuffle
GAIN = 1.1  # a setting is recommended from this ratio on ...
NO_LOSS = 0.95  # ... and one that saves memory from this one on
NEAR_BEST = 0.9
MIN_ROUNDS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_table(parser)
    parser.add_argument(
        "--seconds", type=at_least_one, default=60, metavar="N", help="time for measuring, once Ray runs (default 60)"
    )
    parser.add_argument("--torch", action="store_true", help="measure torch batches; default: Arrow batches")
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="the epoch to begin in, from 0")
    add_ray(parser)
    add_order(parser)
    add_delivery(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Rounds of all trials, then what they say."""
    from ray_lance_stream.blobs import blob_fields
    from ray_lance_stream.cli.trials import run_rounds

    given = make_stream(arguments)
    with ray_session(arguments.address):
        try:
            trials = _trials(arguments, given)
            rounds, turn_s = run_rounds(trials, arguments.seconds, arguments.epoch, say)
        finally:
            given.close()
    has_blobs = bool(blob_fields(given._plan.table.open().schema, list(given._plan.columns)))
    notes = _notes(arguments, given, trials, rounds, turn_s, has_blobs)
    advice = recommendations(trials)
    reached = [1 / ratio for ratio in ratios(trials[1], trials[0])]
    table = [("", "rows/s", "of the stream as given")]
    for trial in trials:
        of_given = _spread(ratios(trial, trials[0]), "{:.2f}") if trial is not trials[0] else ""
        table.append((trial.name, _spread(trial.rates, "{:,.0f}"), of_given))
    data = {
        "table": given.plan.table,
        "table_version": given.plan.version,
        "turn_s": turn_s,
        "rounds": rounds,
        "trials": [
            {
                "name": trial.name,
                "options": trial.options,
                "rows_per_s": trial.rates,
                "ratios": ratios(trial, trials[0]),
            }
            for trial in trials
        ],
        "of_bare_take": reached,
        "recommendations": advice,
        "notes": notes,
    }
    lines = [
        f"the stream as given reaches {_spread(reached, '{:.2f}')} of bare take",
        *(each["text"] for each in advice),
    ]
    text = "\n\n".join([grid(table), "\n".join(f"- {line}" for line in lines), "\n".join(notes)])
    return Answer(text, data)


def _trials(arguments: argparse.Namespace, given: LanceStream) -> list[Trial]:
    """The stream as given, bare take, and the stream with one setting changed."""
    from ray_lance_stream.cli.trials import BareTake, Trial, stream_rate

    form = _torch_batches if arguments.torch else _arrow_batches
    plan = given.plan
    assert plan.num_splits is not None
    take = BareTake(given, plan.chunk_bytes // plan.row_bytes)
    first = given.shard()
    pools = {given._config.readers_per_worker: first._supply.readers}
    trials = [
        Trial("stream as given", {}, partial(stream_rate, first, form)),
        Trial(f"bare take, {take.rows_at_a_time:,} rows at a time, {take.threads} threads", {}, take.rate),
    ]
    for options in settings(given):
        stream = changed(given, options)
        # Readers keep no position and take the table with each read, so that trials can share them.
        stream._coordinator = given._coordinator_handle()
        shard = stream.shard()
        shard._supply.readers = pools.setdefault(stream._config.readers_per_worker, shard._supply.readers)
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        trials.append(Trial(name, options, partial(stream_rate, shard, form)))
    return trials


def changed(given: LanceStream, options: dict[str, int]) -> LanceStream:
    """The stream with some settings changed; nothing is planned anew."""
    from ray_lance_stream.stream import LanceStream

    config: dict[str, Any] = dict(options)
    order = given._plan.order
    if "shuffle_clump_size" in config:
        order = replace(order, clump_size=config.pop("shuffle_clump_size"))
    return LanceStream(replace(given._plan, order=order), replace(given._config, **config), given.context.copy())


def settings(given: LanceStream) -> list[dict[str, int]]:
    """What is tried, one at a time."""
    from ray_lance_stream.order import FEISTEL_1

    plan, config = given.plan, given._config
    found: list[dict[str, int]] = []
    if plan.shuffle and plan.order == FEISTEL_1:
        clumps = [c for c in CLUMPS if c != plan.shuffle_clump_size and c * MIN_CLUMPS <= plan.matched_rows]
        found += [{"shuffle_clump_size": c} for c in clumps]
    if config.read_batch_size is None:
        found.append({"prefetch_bytes": max(1, config.prefetch_bytes // 4)})
        assert plan.num_splits is not None
        cycles = plan.chunk_bytes // (plan.row_bytes * plan.num_splits)
        if 4 * cycles <= (plan.cycles_per_epoch or 0):
            found.append({"read_batch_size": 4 * cycles, "prefetch_bytes": 4 * config.prefetch_bytes})
    found.append({"readers_per_worker": 2 * config.readers_per_worker})
    return found


def ratios(trial: Trial, base: Trial) -> list[float]:
    """The ratio to the stream as given in each round."""
    return [rate / of for rate, of in zip(trial.rates, base.rates, strict=False) if of]


def recommendations(trials: list[Trial]) -> list[dict[str, Any]]:
    """What the figures speak for: settings with a gain in every round, one of each kind.

    `trials` begins with the stream as given and bare take.
    """
    base, _, *tried = trials
    tried = [trial for trial in tried if len(ratios(trial, base)) >= MIN_ROUNDS]
    if not tried:
        return [{"options": {}, "ratio": None, "text": "too few rounds to recommend anything: give more --seconds"}]
    gains = {id(trial): ratios(trial, base) for trial in tried}

    def gain(trial: Trial) -> float:
        return statistics.median(gains[id(trial)])

    def is_gain(trial: Trial) -> bool:
        return gain(trial) >= GAIN and min(gains[id(trial)]) > 1.0

    found: list[dict[str, Any]] = []
    clumped = [trial for trial in tried if "shuffle_clump_size" in trial.options and is_gain(trial)]
    if clumped:
        best = max(gain(trial) for trial in clumped)
        chosen = min(
            (trial for trial in clumped if gain(trial) >= NEAR_BEST * best),
            key=lambda t: t.options["shuffle_clump_size"],
        )
        found.append(_advice(chosen, gain(chosen), "less random, and another row order: for new runs only"))
    larger = [trial for trial in tried if "read_batch_size" in trial.options and is_gain(trial)]
    smaller = [trial for trial in tried if list(trial.options) == ["prefetch_bytes"] and gain(trial) >= NO_LOSS]
    if larger:
        why = "larger chunks, four times the memory; on W workers read_batch_size is W times that for chunks as large"
        found.append(_advice(larger[0], gain(larger[0]), why))
    elif smaller:
        found.append(_advice(smaller[0], gain(smaller[0]), "smaller chunks, a quarter of the memory in flight"))
    readers = [trial for trial in tried if "readers_per_worker" in trial.options and is_gain(trial)]
    if readers:
        found.append(_advice(readers[0], gain(readers[0]), "twice the reader processes"))
    if not found:
        text = (
            f"keep the settings: none that was tried gained {GAIN - 1:.0%} in the median, and something in every round"
        )
        found.append({"options": {}, "ratio": None, "text": text})
    return found


def _advice(trial: Trial, ratio: float, why: str) -> dict[str, Any]:
    return {"options": trial.options, "ratio": ratio, "text": f"{trial.name}: {ratio:.2f} times the rows/s; {why}"}


def _notes(
    arguments: argparse.Namespace,
    given: LanceStream,
    trials: list[Trial],
    rounds: int,
    turn_s: float,
    has_blobs: bool,
) -> list[str]:
    """What was measured and what was not."""
    plan = given.plan
    kind = "torch" if arguments.torch else "Arrow"
    missing = [trial.name for trial in trials if not trial.rates]
    notes = [
        f"Measured: {kind} batches of {plan.global_batch_size:,} rows of about {plan.row_bytes:,} bytes, in one worker on this "
        f"machine that owns all splits; {rounds} rounds, turns of {turn_s:.2g} s, in turns forwards and backwards. "
        "Median (lowest to highest); ratios are taken inside a round.",
        "Not measured: several workers or machines, a training step beside it, and settings together.",
    ]
    if not plan.shuffle:
        notes.append("Without a shuffle every turn reads the same rows from the start of the table.")
    if given._plan.table.is_local:
        notes.append("The table is local: a part that fits into memory was read from there, not from the disk.")
    if has_blobs:
        notes.append("Bare take does not read the bytes of blob columns, so it is no measure for this table.")
    if missing:
        notes.append(f"No time was left for: {'; '.join(missing)}. Give more --seconds.")
    return notes


def _spread(values: list[float], style: str) -> str:
    """`median (lowest to highest)`."""
    if not values:
        return "-"
    middle = style.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({style.format(min(values))} to {style.format(max(values))})"


def _arrow_batches(shard: StreamShard) -> Any:
    return shard.iter_batches(batch_format="pyarrow")


def _torch_batches(shard: StreamShard) -> Any:
    return shard.iter_torch_batches()
