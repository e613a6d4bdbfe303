"""A launcher that does not lead: it joins the one that does, and does with its own workers as it is told."""

import contextlib
import socket
import time
from dataclasses import asdict, replace
from typing import Any

from fleetx.diagnosis.ending import signal_name
from fleetx.launch.channel import Channel, ChannelClosedError
from fleetx.launch.crew import Attempt, Crew, CrewSettings
from fleetx.launch.gathering import versions
from fleetx.launch.messages import Joined, understood
from fleetx.launch.network import interface_of
from fleetx.launch.remote import SILENCE, WORD_EVERY
from fleetx.launch.say import LaunchError, full_stop, say
from fleetx.launch.stopping import Stopping

_TICK = 0.05
_TRY_EVERY = 0.5
# How long the leading machine may take to end the job after a second Ctrl-C here.
_PATIENCE = 5.0
# What the leading machine says, and as what.
_ANSWERS = {"refused": str, "welcome": str}
_ORDERS = {"start": Attempt, "signal": int, "kill": bool, "stacks": float, "end": int, "sentence": str}


def join(
    master: tuple[str, int],
    secret: bytes,
    settings: CrewSettings,
    *,
    rank: int | None,
    job_id: str | None,
    wait: float,
    stopping: Stopping,
) -> "Membership":
    """Find the leading launcher, which may not be there yet, and be let in."""
    name = f"{master[0]}:{master[1]}"
    end = time.monotonic() + wait
    why = ""
    while time.monotonic() < end and not stopping.numbers:
        try:
            connection = socket.create_connection(master, timeout=5.0)
            address = connection.getsockname()[0]
            channel = Channel(connection, secret, leads=False)
        except (OSError, ChannelClosedError) as error:
            why = getattr(error, "strerror", None) or str(error)
            time.sleep(_TRY_EVERY)
            continue
        interface = interface_of(address)
        joined = Joined(settings.host, settings.workers, address, interface, rank, job_id, versions())
        channel.send({"join": asdict(joined)})
        job = _welcome(channel, name)
        return Membership(channel, Crew(settings, address, interface), name, job)
    if stopping.numbers:
        raise LaunchError(f"stopped by {signal_name(stopping.numbers[0])} before the job began.")
    raise LaunchError(
        f"the leading machine at {name} was not there within {wait:g} s ({why}). Start fleetrun on it too, and check "
        "--master and the firewall."
    )


def _welcome(channel: Channel, name: str) -> str:
    end = time.monotonic() + SILENCE
    while time.monotonic() < end:
        try:
            messages = [understood(channel.peer, one, _ANSWERS) for one in channel.receive(1.0)]
        except ChannelClosedError as error:
            raise LaunchError(
                f"{name} did not let this machine in ({error}). The secret must be the same on all machines."
            ) from error
        for message in messages:
            if "refused" in message:
                raise LaunchError(f"{name} did not let this machine in: {message['refused']}")
            if "welcome" in message:
                return message["welcome"]
    raise LaunchError(f"{name} accepted a connection and said nothing: is there another program on that port?")


class Membership:
    """This machine's part in a job that another one leads."""

    def __init__(self, channel: Channel, crew: Crew, leader: str, job_id: str) -> None:
        self.job_id = job_id
        self._channel = channel
        self._crew = crew
        self._leader = leader
        self._heard = self._told = time.monotonic()
        self._passed_on = 0
        self._impatient_since: float | None = None
        self._end: tuple[int, str] | None = None

    def serve(self, stopping: Stopping) -> int:
        """Do as told until the job is over; gives the exit code. Raises if the leader is lost."""
        say(f"this machine has joined the job {self.job_id} at {self._leader}.")
        try:
            while self._end is None:
                self._listen()
                if self._end is None:
                    self._report()
                    self._pass_on(stopping)
        except ChannelClosedError as error:
            self._hear_last_words()
            if self._end is None:
                raise LaunchError(
                    f"the leading machine at {self._leader} is lost: {error}. The workers here were ended."
                ) from error
        finally:
            self._crew.close()
            self._channel.close()
        assert self._end is not None
        code, sentence = self._end
        if sentence:
            say(full_stop(sentence))
        return code

    def _listen(self) -> None:
        for message in self._channel.receive(_TICK):
            self._heard = time.monotonic()
            self._obey(understood(self._channel.peer, message, _ORDERS))
        if time.monotonic() - self._heard > SILENCE:
            raise ChannelClosedError(f"it has been silent for {time.monotonic() - self._heard:.0f} s")

    def _hear_last_words(self) -> None:
        """A leader that said how the job ended, and hung up: we may have noticed the latter first, when sending."""
        with contextlib.suppress(ChannelClosedError):
            for message in self._channel.receive(0.0):
                if "end" in message:
                    self._obey(understood(self._channel.peer, message, _ORDERS))

    def _obey(self, message: dict[str, Any]) -> None:
        crew = self._crew
        if "start" in message:
            crew.start(replace(message["start"], interface=crew.interface))
        elif "signal" in message:
            crew.signal(message["signal"])
        elif "kill" in message:
            crew.kill()
        elif "stacks" in message:
            stacks = crew.stacks(message["stacks"])
            self._channel.send({"stacks": {rank: stack.as_message() for rank, stack in stacks.items()}})
        elif "end" in message:
            self._end = (message["end"], message.get("sentence", ""))

    def _report(self) -> None:
        for ending in self._crew.poll(_TICK if self._crew.ranks else 0.0):
            ago = max(0.0, time.monotonic() - ending.time)
            self._channel.send({"ended": ending.as_message(), "ago": ago})
        now = time.monotonic()
        if now - self._told > WORD_EVERY:
            self._told = now
            self._channel.send({"beats": self._crew.beats(), "failing": self._crew.has_failing()})

    def _pass_on(self, stopping: Stopping) -> None:
        """Ctrl-C here stops the whole job; after a second one we do not wait for long, whatever the leader does."""
        for number in stopping.numbers[self._passed_on :]:
            say(f"{signal_name(number)}: the leading machine is told to stop the job.")
            self._channel.send({"stop": number})
        self._passed_on = len(stopping.numbers)
        if self._passed_on > 1:
            now = time.monotonic()
            self._impatient_since = self._impatient_since or now
            if now - self._impatient_since > _PATIENCE:
                first = stopping.numbers[0]
                self._end = (128 + first, f"stopped by {signal_name(first)}; the leading machine did not answer")
