"""LARS and LAMB by kernels on a CUDA device: the formulas, no waiting, graphs, and lists of all sorts."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet
from fleetx.optim import Lamb, Lars
from fleetx.optim.plan import Tuning
from tests.optim import scenarios

pytestmark = pytest.mark.gpu

MAKERS = {
    "lars": lambda params, **more: Lars(params, lr=0.3, lars_coeff=0.05, **more),
    "lamb": lambda params, **more: Lamb(params, lr=0.02, **more),
}


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


class NoWaiting:
    """Fails where the host waits for the device inside."""

    def __enter__(self):
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_):
        torch.cuda.set_sync_debug_mode("default")


def weights(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to("cuda", dtype)) for shape in shapes]


def give_gradients(parameters, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, device="cuda", generator=generator)
        parameter.grad = (0.1 * parameter.detach().float() + 0.01 * noise).to(parameter.dtype)


def twins(make, shapes, dtype=torch.float32, **more):
    """The same parameters by kernels and by foreach."""
    ours, theirs = weights(*shapes, dtype=dtype), weights(*shapes, dtype=dtype)
    return (ours, make(ours, **more)), (theirs, make(theirs, fused=False, **more))


def assert_near(ours, theirs, tolerance=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).double().norm() <= tolerance * b.double().norm()


# The formulas.


@pytest.mark.timeout(900)  # it compiles a hundred kernels
@settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenarios.scenarios())
def test_kernels_follow_the_formula_of_every_form_in_every_precision_and_with_every_skip(scenario):
    # One way to cut the work: each other one would compile every kernel anew.
    scenario = dataclasses.replace(scenario, tuning=Tuning(block=64, rounds=2, warps=4))
    scenarios.check(scenario, device="cuda", fused=True)


@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenarios.scenarios())
def test_the_foreach_form_follows_it_on_a_device_too(scenario):
    scenarios.check(scenario, device="cuda", fused=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MAKERS)
def test_after_a_hundred_steps_it_is_the_reference_within_a_millionth(kind, dtype):
    random = np.random.default_rng(0)
    values = [0.1 * random.normal(size=shape) for shape in ((1000, 300), (5003,), (64, 32, 3, 3), (7,))]
    settings = {
        "lars": {
            "momentum": 0.9,
            "lars_coeff": 0.02,
            "lars_weight_decay": 5e-4,
            "epsilon": 0.0,
            "max_grad_norm": None,
        },
        "lamb": {"betas": (0.9, 0.999), "eps": 1e-6, "lamb_weight_decay": 0.01, "bias_correction": True},
    }[kind]
    for fused in (True, False):
        worst = scenarios.hundred_steps(
            kind, values, settings, device="cuda", fused=fused, tuning=Tuning(), dtype=dtype
        )
        assert worst < 1e-6, (fused, worst)


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 0.5}, {"skip_nonfinite": True}])
@pytest.mark.parametrize("tuning", [Tuning(), Tuning(1024, 1, 4), Tuning(2048, 4, 8), Tuning(4096, 2, 8)])
def test_ways_to_cut_the_work_agree_with_foreach(make, more, tuning):
    (ours, optimizer), (theirs, twin) = twins(make, [(300, 401), (5000,), (3,), (1,)], **more)
    optimizer._fused_step.tuning = tuning
    for seed in range(5):
        for own, optim in ((ours, optimizer), (theirs, twin)):
            give_gradients(own, seed)
            optim.step()
    assert_near(ours, theirs)


def test_results_repeat_bit_by_bit(make):
    outcomes = []
    for _ in range(2):
        parameters = weights((300, 401), (5000,))
        optimizer = make(parameters)
        for seed in range(3):
            give_gradients(parameters, seed)
            optimizer.step()
        outcomes.append(parameters)
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_kernels_are_chosen_by_themselves_and_can_be_switched_off(make):
    assert make(weights((2,)))._uses_kernels()
    assert not make(weights((2,)), fused=False)._uses_kernels()
    assert not make([nn.Parameter(torch.ones(2))])._uses_kernels()
    assert not make([*weights((2,)), nn.Parameter(torch.ones(2))])._uses_kernels()


# Lists of all sorts.


def test_parameters_on_host_and_device_together(make):
    """What comes to the host from a busy device is read only when it is there."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((40, 30), (50,))]
    alone = [nn.Parameter(value.clone()) for value in values]
    apart = [nn.Parameter(values[0].clone()), nn.Parameter(values[1].to("cuda"))]
    ours, theirs = (make(own, max_grad_norm=0.1) for own in (apart, alone))
    for optimizer, device in ((ours, "cuda"), (theirs, "cpu")):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64, device=device)
    for step in range(3):
        for number, (one, other) in enumerate(zip(alone, apart, strict=True)):
            one.grad = torch.cos(torch.arange(one.numel(), dtype=torch.float64) + step + number).reshape(one.shape)
            other.grad = one.grad.to(other.device)
        torch.cuda._sleep(50_000_000)
        ours.step()
        theirs.step()
    for one, other in zip(alone, apart, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-11, atol=1e-12)


