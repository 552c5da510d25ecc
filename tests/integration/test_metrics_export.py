"""What Ray really exports of a stream, read from the Prometheus endpoint of its node, beside the dashboard and its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_meter import EXPORTED

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "metrics"  # tests/requirements-metrics.txt

# One reader is killed, so that a read is sent again, and a transform fails on one row.
PROGRAM = """
import os, re, signal, socket, sys, time, urllib.request
import ray
from ray._private.state import actors
from ray_lance_stream import lance_stream
from tests.support import make_table

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init(
    address="local",
    num_cpus=4,
    include_dashboard=False,
    _metrics_export_port=port,
    _system_config={"metrics_report_interval_ms": 500},
)


def fails_on_one(batch):
    if 7 in batch["id"]:
        raise ValueError("a bad row")
    return batch


stream = lance_stream(make_table(sys.argv[1], 4800), num_splits=48, global_batch_size=96, read_batch_size=4, prefetch_chunks=1)
stream = stream.map_batches(fails_on_one, on_transform_error="replace", max_replaced_rows=1)
stream.set_name("train")
for step, batch in enumerate(stream.shard().iter_batches()):
    if step == 2:
        for actor in actors().values():
            if actor["ActorClassName"] == "SplitReader":
                os.kill(actor["Pid"], signal.SIGKILL)
    time.sleep(0.1)  # it tells about once a second
found = {}
until_s = time.monotonic() + 30
while len(found) < int(sys.argv[2]) and time.monotonic() < until_s:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    for name, labels in re.findall(r"^(ray_lance_stream_\\w+)\\{(.*)\\}", text, re.M):
        found[name] = sorted(set(re.findall(r'(stream|rank|run)="', labels)))
    time.sleep(0.5)
for name, labels in sorted(found.items()):
    print("exported:", name, *labels)
"""


@pytest.mark.skipif(not PACKAGES.exists(), reason="tests/requirements-metrics.txt is not installed")
def test_every_metric_is_exported_under_the_name_that_the_dashboard_asks_for(tmp_path) -> None:
    path = os.pathsep.join(map(str, (ROOT, PACKAGES)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "t"), str(len(EXPORTED))],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    exported = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("exported: ")]
    assert {name for name, *_ in exported} == EXPORTED, done.stdout + done.stderr[-3000:]
    assert all(labels == ["rank", "run", "stream"] for _, *labels in exported)
