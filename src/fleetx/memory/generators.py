"""Generators of random numbers that modules hold or are given: torch's, Python's and numpy's."""

import copy
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


def is_generator(value: Any) -> bool:
    """Whether numbers are drawn from this, and it can be had again as it was."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)  # which nobody can have again
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def state_of(generator: Any) -> Any:
    """What `put_state` takes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return copy.deepcopy(generator.bit_generator.state if _is_new(generator) else generator.get_state())


def put_state(generator: Any, state: Any) -> None:
    """From now on it draws what it drew then."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif not isinstance(generator, torch.Generator) and _is_new(generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _is_new(generator: Any) -> bool:
    """Whether it is one of numpy's newer ones."""
    return hasattr(generator, "bit_generator")


@dataclass(eq=False)
class Drawn:
    """A generator as it was."""

    copy: Any  # of another library; of torch's the state
    device: torch.device | None = None  # if it is torch's

    @classmethod
    def of(cls, generator: Any) -> "Drawn":
        """The generator as it is."""
        if isinstance(generator, torch.Generator):
            return cls(generator.get_state(), generator.device)
        return cls(copy.deepcopy(generator))

    def again(self) -> Any:
        """One that will draw the same numbers."""
        if self.device is not None:
            return torch.Generator(self.device).set_state(self.copy)
        return copy.deepcopy(self.copy)
