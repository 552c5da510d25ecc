"""The commands that the pages show, and the files that they speak of."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

from ray_lance_stream import lance_stream
from ray_lance_stream.state import StreamState, dump_states
from ray_lance_stream.train import STATE_FILE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHOWN_FOLDER = "/data"  # where the pages have their files
WITH_RAY = ("verify", "bench")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_PROGRAM = "ray-lance-stream "
_PROMPT = "$ " + _PROGRAM


@dataclass(frozen=True)
class Command:
    """A command of a page, and the output that the page shows; None where it shows none of any command."""

    page: str
    arguments: tuple[str, ...]
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.arguments)}"


def commands() -> list[Command]:
    """All commands of all pages, each once.

    They are lines `$ ray-lance-stream ...`, with the lines below up to the next `$` as their output, and lines
    `ray-lance-stream ...` in blocks that show commands alone.
    """
    found: dict[tuple[str, ...], Command] = {}
    for page in reversed(PAGES):  # those of docs/ show output
        for kind, block in _FENCE.findall(page.read_text()):
            if kind == "python":
                continue
            for text in re.split(r"^(?=\$ )", block, flags=re.M):
                line, _, output = text.partition("\n")
                if line.startswith(_PROMPT):
                    arguments = tuple(shlex.split(line[len(_PROMPT) :]))
                    found[arguments] = Command(page.name, arguments, output.rstrip("\n"))
            for line in block.splitlines():
                if line.startswith(_PROGRAM):
                    arguments = tuple(shlex.split(line[len(_PROGRAM) :], comments=True))
                    found.setdefault(arguments, Command(page.name, arguments, None))
    return list(found.values())


def make_files(folder: Path) -> None:
    """`rows.lance`, the table of the README's quick start, and `checkpoint`, where its run stops on two workers."""
    x = np.random.default_rng(0).normal(size=(4800, 8)).astype("float32")
    columns = {"x": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 8), "y": x.sum(axis=1)}
    lance.write_dataset(pa.table(columns), folder / "rows.lance")
    stream = lance_stream(folder / "rows.lance", num_splits=48, global_batch_size=480)
    state = replace(StreamState.from_dict(stream.state_dict()), epoch=1, samples_consumed_per_split=50)
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / STATE_FILE).write_text(dump_states({"train": state}))
