"""What a command does when nobody reads its output, a disk is full, or a standard stream is closed.

The commands write through `run_command`, workers through `LossyFile`. Both show characters that the console's encoding
does not have as backslash escapes.
"""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

_FAILED = 2


class _OutputFile(io.FileIO):
    """The standard output. Remembers why it could not be written: libraries hide that."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write, or note the error and raise it."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class LossyFile(io.FileIO):
    """A file that loses what cannot be written, rather than failing. `note` is called with each reason."""

    def __init__(self, descriptor: int, note: Callable[[OSError], None] | None = None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._note = note

    def write(self, data: Any, /) -> int:
        """All of it counts as written."""
        try:
            return super().write(data)
        except OSError as error:
            if self._note is not None:
                self._note(error)
            return memoryview(data).nbytes


def run_command(name: str, command: Callable[[], object]) -> NoReturn:
    """Run a command of ours and exit as it does.

    When nobody reads the output any more the exit is quiet, with the code that a shell gives to SIGPIPE. Any other
    output that could not be written is an error, said in one line.
    """
    output = _prepare()
    code: Any = 0
    try:
        command()
    except SystemExit as leaving:
        code = leaving.code
    except KeyboardInterrupt:  # before there is a job that could be stopped
        code = 128 + signal.SIGINT
    except OSError as error:
        if output is None or error is not output.failure:
            raise
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    failure = None if output is None else output.failure
    if failure is not None:
        silence(sys.stdout)
        code = _exit_code(name, failure, code)
    sys.exit(code)


def silence(stream: TextIO) -> None:
    """Let what is still to come go nowhere, so that it does not fail again, nor when Python ends."""
    with contextlib.suppress(OSError, ValueError):  # no file of the system, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, _OutputFile):
        raw.failure = None


def rewrapped(before: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    """A text stream like `before` over another file."""
    before.flush()
    raw.name = before.name
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def _exit_code(name: str, failure: OSError, code: Any) -> Any:
    if failure.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    reason = os.strerror(failure.errno or 0)
    print(f"{name}: the standard output could not be written: {reason}.", file=sys.stderr)  # noqa: T201
    return code or _FAILED


def _prepare() -> _OutputFile | None:
    """Put our own files under the standard streams; gives that of the output, if nobody else has replaced it."""
    _open_closed_ones()
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = rewrapped(sys.stderr, LossyFile(sys.stderr.fileno()))
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout is not sys.__stdout__:
        return None
    output = _OutputFile(sys.stdout.fileno(), "w", closefd=False)
    sys.stdout = rewrapped(sys.stdout, output)
    return output


def _open_closed_ones() -> None:
    """Open what the caller has closed: the next file would get its number, and be written to by mistake.

    A closed output is replaced by a file that is for reading only, so that writing fails as it would have.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)
            os.set_inheritable(number, number < 3)
            stream = os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
