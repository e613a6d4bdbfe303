"""The host's time for a tiny segment: a plan against `torch.utils.checkpoint` by hand, on 24 tiny layers on the CPU.

    python -m benchmarks.segment_host_time

Each round runs all ways one after the other. Printed is the CPU time of the quickest round, which other processes
disturb least; the difference to plain training, divided by the segments, is what a segment costs.
"""

import copy
import time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleetx import memory

LAYERS, WIDTH, ROUNDS, STEPS = 24, 16, 20, 5


class Layer(nn.Module):
    """A layer whose kernels take next to no time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Model(nn.Module):
    """Layers in a list, with torch's checkpoint around each if asked for."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.by_hand else layer(x)
        return x


def seconds(model: nn.Module, x: Tensor) -> float:
    """CPU time of a forward and backward, in the mean of a few."""
    begin = time.process_time()
    for _ in range(STEPS):
        model(x).sum().backward()
    return (time.process_time() - begin) / STEPS


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    by_hand = Model(by_hand=True)
    ways: dict[str, nn.Module] = {"plain": Model(), "torch.utils.checkpoint": by_hand}
    for save in ("inputs", "dear"):
        model = copy.deepcopy(ways["plain"])
        memory.apply(model, ["layers.*"], save=save)
        ways[f"plan, {save}"] = model
    x = torch.randn(2, WIDTH)
    for model in ways.values():
        seconds(model, x)
    found = {way: min(times) for way, times in _rounds(ways, x).items()}
    for way, time_of_step in found.items():
        per_segment = (time_of_step - found["plain"]) / LAYERS * 1e6
        print(f"{way:24} {time_of_step * 1e3:7.2f} ms a step {per_segment:7.0f} µs a segment")


def _rounds(ways: dict[str, nn.Module], x: Tensor) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, model in ways.items():
            times[way].append(seconds(model, x))
    return times


if __name__ == "__main__":
    main()
