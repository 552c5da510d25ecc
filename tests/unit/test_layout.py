"""The public surface, what imports what, and the size of files and functions."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_lance_stream
from ray_lance_stream import lance_stream

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ray_lance_stream"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# What users import and call. A change here is a change for them: it belongs into CHANGELOG.md.
PUBLIC = [
    "ConfigError",
    "IterationError",
    "LanceStream",
    "ReadError",
    "StateError",
    "StateMismatchError",
    "StreamDataLoader",
    "StreamDataset",
    "StreamError",
    "StreamShard",
    "TableError",
    "TransformError",
    "VersionNotFoundError",
    "lance_stream",
    "merge_state_dicts",
    "report",
    "to_lancedb_state",
]
SIGNATURE = [
    "table",
    "*",
    "num_splits=None",
    "shuffle=True",
    "shuffle_seed=0",
    "shuffle_clump_size=None",
    "epoch=0",
    "columns=None",
    "filter=None",
    "order='feistel-1'",
    "permutation=None",
    "global_batch_size=None",
    "drop_remainder=True",
    "evaluation=False",
    "read_batch_size=None",
    "prefetch_chunks=4",
    "prefetch_bytes=134217728",
    "readers_per_worker=1",
    "read_timeout_s=300.0",
    "stall_warn_s=60.0",
    "replicas=1",
    "resume='auto'",
    "resume_from=None",
    "on_new_version='stay'",
    "allow_moved=False",
    "storage_options=None",
    "cache_dir=None",
    "cache_bytes=None",
]


def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


# The public surface


def test_the_public_names() -> None:
    assert ray_lance_stream.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(ray_lance_stream, name).__name__ == name
        assert name in dir(ray_lance_stream)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'ray_lance_stream' has no attribute 'nope'"):
        _ = ray_lance_stream.nope


def test_the_signature() -> None:
    found: list[str] = []
    for parameter in inspect.signature(lance_stream).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(parameter.name + default)
    assert found == SIGNATURE


def test_every_argument_is_described() -> None:
    described = re.findall(r"^ {4}(\w+): ", inspect.getdoc(lance_stream) or "", re.M)
    assert {name.partition("=")[0] for name in SIGNATURE if name != "*"} <= set(described)


# What imports what

HEAVY = ("ray", "torch", "lance", "lancedb")


def imported_by(statement: str) -> list[str]:
    """The heavy packages that a fresh interpreter has imported after `statement`."""
    code = f"import sys\n{statement}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_the_package_alone_imports_nothing_heavy() -> None:
    assert (
        imported_by("import ray_lance_stream; ray_lance_stream.ConfigError; ray_lance_stream.merge_state_dicts") == []
    )


def test_the_modules_without_io_import_nothing_heavy() -> None:
    modules = ("errors", "splits", "suggest", "order", "cursor", "own_batches", "plan", "state", "lancedb_state")
    assert imported_by("\n".join(f"import ray_lance_stream.{name}" for name in modules)) == []


def test_actors_can_be_imported_in_a_ray_client() -> None:
    """Where `ray.method` knows none of the options of our methods."""
    modules = ", ".join(f"ray_lance_stream.{name}" for name in ("coordinator", "reader", "stage_worker"))
    enable = "from ray._private.client_mode_hook import enable_client_mode"
    assert imported_by(f"{enable}\nwith enable_client_mode():\n    import {modules}")


def test_the_check_for_heavy_imports_finds_one() -> None:
    assert "ray" in imported_by("import ray_lance_stream.config")


def private_uses(module: ast.Module) -> Iterator[str]:
    """Private modules and names of Ray that a module imports or reaches as `ray.<...>`."""
    for node in ast.walk(module):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            first, *parts = name.split(".")
            if first == "ray" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "_ray.py"])
def test_private_parts_of_ray_are_used_in_one_module_only(name: str) -> None:
    assert list(private_uses(tree(name))) == []


def test_the_check_for_private_parts_finds_them() -> None:
    code = "import ray._private.state\nfrom ray.data import _internal\nfrom ray.data.iterator import _Iterable\nray._raylet.x"
    assert len(set(private_uses(ast.parse(code)))) == 5  # the last one twice, as a whole and up to the private name
    assert list(private_uses(tree("_ray.py")))


# Layout


def test_the_layout_table_names_every_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.partition("\n## Layout\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", section, re.M)
    assert sorted(name for name, _ in rows) == MODULES
    assert all(what.strip(" |") for _, what in rows)


def test_every_folder_with_modules_is_a_package() -> None:
    """Else its modules would be missing in a wheel."""
    folders = {(PACKAGE / name).parent for name in MODULES}
    assert PACKAGE / "cli" in folders
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short(name: str) -> None:
    lines = len((PACKAGE / name).read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines, at most {MAX_FILE_LINES}: move a part of it out"


@pytest.mark.parametrize("name", MODULES)
def test_functions_are_short(name: str) -> None:
    """Counted are the lines of the body, without signature and docstring."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_text = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[1 if has_text else 0]
            lines = (node.end_lineno or 0) - first.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
