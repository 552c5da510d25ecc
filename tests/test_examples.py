"""The examples, run as a user would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "ray_train"

pytestmark = [pytest.mark.timeout(290), pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]


def run(name: str, *arguments: str, cwd: Path) -> str:
    """The output of an example; raises if it fails."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def verdicts(output: str) -> list[tuple[str, ...]]:
    """The lines of the comparison: epoch, workers, steps, rows, differing steps, verdict."""
    return re.findall(r"^ +(\d) +([\w ]+?) +(\d+) +(\d+) +(\d+) +(\w+)$", output, re.MULTILINE)


def test_digits_breaks_goes_on_and_finds_every_step_identical(tmp_path):
    output = run("digits.py", "--storage", str(tmp_path / "storage"), cwd=tmp_path)
    found = verdicts(output)
    assert [(epoch, workers) for epoch, workers, *_ in found] == [("0", "4"), ("1", "4 then 2"), ("2", "2")]
    assert all((differing, verdict) == ("0", "identical") for *_, differing, verdict in found)
    assert "planned failure" in output
    accuracy = [float(text) for text in re.findall(r"validation accuracy ([\d.]+)", output)]
    assert accuracy[-1] > 0.8


def test_elastic_goes_on_with_half_the_workers(tmp_path):
    storage = ("--storage", str(tmp_path / "storage"))
    first = run("elastic.py", "--workers", "2", "--stop-at-step", "20", *storage, cwd=tmp_path)
    second = run("elastic.py", "--workers", "1", *storage, cwd=tmp_path)
    assert "DIFFERENT" not in first + second
    assert "identical" in second
    assert re.search(r"samples_consumed_per_split\D+[1-9]", second)


def test_images_trains_around_corrupt_files(tmp_path):
    output = run("images.py", "--epochs", "1", "--storage", str(tmp_path / "storage"), cwd=tmp_path)
    assert re.search(r"^ +0 +18 +18 +[\d.]+$", output, re.MULTILINE)
    assert sum(map(int, re.findall(r"Rows replaced in this pass: (\d)", output))) > 0
    assert "rows of corrupt files that a worker received: 0" in output


def test_plain_ddp_goes_on_with_other_ranks(tmp_path):
    """Without Ray Train."""
    output = run("plain_ddp.py", "--workers", "2", "--then", "1", cwd=tmp_path)
    assert "2 workers: steps 0 to 6" in output
    assert "1 workers: steps 7 to 19" in output
    assert "20 global steps: identical with the plan" in output


@pytest.mark.parametrize(
    ("name", "needs"),
    [("with_lightning.py", "pytorch_lightning"), ("with_transformers.py", "transformers"), ("sharded.py", "torch")],
)
def test_a_framework_goes_on_with_another_number_of_workers(name, needs, tmp_path):
    pytest.importorskip(needs, reason="the extra `integrations` is not installed")
    output = run(name, cwd=tmp_path)
    assert "stopped by the planned failure in epoch 1 after step 9" in output
    assert verdicts(output) == [
        ("0", "2", "18", "1728", "0", "identical"),
        ("1", "2 then 1", "18", "1728", "0", "identical"),
    ]


def test_bytes_lm_learns_and_goes_on_after_a_failure(tmp_path):
    output = run("bytes_lm.py", cwd=tmp_path)
    assert [(epoch, workers, verdict) for epoch, workers, *_, verdict in verdicts(output)] == [
        ("0", "2", "identical"),
        ("1", "2", "identical"),
    ]
    assert re.search(r"^run 2, epoch 1", output, re.MULTILINE)
    first, last = map(float, re.findall(r"loss: ([\d.]+) at first, ([\d.]+) at last", output)[0])
    assert last < 0.6 * first


LOCAL_MODE = """
import sys
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import ray_lance_stream
from ray_lance_stream import lance_stream
from tests.support import Oracle, make_table, scan_ids

table = make_table(sys.argv[1], 300)


def loop():
    train, val = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("val")
    assert (train.epoch, train.evaluation, val.evaluation) == (0, False, True)
    ids = []
    for batch in train.iter_torch_batches(batch_size=train.local_batch_size(24)):
        ids.append(batch["id"].tolist())
        if len(ids) < 5:
            assert train.state_dict()["samples_consumed_per_split"] == 2 * len(ids)  # not what was told last
    assert "* Rows received: 300 (" in train.stats()
    assert ids == [step.tolist() for step in Oracle(scan_ids(table), 12, 2).epoch(0)]
    assert train.digest() == sum(train.step_digest(0, step, global_batch_size=24) for step in range(len(ids))) % 2**64
    assert sorted(row["id"] for row in val.iter_rows()) == list(range(300))
    assert train.state_dict()["epoch"] == train.epoch == 1
    with open(sys.argv[2] + "/model.txt", "w") as file:
        file.write("weights")
    ray_lance_stream.report({"rows": 300}, checkpoint=ray.train.Checkpoint.from_directory(sys.argv[2]))


streams = {
    "train": lance_stream(table, num_splits=12),
    "val": lance_stream(table, num_splits=7, evaluation=True, drop_remainder=False),
}
for name in ("one", "two"):  # which begins anew
    config = RunConfig(name=name)
    result = TorchTrainer(loop, datasets=streams, scaling_config=ScalingConfig(num_workers=0), run_config=config).fit()
resumed = lance_stream(table, num_splits=12, resume_from=result.checkpoint)
assert resumed.epoch == 1
assert streams["train"].progress("two")[0]["rows"] == 300
print("local mode works")
"""


def test_local_mode_hands_out_the_stream_itself(tmp_path):
    """`num_workers=0`: no worker process, the stream iterates; its state still goes into the checkpoint by name."""
    (tmp_path / "checkpoint").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LOCAL_MODE, str(tmp_path / "t"), str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "local mode works" in done.stdout, done.stdout + done.stderr[-4000:]
    assert '"train"' in (tmp_path / "checkpoint" / "ray_lance_stream.json").read_text()
    assert '"val"' not in (tmp_path / "checkpoint" / "ray_lance_stream.json").read_text()
