"""The files of the disk cache: one folder a node, shared by all processes on it. Imports neither Lance nor Ray.

    <cache_dir>/ray_lance_stream/
      room.lock                        held while room is made, and while files are reserved
      <table>/                         a hash of the table's URI without secrets
        fill.lock                      held by the one process that downloads, as long as it does
        data/<name>                    data files, shared by all versions of the table; `<name>.part` is being written
        checks/<name>                  size and checksum of a data file, and what it looked like when it was last checked
        versions/<view>/               what Lance opens: manifest and deletion files of a version, and a link to data/;
                                       locked by the one process that downloads its files, also between attempts
        users/<id>                     names of the files that a process reads; locked as long as it lives

A file is written beside its place and renamed into it, so that none is there in part. It is read only while it looks as
it did when it was checked, since the machine was last started; else its checksum is computed anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_lance_stream.cache_locks import files_below, filling, in_use
from ray_lance_stream.cache_parts import PART, CachedFile
from ray_lance_stream.cache_spec import CacheSpec

FOLDER = "ray_lance_stream"
FREE_SHARE = 0.1  # of the disk: stays free where cache_bytes is not given
_READ_BYTES = 1 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class TableFiles:
    """The files of one table in a cache.

    Args:
        spec: the cache.
        identity: URI of the table without secrets.
    """

    def __init__(self, spec: CacheSpec, identity: str) -> None:
        self._spec = spec
        self._root = Path(spec.folder) / FOLDER
        self.folder = self._root / _hashed(identity.encode())

    def prepare(self) -> None:
        """Make the folders, which only this user can look into."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("data", "checks", "versions", "users"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def view(self, manifest: bytes, files: Iterable[CachedFile]) -> Path:
        """The folder that Lance opens as the version with that manifest, for fragments that lie in these files.

        It is another one after a start of the machine.
        """
        names = "\n".join(file.name for file in files)
        return self.folder / "versions" / _hashed(manifest + f"{_boot()}\n{names}".encode())

    @contextmanager
    def used(self, files: Collection[CachedFile], view: Path) -> Iterator[None]:
        """While it lasts none of the files is removed by another process, if this one lives."""
        path = self.folder / "users" / uuid.uuid4().hex
        with self._making_room():
            mark = path.open("w")
            fcntl.flock(mark, fcntl.LOCK_EX)
            json.dump({"view": view.name, "files": [file.name for file in files]}, mark)
            mark.flush()
            for file in files:
                with suppress(OSError):
                    os.utime(self._check(file.name))  # used now
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            mark.close()

    def is_good(self, file: CachedFile) -> bool:
        """Whether a file is there and looks as it did when it was checked."""
        looks = _looks(self._data(file.name), file.size)
        return looks is not None and looks == self._recorded(file.name).get("looks")

    def names(self) -> set[str]:
        """The names of the data files that are there, whether good or not."""
        found: set[str] = set()
        for root, _, names in os.walk(self.folder / "data"):
            below = os.path.relpath(root, self.folder / "data")
            found.update(names if below == "." else (f"{below}/{name}" for name in names))
        return {name for name in found if not name.endswith(PART)}

    def folders(self, files: Iterable[CachedFile]) -> set[Path]:
        """Those whose times change when one of the files becomes good."""
        return {path for file in files for path in (self._data(file.name).parent, self._check(file.name).parent)}

    def check(self, file: CachedFile) -> bool:
        """Whether a file is there and has its checksum; one that has not is removed. Reads all of it."""
        if self.is_whole(file):
            self._record(file, self._recorded(file.name)["digest"])
            return True
        self._data(file.name).unlink(missing_ok=True)
        return False

    def is_whole(self, file: CachedFile) -> bool:
        """Whether a file is there and has its checksum. Reads all of it."""
        path = self._data(file.name)
        if _size(path) != file.size:
            return False
        return _digest(path) == self._recorded(file.name).get("digest")

    def forget(self, file: CachedFile) -> None:
        """Drop the checksum of a file, so that it is good no more, and the next one who fills downloads it again."""
        self._check(file.name).unlink(missing_ok=True)

    def reserve(self, files: Sequence[CachedFile]) -> int:
        """Make room for files, and say how many of them, from the first on, fit.

        Those are there in part then, at their full size. No file is removed that a process uses.
        """
        with self._making_room():
            found = list(self._removable())
            paths = [path for table in self._tables() for path in files_below(table / "data")]
            total = sum(_size(path) for path in paths)
            disk = shutil.disk_usage(self.folder)
            free = disk.free - sum(_unwritten(path) for path in paths if path.name.endswith(PART))
            limit = total + free - int(FREE_SHARE * disk.total)
            if self._spec.max_bytes is not None:
                limit = min(self._spec.max_bytes, total + free)
            found.sort(key=lambda removable: removable[0], reverse=True)
            for number, file in enumerate(files):
                while total + file.size > limit and found:
                    _, path, check = found.pop()
                    total -= _size(path)
                    path.unlink(missing_ok=True)
                    check.unlink(missing_ok=True)
                if total + file.size > limit:
                    return number
                part = self._part(file.name)
                part.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as out:
                    out.truncate(file.size)
                total += file.size
            return len(files)

    def write(self, file: CachedFile, pieces: Iterable[bytes]) -> None:
        """Fill a reserved file, and put it into its place."""
        digest, size, part = hashlib.blake2b(digest_size=16), 0, self._part(file.name)
        with part.open("r+b") as out:
            for piece in pieces:
                out.write(piece)
                digest.update(piece)
                size += len(piece)
        if size != file.size:
            raise OSError(f"{file.name} has {size} bytes in the object store, and {file.size} in the manifest")
        self._record(file, digest.hexdigest(), part)
        os.replace(part, self._data(file.name))

    def give_up(self, files: Iterable[CachedFile]) -> None:
        """Remove what is there in part of files that are not written."""
        for file in files:
            self._part(file.name).unlink(missing_ok=True)

    def _data(self, name: str) -> Path:
        return self.folder / "data" / name

    def _part(self, name: str) -> Path:
        return self.folder / "data" / f"{name}{PART}"

    def _check(self, name: str) -> Path:
        return self.folder / "checks" / name

    def _recorded(self, name: str) -> dict[str, str]:
        try:
            found = json.loads(self._check(name).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _record(self, file: CachedFile, digest: str, path: Path | None = None) -> None:
        """Keep a checksum, with what the file looks like now; written before the file is in its place."""
        check = self._check(file.name)
        check.parent.mkdir(parents=True, exist_ok=True)
        looks = _looks(path or self._data(file.name), file.size)
        beside = check.with_name(f"{check.name}{PART}")
        beside.write_text(json.dumps({"digest": digest, "looks": looks}))
        os.replace(beside, check)

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        with (self._root / "room.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _tables(self) -> list[Path]:
        return [path for path in self._root.iterdir() if path.is_dir()]

    def _removable(self) -> Iterator[tuple[float, Path, Path]]:
        """(last use, data file, its check) of the files that nobody uses; views that nobody uses go at once."""
        for table in self._tables():
            if table != self.folder:
                with filling(table):
                    pass
            views, names = in_use(table / "users")
            if not views:
                for view in (table / "versions").glob("*"):
                    shutil.rmtree(view, ignore_errors=True)
            for path in files_below(table / "data"):
                name = path.relative_to(table / "data").as_posix()
                if name not in names and not name.endswith(PART):
                    check = table / "checks" / name
                    with suppress(OSError):
                        yield (check if check.exists() else path).stat().st_mtime, path, check


def _looks(path: Path, size: int) -> str | None:
    """What changes when a file is written to, or may have been lost with the power; None where it has not its size."""
    try:
        status = path.stat()
    except OSError:
        return None
    return f"{_boot()} {size} {status.st_mtime_ns} {status.st_ino}" if status.st_size == size else None


def _boot() -> str:
    """Changes with each start of the machine, where the system tells."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _hashed(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=12).hexdigest()


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _unwritten(path: Path) -> int:
    """Bytes of a reserved file that the disk still counts as free."""
    with suppress(OSError):
        status = path.stat()
        return max(0, status.st_size - 512 * status.st_blocks)
    return 0


def newest_ns(folders: Iterable[Path]) -> int:
    """When a file was last put into one of the folders, or taken out of it."""
    times = [0]
    for folder in folders:
        with suppress(OSError):
            times.append(folder.stat().st_mtime_ns)
    return max(times)
