"""Every fault that a user can fix: its words and its exit code."""

from __future__ import annotations

from collections import Counter

from toolchain import errors
from toolchain.errors import CommandFailed, UserError


def classes() -> list[type[UserError]]:
    found = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, UserError)]
    assert len(found) > 20
    return found


def test_no_two_faults_share_an_exit_code() -> None:
    codes = Counter(item.exit_code for item in classes())
    assert [code for code, count in codes.items() if count > 1] == []


def test_codes_that_belong_to_others_are_left_alone() -> None:
    for item in classes():
        assert "exit_code" in vars(item), f"{item.__name__} has none of its own"
        assert 10 <= item.exit_code < 126, item.__name__


def test_every_fault_says_what_it_is_for() -> None:
    assert [item.__name__ for item in classes() if not item.__doc__] == []


def test_the_text_is_what_was_expected_what_was_found_and_the_fix() -> None:
    fault = UserError("summary", expected="a", found="b", fix="c")
    assert str(fault) == "summary\n  expected: a\n  found:    b\n  fix:      c"
    assert str(UserError("summary", fix="c")) == "summary\n  fix:      c"
    assert str(UserError("summary")) == "summary"


def test_a_commands_last_lines_end_the_text() -> None:
    fault = CommandFailed("cc failed", returncode=2, tail="line\n\n", found="exit status 2")
    assert str(fault) == "cc failed\n  found:    exit status 2\n--- last lines of its output ---\nline"
    assert fault.returncode == 2
    assert str(CommandFailed("cc failed", tail="\n")) == "cc failed"
