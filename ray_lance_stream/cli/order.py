"""Draws which parts of the table the first steps touch, per split and worker, as a PNG file.

Each line of the picture is a split, from the table's first row on the left to its last one on the right. A worker has a
colour, and the steps get darker one after the other.
"""

from __future__ import annotations

import argparse
import os

from ray_lance_stream.cli.answer import Answer
from ray_lance_stream.cli.options import add_order, add_table, at_least_one, make_stream
from ray_lance_stream.errors import ConfigError

NAME = "order"
HELP = "draw which parts of the table the first steps touch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_table(parser)
    parser.add_argument("--png", required=True, metavar="FILE", help="the picture to write")
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="from 0")
    parser.add_argument("--steps", type=at_least_one, default=4, metavar="N", help="steps to draw (default 4)")
    parser.add_argument("--workers", type=at_least_one, default=1, metavar="W", help="workers (default 1)")
    add_order(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Reads no rows, and does not start Ray."""
    from ray_lance_stream.cli.picture import draw, require_pillow, touched_parts
    from ray_lance_stream.config import at_least

    require_pillow()
    at_least("epoch", arguments.epoch, 0)
    folder = os.path.dirname(os.path.abspath(arguments.png))
    if not os.path.isdir(folder):
        raise ConfigError(f"--png must be a file in a folder that exists, got {arguments.png}: make {folder} first")
    stream = make_stream(arguments)
    touched = touched_parts(stream, arguments.epoch, arguments.steps, arguments.workers)
    draw(touched, arguments.png)
    num_parts = touched.parts.shape[1]
    share = float((touched.parts >= 0).any(axis=0).mean())
    data = {
        "table": stream.plan.table,
        "table_version": stream.plan.version,
        "png": arguments.png,
        "epoch": arguments.epoch,
        "steps": touched.num_steps,
        "workers": arguments.workers,
        "rows": touched.num_rows,
        "parts": num_parts,
        "touched_share": share,
    }
    text = (
        f"{arguments.png}: the first {touched.num_steps:,} steps of epoch {arguments.epoch}, {touched.num_rows:,} rows, touch "
        f"{share:.1%} of {num_parts:,} equal parts of the table"
    )
    return Answer(text, data)
