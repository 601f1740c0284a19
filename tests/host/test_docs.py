"""Pages that are made from code are up to date."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from toolchain import config_docs
from toolchain.config import Config, defaults, load_config


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
