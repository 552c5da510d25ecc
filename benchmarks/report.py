"""RESULTS.md: machine, versions and tables, and where a target was missed."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.common import Context, Table, seconds

LIBRARIES = ("ray", "pylance", "lancedb", "pyarrow", "numpy", "torch")


@dataclass(frozen=True)
class Run:
    """One run of one benchmark.

    Attributes:
        tables: what it returned, or why it did not.
        facts: what its figures depend on.
        load_before, load_after: processes that wanted a core in the minute before.
        begun_s, took_s: time of day, and seconds.
        repeats: paired runs.
    """

    tables: list[Table] | str
    facts: dict[str, str]
    load_before: str
    load_after: str
    begun_s: float
    took_s: float
    repeats: int


def _lines(path: str, start: str) -> list[str]:
    try:
        text = Path(path).read_text()
    except OSError:
        return []
    return [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(start)]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def load() -> str:
    """Processes that wanted a core in the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def machine() -> dict[str, str]:
    """What the figures depend on."""
    model = (_lines("/proc/cpuinfo", "model name") or [platform.processor() or "unknown"])[0]
    memory_kb = int((_lines("/proc/meminfo", "MemTotal") or ["0 kB"])[0].split()[0])
    return {
        "processor": f"{model}, {os.cpu_count()} cores",
        "memory": f"{memory_kb / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in LIBRARIES),
        "commit": _commit(),
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]


def render(runs: dict[str, Run], context: Context) -> str:
    """The page of the newest run of each benchmark."""
    lines = ["# Results", "", "Written by `make bench`; see [README.md](README.md) for what is measured, and how.", ""]
    if context.quick:
        lines += ["**A quick run: tiny tables and short windows. The figures mean nothing.**", ""]
    facts = {
        key: " / ".join(dict.fromkeys(run.facts[key] for run in runs.values())) for key in machine() if key != "commit"
    }
    lines += _markdown_table(["", ""], list(facts.items()))
    lines += ["", "Figures are medians (smallest to largest) of paired runs, unless a table says otherwise.", ""]
    columns = ["benchmark", "commit", "begun (UTC)", "took", "paired runs", "load before and after"]
    lines += _markdown_table(columns, [_row(name, run) for name, run in runs.items()])
    lines += _checks([table for run in runs.values() if not isinstance(run.tables, str) for table in run.tables])
    for name, run in runs.items():
        if isinstance(run.tables, str):
            lines += ["", f"## {name}", "", f"Not measured: {run.tables}"]
            continue
        for table in run.tables:
            lines += ["", f"## {table.title}", ""]
            if table.note:
                lines += [table.note, ""]
            lines += _markdown_table(table.columns, table.rows)
    return "\n".join(lines) + "\n"


def _row(name: str, run: Run) -> list[str]:
    begun = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.begun_s))
    loads = f"{run.load_before}, {run.load_after}"
    return [name, run.facts["commit"], begun, seconds(run.took_s), str(run.repeats), loads]


def _checks(tables: Sequence[Table]) -> list[str]:
    checks = [check for table in tables for check in table.checks]
    if not checks:
        return []
    rows = [[check.what, check.target, check.value, "yes" if check.met else "**no**"] for check in checks]
    lines = ["", "## Targets", "", *_markdown_table(["what", "target", "measured", "met"], rows)]
    missed = [check for check in checks if not check.met]
    if missed:
        lines += ["", "## Where a target is missed", ""]
        lines += [f"- {c.what}: {c.value}, target {c.target}{'; ' + c.why if c.why else ''}." for c in missed]
    return lines
