"""The leading launcher waits for the other machines, and lets in only those that belong to the job."""

import contextlib
import errno
import platform
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fleetx.launch.channel import Channel, ChannelClosedError, StrangerError
from fleetx.launch.messages import Joined, OddMessageError, understood
from fleetx.launch.readable import readable
from fleetx.launch.remote import RemoteCrew
from fleetx.launch.say import LaunchError, say
from fleetx.version import __version__

# How long a connection may take to show that it knows the secret, and how many may be about to do so. Strangers can
# open connections without end: each costs a file descriptor and memory.
_HANDSHAKE = 10.0
_MOST_STRANGERS = 128
# How many connections may wait to be accepted, and how many are at a time: a queue that is full keeps machines out.
_BACKLOG, _AT_ONCE = 1024, 64
# How many lines are said about connections from one address.
_MOST_LINES = 10


def versions() -> dict[str, str]:
    """What must be the same on all machines of a job."""
    return {"fleetx": __version__, "torch": torch.__version__, "python": platform.python_version()}


class Gathering:
    """Listens on the given address alone. `most` is the number of machines that the job may have."""

    def __init__(self, address: str, port: int, secret: bytes, job_id: str, most: int | None = None) -> None:
        self.address, self.port = address, port
        self._secret = secret
        self._job_id = job_id
        self._most = most
        try:
            self._listener = socket.create_server((address, port), backlog=_BACKLOG)
        except OSError as error:
            raise _cannot_listen(address, port, error) from error
        self._listener.setblocking(False)
        self._strangers: dict[Channel, float] = {}  # the oldest first, with the time when it connected
        self._refused: Counter[str] = Counter()
        self._joined: list[RemoteCrew] = []

    def newcomers(self, wait: float, here: Sequence[RemoteCrew] = ()) -> list[RemoteCrew]:
        """Machines that have joined since the last call; `here` are those that have before."""
        ready = readable([self._listener, *self._strangers], wait)
        if self._listener in ready:
            self._accept()
        for channel, since in list(self._strangers.items()):
            try:
                messages = channel.receive(0) if channel in ready else []
                if messages:
                    del self._strangers[channel]
                    self._let_in(channel, messages[0], here)
                elif time.monotonic() - since > _HANDSHAKE:
                    raise StrangerError(f"{channel.peer} connected and said nothing")
            except ChannelClosedError as error:
                self._refuse(channel, error)
        # Kept until here: one that is refused, by an exception, must not take others with it.
        joined, self._joined = self._joined, []
        return joined

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()
        for channel in self._strangers:
            channel.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # this process may open no more files
                self._make_room()
                return
            try:
                self._strangers[Channel(connection, self._secret, leads=True)] = time.monotonic()
            except ChannelClosedError:
                connection.close()
            if len(self._strangers) > _MOST_STRANGERS:
                self._make_room()

    def _make_room(self) -> None:
        """The address with the most connections loses its oldest one: it cannot keep others out."""
        if self._strangers:
            ((busiest, _),) = Counter(channel.host for channel in self._strangers).most_common(1)
            oldest = next(channel for channel in self._strangers if channel.host == busiest)
            self._refuse(oldest, StrangerError(f"{oldest.peer} is one of too many that say nothing"))

    def _refuse(self, channel: Channel, error: ChannelClosedError) -> None:
        channel.close()
        self._strangers.pop(channel, None)
        if not isinstance(error, StrangerError):
            return
        self._refused[channel.host] += 1
        if self._refused[channel.host] <= _MOST_LINES:
            last = self._refused[channel.host] == _MOST_LINES
            more = f" Nothing more is said about connections from {channel.host}." if last else ""
            say(f"a connection was refused: {error}.{more}")

    def _let_in(self, channel: Channel, message: dict[str, Any], here: Sequence[RemoteCrew]) -> None:
        joined: Joined | None = understood(channel.peer, message, {"join": Joined}).get("join")
        if joined is None:
            raise OddMessageError(f"{channel.peer} knows the secret, and did not say that it joins")
        who = f"host {joined.host} ({joined.address})"
        if wrong := self._difference(joined):
            _turn_away(channel, f"{wrong}. Use the same on all machines.")
            raise LaunchError(f"{who} cannot take part: {wrong}.")
        if wrong := self._taken(joined.rank, [*here, *self._joined]):
            _turn_away(channel, wrong)
            say(f"{who} cannot take part: {wrong}")
            return
        channel.send({"welcome": self._job_id})
        say(f"{who} has joined with {_count(joined.workers)}.")
        self._joined.append(RemoteCrew(channel, joined))

    def _difference(self, joined: Joined) -> str:
        """What must be the same on all machines and is not."""
        if joined.job_id not in (None, self._job_id):
            return f"its --job_id is {joined.job_id}, and this job is {self._job_id}"
        ours, theirs = versions(), joined.versions
        differing = [
            f"{name} {theirs.get(name)} there and {ours[name]} here" for name in ours if theirs.get(name) != ours[name]
        ]
        return "versions differ, " + ", ".join(differing) if differing else ""

    def _taken(self, rank: int | None, here: Sequence[RemoteCrew]) -> str:
        """Why a machine cannot have the number it was given."""
        if rank is None:
            return ""
        if self._most is not None and rank >= self._most:
            return f"its --rank is {rank}, and this job has {self._most} machines (--nnodes): use the same on all."
        if rank == 0:
            return "its --rank is 0, the number of the machine that leads: give it another one."
        for crew in here:
            if crew.node == rank and crew.has_sent_word():
                return (
                    f"its --rank {rank} is that of host {crew.settings.host} ({crew.address}), which has joined: give "
                    "each machine a --rank of its own."
                )
            if crew.node == rank and not crew.lost:
                crew.lose(f"it is silent, and another machine has joined with its --rank {rank}")
        return ""


def _turn_away(channel: Channel, why: str) -> None:
    with contextlib.suppress(ChannelClosedError):
        channel.send({"refused": why})
    channel.close()


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _cannot_listen(address: str, port: int, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"port {port} of {address} is in use by another program. If that is the first machine of this job, the "
            "others need --rank 1, 2, ...; if it is an earlier job or none of ours, end it, or give another port with "
            "--master HOST:PORT on all machines."
        )
    return LaunchError(
        f"cannot listen on {address}:{port}: {error.strerror}. Is it an address of this machine? The others "
        "need --rank 1, 2, ..."
    )
