"""Ray in one process and without a cluster: references, actors that can be killed, and nothing that takes time.

What the library asks of Ray where a stream is iterated is replaced: `ray.get` and its like, and how actors are started.
Its own code runs as it is, that of readers and coordinator included, and so does Ray Data's batching. A read begins when
somebody waits for it, so those that are in flight when a reader is killed are lost with it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.data._internal.stats import _StatsManager

from ray_lance_stream import LanceStream, coordinator, epoch_pass, reader, stream
from ray_lance_stream.coordinator import SplitRequest, StreamCoordinator
from ray_lance_stream.meter import Meter
from ray_lance_stream.reader import ReadRequest, SplitReader
from ray_lance_stream.runs import RunBook
from ray_lance_stream.splits import SplitBlock

_numbers = itertools.count(1)


def without_coordinator(patch: pytest.MonkeyPatch) -> None:
    """Let streams be split without Ray, into shards that read nothing."""

    def assigned(stream: LanceStream, request: SplitRequest) -> dict[int, SplitBlock]:
        runs = RunBook()
        runs.assign(request.attempt, request.num_splits, request.replicas)
        return runs.blocks_of(request.attempt.attempt_id)

    patch.setattr(stream, "start_coordinator", lambda label, table: None)
    patch.setattr(LanceStream, "_assigned", assigned)
    patch.setattr(LanceStream, "_announce", lambda stream, request: None)


class Store:
    """What the cluster keeps, in place of its key-value store; of all namespaces."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_puts = 0

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def put(self, key: str, value: str) -> None:
        self.num_puts += 1
        self.values[key] = value

    def put_if_absent(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def delete(self, prefix: str) -> None:
        for key in self.keys(prefix):
            del self.values[key]


class Call:
    """A call of a method of an actor, which begins when its result is asked for."""

    def __init__(self, actor: Actor, method: Callable[..., Any], args: tuple[Any, ...], num_returns: int) -> None:
        self._actor, self._method, self._args = actor, method, args
        self.refs = [Ref(call=self) for _ in range(num_returns)]
        self.is_done = False

    def run(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        if len(self.refs) > 1 and self._actor.cluster.is_to_die(self._args[0]):
            self._actor.die()
        if self._actor.is_dead:
            self._settle(error=self._actor.death())
            return
        try:
            self._settle(value=self._method(*self._args))
        except Exception as error:
            name = self._method.__name__
            self._settle(error=ray.exceptions.RayTaskError(name, str(error), error, "test", 1, "127.0.0.1"))

    def lose(self) -> None:
        """Its actor has died."""
        if not self.is_done:
            self.is_done = True
            self._settle(error=self._actor.death())

    def _settle(self, value: Any = None, error: Exception | None = None) -> None:
        values = [value] if len(self.refs) == 1 else value
        for number, ref in enumerate(self.refs):
            ref.error = error
            ref.value = None if error is not None else values[number]


class Ref:
    """A reference, with its value where there is one."""

    def __init__(self, value: Any = None, call: Call | None = None) -> None:
        self.value, self.call = value, call
        self.error: Exception | None = None

    @property
    def is_there(self) -> bool:
        return self.call is None or self.call.is_done

    def get(self) -> Any:
        if self.call is not None:
            self.call.run()
        if self.error is not None:
            raise self.error
        return self.value

    def future(self) -> Future[Any]:
        if self.call is not None:
            self.call.run()
        done: Future[Any] = Future()
        done.set_result(None)  # whoever waits for it then gets the reference
        return done


class Actor:
    """An actor; what it is asked is answered at once, but for reads."""

    def __init__(self, cluster: Cluster, make: Callable[[], Any]) -> None:
        self.cluster, self._make = cluster, make
        self._actor_id = next(_numbers).to_bytes(4, "big")
        self.is_dead = False
        self._calls: list[Call] = []
        self.instance = make()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        method = getattr(self.instance, name)
        num_returns = getattr(method, "__ray_num_returns__", None) or 1
        call = Call(self, method, args, num_returns)
        if num_returns == 1:
            call.run()
            return call.refs[0]
        self._calls.append(call)
        return call.refs

    def die(self) -> None:
        self.is_dead = True
        for call in self._calls:
            call.lose()
        self._calls.clear()

    def restart(self) -> None:
        self.instance = self._make()

    def death(self) -> Exception:
        return ray.exceptions.ActorDiedError()

    def drop_blocks(self) -> None:
        """The node with its results is gone."""
        for call in self._calls:
            if call.is_done:
                call.refs[0].error = ray.exceptions.ObjectLostError("0" * 56, None, "")


class Method:
    """`actor.method`."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Any:
        return self._actor.call(self._name, args)


class Cluster:
    """The actors of a test.

    Attributes:
        reads_to_lose: so many of the next reads end their reader; the same one only once.
        every_read_dies: and again whenever it is sent again.
        is_wide: blocks lie on another node, and come when they are waited for.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.readers: list[Actor] = []
        self.coordinators: list[Actor] = []
        self.reads_to_lose = 0
        self.every_read_dies = self.is_wide = False
        self.was_current_actor_reconstructed = False  # for the context of whoever asks
        self._lost: set[str] = set()
        patch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # what is lost is told each time
        for name in ("get", "put", "wait", "kill", "is_initialized", "get_runtime_context"):
            patch.setattr(ray, name, getattr(self, name))
        patch.setattr(coordinator, "start_reader", self._start_reader)
        patch.setattr(stream, "start_coordinator", self._start_coordinator)
        patch.setattr(StreamCoordinator, "_sweep", lambda self: None)
        patch.setattr(StreamCoordinator, "_keep", lambda self: None)
        self.store = Store()
        patch.setattr(coordinator, "ClusterStore", lambda namespace: self.store)
        patch.setattr(reader, "keep_freed_memory", lambda: None)
        patch.setattr(Meter, "export", lambda *args: None)
        patch.setattr(_StatsManager, "update_iteration_metrics", lambda *args: None)
        patch.setattr(epoch_pass, "THREADS_END_S", 0.0)

    def _start_reader(self, label: str, table: Any, node_id: str | None) -> Actor:
        self.readers.append(Actor(self, lambda: SplitReader(label, table)))
        return self.readers[-1]

    def _start_coordinator(self, label: str, table: Any) -> Actor:
        stream_id = f"stream {len(self.coordinators)}"
        self.coordinators.append(Actor(self, lambda: StreamCoordinator(label, table, stream_id)))
        return self.coordinators[-1]

    def is_to_die(self, request: ReadRequest) -> bool:
        """Whether a read ends its reader."""
        key = f"{request.who}, epoch {request.epoch}, splits {request.block.lo}, cycles {request.span.start}"
        if self.every_read_dies:
            return True
        if not self.reads_to_lose or key in self._lost:
            return False
        self.reads_to_lose -= 1
        self._lost.add(key)
        return True

    # ---- what happens to it

    def kill_readers(self) -> None:
        """All of them, with what they read."""
        for each in self.readers:
            each.die()
        self.readers.clear()

    def kill_coordinators(self) -> None:
        """All of them, and with them their readers; Ray starts them again, knowing what they kept in the cluster."""
        self.kill_readers()
        self.was_current_actor_reconstructed = True
        for each in self.coordinators:
            each.instance.keep_runs()
            each.restart()
        self.was_current_actor_reconstructed = False

    def lose_blocks(self) -> None:
        """Chunks that have been read and not been fetched."""
        for each in self.readers:
            each.drop_blocks()

    def forget(self) -> None:
        """The streams of the test before are gone."""
        self.readers.clear()
        self.coordinators.clear()
        self.store.values.clear()
        self._lost.clear()
        self.reads_to_lose = 0
        self.is_wide = False

    # ---- what stands for Ray

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if timeout == 0 and self.is_wide:
            raise ray.exceptions.GetTimeoutError
        return [ref.get() for ref in refs] if isinstance(refs, list) else refs.get()

    def put(self, value: Any) -> Ref:
        return Ref(value)

    def wait(self, refs: list[Ref], **options: Any) -> tuple[list[Ref], list[Ref]]:
        return [ref for ref in refs if ref.is_there], [ref for ref in refs if not ref.is_there]

    def kill(self, actor: Actor, no_restart: bool = True) -> None:
        actor.die()

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return self

    def get_task_function_name(self) -> str:
        return ""

    def get_node_id(self) -> str:
        return "node"
