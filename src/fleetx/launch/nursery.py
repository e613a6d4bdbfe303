"""A process that has imported torch once, and becomes the workers of one host by forking.

Importing torch takes seconds of processor time in each worker. Here a host pays once, and a restart takes no import at
all. The process does nothing but import, fork and report, has no threads of its own, and never touches a device, so
there is nothing that a fork could break.

The launcher and the nursery talk over a socket pair in JSON. When the launcher is gone, however it went, the socket
closes and the nursery ends all workers with everything they have started; if it was stopped (SIGSTOP), the kernel lets
it go on for that. When the nursery is gone, the kernel ends the workers, and the launcher what they have started.
"""

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetx.launch import worker
from fleetx.launch.output import TROUBLE, note_trouble
from fleetx.launch.parting import adopt_orphans, die_with_parent, end_children, go_on_without_parent

MOST_BYTES = 1 << 20
# What a terminal or a batch system sends to all: the launcher gets it, and passes it on.
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Orders:
    """One worker to be: its command, what is added to the environment, and the file for all that it prints.

    Without a log it prints where the launcher does. `fresh` workers import torch themselves.
    """

    rank: int
    command: list[str]
    environment: dict[str, str]
    log: str | None
    fresh: bool = False


@dataclass
class _Brood:
    """The workers that live."""

    ranks: dict[int, int] = field(default_factory=dict)  # by process id

    def signal(self, number: int, ranks: list[int], group: bool) -> None:
        for pid, rank in self.ranks.items():
            if rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number) if group else os.kill(pid, number)


def main() -> None:
    """Serve the launcher at the other end of the socket whose number is the first argument."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    if "warm" in sys.argv[3:]:
        _import_what_torch_puts_off()
    following = serve(launcher)
    if following is None:
        left = end_children()
        shutil.rmtree(sys.argv[2], ignore_errors=True)  # the launcher's scratch folder, if it could not do so itself
        os._exit(1 if left else 0)  # there is nothing to take apart, and somebody waits
    _reseed()
    worker.run_and_leave(following.command)


def serve(launcher: socket.socket) -> Orders | None:
    """Fork workers as told. Returns the orders in each new worker, and None here when the launcher is gone."""
    go_on_without_parent()  # from here on its end is noticed by the socket, and the workers are ended properly
    adopt_orphans()
    woken = _wake_on_child()
    brood = _Brood()
    _send(launcher, {"ready": os.getpid()})
    while True:
        readable, _, _ = select.select([launcher, woken], [], [])
        if woken in readable:
            os.read(woken.fileno(), 4096)
            _report_ended(launcher, brood)
        if launcher in readable:
            message = launcher.recv(MOST_BYTES)
            if not message:
                signal.set_wakeup_fd(-1)  # it ends with this function, and children are still to end
                return None
            told = json.loads(message)
            if "signal" in told:
                brood.signal(told["signal"], told["ranks"], told["group"])
            else:
                orders = Orders(**told)
                if _forked(orders, brood, launcher):
                    launcher.close()
                    woken.close()
                    return orders


def _forked(orders: Orders, brood: _Brood, launcher: socket.socket) -> bool:
    """Fork; true in the new worker, which is then ready to run its command."""
    nursery = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that comes before the worker is ready for it waits until it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    with warnings.catch_warnings():
        # numpy may have made threads for its matrix products; these stop and start again around a fork by themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the worker does the same: one comes first
            os.setpgid(pid, pid)
        brood.ranks[pid] = orders.rank
        _send(launcher, {"started": orders.rank, "pid": pid})
        return False
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    die_with_parent(nursery)
    _redirect(orders)
    os.environ.update(orders.environment)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    if orders.fresh:
        os.execv(sys.executable, [sys.executable, "-m", "fleetx.launch.worker", *orders.command])
    return True


def _redirect(orders: Orders) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if orders.log is not None:
        file = _opened(orders.log, orders.environment.get(TROUBLE))
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def _opened(log: str, trouble: str | None) -> int:
    """The log, or nothing at all where it cannot be made: a disk that is full must not keep a worker from its work."""
    try:
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        if trouble is not None:
            note_trouble(Path(trouble), error)
        return os.open(os.devnull, os.O_WRONLY)


def _import_what_torch_puts_off() -> None:
    """torch imports its compiler when the first optimizer is made, which takes as long as all the rest."""
    for name in ("torch._dynamo", "fleetx.memory"):
        importlib.import_module(name)


def _reseed() -> None:
    """Python draws anew in a forked process by itself, numpy does not."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _wake_on_child() -> socket.socket:
    """Readable when a child has ended."""
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, waking = socket.socketpair()
    woken.setblocking(False)
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)
    return woken


def _report_ended(launcher: socket.socket, brood: _Brood) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid not in brood.ranks:
            continue  # a grandchild whose parent is gone
        rank = brood.ranks.pop(pid)
        # What the worker has started goes with it: it may hold locks, ports and memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not brood.ranks:
            end_children()  # what has left its group too
        code = os.waitstatus_to_exitcode(status)
        _send(launcher, {"ended": rank, "pid": pid, "code": code, "time": time.monotonic()})


def _send(launcher: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed when reading
        launcher.send(json.dumps(message).encode())
