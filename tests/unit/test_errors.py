"""Tests of user errors: their texts and exit codes."""

from __future__ import annotations

from toolchain import errors
from toolchain.errors import CommandFailed, UserError


def classes() -> list[type[UserError]]:
    return [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, UserError)]


def test_exit_codes_are_few_and_not_used_by_other_programs() -> None:
    codes = {item.exit_code for item in classes()}
    assert all(10 <= code < 126 for code in codes)
    assert len(codes) <= 20


def test_the_text_has_expected_found_and_fix() -> None:
    fault = UserError("summary", expected="a", found="b", fix="c")
    assert str(fault) == "summary\n  expected: a\n  found:    b\n  fix:      c"
    assert str(UserError("summary", fix="c")) == "summary\n  fix:      c"
    assert str(UserError("summary")) == "summary"


def test_the_last_lines_of_a_command_end_the_text() -> None:
    fault = CommandFailed("cc failed", returncode=2, tail="line\n\n", found="exit status 2")
    assert str(fault) == "cc failed\n  found:    exit status 2\n--- last lines of its output ---\nline"
    assert fault.returncode == 2
    assert str(CommandFailed("cc failed", tail="\n")) == "cc failed"
