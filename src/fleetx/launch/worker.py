"""What each worker process runs first: Fleet's environment beside torch's, then the user's script."""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from fleetx import boxes


def fleet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Fleet's variables, derived from torch's. Endpoints name workers; only the first one's port is listened on."""
    rank, workers = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    endpoints = [f"{address}:{port + worker}" for worker in range(workers)]
    return {
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINERS_NUM": str(workers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "FLAGS_selected_gpus": environment.get("LOCAL_RANK", "0"),
        "PADDLE_TRAINER_ID": str(rank),
    }


def main() -> None:
    """Run the script, or `-m module`, as if Python had been started with it."""
    ours = fleet_environment(os.environ)
    os.environ.update(ours)
    if ours["PADDLE_TRAINER_ID"] == "0":
        print(boxes.envs_box(ours), flush=True)
    command = sys.argv[1:]
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
