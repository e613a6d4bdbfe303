"""Two workers that no launcher watches: each a process with torch's variables, and an output of its own."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.jobs.starting import ROOT
from tests.waiting import GUARD, wait_for


class Bare:
    """Workers that run `script` with the arguments; `note(rank)` waits for what one wrote into its file."""

    def __init__(self, script, folder, *args, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.folder = folder
        self.workers = []
        for rank in range(2):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path, "FLEETX_SHARE_GPUS": "1"}
            with self.log(rank).open("w") as log:
                command = [sys.executable, str(script), str(folder / f"note{rank}"), *map(str, args)]
                self.workers.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **own, **environment}
                    )
                )

    def log(self, rank):
        return Path(self.folder, f"log{rank}")

    def note(self, rank):
        file = self.folder / f"note{rank}"
        return wait_for(
            lambda: file.exists() and file.read_text(),
            lambda: f"note of worker {rank}, which said: {self.log(rank).read_text()}",
        )

    def ends(self):
        """The exit codes, and what each printed."""
        codes = [worker.wait(GUARD) for worker in self.workers]
        return codes, [self.log(rank).read_text() for rank in range(2)]

    def kill(self):
        for worker in self.workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
