"""Which devices there are, how much memory they have, and how fast bytes travel between them and the host."""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fleetx.control_groups import group_folders, read_text
from fleetx.cores import cores
from fleetx.planner.link import bandwidth
from fleetx.results import describe_machine
from fleetx.units import format_bytes


def all_devices() -> list[torch.device]:
    """The CPU and every GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", number) for number in range(count))]


def devices() -> dict[str, Any]:
    """Of each device what it is and has."""
    gpus = [device for device in all_devices() if device.type == "cuda"]
    found: dict[str, Any] = {
        "cpu": describe_machine()["cpu"],
        "usable cores": str(cores()),
        "torch threads": torch.get_num_threads(),
        "fleetrun's threads": worker_threads(max(2, len(gpus))),
        "host memory": host_memory(),
    }
    return found | {str(device): _gpu(device) for device in gpus}


def worker_threads(workers: int) -> str:
    """How many threads torch gets in the workers that fleetrun starts here."""
    given = os.environ.get("OMP_NUM_THREADS")
    if given is not None:
        return f"{given} for each worker (OMP_NUM_THREADS is set)"
    return f"{cores().usable} for one worker, {cores().share(workers)} for each of {workers}"


def host_memory() -> str:
    """How much there is, how much of it is free, and how much a container may use."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return "unknown"
    lines = dict(line.split(":", 1) for line in info.read_text(encoding="utf-8").splitlines())
    total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    folders = chain.from_iterable(group_folders("memory"))
    limits = [read_text(folder / name) for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    limit = min((int(text) for text in limits if text.strip().isdecimal()), default=total)
    limited = f", limited to {format_bytes(limit)} by a control group" if limit < total else ""
    return f"{format_bytes(total)}, {format_bytes(free)} available{limited}"


def _gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, capability {capability}, {format_bytes(total)}, {format_bytes(free)} free"


def links() -> dict[str, Any]:
    """Bytes per second to pinned host memory and back, measured while the device computes; nothing without a GPU."""
    return {
        f"{device} and host": f"{bandwidth(device) / 1e9:.1f} GB/s in each direction, while computing"
        for device in all_devices()
        if device.type == "cuda"
    }