def test_many_small_tensors(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(1 + number % 7,) for number in range(3000)])
    for seed in range(2):
        for own, optim in ((ours, optimizer), (theirs, twin)):
            give_gradients(own, seed)
            optim.step()
    assert_near(ours, theirs, tolerance=2e-6)


@pytest.mark.parametrize("kind", MAKERS)
def test_one_tensor_of_more_than_two_to_the_31_elements(kind):
    size = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 5 * 4 * size:
        pytest.skip("needs more memory")
    weight = nn.Parameter(torch.ones(size, device="cuda"))
    weight.grad = torch.ones(size, device="cuda")
    optimizer = MAKERS[kind]([weight])
    optimizer.step()
    group = optimizer.param_groups[0]
    if kind == "lars":
        decay = group["lars_weight_decay"]
        expected = 1 - group["lr"] * group["lars_coeff"] / (1 + decay) * (1 + decay)
    else:
        expected = 1 - group["lr"]
    low, high = weight.aminmax()
    assert low.item() == pytest.approx(expected, rel=1e-6)
    assert high.item() == pytest.approx(expected, rel=1e-6)


def test_gradients_that_are_slices_of_a_bucket(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(7, 5), (3,), (64, 64)])
    for seed in range(4):
        give_gradients(theirs, seed)
        offset = seed % 3  # aligned or not
        bucket = torch.zeros(sum(p.numel() for p in ours) + 8, device="cuda")
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = bucket[offset : offset + parameter.numel()].view_as(parameter).copy_(other.grad)
            offset += parameter.numel()
        optimizer.step()
        twin.step()
    assert_near(ours, theirs)


def test_channels_last_convolutions_and_their_gradients(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(16, 8, 3, 3), (16, 16, 1, 1)])
    for parameter in ours:
        parameter.data = parameter.data.to(memory_format=torch.channels_last)
    for seed in range(3):
        give_gradients(theirs, seed)
        for parameter, other in zip(ours, theirs, strict=True):
            layout = torch.channels_last if seed else torch.contiguous_format
            parameter.grad = other.grad.clone(memory_format=layout)
        optimizer.step()
        twin.step()
    assert_near(ours, theirs)
    assert ours[0].is_contiguous(memory_format=torch.channels_last)


def test_state_of_a_checkpoint_in_another_order_of_memory(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(16, 8, 3, 3)])
    for own, optim in ((ours, optimizer), (theirs, twin)):
        give_gradients(own, 0)
        optim.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        for name, value in state.items():
            if value.ndim == 4:
                state[name] = value.to(memory_format=torch.channels_last)
    optimizer.load_state_dict(saved)
    for own, optim in ((ours, optimizer), (theirs, twin)):
        give_gradients(own, 1)
        optim.step()
    assert_near(ours, theirs)


