"""Tests that generated pages are up to date, and that tasks, options, links, exit codes and steps on pages exist."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from device import suite
from flow import pipelines, upstream_page
from flow.context import Context
from flow.upstream_tests import Report
from toolchain import config_docs, errors, progress
from toolchain.config import ROOT, Config, defaults, load_config
from toolchain.steps import Step

PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "wheelhouse/README.md")),
    *sorted(page for folder in ("docs", "libqpu") for page in (ROOT / folder).rglob("*.md")),
)

# Runs in a separate process: tasks.py removes the INVOKE_* variables from the environment.
LIST_TASKS = """
import json, tasks
from invoke.tasks import Task
named = {id(task) for task in tasks.namespace.tasks.values()}
print(json.dumps({
    "options": {
        context.name: sorted({*context.flags, *context.flags.aliases}) for context in tasks.namespace.to_contexts()
    },
    "left out": [name for name, value in vars(tasks).items() if isinstance(value, Task) and id(value) not in named],
}))
"""


class Tasks(typing.NamedTuple):
    """All tasks in tasks.py with their options, and the tasks that are not available on the command line."""

    options: dict[str, list[str]]
    left_out: list[str]


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    listed = subprocess.run([sys.executable, "-c", LIST_TASKS], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(listed.stdout)
    return Tasks(found["options"], found["left out"])


def commands(page: Path) -> list[tuple[str, set[str]]]:
    """Return every ``./inv TASK`` on a page, with its options."""
    found = re.findall(r"\./inv\s+([a-z][a-z-]*)([^`\n#&]*)", page.read_text())
    return [(task, set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", rest))) for task, rest in found]


def test_configuration_page_is_up_to_date() -> None:
    assert config_docs.PAGE.read_text() == config_docs.render(), "run: python -m toolchain.config_docs"


def test_page_of_upstreams_tests_is_up_to_date() -> None:
    report = Report.load(upstream_page.STORED)
    assert upstream_page.PAGE.read_text() == upstream_page.render(report), "run: python -m flow.upstream_page"
    assert report.torch == upstream_page.identity_of_wheel(upstream_page.wheel()), "the report is on another wheel"


def test_configuration_page_has_every_setting_and_variable() -> None:
    page = config_docs.render()
    sections = typing.get_type_hints(Config)
    for section in dataclasses.fields(Config):
        for setting in dataclasses.fields(sections[section.name]):
            line = next(line for line in page.splitlines() if line.startswith(f"| `{section.name}.{setting.name}`"))
            assert f"`INVOKE_{section.name.upper()}_{setting.name.upper()}`" in line
            assert setting.metadata["help"].replace("|", "\\|") in line


# ------------------------------------------------------------------------------------------------ tasks


def test_command_line_has_every_task(tasks: Tasks) -> None:
    assert tasks.left_out == []
    assert {"build-image", "upstream-tests", "test"} <= set(tasks.options)


def test_short_option_h_is_help_in_every_task(tasks: Tasks) -> None:
    assert [name for name, options in tasks.options.items() if "-h" in options] == []


def test_tasks_and_options_in_pages_exist(tasks: Tasks) -> None:
    named = [(page.relative_to(ROOT), *command) for page in PAGES for command in commands(page)]
    assert {"build-image", "upstream-tests", "registry"} <= {task for _, task, _ in named}
    assert [f"{page}: ./inv {task}" for page, task, _ in named if task not in tasks.options] == []
    assert [
        f"{page}: ./inv {task} {option}"
        for page, task, options in named
        for option in sorted(options - set(tasks.options[task]))
    ] == []


def test_task_page_lists_every_task(tasks: Tasks) -> None:
    table = (ROOT / "docs/tasks.md").read_text().partition("\n## ")[0]
    assert set(tasks.options) - set(re.findall(r"`\./inv ([a-z][a-z-]*)", table)) == set()


def test_output_of_every_task_is_on_a_page(tasks: Tasks) -> None:
    """A task's output follows its command line, except for two tasks, whose output the pages describe in words."""
    prompt = re.compile(r"^[$#] (?:sudo )?(?:\w+=\S+ )*\./inv ([a-z][a-z-]*)[^\n]*\n(?![$#] |```)", re.MULTILINE)
    printed = {task for page in PAGES for task in prompt.findall(page.read_text())}
    assert set(tasks.options) - printed == {"completion", "cuda-timing"}


