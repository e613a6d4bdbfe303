"""Saved measurements: every raw figure, with the machine, the versions and the command that made it."""

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fleetx.cores import cores
from fleetx.version import __version__


def save_result(name: str, figures: dict[str, Any], folder: Path) -> Path:
    """Write `name.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result_of(name, figures), indent=2) + "\n", encoding="utf-8")
    return path


def result_of(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with what made them; a `command` among them stands for that of this process."""
    return {
        "name": name,
        "taken": now(),
        "command": command_line(sys.argv),
        "machine": describe_machine(),
        "versions": _versions(),
        **figures,
    }


def now() -> str:
    """When something was measured."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(arguments: list[str]) -> str:
    """How to measure again; where the file went is nobody else's matter."""
    name = "fleetx" if arguments[0] == "-c" else Path(arguments[0]).name
    if name == "__main__.py":  # a package was started
        spec = sys.modules["__main__"].__spec__
        name = name if spec is None else f"python -m {spec.parent}"
    rest = [argument for argument in arguments[1:] if not argument.startswith("--out=")]
    if "--out" in rest:
        place = rest.index("--out")
        rest = rest[:place] + rest[place + 2 :]
    return " ".join([name, *map(shlex.quote, rest)])


def so_far(path: Path, part: str = "cases") -> Any:
    """What was measured before on the same machine with the same versions, so that a part may be measured anew."""
    if not path.exists():
        return None
    before = json.loads(path.read_text(encoding="utf-8"))
    same = before["machine"] == describe_machine() and before["versions"] == _versions()
    return before[part] if same else None


def _versions() -> dict[str, str]:
    return {"fleetx": __version__, "torch": torch.__version__, "python": platform.python_version()}


def describe_machine() -> dict[str, Any]:
    """What a reader needs to know to judge a figure."""
    machine: dict[str, Any] = {"cpu": _cpu_name(), "cores": cores().usable, "system": platform.system()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    return machine


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
