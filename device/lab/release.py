"""A process that releases a place when the task that holds it exits (``python -m device.lab.release``).

labgrid's coordinator keeps a place for a client that was killed. The task therefore starts this process before it
acquires a place, and it is the only code that releases it: the kernel closes its standard input when the task exits for
any reason, including SIGKILL. It runs in a separate session and ignores Ctrl-C. While the coordinator does not respond,
it tries again.
"""

from __future__ import annotations

import signal
import sys
import time

LIMIT_S = 600.0
"""The maximum time for which it tries to reach the coordinator."""

_PAUSE_S = 2.0


def main(address: str, place: str, holder: str, token: str) -> int:
    """Wait for the end of the input, then release the place and cancel the reservation; returns the exit status."""
    from device.lab.coordinator import Coordinator
    from toolchain.errors import NetworkUnreachable, UserError

    coordinator = Coordinator(address)
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            coordinator.cancel(token)  # first: labgrid gives the next user a place that is released without reservation
            coordinator.release(place, holder)
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
    sys.stdin.read()
    sys.exit(main(*sys.argv[1:]))
