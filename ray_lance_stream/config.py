"""StreamConfig and ReadPlan: what travels from the driver to coordinator, readers and workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import numpy as np
import ray

from ray_lance_stream.aside import aside
from ray_lance_stream.content import TableContent
from ray_lance_stream.errors import ConfigError, ReadError
from ray_lance_stream.order import Order
from ray_lance_stream.pin import PinnedAs
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.source import match_rows
from ray_lance_stream.splits import SplitGrid
from ray_lance_stream.state import SkippedCycles, StreamIdentity, StreamState, join_skipped
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from ray_lance_stream.transform import Stage

T = TypeVar("T")
DEFAULT_PREFETCH_BYTES = 128 * 2**20
# Above the 126 s that opening a table and the 86 s that a read take to give up on an object store that is gone, and below the
# 600 s after which a collective of the other ranks does.
DEFAULT_READ_TIMEOUT_S = 300.0
DEFAULT_STALL_WARN_S = 60.0
MAX_CHUNK_BYTES = 16 * 2**20
MAX_CHUNK_ROWS = 262_144


class SharedLostError(ReadError):
    """A shared value went with the process that made it. Raised in place of Ray's error, which Ray does not hand on as such."""


class Shared(Generic[T]):
    """A value, one copy a node: as it is in its own process, an object store reference elsewhere."""

    def __init__(self, value: T | None, ref: ray.ObjectRef | None = None) -> None:
        self._value = value
        self._ref = ref

    @classmethod
    def put(cls, value: T) -> Shared[T]:
        """A value that this process keeps in the object store alone, where there is one."""
        return cls(None, ray.put(value)) if ray.is_initialized() else cls(value)

    def get(self) -> T:
        """The value; an array without a copy where it lies in this node's object store."""
        if self._value is None:
            assert self._ref is not None
            try:
                self._value = cast(T, ray.get(self._ref))
            except ray.exceptions.ObjectLostError as error:
                raise SharedLostError(f"rows that were shared are lost: {error}") from None
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        if self._ref is None and ray.is_initialized():
            self._ref = aside(partial(ray.put, self._value))
        return Shared, (self._value, None) if self._ref is None else (None, self._ref)


