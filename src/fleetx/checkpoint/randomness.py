"""The random state of this process: Python's, numpy's, torch's on the host and on the devices in use."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fleetx.notices import tell_once


def random_state(devices: Sequence[torch.device]) -> dict[str, Any]:
    """All of it; `devices` are those that the models are on."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _used(devices)],
    }


def set_random_state(state: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Put it back, device by device in their order."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    used = _used(devices)
    if len(used) != len(state["cuda"]):
        tell_once(
            "checkpoint-devices",
            f"the random state of {len(state['cuda'])} CUDA devices was saved, and {len(used)} are in use here: "
            "what is drawn on a device will differ from the run that was interrupted.",
        )
    for device, saved in zip(used, state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved, device)


def set_derived_state(state: dict[str, Any], rank: int) -> None:
    """For a worker that there was not before: a state that follows from the first worker's and its own number."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "big")).digest()
    seed = int.from_bytes(digest[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _used(devices: Sequence[torch.device]) -> list[torch.device]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    numbers = {device.index for device in devices if device.type == "cuda"} | {torch.cuda.current_device()}
    return [torch.device("cuda", number) for number in sorted(numbers)]
