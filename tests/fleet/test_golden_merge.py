"""Gradient merge against numbers from Fleet itself: parameters after every micro-step."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fleetx import fleet

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fleet_golden.json").read_text())["gradient_merge"]


class Given(nn.Module):
    """A model whose gradients are what the golden file says."""

    def __init__(self, values):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values["fc_0.w_0"], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(values["fc_0.b_0"], dtype=torch.float64))

    def forward(self, grad_w, grad_b):
        return (self.w * torch.tensor(grad_w)).sum() + (self.b * torch.tensor(grad_b)).sum()


@pytest.mark.parametrize(
    ("case", "momentum"), [("sgd_k3_avg", 0.0), ("momentum_k3_avg", 0.9), ("first_update_timing_k4", 0.0)]
)
def test_fleets_own_numbers(case, momentum):
    torch.set_default_dtype(torch.float64)
    golden = GOLDEN[case]
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": golden["k_steps"], "avg": golden["avg"]}
    )
    model = fleet.distributed_model(Given(golden["inputs"]["params"]), strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=momentum), strategy)
    grads = golden["inputs"]["grads_cycled"]
    for step, expected in enumerate(golden["after_microstep"]):
        turn = step % len(grads["fc_0.w_0"])
        out = optimizer.minimize(model(grads["fc_0.w_0"][turn], grads["fc_0.b_0"][turn]))
        assert out.updated == ((step + 1) % golden["k_steps"] == 0)
        for ours, theirs in ((model.w, "fc_0.w_0"), (model.b, "fc_0.b_0")):
            torch.testing.assert_close(ours, torch.tensor(expected["param"][theirs]), rtol=5e-7, atol=5e-7)
