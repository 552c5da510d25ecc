"""The command line, in this process and without Ray: results, exit codes, errors, secrets."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray
from PIL import Image

from ray_lance_stream import lance_stream
from ray_lance_stream.cli import options, picture
from ray_lance_stream.cli.answer import as_json
from ray_lance_stream.cli.main import COMMANDS, main, parser
from ray_lance_stream.cli.picture import colour, draw, raster, touched_parts
from ray_lance_stream.splits import SplitBlock, split_block
from ray_lance_stream.state import StreamState, dump_states, parse_states
from ray_lance_stream.train import STATE_FILE
from tests.support import make_table

ROWS, SPLITS, BATCH = 305, 12, 24
ORDER = ["--num-splits", str(SPLITS), "--global-batch-size", str(BATCH)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return make_table(tmp_path_factory.mktemp("cli") / "t", ROWS)


@pytest.fixture(autouse=True)
def no_ray():
    yield
    assert not ray.is_initialized()


class Run:
    """Calls `main` and keeps what it wrote."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        try:
            found = main(list(map(str, arguments)))
        except SystemExit as left:
            found = left.code
        self.out, self.err = self._capsys.readouterr()
        assert found == code, self.err
        if code == 2:
            assert self.out == ""
            assert self.err.endswith("\n")
            assert "Traceback" not in self.err
            assert len([line for line in self.err.splitlines() if "error:" in line]) == 1
        return self.out

    def err_lines(self) -> list[str]:
        """What `main` itself wrote since the last call."""
        return self._capsys.readouterr().err.splitlines()

    def json(self, *arguments: str, code: int = 0) -> dict:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def run(capsys) -> Run:
    return Run(capsys)


# Help, usage, errors


@pytest.mark.parametrize("name", [command.NAME for command in COMMANDS])
def test_every_command_explains_itself(run, name):
    assert f"ray-lance-stream {name}" in run(name, "--help")
    assert "--json" in run.out


