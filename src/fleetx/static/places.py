"""Where an executor runs: Fleet's names for torch's devices."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CPUPlace:
    """The host."""

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return torch.device("cpu")


@dataclass(frozen=True)
class CUDAPlace:
    """A GPU by its number among the visible ones."""

    index: int = 0

    def __post_init__(self) -> None:
        found = torch.cuda.device_count()
        if isinstance(self.index, bool) or not isinstance(self.index, int) or not 0 <= self.index < max(found, 1):
            raise ValueError(f"CUDAPlace({self.index!r}): this machine has {found} GPUs, counted from 0.")
        if found == 0:
            raise RuntimeError(
                f"CUDAPlace({self.index}) needs a GPU, and this machine has none. Say CPUPlace() to run on the host; "
                "for scripts of the guide, fleetrun --devices cpu,cpu does so for all of them."
            )

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return torch.device("cuda", self.index)


Place = CPUPlace | CUDAPlace
