"""The processes of a stage: tasks for functions, StageWorker actors where there is an instance of a class to keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import ray

from ray_lance_stream.actor_method import actor_method
from ray_lance_stream.chain import Chain, kept_chains
from ray_lance_stream.error_transport import Failure, answered
from ray_lance_stream.reader import ChunkAnswer, ChunkInfo, ReadRequest
from ray_lance_stream.transform import Stage


def transform_chunk(
    stage: Stage, table: pa.Table | None, info: ChunkInfo | Failure, request: ReadRequest, after: Any
) -> ChunkAnswer:
    """A chunk through a stage. As a task, it starts once `after` is there."""
    return run_chain(kept_chains.of(stage), table, info, request)


def run_chain(chain: Chain, table: pa.Table | None, info: ChunkInfo | Failure, request: ReadRequest) -> ChunkAnswer:
    """See Chain.run; what it raises is a Failure in place of the ChunkInfo, and one of an earlier step is passed on."""
    if isinstance(info, Failure):
        return None, info
    return answered(partial(chain.run, table, info, request))


class StageWorker:
    """One process of a stage; keeps the instances of its classes.

    Args:
        stage: what it runs.
    """

    def __init__(self, stage: Stage) -> None:
        self._label = str(stage)
        self._chain = Chain(stage)

    def __repr__(self) -> str:
        return f"StageWorker[{getattr(self, '_label', '')}]"  # Ray asks before there is an instance

    def started(self) -> bool:
        """Answers once the actor has the resources that it asks for."""
        return True

    def leave(self) -> None:
        """End this actor, after the chunks that it has been sent."""
        ray.actor.exit_actor()

    def ready(self) -> bool:
        """Answers once the instances are made. What a constructor raises is reported with the first chunk."""
        answered(self._chain.load)
        return True

    @actor_method(num_returns=2)
    def apply(self, table: pa.Table | None, info: ChunkInfo | Failure, request: ReadRequest) -> ChunkAnswer:
        """See run_chain."""
        return run_chain(self._chain, table, info, request)


def stage_task(stage: Stage) -> Any:
    """`transform_chunk` as tasks of a stage, not retried by Ray: the window sends a lost chunk again.

    Not in the placement group of a training worker, which has no room for them.
    """
    assert stage.processes is not None
    task: Any = ray.remote(transform_chunk)
    fixed = {"num_returns": 2, "max_retries": 0, "name": f"transform_chunk[{stage}]"}
    return task.options(**({"scheduling_strategy": "DEFAULT"} | dict(stage.processes.options) | fixed))


def start_stage_worker(stage: Stage) -> ray.actor.ActorHandle:
    """One actor of a stage: no restarts and no retries by Ray, as a reader."""
    assert stage.processes is not None
    actor: Any = ray.remote(StageWorker)
    fixed = {"max_concurrency": 1, "max_restarts": 0, "max_task_retries": 0}
    return actor.options(**(dict(stage.processes.options) | fixed)).remote(stage)
