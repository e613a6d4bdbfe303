"""Starts real jobs: worker processes under fleetrun, torchrun, or alone."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def start(script, *args, workers=1, launcher="fleetrun", timeout=500, env=None, check=True, options=()):
    """Run `script` on `workers` processes; gives the completed process with its output as text."""
    if launcher == "fleetrun" and "--log_dir" not in options:
        with tempfile.TemporaryDirectory() as logs:
            options = [*options, "--log_dir", logs]
            return start(script, *args, workers=workers, timeout=timeout, env=env, check=check, options=options)
    command = [sys.executable]
    if launcher == "fleetrun":
        command += ["-m", "fleetx.launch", "--nproc_per_node", str(workers), *map(str, options)]
    elif launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(workers)]
    else:
        assert workers == 1
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        # A machine with one GPU runs all jobs too: most of them train on the host.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FLEETX_SHARE_GPUS": "1", **(env or {})},
    )
    if check and done.returncode:
        raise AssertionError(f"the job ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done
