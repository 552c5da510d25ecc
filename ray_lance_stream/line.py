"""ChunkLine: the way of a chunk from a reader through the processes of the stages, as one shard uses them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ray

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.pool import ReaderPool
from ray_lance_stream.reader import ReadRequest
from ray_lance_stream.shelf import Worker
from ray_lance_stream.stage_worker import stage_task
from ray_lance_stream.transform import Stage

DIED = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
CHUNKS_ON_THE_WAY = 2  # one is read while another one waits for the loop: the rest keeps the stages busy

# After a pause the coordinator is asked again for an actor, which it may have given back meanwhile. Shorter than
# coordinator.SPARE_STAGE_S: it must not give back what is in use.
LEASE_S = 2.0

SentToStage = tuple["Worker | None", ray.ObjectRef, ray.ObjectRef]
Claim = Callable[[Stage, int, "Worker | None"], Worker]


def share_of(stage: Stage, rank: int, world_size: int) -> list[int]:
    """The processes of a stage that serve a rank: i serves rank i % W, and where there are fewer, ranks share.

    Empty where their number is not limited.
    """
    count = stage.processes.concurrency if stage.processes is not None else None
    if count is None:
        return []
    return list(range(rank, count, world_size)) or [rank % count]


def with_chunks_for_stages(config: StreamConfig, world_size: int) -> StreamConfig:
    """The config with as many chunks in flight as it takes to keep the processes of a rank busy; in the same bytes."""
    busy = sum(len(share_of(stage, 0, world_size)) for stage in config.stages)
    return replace(config, prefetch_chunks=max(config.prefetch_chunks, busy + CHUNKS_ON_THE_WAY if busy else 0))


@dataclass(frozen=True)
class Sent:
    """A chunk on its way. Blocks between its stages are held by Ray alone, until the stage that takes them is done.

    Attributes:
        reader: which reads it.
        workers: the actor of each stage; None: a task.
        info_refs: what the reader and each stage tell of it.
        block_ref: the chunk at the end of its way.
    """

    reader: Worker
    workers: tuple[Worker | None, ...]
    info_refs: tuple[ray.ObjectRef, ...]
    block_ref: ray.ObjectRef

    @property
    def info_ref(self) -> ray.ObjectRef:
        """What is known of the chunk at the end of its way."""
        return self.info_refs[-1]

    def steps_done(self) -> int:
        """How many of reader and stages have answered."""
        refs = list(self.info_refs)
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0])


class StageTasks:
    """A stage of functions, of which a rank has at most its share at a time: a task waits for the one that many before.

    For one pass: a task that fails takes along those that wait for it.

    Args:
        stage: what is run.
        at_a_time: tasks of this rank; None: one for each chunk in flight.
    """

    def __init__(self, stage: Stage, at_a_time: int | None) -> None:
        self.stage = stage
        self._task = stage_task(stage)
        self._lock = threading.Lock()
        self._last: deque[ray.ObjectRef] = deque(maxlen=at_a_time or 0)

    def send(self, block_ref: ray.ObjectRef, info_ref: ray.ObjectRef, request: ReadRequest) -> SentToStage:
        """A chunk; returns (no worker, block reference, info reference)."""
        with self._lock:
            after = self._last[0] if self._last and len(self._last) == self._last.maxlen else None
            refs = self._task.remote(self.stage, block_ref, info_ref, request, after)
            self._last.append(refs[1])
        return None, refs[0], refs[1]

    def drop(self, lost: Worker | None) -> None:
        """A chunk was lost, and with it all tasks that wait for this one: count anew."""
        with self._lock:
            self._last.clear()


@dataclass
class _Slot:
    number: int
    worker: Worker | None = None
    ready_ref: ray.ObjectRef | None = None  # of a worker that was just claimed; None once it has answered
    lost: Worker | None = None
    is_stale: bool = False  # the coordinator may have given the worker back

    def is_ready(self) -> bool:
        if self.ready_ref is not None and ray.wait([self.ready_ref], timeout=0)[0]:
            self.ready_ref = None
        return self.ready_ref is None


class StageActors:
    """A stage with classes: the actors that serve this rank take turns. One that the cluster has no room for yet is not
    waited for while another one runs.

    The coordinator gives idle actors back. So it hears every LEASE_S that these are in use, and after a longer pause it is
    asked for them again. No lock is held while it is asked.

    Args:
        stage: what is run.
        numbers: of the actors.
        claim: (stage, number, dead actor of that number) -> actor.
        alive: tells the coordinator that the actors are in use; waits for nothing.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stage: Stage,
        numbers: Sequence[int],
        claim: Claim,
        alive: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage = stage
        self._slots = [_Slot(number) for number in numbers]
        self._claim = claim
        self._alive = alive
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = 0
        self._used_s = self._told_s = -math.inf

    def send(self, block_ref: ray.ObjectRef, info_ref: ray.ObjectRef, request: ReadRequest) -> SentToStage:
        """A chunk; returns (actor, block reference, info reference)."""
        worker = self._next()
        refs = worker.apply.remote(block_ref, info_ref, request)
        return worker, refs[0], refs[1]

    def drop(self, lost: Worker | None) -> None:
        """An actor has died; the next chunk gets another one in its place."""
        with self._lock:
            for slot in self._slots:
                if lost is not None and slot.worker == lost:
                    slot.worker, slot.lost = None, lost

    def clear(self) -> None:
        """Let the actors go."""
        with self._lock:
            self._slots = [
                _Slot(slot.number, lost=slot.lost) for slot in self._slots
            ]  # one that is being claimed is nobody's then

    def _next(self) -> Worker:
        slots = self._in_use()
        for slot in slots:
            if slot.worker is None or slot.is_stale:
                self._fill(slot)
            if not slots[0].is_ready():
                break  # where there is not room for all, every rank gets one before any gets a second
        with self._lock:
            self._turn += 1
            usable = [slot for slot in slots if slot.worker is not None and not slot.is_stale]
            running = [slot for slot in usable if slot.is_ready()] or usable
            if running:
                return running[self._turn % len(running)].worker
        return self._next()  # what was claimed has been dropped meanwhile

    def _in_use(self) -> list[_Slot]:
        """The slots, about to be used."""
        with self._lock:
            now_s = self._clock()
            is_paused = now_s - self._used_s > LEASE_S
            is_to_tell = not is_paused and now_s - self._told_s > LEASE_S
            self._used_s = now_s
            if is_paused or is_to_tell:
                self._told_s = now_s
            for slot in self._slots if is_paused else ():
                slot.is_stale = True
            slots = self._slots
        if is_to_tell:
            self._alive()
        return slots

    def _fill(self, slot: _Slot) -> None:
        lost = slot.lost
        worker = self._claim(self.stage, slot.number, lost)
        with self._lock:
            if slot.worker != worker:
                slot.worker, slot.ready_ref = worker, worker.ready.remote()
            slot.is_stale = False
            if slot.lost == lost:
                slot.lost = None


