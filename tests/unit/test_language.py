"""Tests of the language: codespell with this project's settings, and phrases that it cannot check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolchain import checks
from toolchain.config import ROOT

PHRASES = re.compile(
    r"""(?<!\bthere\s)\bis\s+no\b(?!\s+longer)  # is not a
    | \bcomes?\s+to\s+an\s+end\b             # ends
    | \bgoes\s+by\b                          # uses
    | \bat\s+hand\b                          # available
    | \bof\s+(?:its|their)\s+own\s+accord\b  # automatically
    | \bholds?\s+good\b                      # applies
    | \bstands?\s+in\s+for\b                 # replaces
    | \bgives?\s+way\b                       # fails, yields
    | \bbroke\s+off\b                        # was interrupted
    | \bnone\s+but\b                         # only
    | \bin\s+vain\b                          # without success
    | \bwant\s+of\b                          # lack of
    | \bof\s+(?:yours|theirs|ours)\b         # your, their, our
    """,
    re.VERBOSE | re.IGNORECASE,
)
CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def codespell(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "codespell_lib", str(page)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("The user is told the reason.", "told ==> reported"),  # codespell:ignore
        ("The tree is made anew.", "anew ==> again"),  # codespell:ignore
        ("It checks the maschine.", "maschine ==> machine"),  # codespell:ignore
    ],
)
def test_banned_and_misspelled_words_are_reported(tmp_path: Path, text: str, report: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    ended = codespell(page)
    assert ended.returncode != 0
    assert f"{page}:1: {report}" in ended.stdout


def test_plain_words_and_identifiers_are_accepted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The error names the reason. `test_the_user_is_told` and kInf are identifiers.\n")
    ended = codespell(page)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_banned_words_are_sorted_and_unique() -> None:
    words = [line.partition("->")[0] for line in (ROOT / ".codespell/banned-words.txt").read_text().splitlines()]
    assert words == sorted(set(words))


def phrases_in(text: str) -> list[str]:
    return [phrase[0] for phrase in PHRASES.finditer(text)]


def test_pages_contain_no_banned_phrase() -> None:
    """Code blocks are excluded, because they contain programs' output."""
    pages = [path for path in checks.files_of_the_project() if path.suffix == ".md"]
    found = {page.relative_to(ROOT): phrases_in(CODE.sub("", page.read_text())) for page in pages}
    assert {page: phrases for page, phrases in found.items() if phrases} == {}


def test_strings_contain_no_banned_phrase() -> None:
    """The strings include the messages, help texts and docstrings in the product's Python code."""
    found: dict[Path, list[str]] = {}
    for path in checks.files_of_the_project():
        module = path.relative_to(ROOT)
        if path.suffix == ".py" and module.parts[0] != "tests":
            nodes = ast.walk(ast.parse(path.read_text()))
            strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            found[module] = [phrase for text in strings for phrase in phrases_in(text)]
    assert {module: phrases for module, phrases in found.items() if phrases} == {}


def test_test_names_are_shorter_than_60_characters() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) >= 60] == []
