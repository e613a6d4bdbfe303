"""The static door, eager unless a test says otherwise: same numbers as the dynamic door, and everything by name."""

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet, static
from tests.static.making import Classifier, feeds, merging, program, sgd, tensors


def by_minimize(strategy=None, count=8, clip_norm=None):
    strategy = strategy or merging()
    model = fleet.distributed_model(Classifier(), strategy)
    optimizer = fleet.distributed_optimizer(sgd(model.parameters()), strategy, clip_norm=clip_norm)
    for feed in feeds(count):
        optimizer.minimize(model(**tensors(feed))["loss"])
    return model


def test_the_same_numbers_as_the_dynamic_door():
    main, exe = program(), static.Executor(static.CPUPlace())
    losses = [exe.run(main, feed, ["loss"])[0] for feed in feeds()]
    for (name, ours), theirs in zip(main.model.named_parameters(), by_minimize().parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert all(isinstance(loss, np.ndarray) and loss.shape == () for loss in losses)
    assert losses[0] != losses[4]


def test_everything_is_fetched_by_name():
    main, exe = program(), static.Executor()
    wanted = ["loss", "net.head.weight", "net.head.weight@GRAD", "net.first", "calls", static.Variable("scale.grad")]
    for number, feed in enumerate(feeds(4)):
        _, weight, gradient, output, calls, scale = exe.run(main, feed, wanted)
        assert weight.shape == (3, 10)
        assert (output.shape, calls.shape) == ((6, 10), ())
        assert (gradient is None) == (number < 3)
        assert (scale is None) == (number < 3)
    reference = Classifier()
    batches = [tensors(feed) for feed in feeds(4)]
    (sum(reference(**batch)["loss"] for batch in batches) / 4).backward()
    np.testing.assert_allclose(gradient, reference.net.head.weight.grad.numpy(), rtol=1e-12)
    np.testing.assert_allclose(scale, reference.scale.grad.numpy(), rtol=1e-12)
    np.testing.assert_allclose(output, reference.net.first(reference.net.frozen(batches[3]["images"])).detach().numpy())


def test_a_fetched_gradient_is_neither_scaled_nor_clipped():
    main, exe = program(clip_norm=1e-3), static.Executor()
    for feed in feeds(4):
        (gradient,) = exe.run(main, feed, ["net.head.weight@GRAD"])
    unclipped = program()
    for feed in feeds(4):
        (expected,) = exe.run(unclipped, feed, ["net.head.weight@GRAD"])
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


def test_a_test_program_leaves_the_weights_alone():
    main, exe = program(), static.Executor()
    exe.run(main, feeds(1)[0])
    before = [p.clone() for p in main.model.parameters()]
    test = main.clone(for_test=True)
    loss, output = exe.run(test, feeds(2)[1], ["loss", "net.first"])
    assert np.isfinite(loss)
    assert output.shape == (6, 10)
    assert all(torch.equal(a, b) for a, b in zip(before, main.model.parameters(), strict=True))


def test_hooks_of_a_fetch_are_gone_afterwards():
    main = program()
    static.Executor().run(main, feeds(1)[0], ["net.first"])
    assert not main.model.net.first._forward_hooks


def test_the_startup_program_fills_a_model_without_memory():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return {"loss": self.norm(self.b(self.a(x))).square().mean()}

    model = static.build(Tied)
    assert all(p.is_meta for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main = static.Program(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), seed=5, compile=False)
    exe = static.Executor()
    with pytest.raises(RuntimeError, match="no weights yet"):
        exe.run(main, {"x": np.ones((2, 4), dtype=np.float32)})
    torch.manual_seed(123)
    state = torch.get_rng_state()
    exe.run(static.StartupProgram(main))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    expected = Tied()
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert model.b.weight is model.a.weight
    assert optimizer.param_groups[0]["params"][0] is model.a.weight
    exe.run(main, {"x": np.ones((2, 4), dtype=np.float32)}, ["loss"])


def test_default_programs():
    static.reset_default_programs()
    exe = static.Executor()
    with pytest.raises(ValueError, match=r"program is empty.*minimize\(model.loss\)"):
        exe.run(feed=feeds(1)[0])
    static.default_main_program().model = static.build(Classifier)
    static.default_main_program().compile = False
    exe.run(static.default_startup_program())
    (loss,) = exe.run(static.default_main_program(), feeds(1)[0], ["loss"])
    assert np.isfinite(loss)
    static.reset_default_programs()


def test_places():
    assert static.CPUPlace().device == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"needs a GPU, and this machine has none.*CPUPlace"):
            static.CUDAPlace(0)
        with pytest.raises(ValueError, match="has 0 GPUs"):
            static.CUDAPlace(-1)


def test_a_parameter_without_dimensions_is_updated_eagerly():
    """torch's compiled update of one is wrong: it keeps the first gradient."""

    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, x):
            return {"loss": (self.weight * x).mean()}

    main = static.Program(Scalar(), sgd, compile=True)
    for value in (1.0, 2.0, 3.0):
        static.Executor().run(main, {"x": np.full((2,), value)})
    reference = Scalar()
    optimizer = sgd(reference.parameters())
    for value in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        (reference.weight * value).backward()
        optimizer.step()
    torch.testing.assert_close(main.model.weight, reference.weight, rtol=1e-12, atol=1e-12)
