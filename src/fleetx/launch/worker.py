"""What each worker process does first: Fleet's environment beside torch's, then the user's script."""

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fleetx.comm import beats
from fleetx.launch.output import forgive_lost_output

# Where a worker leaves word of how its script ended, and where it writes its stack when asked.
REPORT = "FLEETX_REPORT"
STACK = "FLEETX_STACK"
# Before the name of a program that is no Python, in place of a script.
PROGRAM = "--no_python"
# A real-time signal: scripts and batch systems use SIGUSR1 and SIGUSR2 for themselves.
STACK_SIGNAL = signal.SIGRTMIN + 5
# Of an error's message, the log has all of it.
_LONGEST_MESSAGE = 10_000


def fleet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Fleet's variables, derived from torch's. Endpoints name workers; only the first one's port is listened on."""
    rank, workers = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    endpoints = [f"{address}:{port + worker}" for worker in range(workers)]
    given = environment.get("PADDLE_TRAINER_ENDPOINTS")
    endpoints = given.split(",") if given else endpoints
    return {
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINERS_NUM": str(workers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "FLAGS_selected_gpus": environment.get("LOCAL_RANK", "0"),
        "PADDLE_TRAINER_ID": str(rank),
    }


def run(command: Sequence[str]) -> None:
    """Run the script, or `-m module`, as if Python had been started with it. The environment is complete by now."""
    ours = fleet_environment(os.environ)
    os.environ.update(ours)
    if command[0] == PROGRAM:
        _become(command[1:])
    forgive_lost_output()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a worker has printed is in its log, however it ends
    _answer_with_stacks()
    beats.open_from_environment()
    report, process = os.environ.pop(REPORT, None), os.getpid()
    try:
        _run_as_main(list(command))
        _leave_word(report, process, {"code": 0})
    except SystemExit as leaving:
        code = leaving.code or 0
        _leave_word(report, process, {"code": code if isinstance(code, int) else 1})
        raise
    except Exception as error:
        _leave_word(report, process, {"type": type(error).__name__, "message": str(error)[:_LONGEST_MESSAGE]})
        # Only the script's own part: how it was started is nobody's error.
        own = error.with_traceback(_own_part(error.__traceback__))
        # As Python has it: exit functions can tell by it that the program has failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(own), own, own.__traceback__
        sys.excepthook(type(own), own, own.__traceback__)
        sys.exit(1)


def _become(program: Sequence[str]) -> NoReturn:
    """Go on as a program that knows nothing of us: it has no heartbeat, and writes no stack when it is asked to."""
    report, _, _ = (os.environ.pop(name, None) for name in (REPORT, STACK, beats.FILE))
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored stays so
    try:
        os.execvp(program[0], list(program))
    except OSError as error:
        _leave_word(report, os.getpid(), {"type": type(error).__name__, "message": f"{program[0]}: {error.strerror}"})
        print(f"{program[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def run_and_leave(command: Sequence[str]) -> None:
    """The same in a forked process, which ends without taking apart everything that it got from its parent.

    What the script has asked for is done: threads are waited for, exit functions called, files flushed.
    """
    code = 1
    try:
        run(command)
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:  # nothing else is left that Python knows of
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # as Python does before it calls exit functions
        atexit._run_exitfuncs()
        _flush_all_files()
        os._exit(code)


def _flush_all_files() -> None:
    """Python closes files that a script has left open when it takes its modules apart; here nobody does."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or a disk that is full: as when Python ends
                thing.flush()


def _exit_code(value: object) -> int:
    """What Python makes of the argument of `sys.exit`."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


_left_behind: dict[str, Any] = {}
"""The script's own names: as in Python, what they hold is there until exit functions were called."""


def _run_as_main(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        _left_behind.update(runpy.run_module(command[1], run_name="__main__", alter_sys=True))
        return
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    _left_behind.update(runpy.run_path(command[0], run_name="__main__"))


def _answer_with_stacks() -> None:
    """On a crash the stack goes to the log; when the launcher asks, to a file that it reads."""
    faulthandler.enable()
    path = os.environ.pop(STACK, None)
    if path is not None:
        # Opened once and kept: the handler may run when nothing else can.
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # what is put back when Python ends must not end the process
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


def _leave_word(path: str | None, process: int, word: dict[str, object]) -> None:
    """Before anything is torn down: the others fail as soon as this worker's connections close."""
    if path is None or os.getpid() != process:  # a process that the script forked does not speak for it
        return
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        Path(path).write_text(json.dumps({"time": time.monotonic(), **word}), encoding="utf-8")


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    whole = trace
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace or whole


def main() -> None:
    """Be a worker that was started as a program of its own."""
    try:
        run(sys.argv[1:])
    except KeyboardInterrupt:  # somebody asked for it, and a traceback would tell nobody anything
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
