"""Starts workers, waits for them, and tells which one failed first."""

import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

BANNER = "-----------  Configuration Arguments -----------"


def launch(command: Sequence[str], *, workers: int, environment: Mapping[str, str] | None = None) -> int:
    """Run a script (or `-m module`) with its arguments on `workers` processes; gives the exit code to pass on."""
    os.environ.update(environment or {})
    print(configuration({"nproc_per_node": workers, "script": " ".join(command)}), flush=True)
    # Workers that each start a thread per core would fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    with tempfile.TemporaryDirectory(prefix="fleetrun-") as scratch:
        return _launch(command, workers, scratch)


def _launch(command: Sequence[str], workers: int, scratch: str) -> int:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        # torch keeps workers' error files there, and would leave its own folder behind.
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fleetx.launch.worker", *command)
    except ChildFailedError as failure:
        return _explain(failure)
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def configuration(arguments: dict[str, object]) -> str:
    """The guide's block of arguments."""
    lines = [f"{name}: {value}" for name, value in arguments.items()]
    return "\n".join([BANNER, *lines, "-" * len(BANNER)])


def _explain(failure: ChildFailedError) -> int:
    rank, first = failure.get_first_failure()
    if first.exitcode < 0:
        number = -first.exitcode
        print(f"fleetrun: worker {rank} was ended by {signal.Signals(number).name}.", file=sys.stderr)
        return 128 + number
    print(
        f"fleetrun: worker {rank} failed with exit code {first.exitcode}; its error stands above.",
        file=sys.stderr,
    )
    return first.exitcode