class ChunkLine:
    """Sends chunks on their way; the blocks meanwhile belong to Ray, and a chunk that is lost is sent from its start.

    Args:
        readers: read chunks.
        stages: what they go through next.
        alive: tells the coordinator that somebody waits, so that it keeps readers and actors at hand.
    """

    def __init__(
        self, readers: ReaderPool, stages: Sequence[StageTasks | StageActors], alive: Callable[[], None]
    ) -> None:
        self.alive = alive
        self._readers = readers
        self._stages = stages

    def __str__(self) -> str:
        """For messages, after the words for a chunk."""
        return "".join(f", then {held.stage}" for held in self._stages)

    def send(self, request: ReadRequest) -> Sent:
        """Start a chunk; may take as long as a process takes to start."""
        reader, block_ref, info_ref = self._readers.send(request)
        workers, info_refs = [], [info_ref]
        for stage in self._stages:
            worker, block_ref, info_ref = stage.send(block_ref, info_ref, request)
            workers.append(worker)
            info_refs.append(info_ref)
        return Sent(reader, tuple(workers), tuple(info_refs), block_ref)

    def drop(self, sent: Sent, error: Exception) -> None:
        """Let the process go whose death lost a chunk. Where the error does not tell which one it was, the reader, which is
        the cheapest; an actor that has died says so itself when the chunk is sent again."""
        dead = getattr(error, "actor_id", None)
        holders = zip((self._readers, *self._stages), (sent.reader, *sent.workers), strict=True)
        for holder, worker in holders:
            is_dead = worker is not None and dead == worker._actor_id.hex()
            is_suspect = dead is None and holder is self._readers and isinstance(error, DIED)
            if worker is None or is_dead or is_suspect:
                holder.drop(worker)

    def abandon(self, sent: Sent) -> None:
        """End the reader of a chunk, whose call cannot be cancelled; the other reads that it has are lost with it."""
        ray.kill(sent.reader)
        self._readers.drop(sent.reader)

    def stage_after(self, done: int, sent: Sent) -> tuple[Stage | None, Worker | None]:
        """The stage that has not answered yet, and its actor if it has one, where so many of reader and stages have."""
        if not done or not self._stages:
            return None, None
        number = min(done, len(self._stages)) - 1
        return self._stages[number].stage, sent.workers[number]
