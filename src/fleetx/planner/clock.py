"""Moments of a device: when it had done what it was asked for until then. Nobody waits for them while it works."""

import time
from typing import Any

import torch


def moment(device: torch.device) -> Any:
    """This one; on a GPU it may lie in the future."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, second: Any) -> float:
    """Between two moments that are over."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3


def wait_for(device: torch.device) -> None:
    """Until it has done all that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
