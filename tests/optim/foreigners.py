"""timm's and apex's LARS and LAMB, restated for the tests: their formulas, and the shape of the states they save."""

import copy
from types import MappingProxyType

import torch


def length(tensor):
    return tensor.square().sum().sqrt()


class Foreigner:
    """Weights with gradients of their own, moved by a formula; `saved` is what their `state_dict` would give."""

    def __init__(self, shapes, groups, **more):
        torch.manual_seed(0)
        self.weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        self.groups = [{**self.defaults, **more, **group} for group in groups]
        self.state = {}
        self.lr = 0.1

    def step(self, gradients):
        gradients = self.clipped(gradients)
        for group in self.groups:
            group["lr"] = self.lr
            self.count(group)
            for number in group["params"]:
                self.move(group, number, gradients[number])

    def clipped(self, gradients):
        return gradients

    def count(self, group):
        pass

    def saved(self):
        return copy.deepcopy({"state": self.state, "param_groups": self.groups})


class TimmLars(Foreigner):
    defaults = MappingProxyType({
        "momentum": 0.9, "dampening": 0, "weight_decay": 0.05, "nesterov": False, "trust_coeff": 0.02, "eps": 1e-8,
        "trust_clip": False, "always_adapt": False, "foreach": None,
    })  # fmt: skip

    def move(self, group, number, g):
        p, decay = self.weights[number], group["weight_decay"]
        if decay != 0 or group["always_adapt"]:
            ratio = group["trust_coeff"] * length(p) / (length(g) + decay * length(p) + group["eps"])
            g = ratio * (g + decay * p)
        state = self.state.setdefault(number, {})
        old = state.get("momentum_buffer")
        state["momentum_buffer"] = g.clone() if old is None else group["momentum"] * old + g
        self.weights[number] = p - self.lr * state["momentum_buffer"]


class ApexLars(Foreigner):
    defaults = MappingProxyType({
        "momentum": 0.9, "dampening": 0, "weight_decay": 0.05, "nesterov": False, "trust_coefficient": 0.02,
        "eps": 0.0, "is_skipped": False,
    })  # fmt: skip

    def move(self, group, number, g):
        p, decay = self.weights[number], group["weight_decay"]
        ratio = 1.0
        if not group["is_skipped"]:
            ratio = group["trust_coefficient"] * length(p) / (length(g) + decay * length(p) + group["eps"])
        state = self.state.setdefault(number, {"momentum_buffer": torch.zeros_like(p)})
        state["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] - self.lr * ratio * (g + decay * p)
        self.weights[number] = p + state["momentum_buffer"]


class ApexLamb(Foreigner):
    """Steps are counted in the group."""

    defaults = MappingProxyType({
        "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.05, "grad_averaging": True,
        "max_grad_norm": 1.0,
    })  # fmt: skip
    always_adapt = False
    step_as = int

    def clipped(self, gradients):
        together = torch.stack([length(g) for g in gradients]).square().sum().sqrt()
        return [g / max(1.0, together.item() / self.groups[0]["max_grad_norm"]) for g in gradients]

    def count(self, group):
        group["step"] = self.step_as(int(group.get("step", 0)) + 1)

    def number_of_steps(self, group, number):
        return int(group["step"])

    def move(self, group, number, g):
        p, decay, (b1, b2) = self.weights[number], group["weight_decay"], group["betas"]
        state = self.state.setdefault(number, {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)})
        t = self.number_of_steps(group, number)
        state["exp_avg"] = b1 * state["exp_avg"] + (1 - b1) * g
        state["exp_avg_sq"] = b2 * state["exp_avg_sq"] + (1 - b2) * g * g
        r = (state["exp_avg"] / (1 - b1**t)) / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]) + decay * p
        ratio = length(p) / length(r) if decay != 0 or self.always_adapt or group.get("always_adapt") else 1.0
        self.weights[number] = p - self.lr * ratio * r


class ApexNvLamb(ApexLamb):
    """With `use_nvlamb`, which is not saved."""

    always_adapt = True


class ApexMixedLamb(ApexLamb):
    """Counts in a tensor of one element."""

    @staticmethod
    def step_as(count):
        return torch.tensor([count], dtype=torch.int)


class TimmLamb(ApexLamb):
    defaults = MappingProxyType(ApexLamb.defaults | {
        "trust_clip": False, "always_adapt": False, "caution": False, "decoupled_decay": False,
        "corrected_weight_decay": False, "foreach": None,
    })  # fmt: skip
    step_as = torch.tensor


class LambOfStates(ApexLamb):
    """Steps are counted in the state of each parameter, as some versions do."""

    def count(self, group):
        for number in group["params"]:
            state = self.state.setdefault(
                number,
                {
                    "step": 0,
                    "exp_avg": torch.zeros_like(self.weights[number]),
                    "exp_avg_sq": torch.zeros_like(self.weights[number]),
                },
            )
            state["step"] += 1

    def number_of_steps(self, group, number):
        return self.state[number]["step"]