def test_help_needs_none_of_the_heavy_packages():
    heavy = ("ray", "torch", "lance", "lancedb", "numpy", "pyarrow")
    code = (
        "import sys\nfrom ray_lance_stream.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as left:\n    assert not left.code\n"
        f"print('imported', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("imported []\n")
    assert all(command.NAME in done.stdout for command in COMMANDS)


def test_as_a_program_from_any_folder(table, tmp_path):
    """Result on stdout alone, exit codes, no traceback; the module and the script are the same."""
    command = [sys.executable, "-m", "ray_lance_stream"]
    good = subprocess.run(
        [*command, "plan", table, *ORDER, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["plan"]["steps_per_epoch"] == 13
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    assert scripts.strip().startswith('ray-lance-stream = "ray_lance_stream.cli.main:main"')


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: command"),
        (["nope"], "invalid choice"),
        (["plan"], "required: URI"),
        (["rows", "t"], "required: --step, --num-splits, --global-batch-size"),
        (["plan", "t", "--num-splits", "many"], "invalid int value: 'many'"),
        (["plan", "t", "--workers", "8:2"], "2:8, 2:8:2 or 2,4,8"),
        (["plan", "t", "--workers", "0:2"], "2:8, 2:8:2 or 2,4,8"),
        (["plan", "t", "--workers", "2:8:0"], "2:8, 2:8:2 or 2,4,8"),
        (["plan", "t", "--workers", "1:2:3:4"], "2:8, 2:8:2 or 2,4,8"),
        (["order", "t", *ORDER, "--png", "x", "--steps", "0"], "int >= 1, got '0'"),
        (["plan", "t", "--num-split", "4"], "no such option: --num-split"),
        (["plan", "t", "more"], "1 arguments too many"),
    ],
)
def test_wrong_usage(run, arguments, says):
    run(*arguments, code=2)
    assert says in run.err
    assert run.err.count("\n") == 1


def test_errors_are_one_line_with_rule_value_and_remedy(run, table):
    run("plan", "nowhere", code=2)
    assert run.err.startswith("ray-lance-stream plan: error: no Lance dataset can be opened at ")
    assert run.err.count("\n") == 1
    run("plan", table, "--num-splits", 48, "--global-batch-size", 100, code=2)
    assert run.err == (
        "ray-lance-stream plan: error: global_batch_size must be a positive multiple of num_splits, got "
        "global_batch_size=100 and num_splits=48; use global_batch_size=96 or 144, or num_splits=25 or 50\n"
    )
    run("rows", table, *ORDER, "--step", 99, code=2)
    assert "step must be an int in [0, 13)" in run.err
    run("plan", table, "--filter", "nope = 1", code=2)
    assert "filter must be an SQL condition" in run.err
    run("plan", table, "--version", 999, code=2)
    assert "version 999" in run.err


def test_an_unforeseen_error_is_one_line_too_unless_a_traceback_is_asked_for(run, table, monkeypatch):
    def fail(*_):
        raise OSError("the disk\nis gone")

    monkeypatch.setattr(options, "table", fail)
    run("plan", table, code=2)
    assert run.err == "ray-lance-stream plan: error: OSError: the disk is gone\n"
    assert main(["plan", table, "--traceback"]) == 2
    lines = run.err_lines()
    assert (lines[0], lines[-2:]) == ("Traceback (most recent call last):", ["OSError: the disk", "is gone"])


def test_an_interrupt_is_no_traceback(run, table, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "table", interrupt)
    assert run("plan", table, code=130) == ""
    assert run.err == "interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    """`rows | head -1`: the pipe is closed before the rest is written."""
    code = (
        "import sys\nfrom ray_lance_stream.cli import main, plan\nfrom ray_lance_stream.cli.answer import Answer\n"
        "plan.run = lambda arguments: Answer('0123456789' * 100_000)\nsys.exit(main.main(['plan', 't']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_a_ray_that_a_command_started_ends_with_it(run, table, monkeypatch):
    """Also where the command fails; what workers print stays off stdout."""
    calls = []
    monkeypatch.setattr(ray, "init", lambda **given: calls.append(given))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr("ray_lance_stream.testing.assert_elastic", lambda *_, **__: 1 / 0)
    run("verify", table, *ORDER, "--address", "auto", code=2)
    assert "ZeroDivisionError" in run.err
    begun, ended = calls
    assert (begun["address"], begun["log_to_driver"], ended) == ("auto", False, "shutdown")


# Secrets

SECRET = "hush-hush-7"


@pytest.mark.parametrize(
    "arguments",
    [
        ["s3://bucket/t", "--storage-option", f"aws_secret_access_key={SECRET}", "--storage-option", "allow_http=true"],
        [f"s3://user:{SECRET}@bucket/t"],
        ["nowhere", "--storage-option", SECRET],
        ["nowhere", "--storage-options", f"key={SECRET}"],
        ["nowhere", f"--storage-options=key={SECRET}"],
        ["nowhere", "--storage-option-env", f"{SECRET}"],
        ["nowhere", "--storage-option-env", f"key={SECRET}"],
    ],
)
def test_secrets_are_never_shown(run, arguments, monkeypatch):
    monkeypatch.setenv("TOP_SECRET", SECRET)
    # No request leaves this machine.
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    limits = ["--storage-option", "client_max_retries=0", "--storage-option", "retry_timeout=1"]
    run("plan", *arguments, *(limits if "s3://" in arguments[0] else []), code=2)
    assert SECRET not in run.err


@pytest.mark.parametrize("given", [("", SECRET), ("-env", "TOP_SECRET")])
def test_an_unforeseen_error_shows_no_secret_either(run, monkeypatch, given):
    def fail(*_):
        raise RuntimeError(f"cannot sign with {SECRET}")

    monkeypatch.setenv("TOP_SECRET", SECRET)
    monkeypatch.setattr(options, "table", fail)
    run("plan", "t", f"--storage-option{given[0]}", f"aws_secret_access_key={given[1]}", code=2)
    assert run.err == "ray-lance-stream plan: error: RuntimeError: cannot sign with ***\n"


def test_a_traceback_shows_none_and_is_whole(run, monkeypatch):
    def fail(*_):
        cause = ValueError(f"s3://user:{SECRET}@bucket/t?key={SECRET}")
        raise RuntimeError(f"{'cannot ' * 1000}sign with {SECRET}") from cause

    monkeypatch.setattr(options, "table", fail)
    assert main(["plan", "t", "--storage-option", f"aws_secret_access_key={SECRET}", "--traceback"]) == 2
    lines = run.err_lines()
    assert "ValueError: s3://***@bucket/t?key=***" in lines
    assert "    raise RuntimeError(" in "\n".join(lines)
    assert lines[-1].endswith("cannot sign with ***")
    assert SECRET not in "".join(lines)


def test_the_uri_of_a_checkpoint_shows_none(run, monkeypatch, checkpoint):
    uri = f"s3://user:{SECRET}@bucket/run/checkpoint?secret_key={SECRET}"
    run("state", uri, code=2)
    assert "Unexpected query parameter" in run.err
    assert SECRET not in run.err
    states = parse_states((checkpoint / STATE_FILE).read_text())
    monkeypatch.setattr("ray.train.Checkpoint", lambda uri: uri)
    monkeypatch.setattr("ray_lance_stream.train.read_states", lambda _: states)
    assert run.json("state", uri)["path"] == "s3://bucket/run/checkpoint"
    assert run.json("state", str(checkpoint))["path"] == str(checkpoint)
    monkeypatch.setattr("ray_lance_stream.train.read_states", lambda _: {})
    run("state", uri, code=2)
    assert "got s3://bucket/run/checkpoint, which has none" in run.err


def test_storage_options_reach_the_table(monkeypatch):
    monkeypatch.setenv("TOP_SECRET", SECRET)
    arguments = parser().parse_args(
        ["plan", "t", "--storage-option", "a=b=c", "--storage-option-env", "key=TOP_SECRET", "--storage-option", "d="]
    )
    assert options.storage_options(arguments) == {"a": "b=c", "d": "", "key": SECRET}
    assert options.storage_options(parser().parse_args(["plan", "t"])) is None


# plan


def test_plan_prints_the_plan(run, table):
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=BATCH, filter="id < 200", shuffle_seed=3)
    arguments = ["plan", table, *ORDER, "--filter", "id < 200", "--shuffle-seed", "3"]
    assert run(*arguments) == stream.explain() + "\n"
    data = run.json(*arguments)
    assert data == {"plan": json.loads(json.dumps(as_json(vars(stream.plan))))}


def test_every_option_reaches_the_stream(run, table):
    given = {
        "--order": "feistel-1",
        "--shuffle-clump-size": "4",
        "--replicas": "2",
        "--columns": "vec,id",
        "--prefetch-bytes": "4000",
        "--prefetch-chunks": "3",
        "--read-batch-size": "2",
        "--readers-per-worker": "2",
        "--version": "3",
    }
    flat = [text for pair in given.items() for text in pair]
    arguments = parser().parse_args(["plan", table, *ORDER, *flat, "--no-shuffle", "--keep-remainder"])
    stream = options.make_stream(arguments)
    plan, config = stream.plan, stream._config
    assert (plan.order, plan.shuffle, plan.shuffle_clump_size, plan.replicas) == ("feistel-1", False, 4, 2)
    assert (plan.columns, plan.drop_remainder, plan.version) == (("vec", "id"), False, 3)
    assert plan.table_rows == lance.dataset(table, version=3).count_rows()
    assert (config.prefetch_bytes, config.prefetch_chunks) == (4000, 3)
    assert (config.read_batch_size, config.readers_per_worker) == (2, 2)
    assert set(options._STREAM_OPTIONS) <= set(vars(arguments))


def test_plan_for_worker_counts(run, table):
    data = run.json("plan", table, *ORDER, "--workers", "2:5")
    assert [(share["workers"], share["splits"], share["step_rows"]) for share in data["workers"]] == [
        (2, [6, 6], [12, 12]),
        (3, [4, 4], [8, 8]),
        (4, [3, 3], [6, 6]),
        (5, [2, 3], [4, 6]),
    ]
    assert data["refused"] == {}
    assert data["num_splits_given"] == data["suggestions"][0]
    assert [choice["num_splits"] for choice in data["suggestions"]] == [12, 24]
    assert data["suggestions"][0]["uneven_workers"] == [5]
    run("plan", table, *ORDER, "--workers", "2:5")
    assert "with global_batch_size=60, num_splits=60 is equal with all of them" in run.out
    assert re.search(r"^12, as given +5 +1.250 of the mean$", run.out, re.M)
    assert "24 has equal shares with 1, 2, 3, 4, 6, 8, 12, 24 workers" in run.out


def test_plan_says_no_where_workers_cannot_be_served(run, table):
    assert "13 workers: each worker needs at least one split" in run(
        "plan", table, *ORDER, "--workers", "12,13", code=1
    )
    data = run.json("plan", table, *ORDER, "--replicas", "2", "--workers", "3,4", code=1)
    assert list(data["refused"]) == ["3"]
    assert [share["workers"] for share in data["workers"]] == [4]


def test_plan_suggests_before_a_number_of_splits_is_known(run, table):
    assert "as many as workers" in run("plan", table, "--workers", "2,4,8")
    suggestions = run.json("plan", table, "--workers", "2,4,8")["suggestions"]
    assert [choice["num_splits"] for choice in suggestions] == [8, 16, 48, 96]
    assert "no num_splits can be suggested" in run("plan", table, "--workers", "400", code=1)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("2:4", (2, 3, 4)), ("2:8:3", (2, 5, 8)), ("8,2:3,2", (2, 3, 8))]
)
def test_worker_counts_are_written_as_ranges_and_lists(text, counts):
    assert options.worker_counts(text) == counts


def test_worker_counts_without_end_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="at most 10,000 worker counts can be asked for"):
        options.worker_counts("1:1000000000000")


# rows


def test_rows_of_a_step(run, table):
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=BATCH)
    offsets = stream.row_ids(2, 5).tolist()
    arguments = ["rows", table, *ORDER, "--epoch", "2", "--step", "5"]
    assert [int(line) for line in run(*arguments).splitlines()] == offsets
    assert run.json(*arguments)["rows"] == offsets
    values = run.json(*arguments, "--column", "vec")["rows"]
    assert values == stream.row_ids(2, 5, column="vec")
    run(*arguments, "--column", "nope", code=2)
    assert "column must be one of" in run.err


def test_rows_of_an_older_version(run, tmp_path):
    path = make_table(tmp_path / "t", ROWS)
    version = lance.dataset(path).version
    before = run("rows", path, *ORDER, "--step", "1")
    lance.dataset(path).delete("id < 100")
    assert run("rows", path, *ORDER, "--step", "1") != before
    assert run("rows", path, *ORDER, "--step", "1", "--version", str(version)) == before


def test_values_of_every_kind_are_one_line_of_json(run, tmp_path):
    values = {
        "text": ["a\nb", "ü", ""],
        "bytes": [b"\x00\xff", b"", None],
        "float": [float("nan"), float("inf"), 1.5],
        "when": pa.array([0, 1, None], pa.timestamp("us")),
        "struct": [{"a": [1, 2]}, {"a": []}, None],
    }
    lance.write_dataset(pa.table(values), tmp_path / "t")
    order = ["--num-splits", "3", "--global-batch-size", "3", "--no-shuffle", "--step", "0"]
    found = {name: run.json("rows", tmp_path / "t", *order, "--column", name)["rows"] for name in values}
    assert found["text"] == ["a\nb", "ü", ""]
    assert found["bytes"] == ["AP8=", "", None]
    assert found["float"] == ["nan", "inf", 1.5]
    assert found["when"] == ["1970-01-01 00:00:00", "1970-01-01 00:00:00.000001", None]
    assert found["struct"] == [{"a": [1, 2]}, {"a": []}, None]
    lines = run("rows", tmp_path / "t", *order, "--column", "text").splitlines()
    assert [json.loads(line) for line in lines] == values["text"]


# state


@pytest.fixture
def checkpoint(table, tmp_path) -> Path:
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=BATCH, shuffle_seed=7)
    start = StreamState.from_dict(stream.state_dict())
    state = replace(start, epoch=2, samples_consumed_per_split=10, skipped=((0, 2, 4),))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / STATE_FILE).write_text(dump_states({"train": state}))
    return tmp_path / "checkpoint"


def test_state_of_a_checkpoint(run, checkpoint, table, monkeypatch):
    text = run("state", checkpoint)
    assert re.search(r"^stream +train$", text, re.M)
    assert re.search(r"^position +epoch 2, 10 of 25 cycles \(40.0 %\)$", text, re.M)
    assert re.search(r"^steps +5 of 13 done, of 24 rows$", text, re.M)
    assert re.search(rf"^table +{re.escape(table)}, version \d+$", text, re.M)
    assert re.search(r"^skipped +cycles 2 to 3 of epoch 0$", text, re.M)
    assert "fits" not in text
    data = run.json("state", checkpoint)
    assert data["streams"][0]["state"]["samples_consumed_per_split"] == 10
    assert (data["streams"][0]["steps_done"], data["streams"][0]["fits"]) == (5, None)
    monkeypatch.chdir(checkpoint.parent)
    assert run("state", "checkpoint/") == run("state", f"checkpoint/{STATE_FILE}") == text
    monkeypatch.chdir(checkpoint)
    assert run("state", STATE_FILE) == run("state", ".") == text


def test_state_says_whether_a_table_fits(run, checkpoint, table, tmp_path):
    assert re.search(r"^fits +yes$", run("state", checkpoint, "--table", table), re.M)
    # What is given counts, not what was saved.
    no = run("state", checkpoint, "--table", table, "--num-splits", "24", "--no-shuffle", code=1)
    assert "no: the saved stream state does not fit this stream (" in no
    assert "num_splits: saved 12, current 24" in no
    assert "shuffle: saved True, current False" in no
    other = make_table(tmp_path / "other", ROWS)
    found = run.json("state", checkpoint, "--table", other, code=1)["streams"][0]
    assert not found["fits"]
    assert "table_uri" in found["reason"]
    run("state", checkpoint, "--table", tmp_path / "nowhere", code=2)
    assert "no Lance dataset can be opened" in run.err


def test_state_of_a_version_that_is_gone(run, checkpoint, tmp_path):
    path = make_table(tmp_path / "t", ROWS)
    state = StreamState.from_dict(lance_stream(path, num_splits=SPLITS).state_dict())
    (checkpoint / STATE_FILE).write_text(dump_states({"train": state}))
    assert run.json("state", checkpoint, "--table", path)["streams"][0]["fits"]
    lance.dataset(path).delete("id = 0")
    assert run.json("state", checkpoint, "--table", path)["streams"][0]["fits"]  # the saved version is still there
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0))
    assert "no longer exists" in run.json("state", checkpoint, "--table", path, code=1)["streams"][0]["reason"]


def test_state_at_an_edge_whose_version_is_gone(run, checkpoint, tmp_path):
    path = make_table(tmp_path / "t", ROWS)
    state = StreamState.from_dict(lance_stream(path, num_splits=SPLITS).state_dict())
    (checkpoint / STATE_FILE).write_text(dump_states({"train": replace(state, epoch=1)}))
    lance.dataset(path).delete("id = 0")
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0))
    asked = ("state", checkpoint, "--table")
    assert not run.json(*asked, path, code=1)["streams"][0]["fits"]
    assert run.json(*asked, path, "--on-new-version", "next_epoch")["streams"][0]["fits"]
    moved = shutil.copytree(path, tmp_path / "moved.lance")
    assert "table_uri" in run.json(*asked, moved, "--on-new-version", "next_epoch", code=1)["streams"][0]["reason"]
    assert "no longer exists" in run.json(*asked, moved, "--allow-moved", code=1)["streams"][0]["reason"]
    assert run.json(*asked, moved, "--allow-moved", "--on-new-version", "next_epoch")["streams"][0]["fits"]


def test_state_of_an_order_that_no_option_names(run, checkpoint, table):
    state = StreamState.from_dict(lance_stream(table, num_splits=SPLITS).state_dict())
    listed = replace(state, identity=replace(state.identity, order="permutation:0123"))
    (checkpoint / STATE_FILE).write_text(dump_states({"train": listed}))
    assert "permutation:0123" in run("state", checkpoint)
    run("state", checkpoint, "--table", table, code=2)
    assert "got a state of order 'permutation:0123': try it in Python" in run.err
    assert "order: saved 'permutation:0123'" in run(
        "state", checkpoint, "--table", table, "--order", "feistel-1", code=1
    )


def test_state_of_several_streams(run, checkpoint, table, tmp_path):
    other = make_table(tmp_path / "other", ROWS)
    states = {
        name: StreamState.from_dict(lance_stream(path, num_splits=SPLITS).state_dict())
        for name, path in (("train", table), ("extra", other))
    }
    (checkpoint / STATE_FILE).write_text(dump_states(states))
    # As resume_from: one of them has to fit.
    found = {each["name"]: each["fits"] for each in run.json("state", checkpoint, "--table", other)["streams"]}
    assert found == {"train": False, "extra": True}
    assert not run.json("state", checkpoint, "--table", other, "--stream", "train", code=1)["streams"][0]["fits"]
    run("state", checkpoint, "--stream", "nope", code=2)
    assert "['extra', 'train']" in run.err


def test_paths_without_a_state(run, tmp_path):
    run("state", tmp_path, code=2)
    assert f"got {tmp_path}, which has none" in run.err
    run("state", tmp_path / "nowhere", code=2)
    assert "which is none" in run.err
    (tmp_path / STATE_FILE).write_text("{")
    run("state", tmp_path, code=2)
    assert "truncated" in run.err


# order


def test_the_picture_shows_the_rows_of_the_steps(table):
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=BATCH)
    touched = touched_parts(stream, 1, 3, 4)
    plan, expected = stream._plan.resolve(), np.full((SPLITS, ROWS), -1)
    for split in range(SPLITS):
        for cycle in range(6):
            expected[split, plan.rows(1, SplitBlock(split, split + 1), cycle, cycle + 1)[0]] = cycle // 2
    assert np.array_equal(touched.parts, expected)  # as many parts as rows in a table as small as this
    assert (touched.num_steps, touched.num_rows) == (3, 3 * BATCH)
    owners = [rank for rank in range(4) for _ in range(split_block(SPLITS, 4, rank).size)]
    assert touched.ranks.tolist() == owners
    colours = raster(touched)
    split, row = np.argwhere(expected == 2)[0]
    assert tuple(colours[split, row]) == colour(owners[split], 2, 3)
    assert tuple(colours[split, np.flatnonzero(expected[split] == -1)[0]]) == (245, 245, 245)


def test_where_a_part_is_touched_more_than_once_its_first_step_is_shown(table, monkeypatch):
    monkeypatch.setattr(picture, "MAX_PARTS", 7)
    monkeypatch.setattr(picture, "MAX_LINES", 5)
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=BATCH)
    touched = touched_parts(stream, 0, 6, 1)
    expected = np.full((5, 7), -1)
    for step in reversed(range(6)):
        for place, row in enumerate(stream.row_ids(0, step)):
            expected[place % SPLITS * 5 // SPLITS, row * 7 // ROWS] = step
    assert np.array_equal(touched.parts, expected)
    assert len(np.unique(expected)) > 2


def test_order_draws_a_file(run, table, tmp_path):
    out = tmp_path / "out.png"
    arguments = ["order", table, *ORDER, "--png", out, "--workers", "4", "--steps", "2"]
    assert run(*arguments).startswith(f"{out}: the first 2 steps of epoch 0, 48 rows, touch ")
    stream = lance_stream(table, num_splits=SPLITS, global_batch_size=BATCH)
    with Image.open(out) as image:
        found = np.asarray(image)
    cells = raster(touched_parts(stream, 0, 2, 4)).repeat(25, axis=0).repeat(3, axis=1)  # 12 lines, 305 parts
    assert np.array_equal(found[50 : 50 + cells.shape[0], 150 : 150 + cells.shape[1]], cells)
    data = run.json(*arguments)
    assert data["touched_share"] == pytest.approx(48 / ROWS)
    assert (data["rows"], data["parts"], data["steps"]) == (48, ROWS, 2)


def test_pictures_of_many_splits_workers_and_steps(tmp_path):
    path = make_table(tmp_path / "t", 3100)
    stream = lance_stream(path, num_splits=1550, global_batch_size=1550, filter="id % 2 = 0")
    touched = touched_parts(stream, 0, 50, 1550)
    assert touched.parts.shape == (1000, 1000)
    assert touched.num_steps == 1
    draw(touched, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_what_order_needs(run, table, tmp_path, monkeypatch):
    run("order", table, *ORDER, "--png", tmp_path / "no" / "out.png", code=2)
    assert "make" in run.err
    run("order", table, *ORDER, "--png", tmp_path / "out.png", "--workers", "13", code=2)
    assert "13 workers for num_splits=12" in run.err
    monkeypatch.setitem(sys.modules, "PIL", None)
    run("order", table, *ORDER, "--png", tmp_path / "out.png", code=2)
    assert "pip install 'ray_lance_stream[plot]'" in run.err
    assert os.listdir(tmp_path) == []
