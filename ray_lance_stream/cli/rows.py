"""Prints the rows of one global step, in the order of one worker: their offsets in the table, or a column's values."""

from __future__ import annotations

import argparse
import json

from ray_lance_stream.cli.answer import Answer, as_json
from ray_lance_stream.cli.options import add_order, add_table, make_stream

NAME = "rows"
HELP = "the rows of a step, for finding the batch behind a loss spike"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add_table(parser)
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="from 0")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="from 0, counted from the epoch's start")
    parser.add_argument("--column", metavar="NAME", help="print the values of this column, which are read")
    add_order(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Reads rows only with --column, and does not start Ray."""
    stream = make_stream(arguments)
    rows = stream.row_ids(arguments.epoch, arguments.step, column=arguments.column)
    values = as_json(rows if isinstance(rows, list) else rows.tolist())
    data = {
        "table": stream.plan.table,
        "table_version": stream.plan.version,
        "epoch": arguments.epoch,
        "step": arguments.step,
        "column": arguments.column,
        "rows": values,
    }
    return Answer("\n".join(json.dumps(value) for value in values), data)