class Own(Shared[T]):
    """A value that is copied to each process, also to those that know nothing of Ray."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Own, (self._value,)


@dataclass(frozen=True)
class RowList:
    """The rows of a listed order, small enough to be sent with each read: the list itself is shared.

    Attributes:
        epoch: which epoch it is of; None: every epoch.
        fingerprint: of the list, see `plan.fingerprint_of`.
        rows: int64 [S * R], offsets of the rows in the pinned version, by index (split * R + position).
    """

    epoch: int | None
    fingerprint: str
    rows: Shared[np.ndarray] = field(compare=False, repr=False)


@dataclass(frozen=True)
class ReadPlan:
    """The rows of a stream at one table version, small enough to be sent with each read.

    Attributes:
        table: pinned table.
        columns: what is read.
        filter: SQL prefilter, or None.
        order: the row order over the matched rows.
        num_splits: S; None: the world size, fixed when the stream is split.
        drop_remainder: see SplitGrid.
        every_column: whether the user named no columns; another version may have others.
        content: fingerprints of the table version, None before it is planned.
        matched: int64 [N], offsets of the rows that match the filter; None without a filter.
        row_bytes: estimated Arrow bytes of one row.
        listed: the rows of one epoch of a listed order; None: computed, or not asked for yet.
    """

    table: TableRef
    columns: tuple[str, ...]
    filter: str | None
    order: Order
    num_splits: int | None
    drop_remainder: bool
    every_column: bool = False
    content: TableContent | None = field(default=None, compare=False)
    matched: Shared[np.ndarray] | None = field(default=None, compare=False, repr=False)
    row_bytes: int = field(default=1, compare=False)
    listed: RowList | None = None

    def __post_init__(self) -> None:
        if self.order.is_permutation and self.listed is None:
            raise ConfigError(
                f"order must not name a permutation, got {self.order.order_id!r}; pass permutation=<table>"
            )

    @property
    def grid(self) -> SplitGrid:
        """The splits; one split where num_splits is not fixed yet."""
        return SplitGrid(self.order.num_rows, self.num_splits or 1, self.drop_remainder)

    def with_splits(self, world_size: int) -> ReadPlan:
        """The plan with num_splits fixed: as given, else the world size."""
        return self if self.num_splits else replace(self, num_splits=world_size)

    def at(self, version: int) -> ReadPlan:
        """The same stream at another table version, still to be planned there. A permutation keeps its list."""
        return replace(self.unlisted(), table=self.table.at(version), matched=None, content=None)

    def unlisted(self) -> ReadPlan:
        """The plan without the list of an epoch."""
        return self if self.listed is None or self.listed.epoch is None else replace(self, listed=None)

    def lacks_list(self, epoch: int) -> bool:
        """Whether the list of that epoch has to be brought along."""
        return self.order.is_listed and (self.listed is None or self.listed.epoch not in (None, epoch))

    def resolve(self) -> StreamPlan:
        """The pure plan, with the matched or listed rows at hand."""
        if self.listed is None:
            return StreamPlan(self.order, self.grid, self._matched_rows())
        return StreamPlan(self.order, self.grid, None, self.listed.rows.get(), self.listed.epoch)

    def _matched_rows(self) -> np.ndarray | None:
        if self.matched is None:
            return None
        try:
            return self.matched.get()
        except SharedLostError:
            # They died with the coordinator that had found them; its next one may not know that they are needed.
            assert self.filter is not None
            return match_rows(self.table, self.filter, progress=False)

    def identity(self, replicas: int) -> StreamIdentity:
        """What a state must agree with."""
        return StreamIdentity(
            table_uri=self.table.identity,
            table_version=self.table.version,
            num_rows=self.order.num_rows,
            filter=self.filter,
            order=self.order.order_id,
            shuffle=self.order.shuffle,
            shuffle_seed=self.order.seed,
            shuffle_clump_size=self.order.clump_size,
            num_splits=self.num_splits or 1,
            drop_remainder=self.drop_remainder,
            replicas=replicas,
            table_content=self.content.content if self.content else None,
            table_files=self.content.files if self.content else None,
        )


def at_least(name: str, value: Any, minimum: int) -> None:
    """Raises ConfigError unless an argument is an int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an int >= {minimum}, got {value!r}")