# Nothing waits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr_device", [None, "cpu", "cuda"])
@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 1.0, "skip_nonfinite": True}])
def test_a_step_never_waits(make, dtype, lr_device, more):
    parameters = weights((300, 70), (5,), (16, 4, 3, 3), dtype=dtype)
    optimizer = make(parameters, **more)
    group = optimizer.param_groups[0]
    give_gradients(parameters, 0)
    for number in range(6):
        rate = 0.01 * (number + 1)
        group["lr"] = rate if lr_device is None else torch.tensor(rate, device=lr_device)
        gradients = [parameter.grad.clone() for parameter in parameters]
        optimizer.grad_scale = torch.tensor(2.0, device="cuda")
        optimizer.found_inf = torch.zeros((), device="cuda")
        with NoWaiting():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in parameters)


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize(
    "amp", [None, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"use_pure_bf16": True}, {"use_pure_fp16": True}]
)
def test_a_whole_step_of_fleetx_never_waits_and_learns(name, amp):
    net, step = network_step(name, **({"amp": True, "amp_configs": amp} if amp else {}))
    batch = tuple(tensor.cuda() for tensor in samples())
    outs = [step(batch) for _ in range(3)]
    with NoWaiting():
        outs += [step(batch) for _ in range(60)]
    assert outs[-1].loss.item() < 0.6 * outs[0].loss.item()
    assert all(out.updated for out in outs[-10:])
    assert all(parameter.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("bad_window", [0, 2])
def test_a_skipped_window_leaves_no_trace(name, bad_window):
    (net, step), (twin, theirs) = network_step(name), network_step(name)
    x, y = samples()
    for number in range(5):
        images = x + 0.01 * number
        if number == bad_window:
            broken = images.clone()
            broken[20] = float("nan")
            out = step((broken, y))
            assert (out.updated, out.skipped) == (False, True)
            continue
        assert step((images, y)).updated
        assert theirs((images, y)).updated
    for ours, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, other)


def network_step(name, **more):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 3)).cuda()
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": 4}, **{name: True}, **more
    )
    if name == "lars":
        strategy.lars_configs = {"lars_coeff": 0.1, "exclude_from_weight_decay": ["norm", "bias"]}
        inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    else:
        inner = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-6)
    return net, X.Step(net, inner, functional.cross_entropy, strategy, clip_norm=10.0)


def samples(n=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    return x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()


def test_a_scaler_of_torch_skips_and_unscales_without_waiting(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(30, 20), (5,)])
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for factor in (float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(sum(p.square().sum() for p in ours) * factor).backward()
        with NoWaiting():
            scaler.step(optimizer)
        scaler.update()
        if factor == 1.0:
            twin.zero_grad()
            sum(p.square().sum() for p in theirs).backward()
            twin.step()
    assert_near(ours, theirs)


# Trust ratios.


def test_trust_ratios_are_observed_without_waiting(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(300, 70), (5,), (16, 4, 3, 3)])
    for optim in (optimizer, twin):
        optim.observe_trust_ratios(every=3)
    for seed in range(6):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        twin.step()
        with NoWaiting():
            optimizer.step()
    found, expected = (optim.trust_ratios.per_layer() for optim in (optimizer, twin))
    assert found.keys() == expected.keys()
    for name, spread in found.items():
        assert spread == pytest.approx(expected[name], rel=1e-4)
    assert set(optimizer.trust_ratios.metrics()) == {"trust_ratio_min", "trust_ratio_median", "trust_ratio_max"}


def test_a_step_left_out_has_no_ratios(make):
    parameters = weights((30, 20))
    optimizer = make(parameters, skip_nonfinite=True)
    optimizer.observe_trust_ratios(every=2)
    give_gradients(parameters, 0)
    optimizer.step()
    parameters[0].grad.fill_(float("nan"))
    optimizer.step()
    assert [len(values) for values in optimizer.trust_ratios.by_number().values()] == [1]


def test_a_layer_of_zeros_is_told_of_as_soon_as_the_ratios_arrived(make, caplog, monkeypatch):
    monkeypatch.setattr("fleetx.notices._told", set())
    parameters = [*weights((300, 70), (40, 40)), nn.Parameter(torch.zeros(50, device="cuda"))]
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.1)  # far shorter than their steps would be at the rate itself
    optimizer = make([(f"layer{number}", parameter) for number, parameter in enumerate(parameters)])
    for seed in range(2):
        give_gradients(parameters, seed)
        optimizer.step()
        torch.cuda.synchronize()
    assert sum("layer2 first" in message for message in caplog.messages) == 1


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_cannot_collect_ratios_and_says_so(make):
    parameters = weights((4,))
    optimizer = make(parameters)
    optimizer.observe_trust_ratios(every=5)
    for seed in range(2):
        give_gradients(parameters, seed)
        optimizer.step()
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"which a graph has not: call observe_trust_ratios\(None\) before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_scaled_gradients_without_their_scaler_are_refused(make):
    parameters = weights((4,))
    optimizer = make(parameters)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(parameters[0].square().sum()).backward()
    with pytest.raises(RuntimeError, match="a GradScaler with scale 4 scaled a loss but unscaled nothing"):
        optimizer.step()
    scaler.step(optimizer)


