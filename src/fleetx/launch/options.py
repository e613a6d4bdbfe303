"""The options of `fleetrun`: their meaning, their defaults, and what is wrong with them."""

import argparse
import difflib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fleetx.cores import cores
from fleetx.launch.devices import Devices, parse_devices
from fleetx.launch.network import LOOPBACK, is_here
from fleetx.launch.worker import PROGRAM
from fleetx.own_gpu import SHARE, may_share

DEFAULT_PORT = 6170
# Shown by the guide, for parameter servers and heterogeneous jobs. They have no meaning here.
MEANINGLESS = ("heter_worker_num", "heter_workers", "http_port", "servers", "workers", "server_num", "worker_num")


@dataclass(frozen=True)
class Options:
    """What `fleetrun` was asked to do, checked."""

    command: list[str]
    workers: int
    devices: Devices | None
    least_hosts: int
    most_hosts: int
    master: tuple[str, int] | None
    ips: list[str]
    rank: int | None
    log_dir: Path
    max_restart: int
    job_id: str | None
    progress_timeout: float
    start_timeout: float
    stop_timeout: float
    join_timeout: float
    secret_file: Path | None
    fresh_workers: bool

    @property
    def alone(self) -> bool:
        """Whether the job needs no other machine."""
        return self.most_hosts == 1

    def banner(self) -> dict[str, object]:
        """The rows of the guide's block."""
        words = 2 if self.command[0] in ("-m", PROGRAM) else 1
        hosts = f"{self.least_hosts}:{self.most_hosts}" if self.least_hosts != self.most_hosts else self.most_hosts
        return {
            "gpus": self.devices,
            "heter_worker_num": None,
            "heter_workers": None,
            "http_port": None,
            "ips": ",".join(self.ips),
            "job_id": self.job_id,
            "join_timeout": f"{self.join_timeout:g}",
            "log_dir": self.log_dir,
            "master": None if self.master is None else f"{self.master[0]}:{self.master[1]}",
            "max_restart": self.max_restart,
            "nnodes": hosts,
            "nproc_per_node": self.workers,
            "progress_timeout": f"{self.progress_timeout:g}",
            "rank": self.rank,
            "start_timeout": f"{self.start_timeout:g}",
            "stop_timeout": f"{self.stop_timeout:g}",
            "training_script": " ".join(self.command[:words]),
            "training_script_args": self.command[words:],
        }


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; what is wrong ends the program with a message."""
    parser = _parser()
    given, unknown = _parsed(parser, sys.argv[1:] if arguments is None else arguments)
    wrong = [_remedy(option, parser) for option in unknown]
    wrong += [
        f"--{name} belongs to parameter servers and heterogeneous jobs, which FleetX does not have; "
        f"got {getattr(given, name)!r}. Leave it out."
        for name in MEANINGLESS
        if getattr(given, name) is not None
    ]
    if wrong:
        parser.error(" ".join(wrong))
    command = _command(parser, given)
    workers, devices = _workers(parser, given.nproc_per_node, given.devices)
    ips = given.ips or [LOOPBACK]
    least, most = given.nnodes or (len(ips), len(ips))
    if given.ips and most != len(ips):
        hosts = f"{len(ips)} host{'' if len(ips) == 1 else 's'}"
        parser.error(f"--nnodes {most} contradicts --ips, which names {hosts}: leave one of them out.")
    master = given.master
    if most > 1 and master is None and given.ips:
        master = (ips[0], DEFAULT_PORT)
    if most == 1 and given.master is not None and given.nnodes is None:
        parser.error("--master is for several hosts, and --nnodes, which says how many, is missing: give both.")
    if most > 1 and master is None:
        parser.error(
            f"--nnodes {most} needs --master HOST:PORT, the address of the first host, the same on all of them."
        )
    if given.rank is not None and not 0 <= given.rank < most:
        parser.error(f"--rank must be from 0 to {most - 1} with --nnodes {most}, not {given.rank}.")
    rank = given.rank
    if rank is None and given.ips:
        here = [index for index, address in enumerate(ips) if is_here(address)]
        if not here:
            parser.error(f"none of --ips {','.join(ips)} is an address of this machine: name the right one, or --rank.")
        rank = here[0]
    return Options(
        command=command,
        workers=workers,
        devices=devices,
        least_hosts=least,
        most_hosts=most,
        master=master,
        ips=ips,
        rank=rank,
        log_dir=given.log_dir,
        max_restart=given.max_restart,
        job_id=given.job_id,
        progress_timeout=given.progress_timeout,
        start_timeout=given.start_timeout,
        stop_timeout=given.stop_timeout,
        join_timeout=given.join_timeout,
        secret_file=given.secret_file,
        fresh_workers=given.fresh_workers,
    )


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the names of all that there are not: what follows such a one may be its value."""
    rest, names = list(arguments), []
    while True:
        given, unknown = parser.parse_known_args(rest)
        if not unknown:
            return given, names
        place = rest.index(unknown[0])
        name, has_value, _ = rest.pop(place).partition("=")
        names.append(name)
        following = rest[place] if place < len(rest) else "-"
        if not has_value and not following.startswith("-") and not Path(following).is_file():
            del rest[place]


