"""The very kernels, run by Triton's interpreter on the host. `test_kernels` starts pytest on this file.

TRITON_INTERPRET must be set before Triton is imported, and is then set for the whole process: hence one of its own.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fleetx.optim import Lamb, Lars, fused, kernels
from fleetx.optim.plan import Tuning

from . import scenarios

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the inf and NaN of skipped steps


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch):
    """Small enough that a handful of tensors takes several turns of the loops over tables."""
    monkeypatch.setattr(kernels, "SUMMED_AT_ONCE", 4)
    monkeypatch.setattr(kernels, "DECIDED_AT_ONCE", 4)


def test_kernels_are_interpreted():
    assert kernels.INTERPRETED


@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.full)])
def test_kernels_follow_the_formula_of_every_form_in_every_precision_and_with_every_skip(examples):
    @settings(max_examples=examples, derandomize=True)
    @given(scenarios.scenarios())
    def check(scenario):
        # The interpreter cuts bf16 off where devices round.
        scenarios.check(scenario, fused=True, rounds_to_nearest=False)

    check()


MAKERS = {
    "lars": lambda p, **more: Lars(p, lr=0.3, lars_coeff=0.05, **more),
    "lamb": lambda p, **more: Lamb(p, lr=0.02, **more),
}


@pytest.fixture(params=MAKERS)
def make(request):
    def made(parameters, **more):
        optimizer = MAKERS[request.param](parameters, **{"fused": True, **more})
        optimizer._fused_step.tuning = Tuning(block=64, rounds=1, warps=1)
        return optimizer

    return made


def weights(*shapes):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def step(optimizer, parameters, seed=0):
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_results_repeat_bit_by_bit(make):
    outcomes = []
    for _ in range(2):
        parameters = weights((300,), (20, 7))
        optimizer = make(parameters)
        for seed in range(3):
            step(optimizer, parameters, seed)
        outcomes.append([parameter.detach().clone() for parameter in parameters])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_kernels_maximize(make, scale):
    for clipped in ({}, {"max_grad_norm": 0.5, "skip_nonfinite": True}):
        outcomes = []
        for sign, more in ((-1, {}), (1, {"maximize": True})):
            parameters = weights((300,), (20, 7))
            optimizer = make(parameters, **more, **clipped)
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            for seed in range(2):
                torch.manual_seed(seed)
                for parameter in parameters:
                    parameter.grad = sign * torch.randn_like(parameter)
                optimizer.step()
            outcomes.append(parameters)
        assert all(map(torch.equal, *outcomes))


def test_one_plan_serves_moving_gradients_and_each_set_of_parameters_has_its_own(make):
    parameters = weights((5,), (70,))
    optimizer = make(parameters)
    plans = optimizer._fused_step._plans
    for seed in range(3):
        step(optimizer, parameters, seed)
    (plan,) = plans.values()
    parameters[0].grad = None
    optimizer.step()
    assert len(plans) == 2
    step(optimizer, parameters, 4)
    assert optimizer._fused_step.last is plan


def test_plans_are_not_collected_without_end(make, monkeypatch):
    monkeypatch.setattr(fused, "MOST_PLANS", 2)
    parameters = weights(*[(3,)] * 4)
    optimizer = make(parameters)
    for left_out in range(4):
        for number, parameter in enumerate(parameters):
            parameter.grad = None if number == left_out else torch.ones_like(parameter)
        optimizer.step()
    assert len(optimizer._fused_step._plans) == 2


def test_new_memory_of_parameters_and_state_is_noticed(make):
    parameters, plain = weights((5,), (70,)), weights((5,), (70,))
    optimizer, twin = make(parameters), make(plain, fused=False)
    for seed in range(4):
        if seed == 1:  # moved, as by model.to
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        if seed == 2:  # reset by hand
            for optim in (optimizer, twin):
                optim.state.clear()
        if seed == 3:  # replaced by hand
            for optim, own in ((optimizer, parameters), (twin, plain)):
                optim.state[own[1]][optim._buffers[0]] = torch.full_like(own[1], 0.25)
        step(optimizer, parameters, seed)
        step(twin, plain, seed)
    for ours, theirs in zip(parameters, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_masters_take_over_what_was_written_into_low_weights(make):
    parameters = [nn.Parameter(p.detach().to(torch.float16)) for p in weights((70,), (5,))]
    optimizer = make(parameters)
    step(optimizer, parameters)
    finer = [optimizer.state[parameter]["master"].clone() for parameter in parameters]
    optimizer.param_groups[0]["lr"] = 0.0
    for parameter in parameters:
        optimizer.state[parameter][optimizer._buffers[0]].zero_()  # the momentum of LARS moves on without an lr
    parameters[0].data[:30] = 3.0
    step(optimizer, parameters)
    master, other = (optimizer.state[parameter]["master"] for parameter in parameters)
    assert torch.equal(parameters[0][:30].float(), torch.full((30,), 3.0))
    assert torch.equal(master[:30], torch.full((30,), 3.0))
    assert torch.equal(master[30:], finer[0][30:])
    assert torch.equal(other, finer[1])


def test_settings_and_learning_rates_may_change_between_steps(make):
    parameters, plain = weights((5,), (70,)), weights((5,), (70,))
    optimizer, twin = make(parameters), make(plain, fused=False)
    decay = "lars_weight_decay" if isinstance(optimizer, Lars) else "lamb_weight_decay"
    for seed in range(4):
        for optim in (optimizer, twin):
            optim.param_groups[0]["lr"] = 0.1 * seed
            optim.param_groups[0][decay] = 0.1 * (seed // 2)
        step(optimizer, parameters, seed)
        step(twin, plain, seed)
    for ours, theirs in zip(parameters, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_groups_have_settings_of_their_own(make):
    parameters, plain = weights((5,), (70,), (9,)), weights((5,), (70,), (9,))

    def groups(own):
        return [{"params": own[:1], "lr": 0.01}, {"params": own[1:], "lr": 0.2}]

    optimizer, twin = make(groups(parameters)), make(groups(plain), fused=False)
    for seed in range(2):
        step(optimizer, parameters, seed)
        step(twin, plain, seed)
    for ours, theirs in zip(parameters, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_from_kernels_to_foreach_and_back_through_a_saved_state(make):
    parameters, plain = weights((5,), (70,)), weights((5,), (70,))
    optimizer, twin = make(parameters), make(plain, fused=False)
    step(optimizer, parameters)
    step(twin, plain)
    ours, theirs = optimizer.state_dict(), twin.state_dict()
    optimizer.load_state_dict(theirs)
    twin.load_state_dict(ours)
    step(optimizer, parameters, 1)
    step(twin, plain, 1)
    assert (optimizer._uses_kernels(), twin._uses_kernels()) == (True, False)
    for one, other in zip(parameters, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_autograd_hears_of_written_parameters(make):
    (weight,) = weights((6,))
    optimizer = make([weight])
    kept = weight.square().sum()
    step(optimizer, [weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_a_skipped_first_step_leaves_zero_state_and_no_count(make):
    (weight,) = weights((6,))
    before = weight.detach().clone()
    optimizer = make([weight], skip_nonfinite=True)
    weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step()
    assert torch.equal(weight, before)
    assert all(not value.any() for value in optimizer.state[weight].values())


def test_trust_ratios_stay_on_the_device(make):
    parameters = weights((6,), (4,))
    optimizer = make([("a", parameters[0]), ("b", parameters[1])], exclude_from_weight_decay=["b"])
    step(optimizer, parameters)
    plan = optimizer._fused_step.last
    ratios = dict(zip(map(id, plan.parameters), plan.ratios.tolist(), strict=True))
    assert ratios[id(parameters[1])] == 1.0
    assert ratios[id(parameters[0])] != 1.0


def test_observed_ratios_are_those_of_foreach_and_a_step_left_out_has_none(make):
    parameters, plain = weights((6,), (40,), (9,)), weights((6,), (40,), (9,))
    optimizers = [make(own, fused=fused, skip_nonfinite=True) for own, fused in ((parameters, True), (plain, False))]
    for optimizer, own in zip(optimizers, (parameters, plain), strict=True):
        optimizer.observe_trust_ratios(every=2)
        step(optimizer, own)
        for parameter in own:
            parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.step()
        step(optimizer, own, 1)
    ours, theirs = (optimizer.trust_ratios.per_layer() for optimizer in optimizers)
    assert ours.keys() == theirs.keys()
    for name, spread in ours.items():
        assert spread == pytest.approx(theirs[name], rel=1e-4)
        assert spread.min == spread.max


def test_parameters_on_several_devices_are_refused(make):
    optimizer = make([*weights((2,)), nn.Parameter(torch.ones(2, device="meta"))])
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\): leave fused out"):
        optimizer.step()


@pytest.mark.full
def test_after_a_hundred_steps_it_is_the_reference_within_a_millionth():
    random = np.random.default_rng(0)
    values = [random.normal(size=shape) * 0.1 for shape in ((8, 3), (70,))]
    for kind, more in (
        (
            "lars",
            {"momentum": 0.9, "lars_coeff": 0.02, "lars_weight_decay": 5e-4, "epsilon": 0.0, "max_grad_norm": None},
        ),
        ("lamb", {"betas": (0.9, 0.999), "eps": 1e-6, "lamb_weight_decay": 0.01, "bias_correction": True}),
    ):
        worst = scenarios.hundred_steps(kind, values, more, device="cpu", fused=True, tuning=Tuning(64, 1, 1))
        assert worst < 1e-6
