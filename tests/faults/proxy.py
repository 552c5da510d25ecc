"""A proxy in front of an S3 stand-in: checks credentials, which that one does not, and answers wrongly where a test asks.

It runs in a thread of the test's own process. Each connection carries one request.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

PASS, CUT, HANG_UP = "pass", "cut", "hang up"
_NAMES = {403: "AccessDenied", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        method: of HTTP.
        path: with the query.
        access_key: whose key signed it.
        token: session token; "" without.
        at_s: when, by the clock.
    """

    method: str
    path: str
    access_key: str
    token: str
    at_s: float

    @property
    def is_data(self) -> bool:
        """Whether a data file of a Lance table is read."""
        return self.method == "GET" and "/data/" in self.path


# What becomes of a request: an HTTP status to answer, PASS, CUT in the middle of the body, or HANG_UP without an answer.
Fault = int | str


@dataclass
class FaultProxy:
    """Forwards to `upstream_port` what it lets pass.

    Attributes:
        upstream_port: where the stand-in listens.
        allowed: whether the credentials of a request are good; others are answered with 403.
        fault: what becomes of a request with good credentials.
        delay_s: how long each request waits before it is served.
        requests: all of them, with what became of each.
        answered_bytes: of the answers that were let pass, with their heads.
    """

    upstream_port: int
    allowed: Callable[[Request], bool] = lambda request: True
    fault: Callable[[Request], Fault] = lambda request: PASS
    delay_s: float = 0.0
    requests: list[tuple[Request, Fault]] = field(default_factory=list)
    port: int = 0
    answered_bytes: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self.come_back()

    @property
    def endpoint(self) -> str:
        """URL."""
        return f"http://127.0.0.1:{self.port}"

    def come_back(self) -> None:
        """Listen, on the same port as before."""

        async def listen() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20)
            self.port = self._server.sockets[0].getsockname()[1]

        self._run(listen())

    def go_away(self) -> None:
        """Listen no more: connections are refused."""

        async def close() -> None:
            assert self._server is not None
            self._server.close()

        self._run(close())

    def close(self) -> None:
        """End it, with the requests that it still serves."""
        self.go_away()

        async def cancel() -> None:
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

        self._run(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def reset(self) -> None:
        """Let all pass, and forget what was."""
        self.allowed, self.fault = (lambda request: True), (lambda request: PASS)
        self.delay_s, self.answered_bytes = 0.0, 0
        self.requests.clear()

    def count(self, fault: Fault) -> int:
        """Requests of which this became."""
        return sum(what == fault for _, what in self.requests)

    @property
    def data_requests(self) -> int:
        """Requests for data files so far."""
        return sum(request.is_data for request, _ in self.requests)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(_header(head, "content-length") or 0))
            request = _parsed(head)
            what = self.fault(request) if self.allowed(request) else 403
            self.requests.append((request, what))
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if isinstance(what, int):
                writer.write(_error(what, request.token))
            elif what != HANG_UP:
                answer = await self._forwarded(head, body)
                self.answered_bytes += len(answer)
                start = answer.index(b"\r\n\r\n") + 4
                writer.write(answer if what == PASS else answer[: (start + len(answer)) // 2])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _forwarded(self, head: bytes, body: bytes) -> bytes:
        """The whole answer of the stand-in, made one that ends the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        try:
            writer.write(_closing(head) + body)
            answer = await reader.read(-1)
        finally:
            writer.close()
        start = answer.index(b"\r\n\r\n") + 4
        return _closing(answer[:start]) + answer[start:]


def _header(head: bytes, name: str) -> str:
    found = re.search(rf"\r\n{name}:[ \t]*([^\r]*)".encode(), head, re.I)
    return found[1].decode() if found else ""


def _closing(head: bytes) -> bytes:
    """The head of a message with `Connection: close`."""
    head = re.sub(rb"\r\n(?:connection|keep-alive):[^\r]*", b"", head, flags=re.I)
    return head[:-2] + b"Connection: close\r\n\r\n"


def _parsed(head: bytes) -> Request:
    method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
    key = re.search(r"Credential=([^/]+)/", _header(head, "authorization"))
    return Request(method, path, key[1] if key else "", _header(head, "x-amz-security-token"), time.time())


def _error(status: int, token: str) -> bytes:
    """As S3 puts it, which repeats the token that it refuses."""
    name = _NAMES[status]
    inner = f"<Code>{name}</Code><Message>on purpose</Message><Token-0>{token}</Token-0>"
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error>{inner}</Error>".encode()
    head = f"HTTP/1.1 {status} {name}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
