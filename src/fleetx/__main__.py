"""The `fleetx` command; also `python -m fleetx`."""

import sys

from fleetx.extras import MissingExtraError
from fleetx.standard_streams import run_command


def main() -> None:
    """Run the command; if an extra is missing, print one line that names it."""
    run_command("fleetx", _run)


def _run() -> None:
    try:
        from fleetx.cli import app

        app()
    except MissingExtraError as error:
        print(f"fleetx: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
