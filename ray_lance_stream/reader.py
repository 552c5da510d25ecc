"""SplitReader: the actor that reads chunks. A chunk is a pure function of its request, so a read can be sent again.

Imports neither ray.data nor ray.train nor torch: a reader must start quickly.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lance_stream.actor_method import actor_method
from ray_lance_stream.allocator import keep_freed_memory
from ray_lance_stream.config import ReadPlan
from ray_lance_stream.cursor import ChunkSpan
from ray_lance_stream.data_cache import take_through_cache
from ray_lance_stream.doing import LOOKING_UP, READING, TRANSFORMING, Desk, Doing, Step
from ray_lance_stream.error_transport import PASSING, Failure, answered
from ray_lance_stream.errors import ReadError, StreamError
from ray_lance_stream.failures import attempt
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.table import TableRef

if TYPE_CHECKING:
    from ray_lance_stream.replaced import Replaced
    from ray_lance_stream.transform import Stage

# Reads that run together slow down the one that the loop waits for. Of a local table, two keep Lance's threads busy; of a
# remote one, most of the time is waiting.
LOCAL_READS_AT_A_TIME = 2
REMOTE_READS_AT_A_TIME = 4
KEPT_PLANS = 4
KEPT_LISTS = 2  # the running pass and the next one: a list takes 8 bytes per row of the node's object store


@dataclass(frozen=True)
class ReadRequest:
    """One chunk: the cycles of `span` of a split block in one epoch.

    Attributes:
        plan, epoch, block, span: which rows.
        who: stream and rank, for messages of transforms.
        stage: the transforms that run where the chunk is read, if any.
        send_id: tells apart the reads that a reader has at a time, which may be of the same rows.
    """

    plan: ReadPlan
    epoch: int
    block: SplitBlock
    span: ChunkSpan
    who: str = ""
    stage: Stage | None = None
    send_id: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, kw_only=True)

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}, splits [{self.block.lo}, {self.block.hi}), cycles [{self.span.start}, "
            f"{self.span.stop}) of {self.plan.table.identity} version {self.plan.table.version}"
        )

    def rows(self, plan: StreamPlan) -> np.ndarray:
        """int64 [rows]: offsets in the table of the rows of the chunk, in the order of delivery."""
        rows = plan.rows(self.epoch, self.block, self.span.start, self.span.stop)
        return rows[self.span.skip_rows : self.span.skip_rows + self.span.num_rows]

    def place(self, plan: StreamPlan, row: int) -> tuple[int, int]:
        """(split, position) of a row of the chunk; the rows of the short last cycle have the position after the last."""
        index = plan.order_index(self.block, self.span.start, self.span.stop)[self.span.skip_rows + row]
        per_split = plan.grid.rows_per_split
        split, position = divmod(int(index), per_split)
        over = int(index) - per_split * plan.grid.num_splits
        return (split, position) if over < 0 else (over, per_split)

    def take(self, rows: np.ndarray) -> pa.Table:
        """Rows of the table by their offsets."""
        return take_through_cache(self.plan.table, rows, list(self.plan.columns))


@dataclass(frozen=True)
class ChunkInfo:
    """What the window needs to know of a chunk without fetching it.

    Attributes:
        num_rows: rows.
        size_bytes: Arrow bytes.
        largest_bytes: the most Arrow bytes that it had on its way through the transforms.
        replaced: rows that others stand in for.
        read_s: seconds that reading it took.
        transform_s: seconds that its transforms took.
    """

    num_rows: int
    size_bytes: int
    largest_bytes: int
    replaced: tuple[Replaced, ...] = ()
    read_s: float = 0.0
    transform_s: float = 0.0


ChunkAnswer = tuple[pa.Table, ChunkInfo] | tuple[None, Failure]


def read_chunk(request: ReadRequest, plan: StreamPlan, tell: Step = lambda step: None) -> tuple[pa.Table, ChunkInfo]:
    """The rows of one chunk, in the order of delivery, as the transforms make them that run where it is read.

    Args:
        request: which rows.
        plan: of the stream.
        tell: is told each step as it begins.

    Raises:
        TransformError: one of these failed.
        KeyboardInterrupt, SystemExit: as one of these raised them.
        ReadError: the rows cannot be read; every failure is an Exception, since a BaseException (a Lance panic) would end
            Ray's threads in silence.
    """
    try:
        tell(READING)
        begun_s = time.perf_counter()
        table = request.take(request.rows(plan))
        info = ChunkInfo(table.num_rows, table.nbytes, table.nbytes, read_s=time.perf_counter() - begun_s)
        if request.stage is not None:
            tell(TRANSFORMING)
            from ray_lance_stream.chain import kept_chains  # imports ray.data, which takes seconds and is no reading

            table, info = kept_chains.of(request.stage).run(table, info, request, tell)
    except (StreamError, ray.exceptions.RayError, *PASSING):
        raise
    except BaseException as error:
        raise ReadError(f"cannot read {request}: {type(error).__name__}: {error}") from None
    return table, info


class SplitReader:
    """Reads chunks for one split group; keeps no position.

    Args:
        label: stream name, for the dashboard.
        table: opened at once, so that the first read finds Lance imported and the table open. Any table can be read.
    """

    def __init__(self, label: str, table: TableRef) -> None:
        self._label = label
        self._desk = Desk()
        keep_freed_memory()
        for open_early in (table.open, table.open_uring):
            attempt(open_early)  # if it fails, so does the read, which says why
        self._lock = threading.Lock()
        self._plans: OrderedDict[ReadPlan, _Resolved] = OrderedDict()

    def __repr__(self) -> str:
        return f"SplitReader[{getattr(self, '_label', '')}]"  # Ray asks before there is an instance

    def ready(self) -> bool:
        """Answers once the actor runs."""
        return True

    @actor_method(num_returns=2)
    def read(self, request: ReadRequest) -> ChunkAnswer:
        """Read one chunk; errors of `read_chunk` are a Failure in place of the ChunkInfo."""
        with self._desk.at(request.send_id) as tell:
            tell(LOOKING_UP)
            return answered(lambda: read_chunk(request, self._resolved(request.plan), tell))

    @actor_method(concurrency_group="questions")
    def doing(self, send_id: str) -> Doing:
        """What is done with a read."""
        return self._desk.doing(send_id)

    def _resolved(self, plan: ReadPlan) -> StreamPlan:
        """The plan with its rows at hand. Where that takes a scan, one read makes it and the others wait."""
        with self._lock:
            kept = self._plans.setdefault(plan, _Resolved())
            self._plans.move_to_end(plan)
            while len(self._plans) > (KEPT_PLANS if plan.listed is None else KEPT_LISTS):
                self._plans.popitem(last=False)
        with kept.lock:
            if kept.plan is None:
                kept.plan = plan.resolve()
            return kept.plan


@dataclass
class _Resolved:
    plan: StreamPlan | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def start_reader(label: str, table: TableRef, node_id: str | None) -> ray.actor.ActorHandle:
    """A reader on `node_id`, or near it where that node is full or gone.

    No restarts and no task retries: the window sends a lost read again, a bounded number of times.
    """
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=True) if node_id else "DEFAULT"
    remote: Any = ray.remote
    actor = remote(concurrency_groups={"questions": 1})(SplitReader)  # of its own: all others may be taken by reads
    return actor.options(
        num_cpus=0,
        max_concurrency=LOCAL_READS_AT_A_TIME if table.is_local else REMOTE_READS_AT_A_TIME,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=affinity,
    ).remote(label, table)
