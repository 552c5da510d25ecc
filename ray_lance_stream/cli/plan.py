"""Prints what a stream of a table is going to do, and suggests num_splits for a set of worker counts."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray_lance_stream.cli.answer import Answer, grid
from ray_lance_stream.cli.options import add_delivery, add_order, add_table, make_stream, worker_counts
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.splits import divisors, nearest_multiples
from ray_lance_stream.suggest import SplitChoice, split_choice, suggest_num_splits

if TYPE_CHECKING:
    from ray_lance_stream.stream import LanceStream
    from ray_lance_stream.summary import WorkerShare

NAME = "plan"
HELP = "what a stream is going to do, and which num_splits goes with your worker counts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_table(parser)
    parser.add_argument(
        "--workers", type=worker_counts, metavar="A:B", help="worker counts of the runs to come: 2:8, 2:8:2 or 2,4,8"
    )
    add_order(parser, needed=False)
    add_delivery(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Nothing is read but with a filter, and Ray is not started."""
    stream = make_stream(arguments)
    data: dict[str, Any] = {"plan": asdict(stream.plan)}
    texts = [stream.explain()]
    if arguments.workers:
        shares, refused = _shares(stream, arguments.workers)
        given, choices = _choices(stream, arguments.workers)
        data["workers"] = [asdict(share) for share in shares]
        data["refused"] = refused
        data["num_splits_given"] = asdict(given) if given else None
        data["suggestions"] = [asdict(choice) for choice in choices]
        texts += [_shares_text(shares), *refused.values(), _choices_text(stream, arguments.workers, given, choices)]
    return Answer("\n\n".join(filter(None, texts)), data, fine=not data.get("refused"))


def _shares(stream: LanceStream, workers: tuple[int, ...]) -> tuple[list[WorkerShare], dict[int, str]]:
    """(shares by worker count, why other counts cannot be served)."""
    from ray_lance_stream.summary import worker_share

    shares, refused = [], {}
    for count in workers:
        try:
            shares.append(worker_share(stream._plan, stream._config, count))
        except ConfigError as error:
            refused[count] = f"{count} workers: {error}"
    return shares, refused


def _shares_text(shares: list[WorkerShare]) -> str:
    from ray_lance_stream.summary import size_text

    if not shares:
        return ""
    rows = [("workers", "splits of each", "rows of each in a step", "largest chunk")]
    for share in shares:
        step_rows = _from_to(share.step_rows) if share.step_rows else "-"
        rows.append((str(share.workers), _from_to(share.splits), step_rows, size_text(share.chunk_bytes[1])))
    return grid(rows)


def _from_to(ends: tuple[int, int]) -> str:
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"


def _choices(stream: LanceStream, workers: tuple[int, ...]) -> tuple[SplitChoice | None, tuple[SplitChoice, ...]]:
    """(what the splits given mean for these counts, other numbers for them); ranks that share their rows count once."""
    plan = stream.plan
    counts = _data_workers(stream, workers)
    if not counts:
        return None, ()
    given = split_choice(plan.num_splits, [w for w in counts if w <= plan.num_splits]) if plan.num_splits else None
    return given, suggest_num_splits(counts, global_batch_size=plan.global_batch_size, num_rows=plan.matched_rows)


def _data_workers(stream: LanceStream, workers: tuple[int, ...]) -> list[int]:
    replicas = stream.plan.replicas
    return [count // replicas for count in workers if count % replicas == 0]


def _choices_text(
    stream: LanceStream, workers: tuple[int, ...], given: SplitChoice | None, choices: tuple[SplitChoice, ...]
) -> str:
    from ray_lance_stream.summary import names

    plan = stream.plan
    if not choices:
        return f"no num_splits can be suggested for these worker counts and {plan.matched_rows:,} rows"

    def cells(label: str, choice: SplitChoice) -> tuple[str, str, str]:
        uneven = tuple(count * plan.replicas for count in choice.uneven_workers)
        return f"{choice.num_splits}{label}", names(uneven) or "-", f"{choice.largest_share:.3f} of the mean"

    rows = [("num_splits", "not equal with", "largest share")]
    if given and given not in choices:
        rows.append(cells(", as given", given))
    rows += [cells(", as given" if choice == given else "", choice) for choice in choices]
    text = grid(rows)
    most = choices[-1].num_splits
    equal = names(tuple(count * plan.replicas for count in divisors(most)))
    text += f"\n{most} has equal shares with {equal} workers"
    if choices[0].uneven_workers and plan.global_batch_size:
        common = math.lcm(*_data_workers(stream, workers))
        sizes = " or ".join(str(size) for size in nearest_multiples(plan.global_batch_size, common))
        text += f"\nwith global_batch_size={sizes}, num_splits={common} is equal with all of them"
    return text
