"""The `fleetrun` command; also `python -m fleetx.launch`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fleetx.launch.devices import parse_devices
from fleetx.launch.run import launch


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers and exit as they do."""
    parser = argparse.ArgumentParser(
        prog="fleetrun",
        description="Start a training script on several worker processes of this machine.",
        epilog="example: fleetrun --nproc_per_node 2 train.py --lr 0.1",
    )
    parser.add_argument(
        "--nproc_per_node", type=_count, metavar="N", help="worker processes to start (as many as devices, else 1)"
    )
    parser.add_argument(
        "--devices",
        "--gpus",
        type=parse_devices,
        metavar="LIST",
        help="one worker per device: GPU numbers such as 0,1, or cpu,cpu to run on the host",
    )
    parser.add_argument("script", help="the Python script that each worker runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if not Path(options.script).is_file():
        parser.error(f"the script {options.script!r} does not exist (looked in {Path.cwd()}).")
    workers = options.nproc_per_node or (len(options.devices.names) if options.devices else 1)
    if options.devices and workers != len(options.devices.names):
        parser.error(f"--nproc_per_node {workers} contradicts --devices {options.devices}: leave one of them out.")
    environment = options.devices.environment() if options.devices else {}
    sys.exit(launch([options.script, *options.script_args], workers=workers, environment=environment))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


if __name__ == "__main__":
    main()