# CUDA graphs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_holds_backward_and_step(make, dtype):
    """Learning rate and overflow flag are read at each replay; steps without the graph may come in between."""
    ours, theirs = weights((64, 64), (64,), dtype=dtype), weights((64, 64), (64,), dtype=dtype)
    optimizer, twin = make(ours), make(theirs)
    lr = torch.tensor(0.1, device="cuda")
    found_inf = torch.zeros((), device="cuda")
    x = torch.randn(8, 64, device="cuda", dtype=dtype)
    optimizer.param_groups[0]["lr"] = lr

    def run(own, optim):
        optim.zero_grad()
        functional.linear(x, own[0], own[1]).float().square().mean().backward()
        optim.found_inf, optim.grad_scale = found_inf, None
        optim.step()

    def both(replay, rate, skip=False):
        lr.fill_(rate)
        twin.param_groups[0]["lr"] = rate
        found_inf.fill_(float(skip))
        run(theirs, twin)
        replay()
        torch.testing.assert_close(ours, theirs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(ours, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        run(theirs, set_rate(twin, 0.1))
    torch.testing.assert_close(ours, theirs)

    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(ours, optimizer)
    for rate in (0.1, 0.05, 0.2):
        both(graph.replay, rate)
    before = copy.deepcopy([p.detach() for p in ours])
    both(graph.replay, 0.3, skip=True)
    assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
    kept = [parameter.grad for parameter in ours]
    both(lambda: run(ours, optimizer), 0.1)  # without the graph, on gradients of its own
    for parameter, gradient in zip(ours, kept, strict=True):
        parameter.grad = gradient
    both(graph.replay, 0.07)
    if "step" in optimizer.state[ours[0]]:
        assert optimizer.state[ours[0]]["step"].item() == twin.state[theirs[0]]["step"].item() == 8


def set_rate(optimizer, rate):
    optimizer.param_groups[0]["lr"] = rate
    return optimizer


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_before_the_first_step_is_refused(make):
    parameters = weights((4,))
    optimizer = make(parameters)
    give_gradients(parameters, 0)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="run a few steps before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_a_compiled_step_calls_the_kernels_as_they_are(make):
    (ours, optimizer), (theirs, twin) = twins(make, [(30, 20), (5,)])
    step = torch.compile(optimizer.step)
    for seed in range(3):
        for own, run in ((ours, step), (theirs, twin.step)):
            give_gradients(own, seed)
            run()
    assert_near(ours, theirs)


# Masters and state dicts.


def test_saved_and_resumed_is_bit_equal(make):
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = weights((64, 33), (5,), dtype=dtype), weights((64, 33), (5,), dtype=dtype)
        optimizer, resumed = make(ours), make(theirs)
        for seed in range(3):
            give_gradients(ours, seed)
            optimizer.step()
        with torch.no_grad():
            for a, b in zip(theirs, ours, strict=True):
                a.copy_(b)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for seed in range(3, 6):
            for own, optim in ((ours, optimizer), (theirs, resumed)):
                give_gradients(own, seed)
                optim.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            for name, value in optimizer.state[a].items():
                assert torch.equal(value, resumed.state[b][name])


def test_weights_written_from_outside_are_followed(make):
    (weight,) = weights((50, 3), dtype=torch.bfloat16)
    optimizer = make([weight])
    for seed in range(2):
        give_gradients([weight], seed)
        optimizer.step()
    with torch.no_grad():
        weight[0] = 3.0
    weight.grad = torch.zeros_like(weight)
    set_rate(optimizer, 0.0)
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master"][0], torch.full((3,), 3.0, device="cuda"))
    assert torch.equal(weight, optimizer.state[weight]["master"].bfloat16())
