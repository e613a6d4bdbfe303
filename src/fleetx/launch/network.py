"""Addresses and network interfaces of this machine."""

import fcntl
import socket
import struct

from fleetx.launch.say import LaunchError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def host_name() -> str:
    """What people call this machine."""
    return socket.gethostname() or "this host"


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None if there is none, or no way to know."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def is_here(address: str) -> bool:
    """Whether this machine has the address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trying:
            trying.bind((address, 0))
    except OSError:
        return False
    return True


def resolved(option: str, host: str) -> str:
    """The address of a host that an option names."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise LaunchError(f"{option}: the host {host!r} is not known ({error.strerror}).") from error


def require_reachable(host: str, address: str) -> None:
    """Raise if a name means this machine to itself alone: many systems give their own name an address of loopback."""
    if address.startswith("127.") and host not in (address, "localhost"):
        raise LaunchError(
            f"--master must be an address that all machines can reach, and {host!r} is {address} on this one. Give the "
            "address itself, such as 10.0.0.1, on all machines."
        )
