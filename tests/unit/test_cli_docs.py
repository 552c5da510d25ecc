"""The commands that the pages show give the output that they show; those that start Ray are run with a cluster."""

from __future__ import annotations

import pytest

from ray_lance_stream.cli.main import COMMANDS, main
from tests.commands import SHOWN_FOLDER, WITH_RAY, commands, make_files

SHOWN = commands()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    make_files(folder)
    return folder


def test_every_command_is_shown():
    assert {command.arguments[0] for command in SHOWN} == {command.NAME for command in COMMANDS}


@pytest.mark.parametrize("command", [each for each in SHOWN if each.arguments[0] not in WITH_RAY], ids=str)
def test_a_command_of_a_page(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(command.arguments) == 0
    out = capsys.readouterr().out.rstrip("\n").replace(str(folder), SHOWN_FOLDER)
    assert out
    assert command.output in (out, None)
