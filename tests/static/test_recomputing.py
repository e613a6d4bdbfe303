"""Programs whose strategy recomputes: compiled between the cuts, same numbers, same fetches."""

import pytest
import torch

from fleetx import fleet, static
from fleetx.applications import Resnet50

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles


def run(*, recompute, compile, fetch_list=("loss", "layer2.0", "layer1.0.conv2", "fc.weight@GRAD")):
    strategy = fleet.DistributedStrategy()
    if recompute:
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": "auto", "enable_offload": True}
    torch.manual_seed(0)
    model = Resnet50(classes=3, depths=(1, 1, 1, 1), width=4).double()
    program = static.Program(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), strategy, compile=compile)
    executor = static.Executor(static.CPUPlace())
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(2):
        images = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
        feed = {"images": images, "labels": torch.randint(3, (4,), generator=generator)}
        results += executor.run(program, feed, list(fetch_list))
        results += executor.run(program, feed, ["loss"])  # another set of fetched outputs
    return [torch.as_tensor(value) for value in results], model.state_dict()


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_program_that_recomputes_gives_the_same_numbers(compile):
    plain, weights = run(recompute=False, compile=False)
    ours, our_weights = run(recompute=True, compile=compile)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    for name, tensor in weights.items():
        torch.testing.assert_close(our_weights[name], tensor, rtol=1e-10, atol=1e-10, msg=name)
