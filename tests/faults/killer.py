"""The cluster of kill rounds, and who kills in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.faults.kills import (
    AHEAD,
    COORDINATOR,
    DRIVER,
    EPOCHS,
    MANAGER,
    NODE,
    READER,
    READERS,
    WORKER,
    Kill,
    Run,
    Table,
    allow,
    total_since,
)

CLASSES = {
    READER: "SplitReader",
    READERS: "SplitReader",
    WORKER: "RayTrainWorker",
    COORDINATOR: "StreamCoordinator",
    MANAGER: "DatasetManager",
}
NODE_ARGS: dict[str, Any] = {"num_cpus": 4, "resources": {"side": 1}, "object_store_memory": 100 << 20}
SYSTEM_CONFIG = {
    # Chunks of a few rows lie in the object store of their node, as large ones do, and not with who asked for them.
    "max_direct_call_object_size": 1024,
    # The end of a node is noticed within seconds.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,  # by default 10 s, five times: a killed node may be taken as alive for a minute
}
LONG_S = 180.0


class Killer:
    """Kills processes of a cluster of its own: a head, and a node beside it that is replaced when it is killed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._side = cluster.add_node(**NODE_ARGS)
        cluster.wait_for_nodes()

    def hit(self, run: Run, folder: Path) -> None:
        """A run to its end, with its kills.

        Raises:
            AssertionError: it does not go on, or ends with an error, or leaves something behind.
        """
        table, killed_s = Table(folder, run.kind), 0.0
        allow(folder, AHEAD)
        drivers = [self._driver(run, folder, 0)]
        try:
            steps = table.steps() * EPOCHS
            for number, kill in enumerate(run.kills):
                if kill.at is not None:
                    step = int(kill.at * steps)
                    allow(folder, step + AHEAD)
                    until(partial(_is_at, folder, step, killed_s), drivers[-1], f"step {step} before {kill}")
                if table.grows and number == 0:
                    table.append()
                time.sleep(kill.delay_s)
                if kill.target == DRIVER:
                    end(drivers[-1])
                    drivers.append(self._driver(run, folder, len(drivers)))
                elif kill.target == NODE:
                    self._replace_node()
                else:
                    until(partial(self._kill, kill), drivers[-1], f"{kill}")
                killed_s = time.time()
            allow(folder, 10**9)
            until(lambda: drivers[-1].poll() is not None, None, "the end of the run")
            assert drivers[-1].returncode == 0, "the run ended with an error, or left something behind"
        except AssertionError as error:
            logs = sorted(folder.glob("driver-*.log"))
            said = "".join(f"\n---- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
            raise AssertionError(f"{run}: {error}{said}") from None
        finally:
            end(drivers[-1])

    def _driver(self, run: Run, folder: Path, number: int) -> subprocess.Popen[bytes]:
        """Start the n-th driver of a run."""
        script = "import sys; from tests.faults.kills import drive; drive(*sys.argv[1:])"
        arguments = [self._cluster.address, str(folder), run.kind, str(run.worlds[number])]
        with (folder / f"driver-{number}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def _replace_node(self) -> None:
        """Another one comes in its place."""
        self._cluster.remove_node(self._side, allow_graceful=False)
        self._side = self._cluster.add_node(**NODE_ARGS)

    def _kill(self, kill: Kill) -> bool:
        """Kill the processes of a target, if there are any now."""
        pids = self.pids(CLASSES[kill.target])
        if kill.target != READERS:
            pids = pids[int(kill.choice * len(pids)) :][:1]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        return bool(pids)

    def pids(self, class_name: str) -> list[int]:
        """Process ids of the live actors of a class."""
        return sorted(actor["Pid"] for actor in self._alive(class_name))

    @staticmethod
    def _alive(class_name: str) -> list[dict[str, Any]]:
        from ray._private.state import actors

        found = actors().values()
        return [a for a in found if (a["ActorClassName"], a["State"]) == (class_name, "ALIVE") and a["Pid"]]


def until(condition: Callable[[], bool], driver: subprocess.Popen[bytes] | None, what: str) -> None:
    """Wait for something while a driver runs."""
    until_s = time.monotonic() + LONG_S
    while not condition():
        assert driver is None or driver.poll() is None, f"the driver ended before {what}"
        assert time.monotonic() < until_s, f"waited in vain for {what}"
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL."""
    process.kill()
    process.wait(20)


def _is_at(folder: Path, step: int, since_s: float) -> bool:
    return total_since(folder, since_s) >= step


@contextmanager
def killer() -> Iterator[Killer]:
    """See Killer."""
    args = {"num_cpus": 8, "object_store_memory": 200 << 20, "_system_config": SYSTEM_CONFIG}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield Killer(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()
