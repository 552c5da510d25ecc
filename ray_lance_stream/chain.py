"""Chain: the transforms of a stage in the process that runs them, on one chunk at a time; finds and replaces rows that fail."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from ray_lance_stream._ray import block_rows, within_context
from ray_lance_stream.doing import READING, TRANSFORMING, Step
from ray_lance_stream.errors import StreamError, TransformError, text_of
from ray_lance_stream.failures import attempt
from ray_lance_stream.loaded import LoadedTransform, attempt_user
from ray_lance_stream.nullable_ints import join_rows
from ray_lance_stream.plan import StreamPlan
from ray_lance_stream.reader import ChunkInfo, ReadRequest
from ray_lance_stream.replaced import WINDOW_POSITIONS, Replaced, stand_ins
from ray_lance_stream.splits import SplitBlock
from ray_lance_stream.transform import Stage, name_of

logger = logging.getLogger(__name__)

KEPT_CHAINS = 8
REMEDY = 'mend the row or the function, or pass on_transform_error="replace"'


class Chain:
    """The transforms of a stage, loaded when first needed.

    Args:
        stage: what is run.
    """

    def __init__(self, stage: Stage) -> None:
        self._transforms = (*stage.before, *stage.transforms)
        self._first = len(stage.before)
        self._lock = threading.Lock()
        self._loaded: dict[int, LoadedTransform] = {}

    def load(self) -> None:
        """Make what is to be made, instances of classes above all."""
        for number in range(self._first, len(self._transforms)):
            self.loaded(number)

    def loaded(self, number: int) -> LoadedTransform:
        """The transform of that number."""
        with self._lock:
            if number not in self._loaded:
                self._loaded[number] = LoadedTransform(self._transforms[number])
            return self._loaded[number]

    def run(
        self, table: pa.Table, info: ChunkInfo, request: ReadRequest, tell: Step = lambda step: None
    ) -> tuple[pa.Table, ChunkInfo]:
        """A chunk, transformed.

        Args:
            table: the rows of the chunk, as the stages before have left them.
            info: what is known of the chunk so far.
            request: which rows they are.
            tell: is told when rows are read that stand in, and when that is over.

        Raises:
            TransformError: names function, row, rank and cause.
        """
        try:
            return self._run(table, info, request, tell)
        except TransformError as error:
            raise TransformError(f"{request.who}: {error}", error.__cause__) from error.__cause__

    def _run(self, table: pa.Table, info: ChunkInfo, request: ReadRequest, tell: Step) -> tuple[pa.Table, ChunkInfo]:
        begun_s = time.perf_counter()
        largest_bytes, replaced = info.largest_bytes, list(info.replaced)
        for number in range(self._first, len(self._transforms)):
            step = _Step(self, number, table, request, {each.row: each.by for each in replaced}, tell)
            table = step.run()
            replaced += step.replaced
            largest_bytes = max(largest_bytes, table.nbytes)
        transform_s = info.transform_s + time.perf_counter() - begun_s
        return table, ChunkInfo(info.num_rows, table.nbytes, largest_bytes, tuple(replaced), info.read_s, transform_s)


class _Step:
    """One transform on one chunk.

    Args:
        chain: whose.
        number: of the transform in the chain.
        table: its input.
        request: the chunk.
        stands_in: row of the table -> the row that stands in for it since an earlier transform.
        tell: see Chain.run.
    """

    def __init__(
        self,
        chain: Chain,
        number: int,
        table: pa.Table,
        request: ReadRequest,
        stands_in: dict[int, int],
        tell: Step,
    ) -> None:
        self._chain = chain
        self._number = number
        self._call = chain.loaded(number)
        self._name = self._call.transform.name
        self._table = table
        self._request = request
        self._stands_in = stands_in
        self._tell = tell
        self.replaced: list[Replaced] = []

    def run(self) -> pa.Table:
        """The output for all rows, in their order."""
        size = self._call.transform.batch_size or len(self._table)
        outputs: list[pa.Table] = []
        for lo in range(0, len(self._table), size):
            hi = min(lo + size, len(self._table))
            output, failure = self._attempt(lo, hi)
            outputs += [output] if output is not None else self._mended(lo, hi, failure)
        joined, failure = attempt(partial(join_rows, outputs))
        if joined is None:
            text = f"{self._name} must return the same types for all rows, but its batches cannot be joined"
            raise TransformError(f"{text}: {text_of(failure)}", failure) from failure
        return joined

    def _attempt(self, lo: int, hi: int) -> tuple[pa.Table | None, BaseException | None]:
        """(output for the rows [lo, hi), None), or (None, what the function raised)."""
        output, failure = attempt(partial(self._call, self._table.slice(lo, hi - lo)))
        if isinstance(failure, TransformError):
            raise failure
        return output, failure

    def _halved(self, lo: int, hi: int) -> Iterator[tuple[int, pa.Table | None, BaseException | None]]:
        """(first row, output, failure) of parts of the rows [lo, hi), which failed together; those that fail have one row."""
        middle = (lo + hi) // 2
        for start, stop in ((lo, middle), (middle, hi)):
            if start == stop:
                continue
            output, failure = self._attempt(start, stop)
            if output is not None or stop - start == 1:
                yield start, output, failure
            else:
                yield from self._halved(start, stop)

    def _mended(self, lo: int, hi: int, failure: BaseException | None) -> list[pa.Table]:
        """The outputs for rows that failed together: what fails alone is replaced, or is an error."""
        outputs: list[pa.Table] = []
        for row, output, own_failure in self._halved(lo, hi):
            if own_failure is not None:
                self._check_may_replace(row, own_failure)
                output, replaced = self._stand_in(row)
                self.replaced.append(replaced)
                failure = None
            assert output is not None
            outputs.append(output)
        if failure is not None:
            text = f"{self._name} failed on {hi - lo} rows of {self._request}, but on none of them alone: {text_of(failure)}"
            if self._call.call.on_error == "raise":
                raise TransformError(text, failure) from failure
            logger.warning("%s: %s", self._request.who, text)
        return outputs

    def _check_may_replace(self, row: int, failure: BaseException) -> None:
        """Raises TransformError unless the row is to be replaced."""
        decision: Any = self._call.call.on_error
        if callable(decision):
            values = next(block_rows(self._table.slice(row, 1)))
            with within_context(self._call.call.context):
                decided, wrong = attempt_user(name_of(decision), partial(decision, failure, values))
            if wrong is not None or decided not in ("raise", "replace"):
                what = text_of(wrong) if wrong is not None else f"returned {decided!r}"
                raise TransformError(
                    f'{name_of(decision)} must return "raise" or "replace" for {self._row_text(row)}, but: {what}',
                    wrong,
                ) from wrong
            decision = decided
        if decision == "raise":
            raise TransformError(
                f"{self._name} failed on {self._row_text(row)}: {text_of(failure)}; {REMEDY}", failure
            ) from failure

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """While Lance reads, which has a limit in a reader, and not what users write."""
        self._tell(READING)
        try:
            yield
        finally:
            self._tell(TRANSFORMING)

    # ---- which row of the table it is

    @cached_property
    def _plan(self) -> StreamPlan:
        return self._request.plan.resolve()

    @cached_property
    def _rows(self) -> np.ndarray:
        """int64 [rows]: offsets in the table."""
        return self._request.rows(self._plan)

    def _row_text(self, row: int) -> str:
        table, offset = self._request.plan.table, int(self._rows[row])
        instead = f", in place of which comes row {self._stands_in[offset]}," if offset in self._stands_in else ""
        text = f"row {offset}{instead} of table {table.identity} version {table.version}"
        with suppress(StreamError), self._reading():
            if "id" in table.open().schema.names:
                text += f" (id={table.take(self._rows[row : row + 1], ['id'])['id'][0].as_py()!r})"
        return text

    # ---- replacement

    def _stand_in(self, row: int) -> tuple[pa.Table, Replaced]:
        """The output for the row that stands in, which goes through all transforms up to this one without a failure."""
        grid = self._plan.grid
        split, position = self._request.place(self._plan, row)
        for other in stand_ins(position, grid.rows_per_split):
            offset = self._plan.rows(self._request.epoch, SplitBlock(split, split + 1), other, other + 1)
            with self._reading():
                rows = self._request.take(offset)
            output, failure = attempt(partial(self._all_so_far, rows))
            if isinstance(failure, TransformError):
                raise failure
            if output is not None:
                return output, Replaced(self._call.transform.key, int(self._rows[row]), int(offset[0]))
        raise TransformError(
            f"{self._name} failed on {self._row_text(row)}, position {position} of split {split}, and no row can stand in: "
            f"transforms fail on all of the {WINDOW_POSITIONS} positions of the split around it"
        )

    def _all_so_far(self, rows: pa.Table) -> pa.Table:
        for number in range(self._number + 1):
            rows = self._chain.loaded(number)(rows)
        return rows


class KeptChains:
    """The chains that a process has used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: OrderedDict[str, Chain] = OrderedDict()

    def of(self, stage: Stage) -> Chain:
        """The chain of a stage."""
        with self._lock:
            chain = self._chains.get(stage.key)
            if chain is None:
                chain = self._chains[stage.key] = Chain(stage)
            self._chains.move_to_end(stage.key)
            while len(self._chains) > KEPT_CHAINS:
                self._chains.popitem(last=False)
            return chain


kept_chains = KeptChains()
