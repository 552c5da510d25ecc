"""An object store of a benchmark: the tables' folder behind a proxy that delays each request, in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from tests.faults.file_server import FileServer
from tests.faults.object_store import storage_options
from tests.faults.proxy import FaultProxy


def _serve(folder: Path, pipe: Connection) -> None:
    server = FileServer(folder)
    proxy = FaultProxy(server.port)
    pipe.send(proxy.port)
    while True:
        try:
            delay_s = pipe.recv()
        except EOFError:
            break
        pipe.send((len(proxy.requests), proxy.answered_bytes))
        proxy.reset()
        proxy.delay_s = delay_s


class Store:
    """What the benchmark asks of it.

    Args:
        folder: that has the bucket in it.
        pipe: to its process.
    """

    def __init__(self, folder: Path, pipe: Connection) -> None:
        self._pipe = pipe
        self.options = storage_options(pipe.recv())
        self._bucket = folder.name

    def uri(self, path: str) -> str:
        """Of a table in the folder."""
        return f"s3://{self._bucket}/{Path(path).name}"

    def delay(self, delay_s: float) -> tuple[int, int]:
        """Delay each request from here on; (requests, bytes of answers) since the last call."""
        self._pipe.send(delay_s)
        return self._pipe.recv()


@contextmanager
def served(folder: Path) -> Iterator[Store]:
    """The tables in a folder as those of an object store."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder.parent, there), daemon=True)
    process.start()
    there.close()
    try:
        yield Store(folder, here)
    finally:
        here.close()
        process.join(timeout=10)
        process.terminate()
