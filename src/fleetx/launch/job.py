"""A job: attempts to run all workers to their end, on one machine or on many."""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleetx.comm.beats import Beat, Manner
from fleetx.diagnosis.ending import Ending, root_cause, signal_name
from fleetx.diagnosis.progress import Progress, culprits, misses_the_start, stuck_ending
from fleetx.launch.crew import Attempt
from fleetx.launch.roster import Roster
from fleetx.launch.say import LaunchError, full_stop, named, say, show
from fleetx.launch.stopping import Stopping
from fleetx.launch.store import AttemptStore

# How long workers of a job that has failed may take to end by themselves.
_GRACE = 1.0
# How long the rest may take once one of the workers that were told to save and leave has failed.
_REST = 5.0
# How long the end of a worker may take to become known after that of others who lost it.
_CAUSE_COMES = 0.5
# How long a worker may take to end once it has met an error.
_SLOWEST_END = 2.5
_TICK = 0.05


@dataclass(frozen=True)
class JobSettings:
    """How a job deals with what goes wrong."""

    job_id: str
    most_restarts: int = 0
    progress_limit: float = 600.0
    start_limit: float = 1800.0
    stop_limit: float = 30.0


class Job:
    """Runs attempts until one succeeds, restarts are used up, or somebody asks to stop."""

    def __init__(self, settings: JobSettings, roster: Roster, stopping: Stopping) -> None:
        self.settings = settings
        self.roster = roster
        self.stopping = stopping
        # Whether the attempt ends because another machine has joined, and since when a worker is about to fail.
        self._is_reforming = False
        self._failing_since: float | None = None
        # What is to be said about workers that did not leave when they were asked to.
        self._forced = ""

    def run(self) -> int:
        """Gives the exit code to pass on, after telling the other machines."""
        code, sentence = 1, "the leading launcher has failed"
        try:
            code, sentence = self._run()
        except LaunchError as error:
            sentence = full_stop(str(error))
            say(sentence)
        finally:
            self.roster.end(code, sentence)
        return code

    def _run(self) -> tuple[int, str]:
        attempt = restarts = 0
        while True:
            self.roster.assemble(self.stopping)
            endings = [] if self.stopping.numbers else self._attempt(attempt)
            cause = root_cause(endings)
            if self.stopping.numbers:
                return self._stopped(cause)
            attempt += 1
            if cause is None and not self._is_reforming:
                return 0, ""
            if cause is None or (self._is_reforming and cause.is_consequence):
                say("the job goes on with all machines that are there.")
                continue
            restarts += 1
            if restarts > self.settings.most_restarts:
                explain(cause, endings)
                return cause.exit_code, cause.sentence()
            explain(cause, endings, f"restart {restarts} of {self.settings.most_restarts}")

    def _attempt(self, number: int) -> list[Ending]:
        """Start all workers, and watch them until none is left; gives how they ended."""
        self._is_reforming = False
        self._failing_since = None
        store = AttemptStore(self.roster.crews[0].address)
        self._start(number, store)
        endings: list[Ending] = []
        progress = Progress(self.settings.progress_limit, self.settings.start_limit)
        while self._ranks():
            endings += self._poll(_TICK)
            self.stopping.numbers += self.roster.stop_signals()
            if any(ending.failed for ending in endings) or self._somebody_fails_slowly():
                endings += self._wind_down(endings)
            elif self.stopping.numbers:
                first = self.stopping.numbers[0]
                # With the terminal's own "^C" before it, one line of 80 columns.
                say(f"{signal_name(first)}: the workers are asked to save and leave; a second ends them.")
                # A terminal that is closed (SIGHUP) is a reason to save as any other.
                endings += self._leave(signal.SIGINT if first == signal.SIGINT else signal.SIGTERM)
            elif self.roster.has_newcomers():
                self._is_reforming = True
                say("another machine has joined: the workers are asked to save and leave, to go on with it.")
                endings += self._leave(signal.SIGTERM)
            else:
                endings += self._ended_for_standing_still(progress)
        return endings

    def _start(self, number: int, store: AttemptStore) -> None:
        crews = self.roster.crews
        homes = [crew.address for crew in crews for _ in range(crew.settings.workers)]
        first = 0
        for node, crew in enumerate(crews):
            crew.start(
                Attempt(
                    number=number,
                    first_rank=first,
                    world_size=len(homes),
                    node=node,
                    nodes=len(crews),
                    master=store.address,
                    port=store.port,
                    endpoints=[f"{home}:{store.port + rank}" for rank, home in enumerate(homes)],
                    job_id=self.settings.job_id,
                    most_restarts=self.settings.most_restarts,
                    interface=crew.interface,
                )
            )
            first += crew.settings.workers

    def _ranks(self) -> list[int]:
        return [rank for crew in self.roster.crews for rank in crew.ranks]

    def _beats(self) -> dict[int, Beat]:
        return {rank: beat for crew in self.roster.crews for rank, beat in crew.beats().items()}

    def _poll(self, wait: float) -> list[Ending]:
        """Who has ended. Machines that wait to be taken in hear from us meanwhile."""
        self.roster.keep_in_touch()
        crews = self.roster.crews
        return [ending for crew in crews for ending in crew.poll(wait / len(crews))]

    def _somebody_fails_slowly(self) -> bool:
        """Whether a worker has met its error a while ago, and still has not ended: its exit functions may hang."""
        if not any(crew.has_failing() for crew in self.roster.crews):
            self._failing_since = None
            return False
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since > _SLOWEST_END

    def _wind_down(self, endings: list[Ending]) -> list[Ending]:
        """Something failed: the others cannot go on without it."""
        if all(ending.rank != 0 for ending in endings if ending.failed):
            self.roster.crews[0].silence()
        more = self._poll(0.0)
        # A worker that lost another one may end before that one has: the cause is on its way.
        end = time.monotonic() + _CAUSE_COMES
        while self._ranks() and _only_consequences([*endings, *more]) and time.monotonic() < end:
            more += self._poll(_TICK)
        for crew in self.roster.crews:
            crew.signal(signal.SIGTERM)
        end = time.monotonic() + _GRACE
        while self._ranks() and time.monotonic() < end:
            more += self._poll(_TICK)
        return more + self._kill()

    def _kill(self) -> list[Ending]:
        for crew in self.roster.crews:
            crew.kill()
        endings: list[Ending] = []
        while self._ranks():
            endings += self._poll(_TICK)
        return endings

    def _leave(self, number: int) -> list[Ending]:
        """Workers save and leave; those that take too long are ended, or all at once at a second signal."""
        self._forced = ""
        end = time.monotonic() + self.settings.stop_limit
        endings = self._held_back(end - self.settings.stop_limit / 2)
        for crew in self.roster.crews:
            crew.signal(number)
        why = f"after {self.settings.stop_limit:g} s (--stop_timeout)"
        has_failed = False
        while self._ranks() and time.monotonic() < end and len(self.stopping.numbers) < 2:
            endings += self._poll(_TICK)
            self.stopping.numbers += self.roster.stop_signals()
            if not has_failed and any(ending.code != 0 for ending in endings):
                has_failed = True
                if time.monotonic() + _REST < end:
                    end = time.monotonic() + _REST
                    why = f"{_REST:g} s after another one had failed"
        if len(self.stopping.numbers) > 1:
            why = f"at the second signal ({signal_name(self.stopping.numbers[1])})"
        if self._ranks():
            self._forced = ended_by_force(self._ranks(), why)
            say(self._forced)
        return endings + self._kill()

    def _held_back(self, end: float) -> list[Ending]:
        """Wait until each worker has shown whether it takes signals well; one that dies of it would hinder the others.

        Not before training has begun: nothing would be lost. Gives who has ended meanwhile.
        """
        endings: list[Ending] = []
        while _may_ask_yet(self._beats()) and not endings and time.monotonic() < end and len(self.stopping.numbers) < 2:
            endings += self._poll(_TICK)
            self.stopping.numbers += self.roster.stop_signals()
        return endings

    def _stopped(self, cause: Ending | None) -> tuple[int, str]:
        number = self.stopping.numbers[0]
        if cause is not None and not cause.is_consequence and not cause.asked:
            explain(cause, [cause])
        say(f"stopped by {signal_name(number)}.")
        # On the other machines this is all that is said.
        return 128 + number, f"stopped by {signal_name(number)}{'; ' if self._forced else ''}{self._forced}"

    def _ended_for_standing_still(self, progress: Progress) -> list[Ending]:
        """Name the worker that makes no progress, with its stack; it ends with the attempt."""
        now = time.monotonic()
        beats = self._beats()
        progress.note(beats, now)
        stalled = progress.stalled(beats, now)
        if not stalled or self._failing_since is not None:
            return []
        for crew in self.roster.crews:
            crew.ask_for_stacks()
        stacks = {rank: stack for crew in self.roster.crews for rank, stack in crew.stacks().items()}
        hosts = {rank: crew.settings.host for crew in self.roster.crews for rank in crew.ranks}
        longest = max(stalled.values())
        stalls = {
            rank: longest._replace(is_missed=True) if misses_the_start(rank, beats) else stalled.get(rank, longest)
            for rank in culprits(beats, stacks)
        }
        return [
            stuck_ending(rank, hosts[rank], stall, stacks[rank], now) for rank, stall in stalls.items() if rank in hosts
        ]


