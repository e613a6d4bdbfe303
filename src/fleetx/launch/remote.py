"""The workers of a machine that has joined, as the leading launcher sees them."""

import time
from dataclasses import replace
from typing import Any

from fleetx.comm.beats import Beat
from fleetx.diagnosis.ending import LOST, Ending
from fleetx.diagnosis.stacks import Stack
from fleetx.launch.channel import Channel, ChannelClosedError
from fleetx.launch.crew import Attempt, CrewSettings
from fleetx.launch.messages import Joined, OddMessageError, understood
from fleetx.launch.stopping import STOPPING

# Machines that have joined send word every second; one that is silent for so long is lost.
SILENCE = 10.0
WORD_EVERY = 1.0
# What they say, and as what; a stop is for the signals that a launcher handles.
_WORDS = {
    "beats": dict[int, Beat],
    "failing": bool,
    "stacks": dict[int, Stack],
    "stop": int,
    "ended": Ending,
    "ago": float,
}


class RemoteCrew:
    """Passes orders on to the launcher there, and keeps what it reports."""

    def __init__(self, channel: Channel, joined: Joined) -> None:
        self.settings = CrewSettings(command=[], workers=joined.workers, host=joined.host)
        self.address = joined.address
        self.interface = joined.interface
        self.node = joined.rank
        self.lost = ""
        self.asked_to_stop: list[int] = []
        self._channel = channel
        self._ranks: list[int] = []
        self._beats: dict[int, Beat] = {}
        self._has_failing = False
        self._early: list[Ending] = []  # endings that came while we waited for something else
        self._stacks: dict[int, Stack] | None = None
        self._heard = self._told = time.monotonic()

    @property
    def ranks(self) -> list[int]:
        """The workers that live, as far as is known."""
        return list(self._ranks)

    def start(self, attempt: Attempt) -> None:
        """Start all workers there."""
        self._ranks = list(range(attempt.first_rank, attempt.first_rank + self.settings.workers))
        self._beats = {}
        self._has_failing = False
        self._send({"start": vars(attempt)})

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        self._send({"signal": number})

    def kill(self) -> None:
        """End the workers there."""
        self._send({"kill": True})

    def silence(self) -> None:
        """Nothing of it is shown here anyhow."""

    def beats(self) -> dict[int, Beat]:
        """How far each living worker had come when the launcher there last sent word."""
        return {rank: self._beats.get(rank, Beat()) for rank in self._ranks}

    def has_failing(self) -> bool:
        """Whether a worker there is about to end."""
        return self._has_failing

    def ask_for_stacks(self, wait: float = 2.0) -> None:
        """Let the launcher there find out where its workers are: all machines do so at the same time."""
        self._stacks = None
        self._send({"stacks": wait})

    def stacks(self, wait: float = 2.0) -> dict[int, Stack]:
        """Where each living worker is; empty stacks if the answer does not come."""
        end = time.monotonic() + wait + 1.0
        while self._stacks is None and not self.lost and time.monotonic() < end:
            self._early += self._listen(0.05)
        found = self._stacks or {}
        return {rank: found.get(rank, Stack()) for rank in self._ranks}

    def has_sent_word(self) -> bool:
        """Whether it is there, and has said so of late."""
        self._early += self._listen(0.0)
        return not self.lost and time.monotonic() - self._heard < 3 * WORD_EVERY

    def poll(self, wait: float) -> list[Ending]:
        """Who has ended there; all of them, if the machine is lost."""
        early, self._early = self._early, []
        endings = early + self._listen(wait)
        now = time.monotonic()
        if now - self._told > WORD_EVERY:
            self._told = now
            self._send({"ping": True})
        if not self.lost and now - self._heard > SILENCE:
            self.lose(f"it has been silent for {now - self._heard:.0f} s")
        return endings + self._lost_ones()

    def lose(self, why: str) -> None:
        """Go on without it; it notices, if it is there."""
        self.lost = why
        self._channel.close()

    def end(self, code: int, sentence: str) -> None:
        """Tell the launcher there that the job is over, and how it ended."""
        self._send({"end": code, "sentence": sentence})
        self._channel.close()
        self.lost = self.lost or "it was sent away"

    def _send(self, message: dict[str, Any]) -> None:
        if self.lost:
            return
        try:
            self._channel.send(message)
        except ChannelClosedError as error:
            self.lose(str(error))

    def _listen(self, wait: float) -> list[Ending]:
        if self.lost:
            return []
        endings: list[Ending] = []
        try:
            for message in self._channel.receive(wait):
                self._heard = time.monotonic()
                endings += self._take(message)
        except ChannelClosedError as error:
            self.lose(str(error))
        return endings

    def _take(self, message: dict[str, Any]) -> list[Ending]:
        words = understood(self._channel.peer, message, _WORDS)
        self._has_failing = words.get("failing", self._has_failing)
        self._beats = words.get("beats", self._beats)
        self._stacks = words.get("stacks", self._stacks)
        if "stop" in words:
            if words["stop"] not in STOPPING:
                raise OddMessageError(f"{self._channel.peer} asked to stop with signal {words['stop']}")
            self.asked_to_stop.append(words["stop"])
        ended: Ending | None = words.get("ended")
        if ended is None or ended.rank not in self._ranks:
            return []
        self._ranks.remove(ended.rank)
        # Clocks differ between machines, so it says how long ago that was.
        return [replace(ended, time=time.monotonic() - words.get("ago", 0.0))]

    def _lost_ones(self) -> list[Ending]:
        if not self.lost:
            return []
        ranks, self._ranks = self._ranks, []
        now = time.monotonic()
        return [Ending(rank, self.settings.host, LOST, now, lost_host=self.lost) for rank in ranks]
