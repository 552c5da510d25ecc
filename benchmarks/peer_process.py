"""The processes that peers run in: each has its own, so that their threads, forks and packages meet nobody else's."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import FAILURE_CHARS

# Where `make bench` installs the packages of requirements-peers.txt.
PEERS_FOLDER = Path(os.environ.get("BENCH_PEERS", Path(sys.prefix) / "peers"))


class PeerError(RuntimeError):
    """A peer failed or did not answer in time."""


class PeerProcess:
    """A process that answers one JSON line with another.

    Args:
        loader: name of the class in peer_loaders.py.
        cap_s: seconds that an answer may take; then the process is ended, and each later request fails alike.
    """

    def __init__(self, loader: str, cap_s: float) -> None:
        self._cap_s = cap_s
        self._failure: str | None = None
        root = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(PEERS_FOLDER)])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer_loaders", loader],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def ask(self, **request: Any) -> Any:
        """The answer to a request.

        Raises:
            PeerError: the peer failed, or took too long.
        """
        if self._failure is not None:
            raise PeerError(self._failure)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("the process has died")
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._cap_s):
                self._fail(f"not finished within {self._cap_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._fail("the process has died")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"][:FAILURE_CHARS])
        return answer["result"]

    def close(self) -> None:
        """End the process and what it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self.close()
        raise PeerError(reason)
