"""One save beside training. What goes wrong there is raised at the next opportunity, and never forgotten."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

from fleetx.comm import beats

Result = TypeVar("Result")
# Seconds. A program that failed must end, since others wait for that; and a draft does no harm.
_PATIENCE = 3.0
_started: set["Background[Any]"] = set()
"""Those whose end nobody has waited for: `fleet.leave` waits for them, whoever has them."""


def wait_for_all() -> None:
    """Wait for all saves that this process has started; errors are logged, as at the end of the program."""
    for background in list(_started):
        background.end()


class Background(Generic[Result]):
    """Runs one task at a time in a thread. A program that ends without asking for the result waits for it.

    `waited` tells for how many seconds the task has been waiting for other workers.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    def start(self, task: Callable[[], Result]) -> None:
        """Begin a task; the one before must have been waited for."""
        assert self._thread is None
        atexit.register(self.end)  # until somebody waits, whoever forgets the checkpoints: errors must be told
        _started.add(self)

        def run() -> None:
            try:
                self._result = task()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="fleetx-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Result | None:
        """The result of the task in progress, None if there is none; raises what went wrong in it, once."""
        if self._thread is None:
            return None
        while self._thread.is_alive():
            self._join()
        self._thread = None
        atexit.unregister(self.end)
        _started.discard(self)
        error, result = self._error, self._result
        self._error = self._result = None
        if error is not None:
            raise error
        return result

    def _join(self) -> None:
        """For a moment: meanwhile this thread waits for other workers, if the task does."""
        assert self._thread is not None
        with beats.waiting() if self._waited() else nullcontext():
            self._thread.join(0.1)

    def end(self) -> None:
        """Wait at the end of the program, and tell of an error that nobody asked for."""
        if self._thread is None:
            return
        failed = getattr(sys, "last_value", None) is not None
        while self._thread.is_alive() and not (failed and self._waited() > _PATIENCE):
            self._join()
        if self._thread.is_alive():
            logging.getLogger("fleetx").error("an asynchronous save was given up, because the program failed.")
            sys.stdout.flush()
            sys.stderr.flush()
            # The thread waits inside of torch for other workers; leaving the usual way would abort the process, and
            # hide the code that it ends with.
            os._exit(1)
        elif self._error is not None:
            logging.getLogger("fleetx").error(
                f"the last asynchronous save failed, and nobody asked for its result: {self._error} "
                "Call checkpoints.wait() before the program ends."
            )
