"""`ray-lance-stream`: parses the command line, runs one command, and turns its answer into output and exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from ray_lance_stream import __version__
from ray_lance_stream.cli import bench, order, plan, rows, state, verify
from ray_lance_stream.cli.answer import Answer, as_json, say
from ray_lance_stream.cli.options import secrets_in
from ray_lance_stream.failures import attempt, redact

PROG = "ray-lance-stream"
SAYS_NO = 1
BAD_INPUT = 2  # what argparse exits with
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
COMMANDS = (plan, state, rows, order, verify, bench)


class _Parser(argparse.ArgumentParser):
    """Takes option names only as they are, and shows no value of an unknown one, which may be a secret."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            what = f"no such option: {', '.join(options)}" if options else f"{len(unknown)} arguments too many"
            self.error(f"{what}; see --help")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = _Parser(
        prog=PROG,
        description="Looks at, checks and measures streams of Lance and LanceDB tables into Ray Train.",
        epilog="Exit codes: 0 fine, 1 the check says no, 2 wrong usage or bad input. Results go to stdout, the rest to stderr.",
    )
    whole.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = whole.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    for command in COMMANDS:
        added = commands.add_parser(command.NAME, help=command.HELP, description=command.__doc__)
        added.add_argument("--json", action="store_true", help="the result as JSON")
        added.add_argument("--traceback", action="store_true", help="show where an error arose, for a report of a bug")
        command.add_arguments(added)
        added.set_defaults(run=command.run, command=command.NAME)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: what follows the name of the program; None: what this process was called with.

    Returns:
        The exit code: 0 fine, 1 the check says no, 2 bad input. Wrong usage exits with 2 as argparse does.
    """
    arguments = parser().parse_args(argv)
    try:
        answer, failure = attempt(lambda: arguments.run(arguments))
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    if answer is None:
        assert failure is not None
        return _failed(failure, arguments)
    _write(answer, arguments.json)
    return 0 if answer.fine else SAYS_NO


def _failed(failure: BaseException, arguments: argparse.Namespace) -> int:
    """Tell in one line what failed, or where as well."""
    secrets = secrets_in(arguments)
    if arguments.traceback:
        say(redact("".join(traceback.format_exception(failure)), secrets, max_chars=sys.maxsize))
        return BAD_INPUT
    from ray_lance_stream.errors import StreamError

    text = str(failure) if isinstance(failure, StreamError) else f"{type(failure).__name__}: {failure}"
    say(f"{PROG} {arguments.command}: error: {redact(' '.join(text.split()), secrets)}")
    return BAD_INPUT


def _write(answer: Answer, wants_json: bool) -> None:
    """The result on stdout; a reader that has seen enough (`| head`) is no error."""
    text = json.dumps(as_json(answer.data), indent=1, allow_nan=False) if wants_json else answer.text
    try:
        sys.stdout.write(f"{text}\n" if text else "")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
