"""Addresses and network interfaces of this machine."""

import fcntl
import ipaddress
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
            return not _names_many(trying.getsockname()[0])
    except OSError:
        return False


def resolved(option: str, host: str) -> str:
    """The address of a host that an option names."""
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = " Machines meet at IPv4 addresses, such as 10.0.0.1." if ":" in host else ""
        raise LaunchError(f"{option}: the host {host!r} is not known ({reason}).{hint}") from error
    if kind := _names_many(address):
        raise LaunchError(
            f"{option} must be the address of one machine, and {host!r} is {kind}. Give an address that the first "
            "machine has and the others can reach, such as 10.0.0.1 (`ip addr` lists them), on all machines."
        )
    return address


def _names_many(address: str) -> str:
    """What an address is that no single machine has; empty if one can."""
    number = ipaddress.IPv4Address(address)
    if int(number) >> 24 == 0:  # 0.0.0.0, and the network that it belongs to
        return f"{address}, which means all interfaces of a machine"
    if number.is_multicast:
        return f"{address}, a multicast address"
    if _is_broadcast(address):
        return f"{address}, a broadcast address"
    return f"{address}, a reserved address" if number.is_reserved else ""


def _is_broadcast(address: str) -> bool:
    """Of all networks, or of one that this machine is in: the kernel lets no ordinary socket send there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except PermissionError:
            return True
        except OSError:  # no way there
            return False
    return False


def require_reachable(host: str, address: str) -> None:
    """Raise if a name means this machine to itself alone: many systems give their own name an address of loopback."""
    if address.startswith("127.") and host not in (address, "localhost"):
        raise LaunchError(
            f"--master must be an address that all machines can reach, and {host!r} is {address} on this one. Give the "
            "address itself, such as 10.0.0.1, on all machines."
        )
