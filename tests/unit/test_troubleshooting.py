"""docs/troubleshooting.md quotes the messages of the code: each quote is there, and no message is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGE = ROOT / "ray_lance_stream"
MODULES = sorted(PACKAGE.rglob("*.py"))

VALUE = "\0"  # stands for what a message puts in
NAMED = re.compile(
    r"(Config|Table|VersionNotFound|Read|NullInTensor|Transform|Iteration|State|StateMismatch)Error|error"
)
LOGGED = re.compile(r"logger\.(warning|error)")

# How messages begin that say that the library itself is wrong, or that are caught inside.
INTERNAL = (
    "the rows of order",
    "the list of epoch",
    "a list must have the",
    "a split block needs",
    "an index must be",
    "keys must be",
    "order, grid and matched rows must have",
    "row offsets must be",
    "the version that is cached in",
    "this path leads to another table",
    "uri must be",
    "version must be",
)


def text_of(node: ast.expr) -> str | None:
    """The text of a literal, an f-string or a sum that begins with one, with VALUE where values go; None for others."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%(\.\d)?[sdrf]", VALUE, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and (left := text_of(node.left)) is not None:
        return left + (text_of(node.right) or VALUE)
    return None


def part_of(node: ast.expr) -> str:
    """What a part of an f-string puts in: its text, that of a named constant, or VALUE."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    return CONSTANTS.get(ast.unparse(node.value), VALUE)


def constants() -> dict[str, str]:
    """The texts that modules have names for."""
    found: dict[str, str] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found[ast.unparse(node.targets[0])] = node.value.value
    return found


CONSTANTS = constants()


def texts(path: Path) -> set[str]:
    """Every text in a module."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr))
    return {text for node in nodes if (text := text_of(node)) is not None}


def messages(path: Path) -> set[str]:
    """The errors and warnings of a module whose text is written where they arise."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        if NAMED.fullmatch(called) or LOGGED.fullmatch(called):
            text = text_of(node.args[0])
        elif called == "guarded":  # (function, what its error begins with, ...)
            text = text_of(node.args[1])
        else:
            continue
        if text is not None and text.strip(VALUE + ": ."):
            found.add(text)
    return found


def quotes() -> list[str]:
    """The first cell of each row of the page's tables."""
    return re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.M)


def is_quoted(message: str, quote: str) -> bool:
    """Whether a quote, whose … may stand for anything, is how a message begins."""
    return re.match(".+?".join(map(re.escape, quote.split("…"))), message, re.S) is not None


TEXTS = set().union(*map(texts, MODULES))


@pytest.mark.parametrize("quote", quotes())
def test_what_the_page_quotes_is_in_the_code(quote: str) -> None:
    assert any(is_quoted(text, quote) for text in TEXTS), "no message of the code begins so: quote it as it is now"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_message_is_on_the_page(path: Path) -> None:
    missing = [
        message.replace(VALUE, "…")
        for message in sorted(messages(path))
        if not message.startswith(INTERNAL) and not any(is_quoted(message, quote) for quote in quotes())
    ]
    assert missing == [], "docs/troubleshooting.md does not say what to do about these"


def test_the_messages_of_the_code_are_found() -> None:
    found = set().union(*map(messages, MODULES))
    assert len(found) > 100
    assert any(text.startswith("global_batch_size must be a positive multiple of num_splits, got") for text in found)
    assert any(text.startswith("no Lance dataset can be opened at \0; for a LanceDB table") for text in found)
    assert any(text.startswith("stream \0: num_splits is the number of workers") for text in found)


def test_no_message_is_quoted_twice() -> None:
    assert len(quotes()) == len(set(quotes()))
