"""The `fleetrun` command; also `python -m fleetx.launch`."""

import sys
from collections.abc import Sequence

from fleetx.launch.options import parse
from fleetx.launch.run import run
from fleetx.standard_streams import run_command


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers and exit as they do."""
    run_command("fleetrun", lambda: sys.exit(run(parse(arguments))))


if __name__ == "__main__":
    main()
