"""The store where the workers of one attempt find each other.

Each attempt has its own, on a port of its own: what an earlier attempt has written there could only mislead. The
launcher holds it, so it lives until all workers have ended, and it listens on the given address alone.
"""

import socket

from torch.distributed import TCPStore


class AttemptStore:
    """A store that listens until it is dropped."""

    def __init__(self, address: str) -> None:
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=1024) as listener:
            self.port = int(listener.getsockname()[1])
            self._store = TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
