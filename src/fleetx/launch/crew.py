"""The workers of one host, as their launcher sees them."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fleetx import boxes
from fleetx.comm import beats
from fleetx.comm.beats import Beat
from fleetx.cores import cores
from fleetx.diagnosis.ending import Ending
from fleetx.diagnosis.stacks import Stack, is_stopped, read_stack
from fleetx.launch import hatch, worker
from fleetx.launch.logs import Relay, WorkerLog
from fleetx.launch.nursery import MOST_BYTES, Orders
from fleetx.launch.oom import OutOfMemory
from fleetx.launch.output import TROUBLE
from fleetx.launch.parting import adopt_orphans, children_at_a_glance, end_children, has_ended
from fleetx.launch.readable import readable
from fleetx.launch.say import LaunchError, say, show
from fleetx.launch.secret import VARIABLE

CONSOLE_NAME = "[worker 0] "
# Seconds that the nursery has to end all workers; if it cannot, the kernel does when it is killed.
_OBEYS = 10.0


@dataclass(frozen=True)
class Attempt:
    """What a host must know to start its share of the workers, once."""

    number: int
    first_rank: int
    world_size: int
    node: int
    nodes: int
    master: str
    port: int
    endpoints: list[str]
    job_id: str
    most_restarts: int
    interface: str | None = None


@dataclass(frozen=True)
class CrewSettings:
    """What stays the same over all attempts."""

    command: list[str]
    workers: int
    host: str
    log_dir: Path | None = Path("log")
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    warm: bool = True


@dataclass
class _Living:
    """A worker that was started and has not ended."""

    pid: int | None
    log: WorkerLog | None
    memory: OutOfMemory
    told_at: float | None = None  # when it was told to end, if it was


class Crew:
    """Starts, signals and watches the workers of this host."""

    def __init__(self, settings: CrewSettings, address: str, interface: str | None) -> None:
        self.settings = settings
        self.address = address
        self.interface = interface
        # For files that the workers and we share, from the first start on: the process that is started then removes
        # the folder if this one is killed.
        self._scratch: Path | None = None
        self._beats: beats.BeatReader
        self._nursery: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._is_stopped = False
        self._killed_at: float | None = None
        # Children that this process has while the nursery lives. Orphans of the job are the nursery's until it dies.
        self._not_ours: set[int] = set()
        self._adopted_before = False
        self._living: dict[int, _Living] = {}
        self._relay: Relay | None = None
        self._attempt: Attempt | None = None
        # Whether it has been said that the logs of the workers cannot be written.
        self._has_told_of_trouble = False

    # What the job asks for -----------------------------------------------------------------------------

    def start(self, attempt: Attempt) -> None:
        """Start all workers of this host."""
        if self._nursery is None:
            self._start_nursery()
        self._attempt = attempt
        self._killed_at = None
        self._renew_folder()
        if attempt.number == 0:
            show(f"{boxes.envs_box(worker.fleet_environment(self._environment(attempt, 0)))}\n", sys.stdout)
        for local in range(self.settings.workers):
            self._start_worker(attempt, local)

    @property
    def ranks(self) -> list[int]:
        """The workers that live."""
        return list(self._living)

    def signal(self, number: int) -> None:
        """Pass a signal on to the workers, for them to end."""
        self._end_with(number, group=False)

    def kill(self) -> None:
        """End the workers and all they have started, at once."""
        self._killed_at = self._killed_at or time.monotonic()
        self._end_with(signal.SIGKILL, group=True)

    def beats(self) -> dict[int, Beat]:
        """How far each living worker has come."""
        return {rank: self._beat_of(rank) for rank in self._living}

    def has_failing(self) -> bool:
        """Whether a living worker has said what its error is, and is about to end."""
        words = [_word(self._report_file(rank)) for rank in self._living]
        return any(word and word.get("code", 1) != 0 for word in words)

    def ask_for_stacks(self) -> None:
        """Nothing to do: those of this host come at once."""

    def stacks(self, wait: float = 2.0) -> dict[int, Stack]:
        """Where each living worker is just now."""
        stopped = {rank: is_stopped(living.pid) for rank, living in self._living.items()}
        self._tell({"signal": worker.STACK_SIGNAL, "ranks": self.ranks, "group": False})
        # A stopped process handles no signal: it must go on for the moment that its stack takes.
        self._tell({"signal": signal.SIGCONT, "ranks": self.ranks, "group": False})
        end = time.monotonic() + wait
        return {
            rank: read_stack(self._stack_file(rank), living.pid, stopped[rank], end)
            for rank, living in self._living.items()
        }

    def poll(self, wait: float) -> list[Ending]:
        """Who has ended; looks for at most `wait` seconds."""
        endings = []
        self._let_nursery_go_on()
        self._know_not_ours()
        if self._killed_at is not None and self._nursery and time.monotonic() - self._killed_at > _OBEYS:
            self._nursery.kill()
        if self._socket is not None and readable([self._socket], wait):
            endings = self._receive(self._socket)
        elif self._socket is None:
            time.sleep(wait)
        if self._relay is not None:
            self._relay.pump()
        self._tell_of_lost_lines()
        return endings

    def silence(self) -> None:
        """Show no more of what worker 0 prints: what it says now are consequences, and its log has them."""
        if self._relay is not None:
            self._relay.pump(whole=False)
        self._relay = None

    def close(self) -> None:
        """End everything that is left."""
        if self._socket is not None:
            self._socket.close()  # the nursery then ends the workers, and itself
            self._socket = None
        if self._nursery is not None:
            self._let_nursery_go_on()
            try:
                self._nursery.wait(_OBEYS)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
            self._bury_nursery(self._nursery)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def fileno(self) -> int:
        """For waiting on several things at once."""
        return -1 if self._socket is None else self._socket.fileno()

    def _end_with(self, number: int, group: bool) -> None:
        now = time.monotonic()
        for living in self._living.values():
            living.told_at = living.told_at or now
        if self._nursery is not None and not self._is_ready:
            self._nursery.kill()  # it still imports, and there is nobody yet who could handle a signal
        self._tell({"signal": number, "ranks": self.ranks, "group": group})

    # Starting ------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        if self._scratch is None:
            self._scratch = _temporary_folder()
            self._beats = beats.BeatReader(self._scratch / "beats", self.settings.workers)
        return self._scratch

    def _renew_folder(self) -> None:
        """For another attempt. What is as old as a long job may have been taken for rubbish: it gets a new folder."""
        if not (self._folder / "beats").exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._scratch = None
        assert self._folder.exists()  # it is made where it is asked for
        self._beats.reset()

    @property
    def _trouble(self) -> Path:
        """Where workers note that their logs cannot be written."""
        return self._folder / "log_trouble"

    def _start_nursery(self) -> None:
        environment = os.environ | self.settings.environment
        environment.pop(VARIABLE, None)  # of no use to workers, also where this job has not asked for it
        # Workers that each start a thread per core would fight over the cores.
        environment.setdefault("OMP_NUM_THREADS", str(cores().share(self.settings.workers)))
        self._not_ours = children_at_a_glance()
        self._adopted_before = adopt_orphans()
        # Worth its time where more than one worker is going to be made.
        warm = ["warm"] if self.settings.warm and not self.settings.fresh else []
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._nursery = subprocess.Popen(
                    [sys.executable, hatch.__file__, str(os.getpid()), str(theirs.fileno()), str(self._folder), *warm],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
                )
        except OSError as error:
            raise LaunchError(
                f"the process that starts the workers cannot be started ({error.strerror}): raise the limits on open "
                "files and processes (`ulimit -a` shows them), or free memory."
            ) from error
        self._is_ready = False

    def _start_worker(self, attempt: Attempt, local: int) -> None:
        rank = attempt.first_rank + local
        title = f"job {attempt.job_id}, attempt {attempt.number}"
        log = WorkerLog(self.settings.log_dir or self._folder, rank, title, first=attempt.number == 0)
        shown = rank == 0 and self.settings.log_dir is None
        if rank == 0 and not shown:
            self._relay = Relay(log, CONSOLE_NAME)
        for file in (self._report_file(rank), self._stack_file(rank), self._error_file(rank)):
            file.unlink(missing_ok=True)
        orders = Orders(
            rank=rank,
            command=self.settings.command,
            environment=self._environment(attempt, local) | ({} if shown else {TROUBLE: str(self._trouble)}),
            log=None if shown else str(log.path),
            fresh=self.settings.fresh,
        )
        self._living[rank] = _Living(None, None if shown else log, OutOfMemory())
        self._tell(asdict(orders))

    def _environment(self, attempt: Attempt, local: int) -> dict[str, str]:
        rank = attempt.first_rank + local
        ours = {
            "RANK": rank,
            "WORLD_SIZE": attempt.world_size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self.settings.workers,
            "GROUP_RANK": attempt.node,
            "GROUP_WORLD_SIZE": attempt.nodes,
            "MASTER_ADDR": attempt.master,
            "MASTER_PORT": attempt.port,
            # torchrun calls workers of one kind a role, and has one.
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": attempt.world_size,
            "TORCHELASTIC_ERROR_FILE": self._error_file(rank),
            # torch's words for a store that the launcher holds, and for a job that is restarted.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": attempt.job_id,
            "TORCHELASTIC_RESTART_COUNT": attempt.number,
            "TORCHELASTIC_MAX_RESTARTS": attempt.most_restarts,
            "PADDLE_TRAINER_ENDPOINTS": ",".join(attempt.endpoints),
            beats.FILE: self._beats.place(local),
            worker.REPORT: self._report_file(rank),
            worker.STACK: self._stack_file(rank),
        }
        if attempt.interface:
            ours |= {
                name: attempt.interface
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
                if name not in os.environ
            }
        return {name: str(value) for name, value in ours.items()}

    # Hearing -------------------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            return
        self._let_nursery_go_on()
        data = json.dumps(message).encode()
        try:
            self._socket.send(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # noticed when reading
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            words = sum(map(len, self.settings.command))
            raise LaunchError(
                f"what a worker is started with is too long for the system, with {words} characters of the script and "
                "its arguments: give long lists to the script in a file."
            ) from error

    def _receive(self, channel: socket.socket) -> list[Ending]:
        endings = []
        while readable([channel], 0):
            try:
                data = channel.recv(MOST_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                return endings + self._lost_nursery()
            message = json.loads(data)
            if "ready" in message:
                self._is_ready = True
            if "started" in message:
                living = self._living.get(message["started"])
                if living is not None:
                    living.pid = message["pid"]
                    living.memory = OutOfMemory(message["pid"])
            elif "ended" in message:
                endings.append(self._ended(message["ended"], message["code"], message["time"]))
        return endings

    def _ended(self, rank: int, code: int, moment: float) -> Ending:
        living = self._living.pop(rank)
        if rank == 0 and self._relay is not None:
            self._relay.pump(whole=False)
        word = _word(self._report_file(rank))
        known = word if "type" in word or code == 0 else _recorded(self._error_file(rank))
        told = living.told_at is not None
        if living.told_at is not None and word.get("code") == 0 and word["time"] > living.told_at:
            word = {}  # it left because it was told to
        if word and told and code < 0:
            code = word.get("code", 1)  # it had failed or left by itself before, and was slow to end
        return Ending(
            rank=rank,
            host=self.settings.host,
            code=code,
            time=word.get("time", moment),
            log=None if living.log is None else str(living.log.path),
            lines=[] if living.log is None else living.log.end(),
            error_type=known.get("type", ""),
            error=known.get("message", ""),
            out_of_memory=code == -signal.SIGKILL and not told and living.memory.has_struck(),
            by_us=told and not word,
            asked=self._beat_of(rank).signal if code == 0 and not told else 0,
        )

    def _beat_of(self, rank: int) -> Beat:
        assert self._attempt is not None
        return self._beats.read(rank - self._attempt.first_rank)

    def _lost_nursery(self) -> list[Ending]:
        """The process that starts workers is gone, and the kernel has ended the workers with it."""
        assert self._nursery is not None
        code = self._bury_nursery(self._nursery)
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        now = time.monotonic()
        return [self._ended(rank, code if code else -signal.SIGKILL, now) for rank in self.ranks]

    def _bury_nursery(self, nursery: subprocess.Popen[bytes]) -> int:
        """Wait for its end, and end what it has left, which is ours now; gives its exit code."""
        code = nursery.wait()
        self._nursery = None
        # One that ended well has left nothing, and this program may have children that are none of the job's.
        if code != 0 and (left := end_children(self._not_ours)):
            numbers = ", ".join(map(str, sorted(left)))
            say(f"of what the workers had started, these processes could not be ended: {numbers}. End them yourself.")
        adopt_orphans(self._adopted_before)
        return code

    def _know_not_ours(self) -> None:
        """Know the children of the program that we are a part of: started by it, or orphans of what it started."""
        if self._nursery is not None and (now := children_at_a_glance()) and not has_ended(self._nursery.pid):
            self._not_ours = now - {self._nursery.pid}

    def _let_nursery_go_on(self) -> None:
        """Resume a stopped nursery: while stopped, it neither obeys nor reports ended workers."""
        if self._nursery is None:
            return
        was_stopped, self._is_stopped = self._is_stopped, is_stopped(self._nursery.pid)
        if self._is_stopped and not was_stopped:
            say("the process that starts the workers was stopped (SIGSTOP or a debugger): it is told to go on.")
        if self._is_stopped:
            self._nursery.send_signal(signal.SIGCONT)

    def _tell_of_lost_lines(self) -> None:
        """Once: a disk that is full is no reason to end a job, and somebody should know."""
        if self._has_told_of_trouble or self._scratch is None or not self._trouble.exists():
            return
        self._has_told_of_trouble = True
        folder = self.settings.log_dir or self._folder
        reason = self._trouble.read_text(encoding="utf-8", errors="replace") or "no room"
        say(
            f"the logs of the workers, {folder}/workerlog.N, cannot be written ({reason}). Training goes on; what the "
            "workers print is lost until there is room: make some, or give another --log_dir next time."
        )

    def _report_file(self, rank: int) -> Path:
        return self._folder / f"report.{rank}"

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error.{rank}.json"

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stack.{rank}"


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="fleetrun-"))
    except OSError as error:
        raise LaunchError(
            f"a job needs a folder for temporary files ({error.strerror}): let TMPDIR name one that can be written to."
        ) from error


def _recorded(path: Path) -> dict[str, str]:
    """The error that torch's `@record` wrote in a worker's process: in one that is no script of ours, say."""
    message = _word(path).get("message")
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str):
        return {}
    match = re.match(r"([A-Za-z_][\w.]*): (.*)", message, re.DOTALL)
    return {"type": match[1], "message": match[2]} if match else {"type": "Error", "message": message}


def _word(path: Path) -> dict[str, Any]:
    """What a worker wrote about its end; nothing if it could not."""
    try:
        word = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return word if isinstance(word, dict) else {}
