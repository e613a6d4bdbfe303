"""The store where the workers of one attempt find each other.

Each attempt has its own, on a port of its own: what an earlier attempt has written there could only mislead. The
launcher holds it, so it lives until all workers have ended, and it listens on the given address alone.
"""

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from fleetx.launch.say import LaunchError

# How long a connection of this machine to itself may take.
_ANSWERS = 3.0
# torch waits for 300 s if not told otherwise, and handles no signals meanwhile.
_STORE_ANSWERS = timedelta(seconds=30)


class AttemptStore:
    """A store that listens until it is dropped."""

    def __init__(self, address: str) -> None:
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as error:
            raise _unreachable(address, error) from error
        with listener:
            self.port = int(listener.getsockname()[1])
            _require_connection(listener, address, self.port)
            self._store = TCPStore(
                address,
                self.port,
                is_master=True,
                timeout=_STORE_ANSWERS,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )


def _require_connection(listener: socket.socket, address: str, port: int) -> None:
    """Raise if this machine cannot connect to itself: torch would try for minutes."""
    try:
        with socket.create_connection((address, port), timeout=_ANSWERS):
            listener.accept()[0].close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: OSError) -> LaunchError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return LaunchError(
        f"the workers meet at {address}, an address of this machine, and it cannot connect to itself there ({reason}). "
        "Bring the loopback interface up (`ip link set lo up`), and let firewalls pass what a machine sends to itself."
    )
