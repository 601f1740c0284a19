"""A process that releases a place if the task that holds it is killed (``python -m device.lab.release``).

If a client is killed, labgrid's coordinator does not release the client's place. The task therefore starts this process
before it acquires a place. The process waits for the end of its standard input, which the kernel closes when the task
exits for any reason, including SIGKILL. If the task has released the place, it writes to this input, and the process
exits without loading labgrid. The process runs in a separate session and ignores Ctrl-C. If the coordinator does not
respond, the process tries again.
"""

from __future__ import annotations

import signal
import sys
import time

LIMIT_S = 600.0
"""The maximum time during which the process tries to reach the coordinator."""

_PAUSE_S = 2.0


def main(address: str, place: str, holder: str, token: str) -> int:
    """Cancel the reservation and release the place, retrying for up to ``LIMIT_S`` seconds. Return the exit status."""
    from device.lab.coordinator import Coordinator
    from toolchain.errors import NetworkUnreachable, UserError

    coordinator = Coordinator(address)
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            coordinator.give_back(place, holder, token)
        except NetworkUnreachable as fault:
            if time.monotonic() > deadline:
                print(fault, file=sys.stderr)
                return fault.exit_code
            time.sleep(_PAUSE_S)
        except UserError as fault:
            print(fault, file=sys.stderr)
            return fault.exit_code
        else:
            return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.read():
        sys.exit(main(*sys.argv[1:]))
