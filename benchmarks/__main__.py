"""Runs benchmarks, each in a process of its own, and writes the page with their results and those of earlier runs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Check, Context, Table, say, start_ray
from benchmarks.report import Run, load, machine, render

# name -> seconds that it may take
BENCHMARKS = {
    "throughput": 900.0,
    "peers": 1200.0,
    "latency": 300.0,
    "rescale": 600.0,
    "planning": 240.0,
    "fragments": 60.0,
    "columns": 300.0,
    "stall": 120.0,
    "memory": 180.0,
    "transforms": 180.0,
    "object_storage": 400.0,
}
WITHOUT_RAY = ("planning", "fragments", "columns")
FORGIVEN_EXIT_S = 60.0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny tables, two repeats: shows that everything works")
    parser.add_argument("--repeats", type=int, default=None, help="paired runs (default 5)")
    parser.add_argument("--out", type=Path, default=None, help="page to write (default benchmarks/RESULTS.md)")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "ray_lance_stream_benchmarks")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no such benchmark: {unknown}; there are {list(BENCHMARKS)}")
    context = Context(arguments.data, arguments.quick, arguments.repeats or (2 if arguments.quick else 5))
    if arguments.child is not None:
        return _run_here(arguments.names[0], context, arguments.child)
    out = arguments.out
    if out is None:  # a quick run does not overwrite real figures
        out = context.data / "QUICK.md" if context.quick else Path(__file__).with_name("RESULTS.md")
    return _run_all(arguments.names or list(BENCHMARKS), context, out)


def _run_all(names: list[str], context: Context, out: Path) -> int:
    kept = context.data / ("quick" if context.quick else "full") / "results"
    kept.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in names:
        say(f"{name} begins")
        begun = Run([], machine(), load(), "", time.time(), 0.0, context.repeats)
        tables = _run_child(name, context)
        failed |= isinstance(tables, str)
        run = dataclasses.replace(begun, tables=tables, load_after=load(), took_s=time.time() - begun.begun_s)
        (kept / f"{name}.json").write_text(json.dumps(dataclasses.asdict(run)))
        out.write_text(render(_kept_runs(kept), context))  # after each, so that an interrupted run leaves a page
    print(out.read_text())
    say(f"written to {out}")
    return 1 if failed else 0


def _kept_runs(folder: Path) -> dict[str, Run]:
    """The newest run of each benchmark."""
    found = {name: folder / f"{name}.json" for name in BENCHMARKS}
    return {name: _run(json.loads(path.read_text())) for name, path in found.items() if path.exists()}


def _run(saved: dict) -> Run:
    tables = saved["tables"]
    return Run(**{**saved, "tables": tables if isinstance(tables, str) else [_table(each) for each in tables]})


def _run_child(name: str, context: Context) -> list[Table] | str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.json"
        command = [sys.executable, "-m", "benchmarks", name, "--child", str(path), "--data", str(context.data)]
        command += ["--repeats", str(context.repeats), *(["--quick"] if context.quick else [])]
        try:
            done = subprocess.run(command, timeout=BENCHMARKS[name] + FORGIVEN_EXIT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not finished within {BENCHMARKS[name] + FORGIVEN_EXIT_S:.0f} s"
        if not path.exists():
            return f"failed with exit code {done.returncode}; see its output"
        return [_table(each) for each in json.loads(path.read_text())]


def _table(saved: dict) -> Table:
    return Table(**{**saved, "checks": [Check(**check) for check in saved["checks"]]})


def _run_here(name: str, context: Context, path: Path) -> int:
    module = importlib.import_module(f"benchmarks.{name}")
    if name not in WITHOUT_RAY:
        start_ray(**getattr(module, "RAY_OPTIONS", {}))
    tables = module.run(context)
    path.write_text(json.dumps([dataclasses.asdict(table) for table in tables]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