def _command(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[str]:
    """What each worker runs."""
    script = given.script
    if script is None:
        parser.error("the following arguments are required: script")
    if given.module and given.no_python:
        parser.error("--module is for a module of Python, and --no_python for other programs: leave one of them out.")
    if given.module:
        return ["-m", script, *given.script_args]
    if given.no_python:
        if shutil.which(script) is None:
            parser.error(
                f"the program {script!r} is not there, or is not executable (looked in PATH, and in {Path.cwd()} if it "
                "has a slash). `chmod +x` makes it so; a Python script needs no --no_python."
            )
        return [PROGRAM, script, *given.script_args]
    if Path(script).is_dir():
        parser.error(f"the script must be a Python file, and {script!r} is a folder: name a file in it.")
    if not Path(script).is_file():
        parser.error(f"the script {script!r} does not exist (looked in {Path.cwd()}).")
    return [script, *given.script_args]


def _workers(
    parser: argparse.ArgumentParser, asked: int | str | None, devices: Devices | None
) -> tuple[int, Devices | None]:
    """How many workers there are on this machine, and their devices where these are chosen."""
    gpus = torch.cuda.device_count()
    if devices is not None:
        count = len(devices.names)
        if asked not in (None, "auto", count, "cpu" if devices.on_host else "gpu"):
            more = " (more workers than devices)" if isinstance(asked, int) and asked > count else ""
            parser.error(f"--nproc_per_node {asked} contradicts --devices {devices}{more}: leave one of them out.")
        return count, devices
    if asked == "gpu" and not gpus:
        parser.error(
            "--nproc_per_node gpu asks for one worker per GPU, and torch finds none here: fleetx doctor says why. "
            "--nproc_per_node cpu starts one per core."
        )
    if asked == "cpu":
        return cores().usable, Devices(("cpu",) * cores().usable)
    if asked == "auto" and not gpus:
        return cores().usable, None
    if isinstance(asked, int) and gpus and asked > gpus and not _may_share(parser):
        parser.error(
            f"--nproc_per_node {asked} asks for more workers than this machine has GPUs ({gpus}): each worker needs "
            f"its own. Lower it, run on the host with --devices cpu,cpu,..., or set {SHARE}=1 to let them share."
        )
    return (asked if isinstance(asked, int) else gpus or 1), None


def _may_share(parser: argparse.ArgumentParser) -> bool:
    try:
        return may_share(os.environ)
    except ValueError as error:
        parser.error(str(error))


def _remedy(option: str, parser: argparse.ArgumentParser) -> str:
    """What to do instead of an option that is not there: many know those of torchrun."""
    name = option.lstrip("-").replace("-", "_")
    if name in _ELSEWHERE:
        return f"fleetrun has no {option}: {_ELSEWHERE[name]}."
    known = {flag[2:] for flag in parser._option_string_actions if flag.startswith("--")} - set(MEANINGLESS)
    close = difflib.get_close_matches(name, sorted(flag for flag in known if "-" not in flag), n=1, cutoff=0.75)
    if close:
        return f"fleetrun has no {option}: use --{close[0]}, or put it after the script if it is the script's own."
    return f"fleetrun has no {option}: fleetrun --help lists its options. Those of the script go after the script."


def _accept_dashes(parser: argparse.ArgumentParser) -> None:
    """`--nproc-per-node` is `--nproc_per_node`, as for torchrun; `--help` shows one spelling."""
    known = parser._option_string_actions
    known.update({f"--{name[2:].replace('_', '-')}": action for name, action in known.items() if name[:2] == "--"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleetrun",
        usage="fleetrun [options] script.py [script options]",
        description="Start a training script on several workers, watch them, and restart them when one fails.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", nargs="?", help="the Python script that each worker runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its own options, passed on as they are")

    here = parser.add_argument_group("workers of this machine")
    here.add_argument(
        "--devices",
        "--gpus",
        type=parse_devices,
        metavar="LIST",
        help="one worker per device: GPU numbers such as 0,1, or cpu,cpu to run on the host",
    )
    here.add_argument("--nproc_per_node", type=_count, metavar="N", help=_NPROC)
    here.add_argument("--module", "-m", action="store_true", help="script is the name of a module, as in python -m")
    here.add_argument("--no_python", action="store_true", help="script is a program, which is started as it is")
    here.add_argument("--log_dir", type=Path, default=Path("log"), metavar="DIR", help=_LOG_DIR)
    here.add_argument("--fresh_workers", action="store_true", help=_FRESH)

    many = parser.add_argument_group("several machines (start fleetrun on each of them with the same options)")
    many.add_argument("--ips", type=_addresses, metavar="LIST", help="addresses of all machines, the first one leads")
    many.add_argument(
        "--nnodes", type=_range, metavar="N or MIN:MAX", help="how many machines; a range makes the job elastic"
    )
    many.add_argument(
        "--master", type=_endpoint, metavar="HOST:PORT", help="where the first machine listens for the others"
    )
    many.add_argument("--rank", type=_whole, metavar="N", help="this machine's number, 0 is the one at --master")
    many.add_argument("--secret_file", type=Path, metavar="FILE", help=_SECRET)
    many.add_argument(
        "--join_timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for machines that have not joined (default 300)",
    )

    wrong = parser.add_argument_group("when something goes wrong")
    wrong.add_argument(
        "--max_restart",
        type=_whole,
        default=0,
        metavar="N",
        help="restart all workers up to N times when one fails; the script resumes from its checkpoint (default 0)",
    )
    wrong.add_argument("--progress_timeout", type=_seconds, default=600.0, metavar="SECONDS", help=_PROGRESS)
    wrong.add_argument("--start_timeout", type=_seconds, default=1800.0, metavar="SECONDS", help=_START)
    wrong.add_argument(
        "--stop_timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long workers may take to save and leave after Ctrl-C or SIGTERM (default 30)",
    )
    wrong.add_argument("--job_id", type=_name, metavar="NAME", help="a name for logs and messages (default: random)")
    for name in MEANINGLESS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    _accept_dashes(parser)
    return parser


# What torchrun and Paddle's launcher call otherwise, or have and fleetrun does not need.
_ADDRESS = "use --master HOST:PORT, the same on all machines"
_ALONE = "leave it out: a job of one machine needs no address, and finds a port by itself"
_LOGS = "leave it out: --log_dir has what each worker prints, and the console shows worker 0"
_NEEDLESS = "leave it out: fleetrun does not need it"
_ELSEWHERE = {
    "node_rank": "use --rank",
    "max_restarts": "use --max_restart",
    "master_addr": _ADDRESS,
    "master_port": _ADDRESS,
    "rdzv_endpoint": _ADDRESS,
    "rdzv_id": "use --job_id",
    "standalone": _ALONE,
    "selected_gpus": "use --gpus",
    "run_path": "leave it out: a script is always run by its path",
    "shutdown_timeout": "use --stop_timeout",
    "signals_to_handle": "leave it out: SIGINT, SIGTERM and SIGHUP are passed on to the workers",
    "numa_binding": "leave it out, and start fleetrun under numactl",
    **dict.fromkeys(("tee", "t", "redirects", "r", "logs_specs", "local_ranks_filter"), _LOGS),
    **dict.fromkeys(("duplicate_stdout_filters", "duplicate_stderr_filters"), _LOGS),
    **dict.fromkeys(("rdzv_backend", "rdzv_conf", "monitor_interval", "start_method", "role", "local_addr"), _NEEDLESS),
    **dict.fromkeys(("use_env", "run_mode", "event_log_handler", "virtual_local_rank"), _NEEDLESS),
}


_NPROC = (
    "workers to start (default: one per GPU, without GPUs one); gpu is one per GPU, cpu one per core and on the host, "
    "auto is gpu where there is one, else cpu"
)
_LOG_DIR = "where workerlog.N keeps what worker N prints, over all restarts (default log)"
_FRESH = "let each worker import torch by itself, rather than forking a process that has done so"
_SECRET = "a file with a secret that all machines share; else the variable FLEETX_JOB_SECRET has it"
_PROGRESS = (
    "a worker that has begun to train and makes no step for so long is named with its stack, and counts as failed "
    "(default 600, 0 switches it off)"
)
_START = (
    "the same for the time that a worker may take to join the others, and from its model to its first step "
    "(default 1800, 0 switches it off)"
)
_EXAMPLES = """examples:
  fleetrun --nproc_per_node 2 train.py --lr 0.1
  fleetrun --gpus 0,1 --max_restart 3 train.py
  fleetrun --ips 10.0.0.1,10.0.0.2 --gpus 0,1,2,3 train.py          on both machines
  fleetrun --nnodes 2:4 --master 10.0.0.1:6170 --rank 0 train.py    goes on while two machines are left"""


def _count(text: str) -> int | str:
    if text in ("auto", "gpu", "cpu"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, or auto, gpu or cpu, not {text!r}")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, not {text!r}")
    return value


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(
            f"must be a number of machines such as 2, or a range such as 2:4, not {text!r}"
        )
    return least, most


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT such as 10.0.0.1:{DEFAULT_PORT}, not {text!r}")
    return host, int(port)


def _addresses(text: str) -> list[str]:
    addresses = [address.strip() for address in text.split(",")]
    if not all(addresses) or len(set(addresses)) < len(addresses):
        raise argparse.ArgumentTypeError(f"must be different addresses such as 10.0.0.1,10.0.0.2, not {text!r}")
    return addresses


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,64}", text):
        raise argparse.ArgumentTypeError(f"must be letters, digits, dots and dashes, at most 64, not {text!r}")
    return text
