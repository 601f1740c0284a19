"""``./inv lab log NAME``: a board's recorded events, from runs and ``./inv netboot``, in chronological order."""

from __future__ import annotations

from toolchain import board_events, lab_boards
from toolchain.config import Config
from toolchain.errors import UserError


def lines(config: Config, name: str) -> list[str]:
    """The events that this PC has recorded for a board, sorted by time. Raises UserError if no events are recorded."""
    if not lab_boards.NAME.fullmatch(name):
        raise UserError(
            "./inv lab log requires the name of a board",
            expected="a name that ./inv lab status lists",
            found=repr(name),
            fix="run ./inv lab log NAME, where NAME is the name of a board",
        )
    recorded = [
        board_events.of_netboot(config, name),
        *config.build_root.glob(f"*/lab*/{name}/**/events.jsonl"),  # for all targets, also from lab check and --shard
    ]
    events = [event for path in recorded for event in board_events.read(path)]
    if not events:
        boards = ", ".join(lab_boards.parse(row).name for row in config.lab.boards)
        raise UserError(
            f"no events for the board {name} are recorded on this PC",
            expected=f"the file {recorded[0]}, or the file lab/{name}/events.jsonl in a target's build folder",
            found=f"no recorded events; boards in lab.boards: {boards or 'none'}",
            fix=f"to record the power, console and login events, run ./inv test-on-pi --place={name}; to record the "
            "DHCP, TFTP and NFS activity of the boards in lab.boards, run ./inv netboot",
        )
    return [event.line() for event in sorted(events, key=lambda event: event.time)]
