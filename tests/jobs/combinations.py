"""Combinations of settings, sampled so that each pair of values occurs, and what bare torch makes of each.

The reference is one process that sees all workers' micro-batches. Everything is fp64, but where bfloat16 computes.
"""

import itertools
import random

import torch
from torch import nn
from torch.nn import functional

from tests import plain

VALUES = {
    "k_steps": (1, 2, 4),
    "optimizer": ("sgd", "adam", "lars", "lamb"),
    "amp": ("off", "float16", "float16, overflow", "bfloat16"),
    "kept": ("all", "recompute", "offload"),
    "norm": ("layer", "batch"),  # the latter with sync_batch_norm
    "groups": (1, 3),
    "hierarchy": ("off", "hosts", "twos", "threes"),
    "wire": ("full", "float16", "bfloat16"),
    "fused": (True, False),
    "way": ("Step", "minimize", "items"),
    "ends": ("even", "uneven"),
    "resume": ("state dict", "checkpoint"),
}
WINDOWS, OVERFLOWS = 3, 1  # in the second one, where it does


def is_possible(combination):
    """False for what FleetX refuses, or what the reference cannot do."""
    of = {"wire": "", "way": "", "norm": "", "ends": "", "amp": ""} | combination
    return not (
        (of["wire"], of["way"]) == ("float16", "items")
        or (of["ends"] == "uneven" and (of["norm"] == "batch" or of["way"] == "Step"))
        or (of["amp"] == "bfloat16" and of["norm"] == "batch")  # which then rounds otherwise than torch's
    )


def sampled(seed):
    """Combinations in which each possible pair of values occurs, those that cover most first.

    Only what is sent in full can equal the reference, so pairs of other settings must occur in one of those.
    """
    chance, missing, chosen = random.Random(seed), _pairs(), {}
    while missing:
        wanted = min(missing)
        drawn = [_draw(chance, wanted) for _ in range(100)]
        found = max(drawn, key=lambda one: len(missing & _shown_by(one)))
        missing -= _shown_by(found)
        chosen[f"{len(chosen)}: " + ", ".join(f"{name} {value}" for name, value in found.items())] = found
    return chosen


def _draw(chance, wanted):
    while True:
        found = {name: chance.choice(values) for name, values in VALUES.items()} | {"wire": "full"}
        found |= {name: VALUES[name][index] for name, index in wanted}
        if is_possible(found):
            return found


def _pairs():
    everything = [(name, index) for name, values in VALUES.items() for index in range(len(values))]
    pairs = [pair for pair in itertools.combinations(everything, 2) if pair[0][0] != pair[1][0]]
    return {pair for pair in pairs if is_possible({name: VALUES[name][index] for name, index in pair})}


def _shown_by(combination):
    pairs = itertools.combinations([(name, VALUES[name].index(value)) for name, value in combination.items()], 2)
    return {pair for pair in pairs if combination["wire"] == "full" or "wire" in (pair[0][0], pair[1][0])}


# Data and model ---------------------------------------------------------------------------------------------


def make_net(combination, seed=0):
    net = plain.make_net(seed)
    if combination["norm"] == "batch":  # a bias before it has a gradient of zero, whose rounding Adam makes large
        net.first, net.norm = nn.Linear(6, 10, bias=False).double(), nn.BatchNorm1d(10).double()
    return net.float() if combination["amp"] == "bfloat16" else net


def windows(combination, workers):
    """For each window the micro-batches of each worker; worker r has r of them, or so, at an uneven end."""
    generator, k_steps = torch.Generator().manual_seed(5), combination["k_steps"]
    dtype = torch.float32 if combination["amp"] == "bfloat16" else torch.float64
    for window in range(WINDOWS + (combination["ends"] == "uneven")):
        parts = []
        for rank in range(workers):
            size = 3 * k_steps + (rank + window) % 3
            inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
            labels = torch.randint(0, 3, (size,), generator=generator)
            if overflows(combination, window) and rank == workers - 1:
                inputs[0] = torch.inf
            micros = list(zip(inputs.tensor_split(k_steps), labels.tensor_split(k_steps), strict=True))
            parts.append(micros if window < WINDOWS else micros[: rank % (k_steps + 1)])
        yield parts


def overflows(combination, window):
    return combination["amp"].endswith("overflow") and window == OVERFLOWS


# The reference ----------------------------------------------------------------------------------------------


def train(combination, workers):
    """Weights and buffers after the first window and at the end, and the loss of each window."""
    net, states, losses = make_net(combination), [], []
    optimizer = plain.make_optimizer(combination["optimizer"], net)
    for window, parts in enumerate(windows(combination, workers)):
        if overflows(combination, window):
            losses.append(None)
            continue
        loss = _loss(combination, net, parts)
        net.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append({name: value.clone() for name, value in net.state_dict().items()})
    return states[0], states[-1], losses


def _loss(combination, net, parts):
    """Each micro-batch counts as many samples as it has, or once."""
    total, weight = 0.0, 0
    for micros in itertools.zip_longest(*parts):
        there = [micro for micro in micros if micro is not None]
        for scores, (_, labels) in zip(_forward(combination, net, there), there, strict=True):
            count = 1 if combination["way"] == "minimize" else len(labels)
            total, weight = total + functional.cross_entropy(scores, labels) * count, weight + count
    return total / weight


def _forward(combination, net, micros):
    """Norms over all workers see all parts together; low precision rounds each part as that worker does."""
    inputs = [inputs for inputs, _ in micros]
    if combination["norm"] == "batch":
        return net(torch.cat(inputs)).split(list(map(len, inputs)))
    if combination["amp"] != "bfloat16":
        return [net(part) for part in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        scores = [net(part) for part in inputs]
    return [part.float() for part in scores]
