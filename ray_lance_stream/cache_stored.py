"""What the disk cache reads from the object store: files of a table version, as they are there."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_lance_stream.cache_parts import CachedParts, manifest_names
from ray_lance_stream.errors import ReadError
from ray_lance_stream.failures import guarded, is_refusal, secrets_of
from ray_lance_stream.storage_options import current_options, renewal_time_s, with_retries
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from lance.file import LanceFileSession


class StoredFiles:
    """The files of a table in its object store, read by Lance, with the storage options of the table.

    Args:
        ref: the table.
    """

    def __init__(self, ref: TableRef) -> None:
        self._ref = ref
        self._lock = threading.Lock()
        self._session: tuple[LanceFileSession, set[str]] | None = None  # with the secrets of its options
        self._renew_at_s = 0.0

    def read(self, path: str, start: int, size: int) -> bytes:
        """Bytes of a file.

        Raises:
            ReadError: they cannot be read.
        """
        return self._tried(lambda session: session.read_range(path, start, size), path)

    def download(self, path: str, to: Path) -> None:
        """A small file.

        Raises:
            ReadError: it cannot be read.
        """
        self._tried(lambda session: session.download_file(path, str(to)), path)

    def _tried(self, ask: Callable[[LanceFileSession], Any], path: str) -> Any:
        session, secrets = self._opened()
        action = f"{path} of table {self._ref.identity} cannot be read"
        try:
            return guarded(lambda: ask(session), action, ReadError, secrets)
        except ReadError as error:
            if not callable(self._ref.storage_options) or not is_refusal(str(error)):
                raise
        again, secrets = self._opened(instead_of=session)
        return guarded(lambda: ask(again), action, ReadError, secrets)

    def _opened(self, instead_of: LanceFileSession | None = None) -> tuple[LanceFileSession, set[str]]:
        """The session and its secrets, made anew before its options expire or where they were refused."""
        from lance.file import LanceFileSession

        with self._lock:
            if self._session is None or self._session[0] is instead_of or time.time() >= self._renew_at_s:
                uri, options = self._ref.uri, current_options(self._ref.storage_options)
                secrets = secrets_of(uri, options)
                with_all = with_retries(uri, options) or None
                action = f"table {self._ref.identity} cannot be opened"
                self._session = guarded(lambda: LanceFileSession(uri, with_all), action, ReadError, secrets), secrets
                self._renew_at_s = renewal_time_s(options)
            return self._session


def make_view(view: Path, version: int, parts: CachedParts, stored: StoredFiles) -> None:
    """Bring the manifest and the deletion files of a version into the folder that Lance opens.

    Raises:
        ReadError: they cannot be read.
        OSError: they cannot be written.
    """
    part = view.with_name(f"{view.name}.{uuid.uuid4().hex}")
    try:
        for name in ("_versions", "_deletions"):
            (part / name).mkdir(parents=True)
        newer, older = (f"_versions/{name}" for name in manifest_names(version))
        try:
            stored.download(newer, part / newer)
        except ReadError:
            (part / newer).unlink(missing_ok=True)
            stored.download(older, part / older)
        for path in parts.deletions:
            stored.download(path, part / path)
        (part / "data").symlink_to(Path("..", "..", "data"))
        try:
            os.replace(part, view)
        except OSError:
            if not view.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
