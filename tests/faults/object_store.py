"""An S3 stand-in for tests: moto in a process of its own, a fault proxy before it, and credentials that expire."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.proxy import FaultProxy, Request

BUCKET = "tables"
KEY = "AKIDLONGLIVED"
SECRET_KEY = "l0ngl1vedS3cretKey"
_PORT_LINE = "Running on http://127.0.0.1:"


@contextmanager
def moto_server(log: Path) -> Iterator[int]:
    """The port of a moto server."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield _port_of(process, log)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and process.poll() is None:
        _, found, rest = log.read_text().partition(_PORT_LINE)
        if found and "\n" in rest:
            return int(rest.split()[0])
        time.sleep(0.05)
    raise RuntimeError(f"moto does not start: {log.read_text()[-2000:]}")


@dataclass(frozen=True)
class ObjectStore:
    """A bucket, reached directly or through the proxy."""

    moto_port: int
    proxy: FaultProxy

    def uri(self, name: str) -> str:
        """Of a table."""
        return f"s3://{BUCKET}/{name}"

    def options(self, *, through_proxy: bool = True, **more: str) -> dict[str, str]:
        """Storage options with credentials that do not expire."""
        return storage_options(self.proxy.port if through_proxy else self.moto_port, **more)

    def request(self, method: str, key: str = "", body: bytes | None = None) -> bytes:
        """Read, write or delete an object, past the proxy."""
        url = f"http://127.0.0.1:{self.moto_port}/{BUCKET}/{key}"
        headers = {
            "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request",
            "Content-Type": "application/octet-stream",
        }
        asked = urllib.request.Request(url, data=body, method=method, headers=headers)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.read()

    def files(self, prefix: str) -> list[str]:
        """Keys below a prefix, sorted."""
        text = self.request("GET", f"?list-type=2&prefix={prefix}").decode()
        return sorted(re.findall("<Key>([^<]*)</Key>", text))


def storage_options(port: int, **more: str) -> dict[str, str]:
    """How Lance reaches a stand-in at a port."""
    return {
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET_KEY,
        "aws_region": "us-east-1",
        "aws_endpoint": f"http://127.0.0.1:{port}",
        "allow_http": "true",
        **more,
    }


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """A stand-in with an empty bucket."""
    with moto_server(folder / "moto.log") as port:
        proxy = FaultProxy(port)
        store = ObjectStore(port, proxy)
        try:
            store.request("PUT")
            yield store
        finally:
            proxy.close()


@dataclass(frozen=True)
class ShortLived:
    """A provider of credentials that expire. Each call notes its process and time in a folder.

    Attributes:
        port: of the proxy, which knows good tokens by their secret.
        life_s: how long a token lasts.
        secret: part of each token.
        folder: where calls are noted.
        tells_expiry: whether the options say when they expire.
    """

    port: int
    life_s: float
    secret: str
    folder: str
    tells_expiry: bool = True

    def __call__(self) -> dict[str, str]:
        expires_ms = int((time.time() + self.life_s) * 1000)
        Path(self.folder, f"{os.getpid()}-{expires_ms}").touch()
        more = {"expires_at_millis": str(expires_ms)} if self.tells_expiry else {}
        token = f"{self.secret}.{os.getpid()}.{expires_ms}"
        return storage_options(self.port, aws_secret_access_key=self.secret, aws_session_token=token, **more)

    def allows(self, request: Request) -> bool:
        """Whether a request carries a token that this made and that has not expired."""
        secret, _, rest = request.token.partition(".")
        return secret == self.secret and int(rest.partition(".")[2]) / 1000 > request.at_s
