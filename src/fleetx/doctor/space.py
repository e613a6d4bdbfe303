"""Room on the disk and in shared memory, which loaders' workers need."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from fleetx.doctor.finding import Check
from fleetx.units import format_bytes

_LITTLE = 2**30
_LITTLE_SHARED = 64 * 2**20  # what containers have unless somebody asks for more


def space() -> dict[str, Any]:
    """Free bytes where runs, temporary files and shared memory are."""
    return {name: f"{format_bytes(free)} free of {format_bytes(total)}" for name, (free, total) in _found().items()}


def check_space() -> list[Check]:
    """That there is enough for a checkpoint, and for loaders with workers."""
    checks = []
    for name, (free, _) in _found().items():
        needed = _LITTLE_SHARED if name == "shared memory" else _LITTLE
        remedy = f"make room: less than {format_bytes(needed)} is soon full"
        if name == "shared memory":
            remedy += "; a container gets more with --shm-size or --ipc=host"
        checks.append(Check(f"room in {name}", free > needed, f"{format_bytes(free)} free", remedy))
    return checks


def _found() -> dict[str, tuple[int, int]]:
    places = {"the present folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if Path("/dev/shm").exists():
        places["shared memory"] = Path("/dev/shm")
    usages = {name: shutil.disk_usage(path) for name, path in places.items()}
    return {name: (usage.free, usage.total) for name, usage in usages.items()}
