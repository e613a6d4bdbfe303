"""Read the time: of the host, and of a device that works while the host is ahead. Tests replace it with their own."""

import time
from typing import Any

import torch


def host_seconds() -> float:
    """Return the host's time. What the planner decides depends on this clock and on the device's events alone."""
    return time.perf_counter()


def moment(device: torch.device) -> Any:
    """Mark this point in the device's work; on a GPU it may lie in the future."""
    if device.type != "cuda":
        return host_seconds()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def has_come(moment: Any) -> bool:
    """Return whether a moment is over, without waiting for it."""
    return isinstance(moment, float) or moment.query()


def seconds_between(first: Any, second: Any) -> float:
    """Return the time between two moments that are over."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
