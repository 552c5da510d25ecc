"""Feed: what a StreamDataset is in the workers of a DataLoader, and how it gets there."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch.utils.data import get_worker_info

from ray_lance_stream.allocator import keep_freed_memory
from ray_lance_stream.config import Own, ReadPlan, Shared
from ray_lance_stream.cursor import Position
from ray_lance_stream.error_transport import PASSING, Failure
from ray_lance_stream.errors import ConfigError, IterationError
from ray_lance_stream.failures import attempt
from ray_lance_stream.own_reads import OwnReads, PassSpec
from ray_lance_stream.reader import ChunkInfo
from ray_lance_stream.sendable import sendable
from ray_lance_stream.transform import Stage, Transform, UserCall

WITHOUT_WORKERS = "use num_workers=0, where the processes of Ray make them"
NO_PASS = -1


class Told(NamedTuple):
    """A batch with what a StreamDataLoader is told along with it. A named tuple: torch converts and pins what is in one.

    Attributes:
        batch: as the collate_fn has made it.
        info: of the chunk that begins with this batch.
        failure: what the worker raised in place of a batch.
    """

    batch: Any
    info: ChunkInfo | None = None
    failure: Failure | None = None


class Feed:
    """The passes of one DataLoader, as its workers see them.

    Pickled for each worker by `multiprocessing`, which knows nothing of Ray: what users write travels as cloudpickle has it,
    and lists of rows in memory that all workers share.

    Args:
        spec: what is read.
        start: where the first pass begins.
        told: whether a StreamDataLoader follows: it moves the feed to the next pass, and is told more than the batches.
        once: whether the pass may be delivered once only.

    Raises:
        ConfigError: a transform that needs Ray, or a collate_fn that cannot be pickled.
    """

    def __init__(self, spec: PassSpec, start: Position, *, told: bool, once: bool) -> None:
        plan, self._lists = _without_lists(spec.plan)
        stage = None if spec.stage is None else _without_ray(spec.stage)
        try:
            self._spec: bytes = ray.cloudpickle.dumps(replace(spec, plan=plan, stage=stage))
        except Exception as error:
            raise ConfigError(
                f"what a DataLoader worker needs must be picklable, which it is not: {type(error).__name__}: {error}; make "
                "what cannot be pickled inside of the collate_fn"
            ) from error
        self._told = told
        self._start = torch.tensor([0, 0, 0]).share_memory_()
        self._pass = torch.tensor([NO_PASS]).share_memory_()
        self._begun = torch.tensor([0]).share_memory_() if once else None
        self._has_delivered = False  # in this process
        self._num_passes = 0
        self.begin_at(start)

    def begin_at(self, start: Position) -> None:
        """Where the next pass begins, also for workers that run already."""
        self._start[:] = torch.tensor([start.epoch, start.cycle, start.partial_rows])
        self._num_passes += 1
        self._pass[0] = self._num_passes

    def end(self) -> None:
        """Nobody asks for more of the pass: a worker that waits for a read does so no longer."""
        self._pass[0] = NO_PASS

    # ---- in a worker

    def batches(self) -> Iterator[Any]:
        """The batches of this worker in the pass that begins, as a DataLoader takes them.

        Raises nothing before its first batch is asked for: workers that begin another pass would not pass it on.
        """
        reads = self._reads()
        yield from _told(reads) if self._told else (sendable(batch) for batch, _ in reads)

    def rows(self) -> Iterator[Any]:
        """The rows of those batches, of which the DataLoader makes them; their `collate_fn` makes lists of rows."""
        for rows, _ in self._reads():
            yield from rows

    def _reads(self) -> OwnReads:
        """What this worker reads of the pass."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        number = self._pass.item()
        self._refuse_again(worker)
        keep_freed_memory()
        spec: PassSpec = pickle.loads(self._spec)
        spec = replace(spec, plan=_with_lists(spec.plan, self._lists))
        return OwnReads(
            spec,
            Position(*self._start.tolist()),
            worker,
            num_workers,
            lambda: number == NO_PASS or self._pass.item() != number,
        )

    def _refuse_again(self, worker: int) -> None:
        """A plain DataLoader gets the pass once, and from workers that persist never another one."""
        if self._told:
            return
        is_again = self._begun is not None and worker == 0 and self._begun.item()
        if is_again or self._has_delivered:
            raise IterationError(
                "this pass has been begun before: the main process does not see what a plain DataLoader with workers "
                "delivers; call set_epoch(epoch) before each pass, and leave persistent_workers=True out, since such "
                "workers do not hear of it; or use StreamDataLoader"
            )
        self._has_delivered = True
        if self._begun is not None and worker == 0:
            self._begun[0] = 1


def _told(reads: OwnReads) -> Iterator[Told]:
    try:
        for batch, info in reads:
            yield Told(sendable(batch), info)
    except (Exception, *PASSING) as error:
        yield Told(None, failure=Failure.of(error))


def _without_lists(plan: ReadPlan) -> tuple[ReadPlan, dict[str, torch.Tensor]]:
    """A plan, and its rows that match or are listed, in memory that processes share."""
    lists = {}
    if plan.matched is not None:
        lists["matched"] = _in_shared_memory(plan.matched.get())
        plan = replace(plan, matched=None)
    if plan.listed is not None:
        lists["listed"] = _in_shared_memory(plan.listed.rows.get())
        plan = replace(plan, listed=replace(plan.listed, rows=Own(None)))
    return plan, lists


def _with_lists(plan: ReadPlan, lists: dict[str, torch.Tensor]) -> ReadPlan:
    if "matched" in lists:
        plan = replace(plan, matched=Shared(lists["matched"].numpy()))
    if plan.listed is not None:
        plan = replace(plan, listed=replace(plan.listed, rows=Shared(lists["listed"].numpy())))
    return plan


def _in_shared_memory(rows: np.ndarray) -> torch.Tensor:
    """int64 [n], copied once."""
    shared = torch.empty(len(rows), dtype=torch.int64).share_memory_()
    shared.numpy()[:] = rows
    return shared


def _without_ray(stage: Stage) -> Stage:
    """Transforms as a process can load them that is not Ray's."""
    return replace(stage, transforms=tuple(_own(transform) for transform in stage.transforms))


def _own(transform: Transform) -> Transform:
    pickled = transform.call.get()
    call: UserCall | None = attempt(partial(pickle.loads, pickled))[
        0
    ]  # if it fails, it fails in the worker, and says why
    if call is not None:
        values = (*call.args, *call.kwargs.values(), *call.constructor_args, *call.constructor_kwargs.values())
        if any(isinstance(value, ray.ObjectRef) for value in values):
            raise ConfigError(
                f"{transform.name} has object references among its arguments, which the workers of a DataLoader, that are "
                f"none of Ray's, cannot get: pass the values, or {WITHOUT_WORKERS}"
            )
    return replace(transform, call=Own(pickled))
