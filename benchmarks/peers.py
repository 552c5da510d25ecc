"""The same rows through other loaders, as torch batches in one process, in the same run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    NUM_SPLITS,
    Context,
    Failure,
    Table,
    at_least,
    factor,
    paired,
    ratios,
    say,
    seconds,
    shown,
    spread,
)
from benchmarks.common import per_s as style_rate
from benchmarks.consumers import batch_rows, global_batch_rows, open_stream, shard_rate, torch_batches
from benchmarks.data import database_of, table_uri
from benchmarks.peer_process import PeerProcess

OURS = "ray_lance_stream"
WHOLE_EPOCH = f"{OURS}, whole epoch"
# num_splits and read_batch_size that StreamingDataset is tried with.
PEER_SETTINGS = [(NUM_SPLITS, 64), (NUM_SPLITS, 512), (4, 64), (4, 512), (4, 4096)]
Competitor = Callable[[], float]


@dataclass
class Field:
    """The competitors of a table, and what else is known of them.

    Attributes:
        run: what measures each.
        settings: the best settings found.
        first_s: seconds to the first batch, from the making of the loader.
    """

    run: dict[str, Competitor] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)

    def noted(self, name: str, measured: dict[str, float]) -> float:
        """The rate, with the time to the first batch kept."""
        self.first_s.setdefault(name, []).append(measured["first_s"])
        return measured["rows_per_s"]


def run(context: Context) -> list[Table]:
    """See the module."""
    return [_table(context, name) for name in ("tokens", "narrow")]


def _table(context: Context, name: str) -> Table:
    say(f"peers: {name}")
    field_ = Field()
    _add_ours(field_, context, name)
    _add_lancedb(field_, context, name)
    _add_ray_data(field_, context, name)
    if name == "tokens":
        _add_own_formats(field_, context, name)
    samples = paired(field_.run, context.repeats) | field_.failed
    table = Table(
        f"Beside other loaders, {name}",
        ["loader", "settings", "rows/s", f"{OURS} is faster by", "first batch"],
        note="Torch batches in one process. Rates count from a moment after the first batch; those of a whole epoch from the "
        "first request, since Ray Data has read and shuffled much of the table, or all, before it hands a batch out. `first "
        "batch` is the time from the making of the loader, which for StreamingDataset includes its permutation.",
    )
    for what, values in samples.items():
        rival = WHOLE_EPOCH if what.startswith("Ray Data") else OURS
        gain = "" if what.startswith(OURS) else spread(ratios(samples, rival, what), factor)
        first = spread(field_.first_s.get(what, []), seconds)
        table.rows.append([what, field_.settings.get(what, ""), shown(values, style_rate), gain, first])
    _add_checks(table, samples, name)
    return table


def _add_checks(table: Table, samples: Any, name: str) -> None:
    streaming = [
        what for what in samples if what.startswith("StreamingDataset") and not isinstance(samples[what], Failure)
    ]
    if streaming:
        best = min(streaming, key=lambda what: sum(ratios(samples, OURS, what)))
        target = {"tokens": 50.0, "narrow": 100.0}[name]
        why = "rows come faster than a bare `take` of them, see the throughput of one worker: no more is to be had"
        table.checks.append(at_least(f"{name}, row shuffle / {best}", ratios(samples, OURS, best), target, why))
    own = [w for w in samples if w.startswith(("litdata", "mosaicml")) and not isinstance(samples[w], Failure)]
    if own:
        best = min(own, key=lambda what: sum(ratios(samples, OURS, what)))
        why = "its files lie in the order in which it reads them, and its shuffle moves rows only near to each other"
        table.checks.append(at_least(f"{name}, row shuffle / {best}", ratios(samples, OURS, best), 1.2, why))
        clumped = f"{OURS}, clumps of 64"
        table.checks.append(at_least(f"{name}, clumps of 64 / {best}", ratios(samples, clumped, best), 3.0, why))


def _add_ours(field_: Field, context: Context, name: str) -> None:
    uri = table_uri(context, name)
    for what, order in ((OURS, "row shuffle"), (f"{OURS}, clumps of 64", "clumps of 64")):
        shard = open_stream(uri, name, order).shard()
        field_.run[what] = partial(shard_rate, shard, "torch batches", context)
        field_.settings[what] = f"batches of {global_batch_rows(name)}"
        if order == "row shuffle":
            field_.run[WHOLE_EPOCH] = partial(_epoch_rate, field_, WHOLE_EPOCH, partial(torch_batches, shard), context)


def _measured(library: str, context: Context, window_s: float, options: dict[str, Any]) -> dict[str, float]:
    """One measurement, in a process of its own: what a loader that is left early keeps alive would disturb the next."""
    process = PeerProcess(library, context.cap_s)
    try:
        return dict(process.ask(what="measure", window_s=window_s, warm_s=context.warm_s, **options))
    finally:
        process.close()


def _add_tuned(field_: Field, what: str, library: str, settings: list[dict[str, Any]], context: Context) -> None:
    """Add a peer with the best of some settings; each is tried once."""
    tried: list[tuple[float, dict[str, Any]]] = []
    failure: Failure | None = None
    for options in settings:
        try:
            measured = _measured(library, context, context.window_s / 2, options)
            tried.append((measured["rows_per_s"], options))
        except Exception as error:
            failure = Failure.of(error)
    if not tried:
        assert failure is not None
        field_.failed[what] = failure
        return
    best = max(tried, key=lambda pair: pair[0])[1]
    shown_options = {k: v for k, v in best.items() if k in ("read_batch_size", "num_splits", "num_workers", "folder")}
    if "folder" in shown_options:
        shown_options["folder"] = Path(str(best["folder"])).name
    field_.settings[what] = ", ".join(f"{key}={value}" for key, value in shown_options.items())
    field_.run[what] = lambda: field_.noted(what, _measured(library, context, 2 * context.window_s, best))


def _add_lancedb(field_: Field, context: Context, name: str) -> None:
    database, table = database_of(table_uri(context, name))
    size = global_batch_rows(name)
    for workers in (0, 2):
        settings = [
            {
                "database": database,
                "table": table,
                "batch_size": size,
                "num_workers": workers,
                "num_splits": splits,
                "read_batch_size": rows,
            }
            for splits, rows in PEER_SETTINGS[: 1 if context.quick else None]
        ]
        _add_tuned(field_, f"StreamingDataset, num_workers={workers}", "lancedb", settings, context)


def _add_own_formats(field_: Field, context: Context, name: str) -> None:
    uri = table_uri(context, name)
    base = Path(uri).parent
    layouts = {"mosaicml-streaming": [f"{name}-mds"], "litdata": [f"{name}-litdata", f"{name}-litdata-flat"]}
    for library, folders in layouts.items():
        say(f"peers: converting to {library}")
        # Converted in a process of its own: Lance, which reads the rows, must not be there when loaders fork.
        converting = PeerProcess(library, context.cap_s)
        try:
            version = converting.ask(what="version")
            for each in folders:
                converting.ask(what="convert", uri=uri, folder=str(base / each))
        except Exception as error:
            field_.failed[library] = Failure(f"not run: {Failure.of(error).reason}")
            continue
        finally:
            converting.close()
        settings = [
            {"folder": str(base / each), "batch_size": global_batch_rows(name), "num_workers": workers, "shuffle": True}
            for each, workers in itertools.product(folders, (0, 1, 2))
        ]
        _add_tuned(field_, f"{library} {version}", library, settings, context)


def _add_ray_data(field_: Field, context: Context, name: str) -> None:
    uri, size = table_uri(context, name), global_batch_rows(name)
    kinds: dict[str, tuple[bool, dict[str, Any]]] = {
        "Ray Data, no shuffle": (False, {}),
        "Ray Data, local_shuffle_buffer_size": (False, {"local_shuffle_buffer_size": 20 * size}),
        "Ray Data, random_shuffle": (True, {}),
    }
    for kind, (shuffles, options) in kinds.items():
        what = f"{kind}, whole epoch"
        field_.settings[what] = ", ".join(f"{key}={value}" for key, value in options.items())
        begin = partial(_ray_data_batches, uri, shuffles, {"batch_size": size, **options})
        field_.run[what] = partial(_epoch_rate, field_, what, begin, context)


def _ray_data_batches(uri: str, shuffles: bool, options: dict[str, Any]) -> Iterator[Any]:
    import ray

    dataset = ray.data.read_lance(uri)
    if shuffles:
        dataset = dataset.random_shuffle()
    return iter(dataset.streaming_split(1)[0].iter_torch_batches(**options))


def _epoch_rate(field_: Field, what: str, begin: Callable[[], Iterator[Any]], context: Context) -> float:
    """Rate of one epoch from the first request to the last batch."""
    begun_s = time.perf_counter()
    batches = begin()
    rows = batch_rows(next(batches))
    first_s = time.perf_counter()
    for batch in batches:
        rows += batch_rows(batch)
        if time.perf_counter() - begun_s > context.cap_s:
            raise RuntimeError(f"not finished within {context.cap_s:.0f} s")
    return field_.noted(what, {"rows_per_s": rows / (time.perf_counter() - begun_s), "first_s": first_s - begun_s})
