"""`--devices`: which devices the workers of a job get."""

import argparse
import os
from dataclasses import dataclass

import torch

# Tells workers that their devices are the host, where a script of the guide names GPUs.
ON_HOST = "FLEETX_DEVICES_ARE_CPU"


@dataclass(frozen=True)
class Devices:
    """GPU numbers, or `cpu` for each worker."""

    names: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """What the workers must see; worker n then uses visible device n."""
        if self.on_host:
            return {"CUDA_VISIBLE_DEVICES": "", ON_HOST: "1"}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.names)}

    @property
    def on_host(self) -> bool:
        """Whether the job runs without GPUs."""
        return self.names[0] == "cpu"

    def __str__(self) -> str:
        return ",".join(self.names)


def on_host(workers: int) -> dict[str, str]:
    """What workers that train without GPUs must see, wherever they run."""
    return Devices(("cpu",) * workers).environment()


def parse_devices(text: str) -> Devices:
    """Read `0,1` or `cpu,cpu`, and check that the devices are there."""
    names = tuple(name.strip() for name in text.split(","))
    if all(name == "cpu" for name in names):
        return Devices(names)
    allowed, found = _allowed(), torch.cuda.device_count()
    for name in names:
        if not name.isdecimal() and name not in allowed:
            raise argparse.ArgumentTypeError(f"must be GPU numbers such as 0,1, or cpu,cpu; not {text!r}")
        if allowed and name not in allowed:
            raise argparse.ArgumentTypeError(
                f"{text!r} names GPU {name}, and CUDA_VISIBLE_DEVICES leaves {','.join(allowed)} to this job. Name "
                "some of these, or leave --devices out to take all of them"
            )
        if not allowed and int(name) >= found:
            raise argparse.ArgumentTypeError(
                f"{text!r} names GPU {name}, and this machine has {found}. Use --devices cpu,cpu to run on the host"
            )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a GPU twice: each worker needs its own")
    return Devices(names)


def _allowed() -> list[str]:
    """What a batch system or the user leaves to this job, by the machine's own numbers; empty if that is everything."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
