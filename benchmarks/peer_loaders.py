"""The loaders of other libraries, each served by a process of its own: `python -m benchmarks.peer_loaders NAME`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Without a shuffle, `to_batches` reads the table for the conversions.
CONVERTED_ROWS = 10_000
CHUNK_BYTES = 64 * 2**20


class Loader:
    """One library."""

    # Makes its loader, whose batches are dicts of tensors or tensors.
    open: Callable[..., Any]

    def version(self) -> str:
        raise NotImplementedError

    def convert(self, uri: str, folder: str) -> float:
        """Write the rows of a Lance table in the library's own format; returns seconds."""
        raise NotImplementedError

    def measure(self, window_s: float, warm_s: float, **options: Any) -> dict[str, float]:
        """Rows per second after the first batch, and how long that took from the making of the loader."""
        begun_s = time.perf_counter()
        batches = iter(self.open(**options))
        next(batches)
        first_s = time.perf_counter()
        rows = 0
        start_s = first_s
        for batch in batches:
            now_s = time.perf_counter()
            if now_s - first_s < warm_s:
                start_s = now_s
                continue
            rows += len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)
            if now_s - start_s >= window_s:
                break
        if not rows:
            raise RuntimeError("the epoch ended before anything was measured")
        return {"rows_per_s": rows / (time.perf_counter() - start_s), "first_s": first_s - begun_s}


class LanceDB(Loader):
    """lancedb.streaming on the table itself."""

    def version(self) -> str:
        import lancedb

        return str(lancedb.__version__)

    def open(self, *, database: str, table: str, batch_size: int, num_workers: int, **options: Any) -> Any:
        import lancedb
        from lancedb.streaming import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(lancedb.connect(database).open_table(table), shuffle_seed=0, **options)
        context = "spawn" if num_workers else None  # Lance must not be used after a fork
        return StreamingDataLoader(
            dataset, batch_size=batch_size, num_workers=num_workers, multiprocessing_context=context
        )


class Mosaic(Loader):
    """mosaicml-streaming on local MDS files."""

    def __init__(self) -> None:
        _import_streaming()
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # of processes before this one

    def version(self) -> str:
        import streaming

        return str(streaming.__version__)

    def convert(self, uri: str, folder: str) -> float:
        from streaming import MDSWriter

        start_s = time.perf_counter()
        with MDSWriter(out=folder, columns={"tokens": "ndarray:int32:512"}, size_limit=CHUNK_BYTES) as writer:
            for row in _rows(uri):
                writer.write({"tokens": row})
        return time.perf_counter() - start_s

    def open(self, *, folder: str, batch_size: int, num_workers: int, shuffle: bool) -> Any:
        from streaming import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(local=folder, shuffle=shuffle, batch_size=batch_size)
        return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers)


class LitData(Loader):
    """litdata on its local chunks; `tokens_loader`: its own layout for token blocks, without a schema per row."""

    def version(self) -> str:
        import litdata

        return str(litdata.__version__)

    def convert(self, uri: str, folder: str) -> float:
        import litdata

        start_s = time.perf_counter()
        is_flat = folder.endswith("-flat")
        litdata.optimize(
            fn=_flat_samples if is_flat else _dict_samples,
            inputs=[uri],
            output_dir=folder,
            chunk_bytes=CHUNK_BYTES,
            num_workers=1,
            item_loader=litdata.TokensLoader(block_size=512) if is_flat else None,
        )
        return time.perf_counter() - start_s

    def open(self, *, folder: str, batch_size: int, num_workers: int, shuffle: bool) -> Any:
        import litdata

        item_loader = litdata.TokensLoader(block_size=512) if folder.endswith("-flat") else None
        dataset = litdata.StreamingDataset(folder, shuffle=shuffle, drop_last=True, item_loader=item_loader)
        return litdata.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers)


def _rows(uri: str) -> Iterator[Any]:
    import lance

    for batch in lance.dataset(uri).to_batches(batch_size=CONVERTED_ROWS):
        yield from batch.column("tokens").flatten().to_numpy().reshape(len(batch), -1)


def _dict_samples(uri: str) -> Iterator[dict[str, Any]]:
    for row in _rows(uri):
        yield {"tokens": row}


def _flat_samples(uri: str) -> Iterator[Any]:
    import torch

    for row in _rows(uri):
        yield torch.from_numpy(row.copy())


def _import_streaming() -> None:
    """mosaicml-streaming imports torchvision for classes that nothing here uses; where it is missing, stand in for it."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        import transformers.feature_extraction_utils
        import transformers.tokenization_utils_base  # noqa: F401

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        datasets = types.ModuleType("torchvision.datasets")
        functional = types.ModuleType("torchvision.transforms.functional")
        datasets.VisionDataset = object  # type: ignore[attr-defined]
        functional.to_tensor = None  # type: ignore[attr-defined]
        for module in (datasets, functional):
            sys.modules[module.__name__] = module
        for name in ("torchvision", "torchvision.transforms"):
            sys.modules[name] = types.ModuleType(name)
    import streaming  # noqa: F401


LOADERS = {"lancedb": LanceDB, "mosaicml-streaming": Mosaic, "litdata": LitData}


def _answer(loader: Loader, request: dict[str, Any]) -> Any:
    what = request.pop("what")
    if what == "convert":
        folder = Path(request["folder"])
        done = folder.with_name(folder.name + ".done")  # beside it: the libraries own their folders
        if done.exists():
            return None
        shutil.rmtree(folder, ignore_errors=True)
        took_s = loader.convert(request["uri"], str(folder))
        done.touch()
        return took_s
    return getattr(loader, what)(**request)


def main() -> None:
    """Answer the requests on stdin. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loader: Loader | None = None
    for line in sys.stdin:
        try:
            loader = loader or LOADERS[sys.argv[1]]()
            answer = {"result": _answer(loader, json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
