"""Shows the state of the streams in a checkpoint, and whether a run on a table may continue from it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ray_lance_stream.cli.answer import Answer
from ray_lance_stream.cli.options import add_order, add_storage, make_stream
from ray_lance_stream.errors import StateError, StreamError, TableError, VersionNotFoundError
from ray_lance_stream.splits import SplitGrid

if TYPE_CHECKING:
    from ray_lance_stream.state import StreamIdentity, StreamState

NAME = "state"
HELP = "the position in a checkpoint, and whether a table fits it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("path", metavar="PATH", help="folder or URI of a checkpoint, or the state file in it")
    parser.add_argument("--stream", metavar="NAME", help="only this stream: its name in datasets={...}")
    parser.add_argument(
        "--table",
        dest="uri",
        metavar="URI",
        help="say whether a stream of this table may continue from the state: with the values saved, or with those given "
        "below; the exit code is 1 if it may not",
    )
    parser.add_argument(
        "--on-new-version", choices=("stay", "next_epoch"), default="stay", help="as the argument of lance_stream()"
    )
    parser.add_argument("--allow-moved", action="store_true", help="as the argument of lance_stream()")
    add_storage(parser)
    add_order(parser, needed=False)


def run(arguments: argparse.Namespace) -> Answer:
    """Reads the state file, and with --table what `lance_stream` checks. Ray is not started."""
    states = _states_at(arguments.path)
    if arguments.stream is not None:
        if arguments.stream not in states:
            raise StateError(f"--stream must be one of {sorted(states)}, got {arguments.stream!r}")
        states = {arguments.stream: states[arguments.stream]}
    found, texts = [], []
    for name, state in states.items():
        reason = None if arguments.uri is None else _misfit(state, arguments)
        fits = None if arguments.uri is None else reason is None
        found.append({"name": name, "state": state.to_dict(), **_position(state), "fits": fits, "reason": reason})
        texts.append(_text(name, state, fits, reason))
    fine = any(entry["fits"] is not False for entry in found)
    return Answer("\n\n".join(texts), {"path": _shown(arguments.path), "streams": found}, fine)


def _shown(path: str) -> str:
    """A path as it was given, a URI without secrets."""
    from ray_lance_stream.table import public_uri

    return public_uri(path) if "://" in path else path


def _states_at(path: str) -> dict[str, StreamState]:
    """The states in a checkpoint, by stream name.

    Raises:
        StateError: there is no such folder, or no state in it.
    """
    from ray.train import Checkpoint

    from ray_lance_stream.train import STATE_FILE, read_states

    path = path.rstrip("/").removesuffix(STATE_FILE)
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path or "."))
        if not os.path.isdir(path):
            raise StateError(f"PATH must be the folder of a checkpoint, got {_shown(path)}, which is none")
    states = read_states(Checkpoint(path))
    if not states:
        raise StateError(
            f"PATH must be a checkpoint with a stream state in it ({STATE_FILE}), got {_shown(path)}, which has none; a run "
            "keeps its checkpoints in folders of its own, and ray.train.report puts the state into them"
        )
    return states


def _misfit(state: StreamState, arguments: argparse.Namespace) -> str | None:
    """Why a run on the table may not continue from the state; None: it may.

    Raises:
        TableError: there is no such table.
        StateError: the order is one that cannot be named on a command line.
    """
    from ray_lance_stream.order import ORDER_IDS

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    saved = {name: value for name, value in _stream_options(state.identity).items() if name not in given}
    if saved.get("order", ORDER_IDS[0]) not in ORDER_IDS:
        raise StateError(
            f"--table compares the orders {', '.join(ORDER_IDS)}, got a state of order {saved['order']!r}: try it in Python, "
            "with lance_stream(..., resume_from=PATH)"
        )
    try:
        make_stream(
            arguments,
            **saved,
            resume_from=state.to_dict(),
            on_new_version=arguments.on_new_version,
            allow_moved=arguments.allow_moved,
        )
    except VersionNotFoundError as error:
        return str(error)
    except TableError:
        raise
    except StreamError as error:
        return str(error)
    return None


def _stream_options(saved: StreamIdentity) -> dict[str, Any]:
    """The arguments of lance_stream() that make a stream with this identity."""
    return {
        "filter": saved.filter,
        "order": saved.order,
        "shuffle": saved.shuffle,
        "shuffle_seed": saved.shuffle_seed,
        "shuffle_clump_size": saved.shuffle_clump_size,
        "num_splits": saved.num_splits,
        "drop_remainder": saved.drop_remainder,
        "replicas": saved.replicas,
    }


def _position(state: StreamState) -> dict[str, Any]:
    """Where in its epoch a state is: cycles of the epoch, and steps where the size of a step is known."""
    saved, size = state.identity, state.global_batch_size
    grid = SplitGrid(saved.num_rows, saved.num_splits, saved.drop_remainder)
    per_step = grid.cycles_per_step(size) if size and size % saved.num_splits == 0 else None
    return {
        "cycles_per_epoch": grid.num_cycles,
        "steps_done": state.samples_consumed_per_split / per_step if per_step else None,
        "steps_per_epoch": grid.num_steps(size) if size and per_step else None,
    }


def _text(name: str, state: StreamState, fits: bool | None, reason: str | None) -> str:
    saved, where = state.identity, _position(state)
    done, cycles = state.samples_consumed_per_split, where["cycles_per_epoch"]
    shuffled = f"shuffled with seed {saved.shuffle_seed}" if saved.shuffle else "not shuffled"
    clumps = f", clumps of {saved.shuffle_clump_size:,} rows" if saved.shuffle_clump_size else ""
    lines = [
        ("stream", name or "(without a name)"),
        ("position", f"epoch {state.epoch}, {done:,} of {cycles:,} cycles ({100 * done / cycles:.1f} %)"),
        ("table", f"{saved.table_uri}, version {saved.table_version}"),
        ("rows", f"{saved.num_rows:,}" + (f" that match the filter {saved.filter!r}" if saved.filter else "")),
        ("order", f"{saved.order}, {shuffled}{clumps}"),
        ("splits", f"{saved.num_splits:,}" + ("" if saved.drop_remainder else ", with the remainder kept")),
    ]
    if where["steps_per_epoch"] is not None:
        steps = f"{where['steps_done']:,g} of {where['steps_per_epoch']:,} done, of {state.global_batch_size:,} rows"
        lines.insert(2, ("steps", steps))
    if saved.replicas > 1:
        lines.append(("replicas", str(saved.replicas)))
    if state.partial is not None:
        rows, world = state.partial.rows, state.partial.world_size
        lines.append(
            ("partial", f"{rows:,} more rows of each of {world:,} workers, which come again on another number")
        )
    lines += [("skipped", f"cycles {lo:,} to {hi - 1:,} of epoch {epoch}") for epoch, lo, hi in state.skipped]
    if fits is not None:
        lines.append(("fits", "yes" if fits else f"no: {reason}"))
    return "\n".join(f"{label:<12}{text}" for label, text in lines)
