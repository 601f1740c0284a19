"""The suite for ``./inv lab check``. If the test in this suite runs, the board has booted and accepts logins."""


def test_board_runs_a_test() -> None:
    """Pass if the board can run a test at all."""
