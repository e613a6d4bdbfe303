"""`python -m fleetx.checkpoint FOLDER`: reads every checkpoint in a folder and says which are whole."""

import argparse
import sys
from collections.abc import Sequence

from fleetx.checkpoint.errors import CheckpointError
from fleetx.checkpoint.inspecting import Inspected, survey


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each checkpoint, the newest first; 1 if one of them is damaged, 2 if there is no folder."""
    parser = argparse.ArgumentParser(
        prog="python -m fleetx.checkpoint",
        description="Read every byte of the checkpoints in a folder, and say which are whole.",
    )
    parser.add_argument("folder", help="the folder of a job's checkpoints, or one of them")
    folder = parser.parse_args(arguments).folder
    try:
        found = survey(folder)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{_line(one)}\n" for one in found) or f"no checkpoints in {folder}\n")
    return int(any(one.problem for one in found))


def _line(one: Inspected) -> str:
    if one.problem is not None or one.manifest is None:
        return f"{one.path.name}  DAMAGED  {one.problem}"
    size = sum(facts.size for facts in one.manifest.files.values()) / 2**20
    workers = "1 worker" if one.manifest.workers == 1 else f"{one.manifest.workers} workers"
    return f"{one.path.name}  whole  {size:,.1f} MiB  {workers}  {one.manifest.written['time']}"


if __name__ == "__main__":
    sys.exit(main())
