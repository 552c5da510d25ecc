"""What all benchmarks share: their context, paired runs with medians and spreads, and the tables that they return."""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_SPLITS = 48
FAILURE_CHARS = 300


@dataclass(frozen=True)
class Context:
    """How a benchmark is run.

    Attributes:
        data: folder of the generated tables, kept between runs.
        quick: tiny sizes, which show that everything works; their figures mean nothing.
        repeats: paired runs.
    """

    data: Path
    quick: bool = False
    repeats: int = 5

    @property
    def cap_s(self) -> float:
        """Seconds after which a peer counts as not finished."""
        return 60.0 if self.quick else 300.0

    @property
    def window_s(self) -> float:
        """Seconds that one rate is measured for."""
        return 0.2 if self.quick else 1.0

    @property
    def warm_s(self) -> float:
        """Seconds between the first batch and the start of the measured window."""
        return 0.05 if self.quick else 0.2


@dataclass(frozen=True)
class Check:
    """A figure beside its target."""

    what: str
    target: str
    value: str
    met: bool
    why: str = ""  # what the gap is made of, shown where the target is not met


@dataclass
class Table:
    """What a benchmark returns."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A competitor that failed, or did not finish in time."""

    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        lines = str(error).strip().splitlines() or [""]
        return cls(f"{type(error).__name__}: {lines[-1]}"[:FAILURE_CHARS])


Samples = dict[str, "list[float] | Failure"]


def paired(competitors: dict[str, Callable[[], float]], repeats: int) -> Samples:
    """`repeats` figures of each competitor; every repeat runs all of them, in turns forwards and backwards.

    Drift of the machine hits all alike, and ratios are taken inside a repeat. A competitor that raises is out.
    """
    samples: Samples = {name: [] for name in competitors}
    for number in range(repeats):
        names = list(competitors) if number % 2 == 0 else list(competitors)[::-1]
        for name in names:
            taken = samples[name]
            if isinstance(taken, Failure):
                continue
            try:
                taken.append(competitors[name]())
            except Exception as error:
                samples[name] = Failure.of(error)
    return samples


def ratios(samples: Samples, of: str, to: str) -> list[float]:
    """The ratio of two competitors in each repeat; empty where one of them failed."""
    above, below = samples.get(of, []), samples.get(to, [])
    if isinstance(above, Failure) or isinstance(below, Failure):
        return []
    return [a / b for a, b in zip(above, below, strict=False) if b]


def best_of(candidates: Iterable[tuple[object, Callable[[], float]]]) -> tuple[object, float]:
    """The candidate with the highest rate, and that rate; candidates that raise are left out."""
    rates: list[tuple[float, object]] = []
    failure: Exception | None = None
    for key, run in candidates:
        try:
            rates.append((run(), key))
        except Exception as error:
            failure = error
    if not rates:
        assert failure is not None
        raise failure
    rate, key = max(rates, key=lambda pair: pair[0])
    return key, rate


def spread(values: Sequence[float], style: Callable[[float], str]) -> str:
    """`median (min to max)`."""
    if not values:
        return "-"
    if len(values) == 1:
        return style(values[0])
    return f"{style(statistics.median(values))} ({style(min(values))} to {style(max(values))})"


def shown(values: list[float] | Failure, style: Callable[[float], str]) -> str:
    """A cell: the spread, or why there is none."""
    return values.reason if isinstance(values, Failure) else spread(values, style)


def per_s(value: float) -> str:
    """Rows per second."""
    return f"{value:,.0f}"


def factor(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Seconds, or milliseconds where that says more."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.2f} ms"


def mib(value: float) -> str:
    """Bytes as MiB."""
    return f"{value / 2**20:,.1f} MiB"


def at_least(what: str, values: Sequence[float], target: float, why: str = "") -> Check:
    """A ratio that must reach a target; judged by its median."""
    met = bool(values) and statistics.median(values) >= target
    return Check(what, f">= {target:g} x", spread(values, factor), met, why)


def below(what: str, values: Sequence[float], target: float, style: Callable[[float], str], why: str = "") -> Check:
    """A figure that must stay below a target; judged by its median."""
    met = bool(values) and statistics.median(values) < target
    return Check(what, f"< {style(target)}", spread(values, style), met, why)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def start_ray(**options: Any) -> None:
    """One local cluster per benchmark process, with the cores of this machine."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))  # workers import this package
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    import ray

    fixed: dict[str, Any] = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    ray.init(logging_level=logging.ERROR, **fixed, **options)