def _may_ask_yet(beats: Mapping[int, Beat]) -> bool:
    manners = {beat.manner for beat in beats.values()}
    if Manner.ASKS in manners:  # they run the same script, so the others will
        return manners != {Manner.ASKS}
    return Manner.UNDECIDED in manners and Manner.NEVER_ASKS not in manners


def _only_consequences(endings: Sequence[Ending]) -> bool:
    return all(ending.is_consequence for ending in endings if ending.failed)


def ended_by_force(ranks: Sequence[int], why: str) -> str:
    """What is said about workers that were asked to save and leave, and had not done so."""
    was, they = ("were", "they") if len(ranks) > 1 else ("was", "it")
    return f"{named(ranks)} had not left {why} and {was} ended; what {they} had not saved is lost."


def explain(cause: Ending, endings: Sequence[Ending], restart: str | None = None) -> None:
    """What went wrong, the cause last: the end of the worker's log, then one line that says it all."""
    show("", sys.stdout)
    victims = [e for e in endings if e.failed and e.is_consequence and e.rank != cause.rank]
    # A worker that left without an error has nothing to show: those that lost it do.
    _show_end(min(victims, key=lambda e: e.time) if cause.left_early and victims else cause)
    gone = {e.rank for e in endings if e.code == 0 and not e.failed and not e.by_us}
    if cause.left_early and len(gone) > 1:
        say(f"workers that had left without an error: {', '.join(map(str, sorted(gone)))}.")
    if victims:
        it = "they" if len({e.rank for e in victims}) > 1 else "it"
        say(f"{named({e.rank for e in victims})} failed because {it} lost worker {cause.rank}.")
    log = f" Its log: {cause.log}." if cause.log else ""
    then = f" This is {restart}." if restart else ""
    say(f"{full_stop(cause.sentence())}{log}{then}")


def _show_end(ending: Ending) -> None:
    """The last lines of a worker's log, or its stack; what worker 0 printed has been shown already."""
    if ending.lines and not ending.asked and (ending.rank != 0 or ending.stuck):
        if not ending.stuck:
            say(f"the end of {ending.log}:")
        show("".join(f"    {line}\n" for line in ending.lines), sys.stderr)
