"""A small stand-in for LanceDB's remote service: the calls that reading takes, answered by Lance from a local folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lance
import lancedb
import pyarrow as pa
from lance.schema import schema_to_json

Answer = tuple[int, bytes, str]  # status, body, content type
ARROW_FILE = "application/vnd.apache.arrow.file"


class RemoteService:
    """Serves the tables of a folder, in threads of this process, until it is closed.

    Args:
        folder: holds `<name>.lance`.
        api_key: what a client must send.

    Attributes:
        calls: (path, body) of each request, in order.
        fault: called with (path, body) before a request is answered; what it returns is answered instead, unless None.
    """

    def __init__(self, folder: Path, api_key: str) -> None:
        self.folder = folder
        self.api_key = api_key
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fault: Callable[[str, dict[str, Any]], Answer | None] = lambda path, body: None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def connect(self, **client_config: Any) -> Any:
        """A connection of lancedb's own client."""
        return lancedb.connect(
            "db://tests",
            api_key=self.api_key,
            host_override=f"http://127.0.0.1:{self._server.server_port}",
            client_config=client_config,
        )

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any], api_key: str | None) -> Answer:
        """The answer to a request."""
        self.calls.append((path, body))
        fault = self.fault(path, body)
        if fault is not None:
            return fault
        if api_key != self.api_key:
            return 401, b"unauthorized", "text/plain"
        _, _, _, name, action, *_ = path.split("/")
        try:
            dataset = lance.dataset(str(self.folder / f"{name}.lance"), version=body.get("version"))
        except (OSError, ValueError):
            return 404, f"no table {name} at version {body.get('version')}".encode(), "text/plain"
        try:
            return getattr(self, f"_{action}")(dataset, body)
        except (OSError, ValueError) as failure:
            return 400, str(failure).encode(), "text/plain"

    def _describe(self, dataset: lance.LanceDataset, body: dict[str, Any]) -> Answer:
        text = {"version": dataset.version, "schema": schema_to_json(dataset.schema), "location": dataset.uri}
        return 200, json.dumps(text).encode(), "application/json"

    def _count_rows(self, dataset: lance.LanceDataset, body: dict[str, Any]) -> Answer:
        return 200, str(dataset.count_rows(body.get("predicate"))).encode(), "application/json"

    def _query(self, dataset: lance.LanceDataset, body: dict[str, Any]) -> Answer:
        table = dataset.scanner(columns=body.get("columns"), filter=body.get("filter"), limit=body["k"]).to_table()
        table = table.take(pa.array(range(len(table))[::-1], pa.int64()))  # no order is promised
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return 200, sink.getvalue().to_pybytes(), ARROW_FILE

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                status, answer, kind = service.answer(self.path, body, self.headers.get("x-api-key"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                """Not to standard error."""

        return Handler
