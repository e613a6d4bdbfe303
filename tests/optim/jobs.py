"""Random training jobs for the optimizers: groups of named fp64 parameters, and gradients for each step."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fleet_golden.json").read_text())

SHAPES = [(), (3,), (2, 3), (4, 1, 2), (0,), (2, 3, 2, 2)]


@dataclass
class Parameter:
    """One parameter of a job: its value, its gradient at each step (None: it has none), and whether it is excluded."""

    name: str
    value: np.ndarray
    gradients: list
    excluded: bool

    def tensor(self):
        return torch.nn.Parameter(torch.tensor(self.value, dtype=torch.float64))


@st.composite
def groups(draw, steps, most_groups=2):
    """One or two lists of parameters; zero weights, zero gradients and missing gradients included."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def tensor(shape, zero):
        return np.zeros(shape) if zero else random.normal(size=shape) * 10.0 ** random.integers(-3, 3)

    def parameter(group, index):
        shape, excluded = draw(st.sampled_from(SHAPES)), draw(st.booleans())
        fates = draw(st.lists(st.sampled_from(["some", "some", "zero", "none"]), min_size=steps, max_size=steps))
        gradients = [None if fate == "none" else tensor(shape, fate == "zero") for fate in fates]
        value = tensor(shape, zero=draw(st.integers(0, 5)) == 0)
        return Parameter(f"{group}.{index}.{'left_out' if excluded else 'kept'}", value, gradients, excluded)

    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=most_groups))
    return [[parameter(group, index) for index in range(count)] for group, count in enumerate(counts)]


def patterns_of(groups):
    """The pattern that takes the excluded ones, if there are any: one that takes nothing is an error."""
    return ["left_out"] if any(parameter.excluded for group in groups for parameter in group) else []


def set_gradients(parameters, tensors, step):
    """Give each tensor its gradient of this step."""
    for parameter, tensor in zip(parameters, tensors, strict=True):
        gradient = parameter.gradients[step]
        tensor.grad = None if gradient is None else torch.tensor(gradient, dtype=tensor.dtype)


def golden_steps(case, make, state_names):
    """Run a recorded case: after each step yield what Fleet had and what we have, parameters and state."""
    inputs = case["inputs"]
    dtype = getattr(torch, inputs["dtype"])
    tensors = {n: torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for n, v in inputs["params"].items()}
    optimizer = make(tensors.items())
    for step, after in enumerate(case["after_step"]):
        if inputs["lrs"]:
            optimizer.param_groups[0]["lr"] = inputs["lrs"][step]
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(inputs["grads"][name][step], dtype=dtype)
        optimizer.step()
        for name, tensor in tensors.items():
            yield after["param"][name], tensor.tolist()
            for fleet_name, our_name in state_names.items():
                (key,) = [key for key in after["state"] if key.startswith(f"{name}_{fleet_name}")]
                yield after["state"][key], optimizer.state[tensor][our_name].tolist()
