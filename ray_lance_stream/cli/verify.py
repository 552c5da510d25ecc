"""Proves on your table that every step holds the same rows on any number of workers, and that a broken run is exact.

Reads real rows through real readers, and compares their contents. Starts Ray.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from ray_lance_stream.cli.answer import Answer, say
from ray_lance_stream.cli.options import (
    add_delivery,
    add_order,
    add_ray,
    add_table,
    at_least_one,
    make_stream,
    worker_counts,
)
from ray_lance_stream.cli.session import ray_session
from ray_lance_stream.splits import data_rank

NAME = "verify"
HELP = "prove elasticity and exact resume on your table"
DEFAULT_WORKERS = (1, 2, 3, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_table(parser)
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="the epoch to begin in, from 0")
    parser.add_argument("--steps", type=at_least_one, default=8, metavar="N", help="steps to compare (default 8)")
    parser.add_argument(
        "--workers", type=worker_counts, metavar="A:B", help="worker counts: 2:8, 2:8:2 or 2,4,8 (default 1:4)"
    )
    add_ray(parser)
    add_order(parser)
    add_delivery(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Both proofs of ray_lance_stream.testing."""
    from ray_lance_stream.testing import assert_elastic, assert_resume_exact

    stream = make_stream(arguments)
    plan = stream.plan
    if arguments.workers:
        workers = arguments.workers
    else:
        workers = tuple(w * plan.replicas for w in DEFAULT_WORKERS if w * plan.replicas <= plan.max_workers)
    worlds = [data_rank(count, 0, plan.replicas)[1] for count in workers]  # the proofs count ranks that share rows once
    told = ", ".join(map(str, workers))
    checks = [
        ("elastic", f"every step holds the same rows on {told} workers", partial(assert_elastic, world_sizes=worlds)),
        (
            "resume",
            f"a run that is resumed on {told} workers has the rows of an unbroken one",
            partial(assert_resume_exact, world_sizes=worlds[::-1]),
        ),
    ]
    results: list[dict[str, Any]] = []
    with ray_session(arguments.address):
        for name, claim, check in checks:
            say(f"{name}: reading up to {arguments.steps} steps ...")
            begun_s = time.monotonic()
            try:
                check(stream, epoch=arguments.epoch, max_steps=arguments.steps)
                reason = None
            except AssertionError as error:
                reason = str(error)
            took_s = round(time.monotonic() - begun_s, 1)
            results.append({"check": name, "claim": claim, "holds": reason is None, "reason": reason, "took_s": took_s})
        stream.close()
    lines = [f"{each['check']:<10}{_verdict(each)}" for each in results]
    data = {"table": plan.table, "table_version": plan.version, "workers": list(workers), "checks": results}
    return Answer("\n".join(lines), data, all(each["holds"] for each in results))


def _verdict(result: dict[str, Any]) -> str:
    return f"yes: {result['claim']}" if result["holds"] else f"NO: {result['reason']}"
