"""Which machines take part in a job, now."""

import time
from collections.abc import Sequence

from fleetx.launch.crew import Crew
from fleetx.launch.gathering import Gathering
from fleetx.launch.remote import RemoteCrew
from fleetx.launch.say import LaunchError, say
from fleetx.launch.stopping import Stopping

# An elastic job that has enough machines waits a little for more.
_LAST_CALL = 5.0


class Roster:
    """This machine, which leads, and those that have joined."""

    def __init__(
        self,
        own: Crew,
        gathering: Gathering | None = None,
        *,
        least: int = 1,
        most: int = 1,
        wait: float = 0.0,
        expected: Sequence[str] = (),
    ) -> None:
        self.least, self.most = least, most
        self._own = own
        self._gathering = gathering
        self._wait = wait
        self._expected = list(expected)
        self._joined: list[RemoteCrew] = []
        self._lost: list[RemoteCrew] = []
        self._newcomers: list[RemoteCrew] = []
        self._has_run = False

    @property
    def crews(self) -> list[Crew | RemoteCrew]:
        """Of all machines; worker 0 is on the one that leads."""
        return [self._own, *self._joined]

    def assemble(self, stopping: Stopping) -> None:
        """Leave out machines that are lost, take in those that have joined, and wait until there are enough."""
        self._lost = [crew for crew in self._joined if crew.lost]
        self._joined = [crew for crew in self._joined if not crew.lost]
        begun = enough_since = time.monotonic()
        while not stopping.numbers:
            stopping.numbers += self.stop_signals()
            self._take_in()
            count, now = len(self.crews), time.monotonic()
            if count >= self.most:
                break
            if count < self.least:
                enough_since = now
                if now - begun > self._wait:
                    raise LaunchError(self._missing())
            # A job that goes on after a loss has no time to lose.
            elif now - enough_since > _LAST_CALL or self._has_run:
                break
            self._joined = [crew for crew in self._joined if not self._is_lost(crew)]
            if self._has_run:
                self.keep_in_touch(0.05)
            else:
                self._look(0.05)
        self._has_run = True

    def has_newcomers(self) -> bool:
        """Whether machines wait to be taken in, and there is room for them."""
        return bool(self._newcomers) and len(self.crews) < self.most

    def keep_in_touch(self, wait: float = 0.0) -> None:
        """While a job runs: answer machines that want to join, and let those that wait know that we are there."""
        if self._gathering is None:
            return
        try:
            self._look(wait)
        except LaunchError as error:  # it is told, and the job goes on without it
            say(str(error))
        for crew in self._newcomers:
            if crew.asked_to_stop:  # it has no part in the job, so it leaves alone
                crew.end(128 + crew.asked_to_stop[0], "this machine had no part in the job yet, and leaves")
        self._newcomers = [crew for crew in self._newcomers if not crew.lost]

    def stop_signals(self) -> list[int]:
        """Signals that launchers elsewhere got and passed on."""
        numbers = [number for crew in self._joined for number in crew.asked_to_stop]
        for crew in self._joined:
            crew.asked_to_stop = []
        return numbers

    def end(self, code: int, sentence: str) -> None:
        """The job is over, on all machines."""
        for crew in [*self._joined, *self._newcomers]:
            crew.end(code, sentence)
        if self._gathering is not None:
            self._gathering.close()
        self._own.close()

    def _look(self, wait: float) -> None:
        if self._gathering is None:
            time.sleep(wait)
        else:
            self._newcomers += self._gathering.newcomers(wait, [*self._joined, *self._newcomers])
        for crew in self._newcomers:
            crew.poll(0.0)  # keeps the connection alive, and notices if it breaks
        self._newcomers = [crew for crew in self._newcomers if not crew.lost]

    def _take_in(self) -> None:
        room = self.most - len(self.crews)
        here = [crew for crew in self._newcomers if not crew.lost]
        self._joined += here[:room]
        self._newcomers = here[room:]
        # Numbers that were given count, then the order of joining.
        self._joined.sort(key=lambda crew: self.most if crew.node is None else crew.node)

    def _is_lost(self, crew: RemoteCrew) -> bool:
        crew.poll(0.0)
        if crew.lost:
            say(f"host {crew.settings.host} ({crew.address}) is lost: {crew.lost}.")
        return bool(crew.lost)

    def _missing(self) -> str:
        here = [crew.address for crew in self.crews]
        ranks = {crew.node for crew in self._joined} | {0}
        named = [f"{crew.settings.host} ({crew.address}), which was lost" for crew in self._lost]
        if not named:
            named = [address for address in self._expected if address not in here]
        if not named and all(crew.node is not None for crew in self._joined):
            named = [f"the one with --rank {rank}" for rank in range(self.least) if rank not in ranks]
        missing = f"missing: {', '.join(named)}" if named else f"{self.least - len(here)} missing"
        return (
            f"{len(here)} of {self.least} machines have joined within {self._wait:g} s ({', '.join(here)}); {missing}. "
            "Start fleetrun on every machine with the same --master, check the network between them, or wait longer "
            "with --join_timeout."
        )
