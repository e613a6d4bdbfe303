"""The `fleetrun` command; also `python -m fleetx.launch`."""

import sys
from collections.abc import Sequence

from fleetx.launch.options import parse
from fleetx.launch.run import run


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers and exit as they do."""
    sys.exit(run(parse(arguments)))


if __name__ == "__main__":
    main()
