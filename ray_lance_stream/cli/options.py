"""The options that commands share, and the stream that they describe."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ray_lance_stream.failures import secrets_of

if TYPE_CHECKING:
    from ray_lance_stream.stream import LanceStream

# Options that go to lance_stream() as they are, where they were given.
_STREAM_OPTIONS = (
    "num_splits",
    "global_batch_size",
    "filter",
    "columns",
    "order",
    "shuffle",
    "shuffle_seed",
    "shuffle_clump_size",
    "drop_remainder",
    "replicas",
    "prefetch_bytes",
    "prefetch_chunks",
    "read_batch_size",
    "readers_per_worker",
)
MAX_WORKER_COUNTS = 10_000


def add_table(parser: argparse.ArgumentParser) -> None:
    """The table, and how to reach it."""
    parser.add_argument("uri", metavar="URI", help="path or URI of a Lance dataset")
    parser.add_argument("--version", type=int, metavar="N", help="version of the table; default: the newest")
    add_storage(parser)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """How to reach an object store."""
    parser.add_argument(
        "--storage-option",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="storage option of the object store, may be repeated; never shown. Other users of the machine see it in the "
        "list of processes: secrets are better in --storage-option-env, or where the object store looks by itself",
    )
    parser.add_argument(
        "--storage-option-env",
        type=_pair_from_environment,
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="storage option with the value of the environment variable NAME, may be repeated",
    )


def add_order(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """What fixes the rows of a step. `needed`: whether num_splits and global_batch_size must be given."""
    group = parser.add_argument_group("what fixes the rows of a step; as the arguments of lance_stream()")
    group.add_argument("--num-splits", type=int, metavar="S", required=needed)
    group.add_argument("--global-batch-size", type=int, metavar="G", required=needed)
    group.add_argument("--filter", metavar="SQL")
    group.add_argument("--order", metavar="ID")
    group.add_argument("--no-shuffle", dest="shuffle", action="store_const", const=False)
    group.add_argument("--shuffle-seed", type=int, metavar="N")
    group.add_argument("--shuffle-clump-size", type=int, metavar="ROWS")
    group.add_argument("--keep-remainder", dest="drop_remainder", action="store_const", const=False)
    group.add_argument("--replicas", type=int, metavar="N")


def add_delivery(parser: argparse.ArgumentParser) -> None:
    """What is read, and how it is delivered."""
    group = parser.add_argument_group("what is read, and how; as the arguments of lance_stream()")
    group.add_argument("--columns", type=names, metavar="A,B", help="default: all")
    group.add_argument("--prefetch-bytes", type=int, metavar="BYTES")
    group.add_argument("--prefetch-chunks", type=int, metavar="N")
    group.add_argument("--read-batch-size", type=int, metavar="CYCLES")
    group.add_argument("--readers-per-worker", type=int, metavar="N")


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Where the readers run."""
    parser.add_argument(
        "--address", default="local", help="Ray cluster to use; default: one of its own on this machine"
    )


def names(text: str) -> list[str]:
    """`a,b` as a list."""
    return [name.strip() for name in text.split(",")]


def at_least_one(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an int >= 1, got {text!r}")
    return int(text)


def worker_counts(text: str) -> tuple[int, ...]:
    """`2:8` (both ends included), `2:8:2` or `2,4,8` as numbers, ascending."""
    counts: set[int] = set()
    try:
        for part in text.split(","):
            first, *rest = (int(number) for number in part.split(":"))
            last, step = (*rest, *(first, 1)[len(rest) :])  # what is not written: the first one alone, every count
            found = range(first, last + 1, step)
            if found[MAX_WORKER_COUNTS:]:
                raise argparse.ArgumentTypeError(
                    f"at most {MAX_WORKER_COUNTS:,} worker counts can be asked for, got {text!r}"
                )
            counts.update(found)
    except ValueError:
        counts.clear()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(
            f"worker counts are written as 2:8, 2:8:2 or 2,4,8, and are >= 1; got {text!r}"
        )
    return tuple(sorted(counts))


def make_stream(arguments: argparse.Namespace, **changes: Any) -> LanceStream:
    """The stream that the options describe; options that were not given have the defaults of `lance_stream`."""
    from ray_lance_stream.factory import lance_stream

    given = {name: getattr(arguments, name, None) for name in _STREAM_OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    return lance_stream(table(arguments), **{**options, "storage_options": storage_options(arguments), **changes})


def table(arguments: argparse.Namespace) -> Any:
    """What `lance_stream` is given as table."""
    if getattr(arguments, "version", None) is None:
        return arguments.uri
    from ray_lance_stream.source import table_ref

    return table_ref(arguments.uri, storage_options(arguments)).at(arguments.version).open()


def storage_options(arguments: argparse.Namespace) -> dict[str, str] | None:
    """The storage options given; None where the object store is to look by itself."""
    pairs = [*getattr(arguments, "storage_option", []), *getattr(arguments, "storage_option_env", [])]
    return dict(pairs) or None


def secrets_in(arguments: argparse.Namespace) -> set[str]:
    """What no message may show."""
    uris = [getattr(arguments, name, None) or "" for name in ("uri", "path")]
    return set().union(*(secrets_of(uri, storage_options(arguments)) for uri in uris))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:  # without what was given, which may be a secret
        raise argparse.ArgumentTypeError("must be KEY=VALUE, and has no key or no '='")
    return key, value


def _pair_from_environment(text: str) -> tuple[str, str]:
    key, name = _pair(text)
    if name not in os.environ:
        raise argparse.ArgumentTypeError(f"the environment variable named for {key!r} is not set: export it first")
    return key, os.environ[name]
