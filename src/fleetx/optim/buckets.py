"""Parameters that one foreach call serves together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fleetx.optim.foreach import number_on
from fleetx.optim.groups import Group, State
from fleetx.optim.sharded import all_norms, local


@dataclass
class Bucket:
    """Parameters of one group, one device, one dtype and equal traits: one foreach call serves them all.

    ``weights`` are what the formulas read and write: the fp32 master where there is one, else the parameter; of a
    sharded parameter this rank's part, as with everything here. ``norms`` are those of the whole tensors.
    """

    group: Group
    traits: tuple[Any, ...]
    numbers: list[int] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def collect(self, name: str) -> list[Tensor]:
        """One entry of every parameter's state."""
        return [local(state[name]) for state in self.states]

    @property
    def lr(self) -> float | Tensor:
        """The learning rate, on the device of the weights if it is a tensor."""
        return number_on(self.group["lr"], like=self.weights[0])


def measure(buckets: Sequence[Bucket], wanted: Callable[[Bucket], Iterable[str]]) -> None:
    """Take the norms of whole tensors, all in one go."""
    places = [(bucket, name) for bucket in buckets for name in wanted(bucket)]
    found = all_norms([(bucket.parameters, getattr(bucket, name)) for bucket, name in places])
    for (bucket, name), norms in zip(places, found, strict=True):
        bucket.norms[name] = norms
