"""SplitReader: the actor that reads chunks. A chunk is a pure function of its request, so a read can be sent again.

Imports neither ray.data nor ray.train nor torch: a reader must start quickly.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lance_stream.config import ReadPlan
from ray_lance_stream.cursor import ChunkSpan
from ray_lance_stream.errors import ReadError, StreamError
from ray_lance_stream.failures import attempt
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.table import TableRef
from ray_lance_stream.take import take_rows

logger = logging.getLogger(__name__)

READS_AT_A_TIME = 4
KEPT_PLANS = 4


@dataclass(frozen=True)
class ReadRequest:
    """One chunk: the cycles of `span` of a split block in one epoch."""

    plan: ReadPlan
    epoch: int
    block: SplitBlock
    span: ChunkSpan

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}, splits [{self.block.lo}, {self.block.hi}), cycles [{self.span.start}, "
            f"{self.span.stop}) of {self.plan.table.identity} version {self.plan.table.version}"
        )


@dataclass(frozen=True)
class ChunkInfo:
    """What the window needs to know of a chunk without fetching it."""

    num_rows: int
    size_bytes: int


def read_chunk(request: ReadRequest, plan: StreamPlan) -> pa.Table:
    """The rows of one chunk, in the order of delivery.

    Raises:
        ReadError: the rows cannot be read; every failure is an Exception, since a BaseException (a Lance panic) would end
            Ray's threads in silence.
    """
    span, table = request.span, request.plan.table
    try:
        rows = plan.rows(request.epoch, request.block, span.start, span.stop)
        rows = rows[span.skip_rows : span.skip_rows + span.num_rows]
        return take_rows(table.open(), rows, list(request.plan.columns), table.open_uring)
    except (StreamError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ReadError(f"cannot read {request}: {type(error).__name__}: {error}") from None


class SplitReader:
    """Reads chunks for one split group; keeps no position.

    Args:
        label: stream name, for the dashboard.
        table: opened at once, so that the first read finds Lance imported and the table open. Any table can be read.
    """

    def __init__(self, label: str, table: TableRef) -> None:
        self._label = label
        for open_early in (table.open, table.open_uring):
            attempt(open_early)  # if it fails, so does the read, which says why
        self._plans: OrderedDict[ReadPlan, StreamPlan] = OrderedDict()

    def __repr__(self) -> str:
        return f"SplitReader[{getattr(self, '_label', '')}]"  # Ray asks before there is an instance

    def ready(self) -> bool:
        """Answers once the actor runs."""
        return True

    @ray.method(num_returns=2)
    def read(self, request: ReadRequest) -> tuple[pa.Table, ChunkInfo]:
        """Read one chunk; errors as `read_chunk`."""
        table = read_chunk(request, self._resolved(request.plan))
        return table, ChunkInfo(table.num_rows, table.nbytes)

    def _resolved(self, plan: ReadPlan) -> StreamPlan:
        resolved = self._plans.get(plan)
        if resolved is None:
            resolved = self._plans[plan] = plan.resolve()
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        return resolved


def start_reader(label: str, table: TableRef, node_id: str | None) -> ray.actor.ActorHandle:
    """A reader on `node_id`, or near it where that node is full or gone.

    No restarts and no task retries: the window sends a lost read again, a bounded number of times.
    """
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=True) if node_id else "DEFAULT"
    actor: Any = ray.remote(SplitReader)
    return actor.options(
        num_cpus=0,
        max_concurrency=READS_AT_A_TIME,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=affinity,
    ).remote(label, table)
