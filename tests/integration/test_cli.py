"""The commands that read through readers: verify and bench."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
import ray

from ray_lance_stream import StreamShard
from ray_lance_stream.cli.main import main
from ray_lance_stream.splits import SplitBlock
from tests.commands import SHOWN_FOLDER, WITH_RAY, commands, make_files

pytestmark = pytest.mark.timeout(200)

ORDER = ["--num-splits", "48", "--global-batch-size", "480"]


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    make_files(folder)
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("command", [each for each in commands() if each.arguments[0] in WITH_RAY], ids=str)
def test_a_command_of_a_page(command, folder, capsys):
    """The figures of `bench` are those of one machine, so no page shows them."""
    assert main(command.arguments) == 0
    out = capsys.readouterr().out.rstrip("\n").replace(str(folder), SHOWN_FOLDER)
    if command.arguments[0] == "bench":
        assert re.search(r"^- the stream as given reaches \d+\.\d\d( \(.*\))? of bare take$", out, re.M)
        assert command.output == ""
    else:
        assert out == command.output


def test_verify_says_no_and_on_which_workers(capsys, monkeypatch):
    """Blocks that overlap: the second of two ranks gets the first one's splits."""
    share = StreamShard._share.fget

    def broken(shard: StreamShard):
        right = share(shard)
        return replace(right, block=SplitBlock(0, right.block.size)) if right.world_size == 2 else right

    monkeypatch.setattr(StreamShard, "_share", property(broken))
    assert main(["verify", "rows.lance", *ORDER, "--workers", "1,2", "--steps", "2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^elastic +NO: .*1 and 2 workers: step 0 holds other rows", out, re.M)
    assert re.search(r"^resume +NO: ", out, re.M)


def test_verify_of_an_order_with_all_its_options(capsys):
    """A filter, a remainder that is delivered, clumps, ranks that share their rows, a batch that ends the epoch short."""
    options = ["--filter", "y > 0", "--keep-remainder", "--shuffle-clump-size", "3", "--replicas", "2", "--epoch", "5"]
    order = ["--num-splits", "30", "--global-batch-size", "600"]
    assert main(["verify", "rows.lance", *order, *options, "--workers", "2,6,14", "--steps", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"] == [2, 6, 14]
    assert main(["verify", "rows.lance", *order, *options, "--workers", "2,3"]) == 2
    assert "multiple of replicas" in capsys.readouterr().err


def test_bench_measures_in_the_time_given(capsys):
    begun_s = time.monotonic()
    assert main(["bench", "rows.lance", *ORDER, "--seconds", "2", "--torch", "--json"]) == 0
    took_s = time.monotonic() - begun_s
    streams = capsys.readouterr()
    found = json.loads(streams.out)
    assert took_s < 25  # with the start of readers, which is not measured
    assert "round 1 of 3: stream as given" in streams.err
    base, take, *tried = found["trials"]
    assert base["name"] == "stream as given"
    assert take["name"].startswith("bare take")
    for trial in (base, take):
        assert all(rate > 0 for rate in trial["rows_per_s"])
        assert trial["ratios"] == [
            pytest.approx(rate / of) for rate, of in zip(trial["rows_per_s"], base["rows_per_s"], strict=False)
        ]
    assert {"readers_per_worker"} in [set(trial["options"]) for trial in tried]
    assert found["recommendations"]
    assert ray.is_initialized()  # the cluster was here before the command
