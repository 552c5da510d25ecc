"""Pin: a tag in the table that keeps the versions of a run from being cleaned up, for as long as the run may need them.

A tag of ours carries a mark in its metadata. Nothing else is ever moved or removed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ray_lance_stream.errors import ConfigError, TableError
from ray_lance_stream.failures import guarded, secrets_of
from ray_lance_stream.manifest import is_same_version
from ray_lance_stream.remote import RemoteTableRef
from ray_lance_stream.storage_options import current_options
from ray_lance_stream.table import TableRef, open_newest

if TYPE_CHECKING:
    import lance

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TAG = "ray_lance_stream.tag"
_OWNER = "ray_lance_stream.owner"
_VERSION = "ray_lance_stream.version"


@dataclass(frozen=True)
class PinnedAs:
    """Under which tag versions are kept, and by whom: the one who took the tag over last removes it.

    The tag without a version in its name is there from the beginning of a pin to its end, and says whose it is.
    """

    tag: str
    owner: str

    def begin(self, table: TableRef) -> None:
        """Have the version of `table` kept: under the tag, or where that names another one, under `<tag>-v<version>`.

        Tags of an earlier run under this name, which did not come to its end, are taken over with their versions: they
        may be what this run resumes from.

        Raises:
            ConfigError: a tag of that name was made by somebody else and names another version.
            TableError: Lance refuses the name, or the table cannot be written to.
            VersionNotFoundError: the version is gone.
        """
        dataset = table.open(fresh=True)
        for name, found in _tags(table, dataset).items():
            if self._is_of_this_name(found) and found["metadata"][_OWNER] != self.owner:
                self._mark(table, dataset, name, found["version"])
        self._keep(table, dataset, _tags(table, dataset))

    def hold(self, table: TableRef) -> None:
        """Have another version kept by a pin that has begun; one that has ended keeps nothing more. Errors as `begin`.

        Never takes a tag from a run that came later: whoever asks may belong to one that was thought dead.
        """
        dataset = table.open(fresh=True)
        tags = _tags(table, dataset)
        made = self._keep(table, dataset, tags) if self.tag in tags else None
        tags = _tags(table, dataset)
        if self.tag in tags:
            return
        if made is not None and made in tags:  # the pin was closed meanwhile, before it could see this one
            _delete(table, dataset, made)
        logger.warning(
            "version %d of table %s is not kept: tag %r is gone, so the pin was closed, or somebody removed it",
            table.version,
            table.identity,
            self.tag,
        )

    def _keep(self, table: TableRef, dataset: lance.LanceDataset, tags: Mapping[str, Any]) -> str | None:
        """Returns the name of the tag, if one had to be made."""
        for name in (self.tag, f"{self.tag}-v{table.version}"):
            if name not in tags:
                create = partial(dataset.tags.create, name, table.version)
                _guarded(table, dataset, f"tag {name!r} cannot be made", create)
                self._mark(table, dataset, name, table.version)
                return name
            if tags[name]["version"] == table.version and _leads_to(dataset, name):
                is_of_earlier_run = self._is_of_this_name(tags[name]) and not self._is_ours(tags[name])
                if is_of_earlier_run and self._is_ours(tags[self.tag]):
                    self._mark(table, dataset, name, table.version)
                return None
            if not self._is_of_this_name(tags[name]):
                branch = tags[name]["branch"]
                named = f"version {tags[name]['version']}" + (f" of branch {branch!r}" if branch else "")
                raise ConfigError(
                    f"tag must be a name of its own, but {name!r} of table {table.identity} names {named}, not version "
                    f"{table.version}, and is not as pin() has made it: choose another name"
                )
        return None

    def release(self, table: TableRef) -> None:
        """Remove the tags that are still as this owner has made them or taken them over.

        The one that says whose they are goes first: what is held meanwhile is found here then, or let go by `hold`.
        """
        dataset = open_newest(table.uri, current_options(table.storage_options))
        for is_first in (True, False):
            for name, found in _tags(table, dataset).items():
                if found["metadata"].get(_TAG) != self.tag or (name == self.tag) is not is_first:
                    continue
                if self._is_ours(found):
                    _delete(table, dataset, name)
                else:
                    logger.warning("tag %r of table %s stays: somebody else has taken it over", name, table.identity)

    def _is_of_this_name(self, found: Mapping[str, Any]) -> bool:
        """Whether a tag was made by a pin of this name, and names the version that it did then."""
        mark = found["metadata"]
        return mark.get(_TAG) == self.tag and mark.get(_VERSION) == str(found["version"]) and _OWNER in mark

    def _is_ours(self, found: Mapping[str, Any]) -> bool:
        return self._is_of_this_name(found) and found["metadata"][_OWNER] == self.owner

    def _mark(self, table: TableRef, dataset: lance.LanceDataset, name: str, version: int) -> None:
        mark = {_TAG: self.tag, _OWNER: self.owner, _VERSION: str(version)}
        replace_metadata = partial(dataset.tags.replace_metadata, name, mark)
        _guarded(table, dataset, f"tag {name!r} cannot be marked", replace_metadata)


def _tags(table: TableRef, dataset: lance.LanceDataset) -> dict[str, Any]:
    return _guarded(table, dataset, "tags cannot be listed", dataset.tags.list)


def _delete(table: TableRef, dataset: lance.LanceDataset, name: str) -> None:
    try:
        _guarded(table, dataset, f"tag {name!r} cannot be removed", partial(dataset.tags.delete, name))
    except TableError:
        if name in _tags(table, dataset):  # else it was removed at the same time
            raise


def _leads_to(dataset: lance.LanceDataset, name: str) -> bool:
    """Whether a tag names this very version: branches have versions of the same number."""
    return is_same_version(dataset.checkout_version(name), dataset)


def _guarded(table: TableRef, dataset: lance.LanceDataset, what: str, action: Callable[[], T]) -> T:
    secrets = secrets_of(table.uri, dataset.initial_storage_options)
    return guarded(action, f"{what} in table {table.identity}", TableError, secrets)


class Pin:
    """The tag of a run. Made by `LanceStream.pin`; ends with `close()`, or as a context manager.

    Left by an error, a `with` block keeps the tag, since the run may be resumed; so does a process that is killed. The
    next run that pins its stream under the same name takes the tag over.

    Args:
        table: the pinned version.
        tag: name of the tag.
        ended: called when the run has come to its end, before the tags go: nothing is to be kept for it any more.
    """

    def __init__(self, table: TableRef, tag: str, ended: Callable[[PinnedAs], None]) -> None:
        if not isinstance(tag, str) or not tag:
            raise ConfigError(f"tag must be a name such as that of the run, got {tag!r}")
        if isinstance(table, RemoteTableRef):
            raise ConfigError(
                f"pin() takes a table that Lance opens itself, got {table!r}: tag its version in the service"
            )
        self.held_as = PinnedAs(tag, uuid.uuid4().hex)
        self._table = table
        self._ended = ended
        self.held_as.begin(table)

    @property
    def tag(self) -> str:
        """Name of the tag."""
        return self.held_as.tag

    def __repr__(self) -> str:
        return f"Pin(tag={self.tag!r}, table={self._table.identity!r}, version={self._table.version})"

    def close(self) -> None:
        """The run has come to its end and will not be resumed: remove its tags. Leaves those that others have made."""
        self._ended(self.held_as)
        self.held_as.release(self._table)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            logger.warning(
                "%r stays, since the run may be resumed; pin the stream of the next one under the same name, or remove "
                "the tag: dataset.tags.delete(%r)",
                self,
                self.tag,
            )
