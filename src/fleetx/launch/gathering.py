"""The leading launcher waits for the other machines, and lets in only those that belong to the job."""

import contextlib
import errno
import platform
import select
import socket
import time
from typing import Any

import torch

from fleetx.launch.channel import Channel, ChannelClosedError, StrangerError
from fleetx.launch.remote import RemoteCrew
from fleetx.launch.say import LaunchError, say
from fleetx.version import __version__

_HANDSHAKE = 10.0


def versions() -> dict[str, str]:
    """What must be the same on all machines of a job."""
    return {"fleetx": __version__, "torch": torch.__version__, "python": platform.python_version()}


class Gathering:
    """Listens on the given address alone."""

    def __init__(self, address: str, port: int, secret: bytes, job_id: str) -> None:
        self.address, self.port = address, port
        self._secret = secret
        self._job_id = job_id
        try:
            self._listener = socket.create_server((address, port), backlog=64)
        except OSError as error:
            raise _cannot_listen(address, port, error) from error
        self._strangers: list[tuple[Channel, float]] = []
        self._joined: list[RemoteCrew] = []

    def newcomers(self, wait: float) -> list[RemoteCrew]:
        """Machines that have joined since the last call."""
        waiting = [self._listener, *(channel for channel, _ in self._strangers)]
        readable = select.select(waiting, [], [], wait)[0]
        if self._listener in readable:
            connection, _ = self._listener.accept()
            with contextlib.suppress(ChannelClosedError):
                self._strangers.append((Channel(connection, self._secret, leads=True), time.monotonic()))
        for entry in list(self._strangers):
            channel, since = entry
            try:
                messages = channel.receive(0)
                if messages:
                    self._strangers.remove(entry)
                    self._let_in(channel, messages[0]["join"])
                elif time.monotonic() - since > _HANDSHAKE:
                    raise StrangerError(f"{channel.peer} connected and said nothing")
            except ChannelClosedError as error:
                if isinstance(error, StrangerError):
                    say(f"a connection was refused: {error}.")
                channel.close()
                if entry in self._strangers:
                    self._strangers.remove(entry)
        # Kept until here: one that is refused, by an exception, must not take others with it.
        joined, self._joined = self._joined, []
        return joined

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()
        for channel, _ in self._strangers:
            channel.close()

    def _let_in(self, channel: Channel, joined: dict[str, Any]) -> None:
        wrong = _difference(joined)
        if joined["job_id"] not in (None, self._job_id):
            wrong = f"its --job_id is {joined['job_id']}, and this job is {self._job_id}"
        if wrong:
            with contextlib.suppress(ChannelClosedError):
                channel.send({"refused": f"{wrong}. Use the same on all machines."})
            channel.close()
            raise LaunchError(f"host {joined['host']} ({joined['address']}) cannot take part: {wrong}.")
        channel.send({"welcome": self._job_id})
        say(f"host {joined['host']} ({joined['address']}) has joined with {_count(joined['workers'])}.")
        self._joined.append(RemoteCrew(channel, joined))


def _difference(joined: dict[str, Any]) -> str:
    ours, theirs = versions(), joined["versions"]
    differing = [
        f"{name} {theirs.get(name)} there and {ours[name]} here" for name in ours if theirs.get(name) != ours[name]
    ]
    return "versions differ, " + ", ".join(differing) if differing else ""


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _cannot_listen(address: str, port: int, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"port {port} of {address} is in use by another program. If that is the first machine of this job, the "
            "others need --rank 1, 2, ...; if it is an earlier job or none of ours, end it, or give another port with "
            "--master HOST:PORT on all machines."
        )
    return LaunchError(f"cannot listen on {address}:{port}: {error.strerror}. Is it an address of this machine?")