def seconds_or_none(name: str, value: Any) -> None:
    """Raises ConfigError unless an argument is None or a time."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ConfigError(f"{name} must be a number of seconds > 0, or None for no limit, got {value!r}")


@dataclass(frozen=True)
class StreamConfig:
    """How a stream is delivered; nothing here changes which rows a global step holds.

    Attributes:
        global_batch_size: G, rows of a global step; None: the loop chooses its batch size.
        epoch: first epoch of a run that starts from the beginning.
        evaluation: every pass is whole and is never resumed.
        read_batch_size: cycles of one chunk; None: sized by bytes.
        prefetch_chunks: chunks in flight per worker.
        prefetch_bytes: bytes in flight per worker.
        readers_per_worker: reader actors of one worker.
        read_timeout_s: a read without progress for so long is abandoned; None: never.
        stall_warn_s: after so long without a chunk a rank says what it waits for; None: never.
        resume: "auto" or "manual".
        resume_states: the states that `resume_from` holds, by stream name; "" stands for any name.
        replicas: consecutive ranks that share their rows.
        skipped: cycles that the user took out of an epoch.
        stages: the transforms, in order; the first ones may run where chunks are read.
        on_new_version: "stay", or "next_epoch" where an epoch takes up the newest version when it begins.
        allow_moved: whether a state of another place of the same table is continued.
        pinned_as: the tag that keeps the versions which are read; None: nobody does.
    """

    global_batch_size: int | None = None
    epoch: int = 0
    evaluation: bool = False
    read_batch_size: int | None = None
    prefetch_chunks: int = 4
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES
    readers_per_worker: int = 1
    read_timeout_s: float | None = DEFAULT_READ_TIMEOUT_S
    stall_warn_s: float | None = DEFAULT_STALL_WARN_S
    resume: Literal["auto", "manual"] = "auto"
    resume_states: Mapping[str, StreamState] = field(default_factory=dict)
    replicas: int = 1
    skipped: SkippedCycles = ()
    stages: tuple[Stage, ...] = ()
    on_new_version: Literal["stay", "next_epoch"] = "stay"
    allow_moved: bool = False
    pinned_as: PinnedAs | None = None

    def __post_init__(self) -> None:
        at_least("epoch", self.epoch, 0)
        at_least("prefetch_chunks", self.prefetch_chunks, 1)
        at_least("prefetch_bytes", self.prefetch_bytes, 1)
        at_least("readers_per_worker", self.readers_per_worker, 1)
        at_least("replicas", self.replicas, 1)
        seconds_or_none("read_timeout_s", self.read_timeout_s)
        seconds_or_none("stall_warn_s", self.stall_warn_s)
        if self.read_batch_size is not None:
            at_least("read_batch_size", self.read_batch_size, 1)
        if self.global_batch_size is not None:
            at_least("global_batch_size", self.global_batch_size, 1)
        if not isinstance(self.evaluation, bool):
            raise ConfigError(f"evaluation must be True or False, got {self.evaluation!r}; pass a bool")
        if self.resume not in ("auto", "manual"):
            raise ConfigError(f'resume must be "auto" or "manual", got {self.resume!r}')
        if self.on_new_version not in ("stay", "next_epoch"):
            raise ConfigError(f'on_new_version must be "stay" or "next_epoch", got {self.on_new_version!r}')
        if not isinstance(self.allow_moved, bool):
            raise ConfigError(f"allow_moved must be True or False, got {self.allow_moved!r}; pass a bool")
        if self.evaluation and self.resume_states:
            raise ConfigError(
                "resume_from must not be given with evaluation=True, which is never resumed; leave one of them out"
            )

    @property
    def takes_up_versions(self) -> bool:
        """Whether each epoch asks which version it reads."""
        return self.on_new_version == "next_epoch"

    def resume_state(self, name: str) -> StreamState | None:
        """The state of `resume_from` that stream `name` continues from: its own, or the only one."""
        states = self.resume_states
        return states.get(name) or (next(iter(states.values())) if len(states) == 1 else None)

    def resumed_from(self, saved: StreamState) -> StreamConfig:
        """The config of a stream that was given a state to continue from: it counts as `resume_from` does."""
        return replace(self, resume_states={"": saved})

    def begun_at(self, epoch: int, *, restart: bool) -> StreamConfig:
        """The config of a stream that was told to begin at an epoch; a state inside of that epoch stays, unless to restart."""
        states = {
            name: saved
            if saved.epoch == epoch and not restart
            else replace(saved, epoch=epoch, samples_consumed_per_split=0, partial=None, listed=None)
            for name, saved in self.resume_states.items()
        }
        return replace(self, epoch=epoch, resume_states=states)

    def with_skipped(self, skipped: SkippedCycles) -> StreamConfig:
        """The config with the skips of a loaded state added."""
        return replace(self, skipped=join_skipped(self.skipped, skipped))

    @property
    def chunk_bytes(self) -> int:
        """Wished bytes of one chunk: the chunks in flight and the two that Ray's batching holds fit prefetch_bytes."""
        return max(1, min(MAX_CHUNK_BYTES, self.prefetch_bytes // (self.prefetch_chunks + 2)))
