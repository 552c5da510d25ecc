"""README and docs: their code runs, their commands and links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
RUN_TIMEOUT_S = 500

pytestmark = pytest.mark.usefixtures("no_cluster")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NOT_RUN = "<!-- not run -->"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.M)
PATH_IN_CODE = re.compile(r"`([\w.-]+/[\w./-]*)`")
PAGE_NAME = re.compile(r"(?<![\w/:.-])(?:[\w.-]+/)*[\w-]+\.md\b")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:home|mnt|root|tmp|work)/\S*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_of(page: Path) -> str:
    """The Python of a page as one program: each block goes on where the one before it ended."""
    text = page.read_text()
    blocks = []
    for found in FENCE.finditer(text):
        before = text[: found.start()].rstrip()
        if found[1] == "python" and not before.endswith(NOT_RUN):
            line = text[: found.start()].count("\n") + 1
            blocks.append("\n" * 2 + f"# {name_of(page)}, line {line}\n" + found[2])
    return "".join(blocks)


def starts_a_cluster(page: Path) -> bool:
    """Whether a page is a program of its own."""
    return "ray.init(" in python_of(page)


PROGRAMS = [page for page in PAGES if starts_a_cluster(page)]
GUIDES = [page for page in PAGES if python_of(page) and not starts_a_cluster(page)]

# The guides share one process and one cluster, each with names and a directory of its own.
RUN_GUIDES = """
import os, sys
from pathlib import Path
import ray
ray.init(address="local", num_cpus=8, include_dashboard=False)
for script in map(Path, sys.argv[1:]):
    directory = script.with_suffix("")
    directory.mkdir()
    os.chdir(directory)
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
"""


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """As a user runs it: a script in an empty directory, which is all that it knows."""
    script = tmp_path / "page.py"
    script.write_text(python_of(page))
    output = run([str(script)], tmp_path)
    for line in promised_by(page):
        assert line in output, f"{name_of(page)} promises the output {line}"


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_the_code_of_the_guides_runs(tmp_path: Path) -> None:
    scripts = [tmp_path / f"{number}-{page.stem}.py" for number, page in enumerate(GUIDES)]
    for page, script in zip(GUIDES, scripts, strict=True):
        script.write_text(python_of(page))
    output = run(["-c", RUN_GUIDES, *map(str, scripts)], tmp_path)
    for page in GUIDES:
        for line in promised_by(page):
            assert line in output, f"{name_of(page)} promises the output {line}"


def promised_by(page: Path) -> list[str]:
    """The lines of output that a page writes behind its prints."""
    return re.findall(r"^print\(.*\)  # (\{.*?\})", python_of(page), re.M)


def run(arguments: list[str], tmp_path: Path) -> str:
    """The output of Python in an empty directory; fails if it does."""
    directory = tmp_path / "empty"
    directory.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_the_readme_has_code_that_promises_output() -> None:
    assert "TorchTrainer(" in python_of(ROOT / "README.md")
    assert len(promised_by(ROOT / "README.md")) >= 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_code_is_left_unrun(page: Path) -> None:
    assert NOT_RUN not in page.read_text()
    assert {kind for kind, _ in FENCE.findall(page.read_text())} <= {"", "python"}


def test_the_commands_of_the_readme_exist() -> None:
    code = "\n".join(text for _, text in FENCE.findall((ROOT / "README.md").read_text()))
    named = set(re.findall(r"^make (\w+)", code, re.M))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"train", "test", "docs"} <= named <= targets


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in (inline or defined for inline, defined in LINK.findall(text)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.is_relative_to(ROOT), f"{name_of(page)}: {target} leads out of the project"
        assert aim.exists(), f"{name_of(page)}: {target} does not exist"
        assert not anchor or anchor in anchors_of(aim), f"{name_of(page)}: no heading {target}"
    labels = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert labels == set(re.findall(r"^\[([\w-]+)\]: ", text, re.M))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_refers_to_the_project_only(page: Path) -> None:
    """Paths and pages that it names are part of the project, and none is one of some machine."""
    text = page.read_text()
    for path in [*PATH_IN_CODE.findall(text), *PAGE_NAME.findall(text)]:
        found = [folder for folder in (ROOT, ROOT / "ray_lance_stream", page.parent) if (folder / path).exists()]
        assert found, f"{name_of(page)} names {path}, which does not exist"
    assert ABSOLUTE_PATH.findall(text) == []
    assert re.findall(r"\b(?:TODO|FIXME|XXX)\b", text) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_can_be_read_as_text(page: Path) -> None:
    """Lines are short, but for the rows of tables and the code."""
    prose = FENCE.sub("", page.read_text())
    long = [line for line in prose.splitlines() if len(line) > 140 and not line.startswith("|")]
    assert long == []
