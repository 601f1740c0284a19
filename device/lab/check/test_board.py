"""The suite of ``./inv lab check``: a board that runs it has booted and can be logged in to."""


def test_board_runs_a_test() -> None:
    """Nothing else is checked."""