# ------------------------------------------------------------------------------------------------ language


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Return a page's lines outside code blocks and tables, with their line numbers."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        if not (in_code or fence or line.lstrip().startswith("|")):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_lines_are_under_100_characters(page: Path) -> None:
    assert [number for number, line in prose(page) if len(line) >= 100] == []


# ------------------------------------------------------------------------------------------------ links, codes, steps


def anchors(page: Path) -> set[str]:
    """Return the fragments of links to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_documented_exit_codes_match_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z]\w+(?:, [A-Z]\w+)*) \|", (ROOT / "docs/tasks.md").read_text(), re.MULTILINE)
    documented = {name: int(code) for code, names in rows for name in names.split(", ")}
    codes = {name: kind.exit_code for name, kind in vars(errors).items() if hasattr(kind, "exit_code")}
    assert {name: code for name, code in documented.items() if codes.get(name) != code} == {}
    assert set(documented.values()) == set(codes.values())


def test_architecture_page_has_every_step() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"[\w-]+", row)}
    with Context(load_config(defaults())) as context:
        assert {step.name for step in pipelines.main_job(context, with_workbench=True).steps} - named == set()


# ------------------------------------------------------------------------------------- output in the walk-through


def shown(command: str) -> str:
    """Return the output of a command in the walk-through."""
    page = (ROOT / "docs/walkthrough.md").read_text()
    blocks: list[str] = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if re.match(rf"\$ (?:\w+=\S+ )*{re.escape(command)}\n", block)]
    return block.partition("\n")[2]


@pytest.fixture(scope="module")
def steps() -> tuple[Step, ...]:
    """Return the main job's steps with default settings."""
    with Context(load_config(defaults())) as context:
        return pipelines.main_job(context).steps


def test_build_output_names_steps_of_the_main_job(steps: tuple[Step, ...]) -> None:
    text = shown("./inv build-image")
    began = re.findall(r"^    (.+): (?:runs|skipped) \(", text, re.MULTILINE)
    ran = re.findall(r"^==> (?!start docker)(.+)$", text, re.MULTILINE)
    images = re.findall(r"pitorch/(\w+):", text)
    assert began
    assert ran
    assert images
    assert {*began, *ran} - {step.title for step in steps} == set()
    assert set(images) - {step.name for step in steps} == set()


def test_plan_output_names_steps_of_the_main_job(steps: tuple[Step, ...]) -> None:
    lines = [line for line in shown("./inv build-image --plan").splitlines() if line != "…"]
    planned = [re.match(r"(.+?)  +(?:runs|skipped)  +(.+)$", line) for line in lines]
    assert planned
    assert [line for line, found in zip(lines, planned, strict=True) if found is None] == []
    titles = [step.title for step in steps]
    assert [found[1] for found in planned if found and found[1] not in titles] == []
    waits = [names for found in planned if found for names in re.findall(r"(.+) will run again", found[2])]
    assert {name for names in waits for name in names.split(", ")} - {step.name for step in steps} == set()


def test_device_suite_output_hides_passed_tests(capsys: pytest.CaptureFixture[str]) -> None:
    line = "test_ops.py::test_one[product-0] "
    with progress.bar("device suite") as bar:
        display = suite._Progress(bar)
        for outcome in ("PASSED", "FAILED"):
            display.handle_line(f"{line}{outcome}    [  1%]")
    assert capsys.readouterr().err == f"    {line}FAILED\n"
    assert "PASSED" not in shown("./inv test-on-pi")
