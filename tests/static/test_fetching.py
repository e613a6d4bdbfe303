"""What a fetch list may ask for, and that what comes back is what was asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet, static
from fleetx.static.fetching import as_array
from tests.static.making import Classifier, feeds, program, sgd

FEED = feeds(1)[0]


@pytest.mark.parametrize(
    ("fetch", "error", "message"),
    [
        (["net.haed.weight"], ValueError, r"nothing is called 'net.haed.weight' \(near: net.head.weight"),
        (["net.head.weight@grad"], ValueError, "near: .*net.head.weight@GRAD"),
        (["Loss"], ValueError, r"nothing is called 'Loss' \(near: loss\)"),
        ([""], ValueError, r"nothing is called ''\. Fetch 'loss'"),
        (["calls@GRAD"], ValueError, "nothing is called 'calls@GRAD'"),
        ([3], TypeError, "names or objects with .name, not a int"),
        ([torch.ones(2)], TypeError, "names or objects with .name, not a Tensor"),
        ("loss", TypeError, "a fetch list is a list of names, not 'loss': put it in brackets"),
        (static.Variable("loss"), TypeError, "a list of names, not a Variable: put it in brackets"),
        (["net.frozen.weight@GRAD"], ValueError, r"net.frozen.weight@GRAD cannot be fetched: the parameter is frozen"),
    ],
)
def test_a_wrong_fetch_list_says_what_is_right_and_moves_nothing(fetch, error, message):
    main = program()
    with pytest.raises(error, match=message):
        static.Executor().run(main, FEED, fetch)
    assert static.Executor().optimizer(main).micro_batches_held == 0


def test_nothing_may_be_asked_for():
    assert static.Executor().run(program(), FEED) == []
    assert static.Executor().run(program(), FEED, None) == []


def test_the_same_name_twice_comes_twice():
    main, exe = program(), static.Executor()
    names = ["loss", "loss", "net.first", "net.first", "scale", "scale", "scale@GRAD", "scale.grad"]
    for feed in feeds(4):
        values = exe.run(main, feed, names)
    for one, other in zip(values[::2], values[1::2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_anything_with_a_name_names():
    exe, objects = static.Executor(), [SimpleNamespace(name="loss"), static.Variable("net.frozen.weight")]
    loss, weight = exe.run(program(), FEED, objects)
    assert (loss.shape, weight.shape) == ((), (6, 6))


def test_an_unused_parameter_has_no_gradient_also_at_the_update():
    main, exe = program(), static.Executor()
    assert [exe.run(main, feed, ["net.unused@GRAD"]) for feed in feeds(4)] == [[None]] * 4


def test_a_test_program_has_no_gradients():
    with pytest.raises(ValueError, match="scale@GRAD cannot be fetched: a program without an optimizer"):
        static.Executor().run(program().clone(for_test=True), FEED, ["scale@GRAD"])


class Awkward(nn.Module):
    """An output that the next operation overwrites, one of several parts, one that is not computed, two losses."""

    losses = ("loss", "second")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.parts = Parts()
        self.idle = nn.Linear(4, 4)

    def forward(self, x, twice=None):
        first, others = self.parts(self.relu(self.before(x)))
        second = others["double"].mean()
        losses = {"loss": first.square().mean() + second, "second": second}
        return losses if twice is None else {"loss": losses["loss"]}


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y, {"double": 2 * y, "none": None, "count": 3}


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.middle
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_fetched_output_is_the_modules_own(compile):
    """Neither the next operation, which works in place, nor a compiled backward, which reuses memory, may touch it."""
    reference = Awkward()
    before = reference.before(X).detach()
    double = 2 * reference.parts.linear(before.relu()).detach()
    main = static.Program(Awkward(), sgd, compile=compile)
    names = ["before", "relu", "parts"]
    values = static.Executor().run(main, {"x": X}, names, return_numpy=False)
    torch.testing.assert_close(values[0], before)
    torch.testing.assert_close(values[1], before.relu())
    torch.testing.assert_close(values[2][1]["double"], double)
    assert values[2][1]["none"] is None
    assert values[2][1]["count"] == 3
    assert not any(value.requires_grad for value in (*values[:2], values[2][0]))


def test_loss_is_what_is_minimised_and_what_it_contains_is_not_added_once_more():
    main, exe = static.Program(Awkward(), lambda p: torch.optim.SGD(p, lr=0.1), compile=False), static.Executor()
    reference = Awkward()
    losses = reference(X)
    losses["loss"].backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    total, second = exe.run(main, {"x": X}, ["loss", "second"])
    assert total == pytest.approx(losses["loss"].item())
    assert second == pytest.approx(losses["second"].item())
    for ours, theirs in zip(main.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "reason"), [("idle", "module was not called"), ("second", "did not return that")])
def test_what_a_run_did_not_compute_is_an_error_before_anything_moves(name, reason):
    main = static.Program(Awkward(), sgd, compile=False)
    before = [parameter.clone() for parameter in main.model.parameters()]
    with pytest.raises(ValueError, match=f"did not compute {name}, only loss.*{reason}"):
        static.Executor().run(main, {"x": X, "twice": 1}, [name])
    assert all(torch.equal(a, b) for a, b in zip(before, main.model.parameters(), strict=True))


def test_tensors_on_request_are_the_users_own():
    main, exe = program(), static.Executor()
    for feed in feeds(4):
        values = exe.run(main, feed, ["loss", "scale", "calls", "net.first", "scale@GRAD"], return_numpy=False)
    assert all(isinstance(value, torch.Tensor) and not value.requires_grad for value in values)
    values[1].zero_()
    assert main.model.scale.item() != 0


def test_arrays_have_the_dtype_of_the_tensor_unless_numpy_has_none():
    for dtype, expected in [
        (torch.bfloat16, np.float32),
        (torch.float8_e4m3fn, np.float32),
        (torch.float16, np.float16),
        (torch.float64, np.float64),
        (torch.int16, np.int16),
        (torch.uint16, np.uint16),
        (torch.bool, np.bool_),
    ]:
        assert as_array(torch.ones(2).to(dtype)).dtype == expected, dtype


def test_low_precision_values_are_fetched_as_fp32():
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"use_pure_bf16": True})

    class Low(Classifier):
        def forward(self, images, labels):
            return super().forward(images.to(self.scale.dtype), labels)

    main, exe = static.Program(Low().float(), sgd, strategy, compile=False), static.Executor()
    names = ["loss", "net.first", "net.first.weight", "net.first.weight@GRAD"]
    feed = FEED | {"images": FEED["images"].astype(np.float32)}
    assert {value.dtype for value in exe.run(main, feed, names)} == {np.dtype(np.float32)}
    _, output, weight, gradient = exe.run(main, feed, names, return_numpy=False)
    assert (output.dtype, weight.dtype, gradient.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
