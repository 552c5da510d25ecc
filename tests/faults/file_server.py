"""A folder of files as an S3 bucket that is only read. Answers a range with that range, where moto loads the whole object.

The folder is the parent of the buckets: `s3://tables/t.lance` is its folder `tables/t.lance`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_OK, _PARTIAL, _NOT_FOUND, _NOT_ALLOWED = "200 OK", "206 Partial Content", "404 Not Found", "405 Method Not Allowed"


class FileServer:
    """Serves a folder, in a thread of its own, until `close`.

    Args:
        folder: of the buckets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="file server", daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = started.result(timeout=10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """End it."""

        async def end() -> None:
            self._server.close()
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split(" ", 2)
                status, headers, body = self._answer(method, target, head)
                lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode())
                if method != "HEAD":
                    writer.write(body)
                await writer.drain()
                if "connection: close" in head.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    def _answer(self, method: str, target: str, head: str) -> tuple[str, dict[str, str], bytes]:
        """(status, headers, body)."""
        url = urlsplit(target)
        query = parse_qs(url.query)
        path = self._folder / unquote(url.path).lstrip("/")
        if method not in ("GET", "HEAD"):
            return _NOT_ALLOWED, {"Content-Length": "0"}, b""
        if "list-type" in query:
            body = self._listed(path, query.get("prefix", [""])[0], query.get("delimiter", [""])[0]).encode()
            return _OK, {"Content-Type": "application/xml", "Content-Length": str(len(body))}, body
        if not path.is_file():
            body = b"<Error><Code>NoSuchKey</Code><Message>no such file</Message></Error>"
            return _NOT_FOUND, {"Content-Type": "application/xml", "Content-Length": str(len(body))}, body
        return _file(path, method, head)

    def _listed(self, bucket: Path, prefix: str, delimiter: str) -> str:
        keys, folders = [], set()
        for path in sorted((bucket / prefix).rglob("*") if prefix.endswith("/") or not prefix else bucket.rglob("*")):
            key = path.relative_to(bucket).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append((key, path.stat().st_size))
        entries = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag>"
            f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, size in keys
        ]
        entries += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
        return (
            "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{len(entries)}</KeyCount>{''.join(entries)}</ListBucketResult>"
        )


def _file(path: Path, method: str, head: str) -> tuple[str, dict[str, str], bytes]:
    size = path.stat().st_size
    start, stop, status = 0, size, _OK
    headers = {"ETag": f'"{path.stat().st_mtime_ns}-{size}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    asked = re.search(r"\r\nrange:\s*bytes=(\d*)-(\d*)", head, re.I)
    if asked:
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        status = _PARTIAL
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    if method == "HEAD":
        return status, headers, b""
    with path.open("rb") as file:
        file.seek(start)
        return status, headers, file.read(stop - start)
