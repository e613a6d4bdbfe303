"""Static training as the guide writes it, compared with bare torch."""

import numpy as np
import pytest
import torch

import fleetx.compat as X
from fleetx import applications
from fleetx.compat import fleet, fluid, paddle
from fleetx.compat.variables import LossVariable
from tests.fleet.test_golden_merge import GOLDEN

SMALL = {"classes": 4, "depths": (1, 1, 1, 1), "width": 4, "image_size": 32}


def feeds(n):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "images": torch.randint(0, 256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8).numpy(),
            "labels": torch.randint(0, 4, (6,), generator=generator).numpy(),
        }
        for _ in range(n)
    ]


def build(optimizer, strategy=None):
    """The guide's lines between the model and the loop, eagerly."""
    model = X.applications.Resnet50(**SMALL)
    if strategy is not None:
        optimizer = fleet.distributed_optimizer(optimizer, strategy)
    optimizer.minimize(model.loss)
    paddle.default_main_program().compile = False
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    return model, exe


def merging(k_steps=4):
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": k_steps, "avg": True}
    return strategy


def test_a_model_is_symbolic_until_it_is_started():
    model = X.applications.Resnet50(**SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (model.loss.name, model.loss.model) == ("loss", model)


def test_minimize_of_a_loss_trains_as_bare_torch_does():
    torch.set_default_dtype(torch.float64)
    model, exe = build(paddle.optimizer.Momentum(learning_rate=0.1, momentum=0.9, weight_decay=1e-3), merging())
    losses = [exe.run(paddle.static.default_main_program(), feed, [model.loss.name])[0] for feed in feeds(8)]

    torch.manual_seed(0)
    reference = applications.Resnet50(**SMALL)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    expected = []
    for number, feed in enumerate(feeds(8), start=1):
        loss = reference(**{name: torch.from_numpy(array) for name, array in feed.items()})["loss"]
        (loss / 4).backward()
        expected.append(loss.item())
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)


def test_without_a_distributed_optimizer_the_strategy_is_the_default():
    model, exe = build(paddle.optimizer.Momentum(learning_rate=0.1))
    before = model.fc.weight.detach().clone()
    exe.run(feed=feeds(1)[0])
    assert not torch.equal(before, model.fc.weight)


@pytest.mark.parametrize(("case", "momentum"), [("sgd_k3_avg", 0.0), ("momentum_k3_avg", 0.9)])
def test_merged_momentum_gives_fleets_own_numbers(case, momentum):
    """The static program of the guide against numbers from Fleet's static program."""
    torch.set_default_dtype(torch.float64)
    golden = GOLDEN[case]

    class Given(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(golden["inputs"]["params"]["fc_0.w_0"]))
            self.b = torch.nn.Parameter(torch.tensor(golden["inputs"]["params"]["fc_0.b_0"]))

        def forward(self, grad_w, grad_b):
            return (self.w * grad_w).sum() + (self.b * grad_b).sum()

    model = Given()
    optimizer = paddle.optimizer.Momentum(learning_rate=0.1, momentum=momentum)
    optimizer = fleet.distributed_optimizer(optimizer, merging(golden["k_steps"]))
    optimizer.minimize(LossVariable(model))
    paddle.default_main_program().compile = False
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    grads = golden["inputs"]["grads_cycled"]
    for step, expected in enumerate(golden["after_microstep"]):
        turn = step % len(grads["fc_0.w_0"])
        feed = {"grad_w": np.array(grads["fc_0.w_0"][turn]), "grad_b": np.array(grads["fc_0.b_0"][turn])}
        w, b = exe.run(paddle.default_main_program(), feed=feed, fetch_list=["w", "b"])
        np.testing.assert_allclose(w, expected["param"]["fc_0.w_0"], rtol=5e-7, atol=5e-7)
        np.testing.assert_allclose(b, expected["param"]["fc_0.b_0"], rtol=5e-7, atol=5e-7)


def test_paddles_names_are_fetched_too():
    model, exe = build(paddle.optimizer.Momentum(learning_rate=0.1))
    outputs = {}
    model.layer1[0].register_forward_hook(lambda _m, _i, output: outputs.update(block=output.detach().numpy()))
    theirs, ours, loss, logits = exe.run(
        feed=feeds(1)[0], fetch_list=["res2a.add.output.5.tmp_0", "layer1.0", model.loss, "fc"]
    )
    np.testing.assert_array_equal(theirs, ours)
    np.testing.assert_array_equal(theirs, outputs["block"])
    assert loss.shape == ()
    assert logits.shape == (6, 4)
    assert "%f" % loss == f"{float(loss):f}"  # noqa: UP031 - how the guide prints it


def test_unknown_names_in_a_fetch_list_are_refused_with_near_ones():
    _, exe = build(paddle.optimizer.Momentum(learning_rate=0.1))
    with pytest.raises(ValueError, match=r"nothing is called 'fcc' \(near: .*fc"):
        exe.run(feed=feeds(1)[0], fetch_list=["fcc"])
    with pytest.raises(TypeError, match="put it in brackets"):
        exe.run(feed=feeds(1)[0], fetch_list="fc")


def test_a_second_loss_needs_fresh_programs():
    optimizer = paddle.optimizer.Momentum(learning_rate=0.1)
    optimizer.minimize(X.applications.Resnet50(**SMALL).loss)
    with pytest.raises(ValueError, match=r"the loss of a Resnet50 already.*reset_default_programs\(\)"):
        optimizer.minimize(X.applications.Resnet50(**SMALL).loss)


def test_an_executor_before_minimize():
    exe = fluid.Executor(fluid.CPUPlace())
    with pytest.raises(ValueError, match=r"program is empty.*minimize\(model.loss\)"):
        exe.run(fluid.default_startup_program())
