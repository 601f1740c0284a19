"""Pages that are made from code are up to date, and what pages name is there: tasks, their options, steps."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from device import suite
from flow import pipelines
from flow.context import Context
from toolchain import config_docs, errors, progress
from toolchain.config import ROOT, Config, defaults, load_config
from toolchain.steps import Step

PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "wheelhouse/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)

# In a process of its own: tasks.py takes the INVOKE_* variables out of the environment.
TELL = """
import json, tasks
from invoke.tasks import Task
named = {id(task) for task in tasks.namespace.tasks.values()}
print(json.dumps({
    "options": {context.name: sorted(context.flags) for context in tasks.namespace.to_contexts()},
    "left out": [name for name, value in vars(tasks).items() if isinstance(value, Task) and id(value) not in named],
}))
"""


class Tasks(typing.NamedTuple):
    """What tasks.py defines: every task with its options, and the functions that the command line does not know."""

    options: dict[str, list[str]]
    left_out: list[str]


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    told = subprocess.run([sys.executable, "-c", TELL], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    return Tasks(found["options"], found["left out"])


def commands(page: Path) -> list[tuple[str, set[str]]]:
    """Every ``./inv TASK`` of a page, with the options that stand behind it."""
    found = re.findall(r"\./inv\s+([a-z][a-z-]*)([^`\n#&]*)", page.read_text())
    return [(task, set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", rest))) for task, rest in found]


def test_the_configuration_page_is_up_to_date() -> None:
    assert config_docs.PAGE.read_text() == config_docs.render(), "run: python -m toolchain.config_docs"


def test_every_setting_is_on_the_configuration_page_with_its_variable() -> None:
    page = config_docs.render()
    sections = typing.get_type_hints(Config)
    for section in dataclasses.fields(Config):
        for setting in dataclasses.fields(sections[section.name]):
            line = next(line for line in page.splitlines() if line.startswith(f"| `{section.name}.{setting.name}`"))
            assert f"`INVOKE_{section.name.upper()}_{setting.name.upper()}`" in line
            assert setting.metadata["help"].replace("|", "\\|") in line


def test_the_page_names_the_valid_values() -> None:
    page = config_docs.render()
    assert "| one of trixie, bookworm |" in page
    assert "| whole number: 1 to 65535 |" in page


def test_the_documented_defaults_are_valid() -> None:
    assert load_config(defaults()) == Config()


def test_writing_the_page_replaces_it_whole(tmp_path: Path) -> None:
    page = tmp_path / "configuration.md"
    page.write_text("an old page")
    config_docs.write(page)
    assert page.read_text() == config_docs.render()
    assert [path.name for path in tmp_path.iterdir()] == ["configuration.md"]


# ------------------------------------------------------------------------------------------------ tasks


def test_every_task_is_known_to_the_command_line(tasks: Tasks) -> None:
    assert tasks.left_out == []
    assert {"build-image", "upstream-tests", "test"} <= set(tasks.options)


def test_every_task_and_option_that_a_page_names_is_there(tasks: Tasks) -> None:
    named = [(page.relative_to(ROOT), *command) for page in PAGES for command in commands(page)]
    assert {"build-image", "upstream-tests", "registry"} <= {task for _, task, _ in named}
    assert [f"{page}: ./inv {task}" for page, task, _ in named if task not in tasks.options] == []
    assert [
        f"{page}: ./inv {task} {option}"
        for page, task, options in named
        for option in sorted(options - set(tasks.options[task]))
    ] == []


def test_the_readme_names_every_task(tasks: Tasks) -> None:
    assert set(tasks.options) - {task for task, _ in commands(ROOT / "README.md")} == set()


def test_every_tasks_output_is_on_a_page(tasks: Tasks) -> None:
    """Behind a prompt; but for what takes another machine or hours, and is told in words."""
    prompt = re.compile(r"^[$#] (?:sudo )?(?:\w+=\S+ )*\./inv ([a-z][a-z-]*)[^\n]*\n(?![$#] |```)", re.MULTILINE)
    printed = {task for page in PAGES for task in prompt.findall(page.read_text())}
    assert set(tasks.options) - printed == {"completion", "cuda-timing", "verify"}


# ------------------------------------------------------------------------------------------------ links, codes, steps


def anchors(page: Path) -> set[str]:
    """What a link to one of a page's headings ends with."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = {name: kind.exit_code for name, kind in vars(errors).items() if hasattr(kind, "exit_code")}
    row = re.compile(r"^\| (\d+(?:, \d+)*) \| ([A-Z]\w+(?:, [A-Z]\w+)*) \|", re.MULTILINE)
    named = [
        (name, int(code))
        for page in PAGES
        for numbers, names in row.findall(page.read_text())
        for code, name in zip(numbers.split(", "), names.split(", "), strict=True)
    ]
    assert ("ReferenceInvalid", 33) in named
    assert [(name, code) for name, code in named if codes.get(name) != code] == []


def test_the_architecture_page_has_every_step() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"[\w-]+", row)}
    with Context(load_config(defaults())) as context:
        assert {step.name for step in pipelines.main_job(context, with_workbench=True).steps} - named == set()


# ------------------------------------------------------------------------------------- output in the README


def shown(command: str) -> str:
    """What the README shows of a command's output."""
    blocks: list[str] = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if re.match(rf"\$ (?:\w+=\S+ )*{re.escape(command)}\n", block)]
    return block.partition("\n")[2]


@pytest.fixture(scope="module")
def steps() -> tuple[Step, ...]:
    """The main job's steps, by default."""
    with Context(load_config(defaults())) as context:
        return pipelines.main_job(context).steps


def test_the_steps_that_a_build_shows_are_those_of_the_main_job(steps: tuple[Step, ...]) -> None:
    text = shown("./inv build-image")
    began = re.findall(r"^    (.+): (?:runs|skipped) \(", text, re.MULTILINE)
    ran = re.findall(r"^==> (?!start docker)(.+)$", text, re.MULTILINE)
    images = re.findall(r"pitorch/(\w+):", text)
    assert began
    assert ran
    assert images
    assert {*began, *ran} - {step.title for step in steps} == set()
    assert set(images) - {step.name for step in steps} == set()


def test_the_steps_that_a_plan_shows_are_those_of_the_main_job(steps: tuple[Step, ...]) -> None:
    lines = [line for line in shown("./inv build-image --plan").splitlines() if line != "…"]
    planned = [re.match(r"(.+?)  +(?:runs|skipped)  +(.+)$", line) for line in lines]
    assert planned
    assert [line for line, found in zip(lines, planned, strict=True) if found is None] == []
    titles = [step.title for step in steps]
    assert [found[1] for found in planned if found and found[1] not in titles] == []
    waits = [names for found in planned if found for names in re.findall(r"(.+) will be made again", found[2])]
    assert {name for names in waits for name in names.split(", ")} - {step.name for step in steps} == set()


def test_of_the_device_suites_tests_only_those_are_shown_that_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A test that passes moves the bar, and no more."""
    line = "test_ops.py::test_one[product-0] "
    with progress.bar("device suite") as bar:
        display = suite._Display(bar)
        for outcome in ("PASSED", "FAILED"):
            display.show(f"{line}{outcome}    [  1%]")
    assert capsys.readouterr().err == f"    {line}FAILED\n"
    assert "PASSED" not in shown("./inv test-on-pi")
