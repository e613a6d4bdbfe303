"""What Lars and Lamb have in common, tested on both."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx import names
from fleetx.optim import Lamb, Lars

from .training import network, train, values

# Masters.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("full_gradients", [True, False])
def test_tiny_steps_add_up_in_the_master(dtype, full_gradients):
    low = nn.Parameter(torch.linspace(0.5, 2, 8).to(dtype))
    full = nn.Parameter(low.detach().float())
    for make in (lambda p: Lars([p], lr=1e-4, lars_coeff=1.0), lambda p: Lamb([p], lr=1e-6)):
        with torch.no_grad():
            full.copy_(low)
        start = full.detach().clone()
        ours, theirs = make(low), make(full)
        if full_gradients:
            low.grad_dtype = torch.float32
        for step in range(200):
            gradient = torch.cos(torch.arange(8.0) + step / 50) / 16
            gradient = gradient if full_gradients else gradient.to(dtype)
            low.grad, full.grad = gradient, gradient.float()
            ours.step()
            theirs.step()
        assert torch.equal(ours.state[low]["master"], full)
        assert torch.equal(low, full.to(dtype))
        assert not torch.equal(start, full)
        low.grad = None


def test_masters_are_fp32_and_only_where_needed(make):
    mixed = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float64)]
    optimizer = make(mixed)
    for parameter in mixed:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    low, single, double = (optimizer.state[parameter] for parameter in mixed)
    assert low["master"].dtype == torch.float32
    assert "master" not in single
    assert "master" not in double
    assert {value.dtype for value in low.values()} == {torch.float32}
    assert {v.dtype for k, v in double.items() if k != "step"} == {torch.float64}
    assert type(optimizer).keeps_masters


@pytest.mark.parametrize("through", ["torch", ".data"])
def test_weights_written_from_outside_are_followed(make, through):
    model = network(torch.bfloat16)
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    weight = model[0].weight
    finer = optimizer.state[weight]["master"].clone()
    (weight.data if through == ".data" else weight.detach())[0] = 3.0
    optimizer.param_groups[0]["lr"] = 0.0
    for state in optimizer.state.values():
        state[optimizer._buffers[0]].zero_()  # the momentum of LARS moves on without an lr
    train(model, optimizer, [2])
    master = optimizer.state[weight]["master"]
    assert torch.equal(master[0], torch.full_like(master[0], 3.0))
    assert torch.equal(master[1:], finer[1:])
    assert torch.equal(weight, master.bfloat16())
    assert not torch.equal(finer, finer.bfloat16().float())


# Parameters of all sorts.


def test_no_gradient_no_change(make):
    moved, still = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = make([moved, still])
    moved.grad = torch.ones(2)
    optimizer.step()
    assert not torch.equal(moved, torch.ones(2))
    assert torch.equal(still, torch.ones(2))
    assert still not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()


def test_empty_parameters(make):
    empty, other = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2))
    optimizer = make([empty, other])
    empty.grad, other.grad = torch.ones(0, 3), torch.ones(2)
    optimizer.step()
    assert torch.isfinite(other).all()


@pytest.mark.parametrize("reason", ["found_inf", "skip_nonfinite"])
def test_a_step_left_out_where_the_first_group_is_empty(make, reason):
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([{"params": []}, {"params": [weight]}], skip_nonfinite=reason == "skip_nonfinite")
    weight.grad = torch.full((3,), float("inf"))
    if reason == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(weight, torch.ones(3))


def test_a_long_parameter_has_the_ratio_of_its_exact_norms(make):
    """On the host torch adds up squares in fp32 one after the other, and is 0.1 % off for a table of words."""
    weight = nn.Parameter(torch.randn(8_000_000, generator=torch.Generator().manual_seed(0)))
    optimizer = make([weight])
    optimizer.observe_trust_ratios(every=1)
    weight.grad = torch.randn(8_000_000, generator=torch.Generator().manual_seed(1)).exp()
    twin = nn.Parameter(weight.detach().double())
    twin.grad = weight.grad.double()
    reference = make([twin])
    reference.observe_trust_ratios(every=1)
    for one in (optimizer, reference):
        one.step()
    ours, theirs = (one.trust_ratios.by_number()[0][0] for one in (optimizer, reference))
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_formats_change_nothing(make, dtype):
    plain = nn.Parameter(torch.linspace(-1, 1, 48).reshape(2, 3, 2, 4).to(dtype))
    last = nn.Parameter(plain.detach().to(memory_format=torch.channels_last))
    strided = nn.Parameter(plain.detach().repeat_interleave(2, dim=-1)[..., ::2])
    assert not strided.is_contiguous()
    for parameter in (plain, last, strided):
        optimizer = make([parameter])
        for step in range(3):
            parameter.grad = torch.cos(torch.arange(48.0) + step).reshape(2, 3, 2, 4).to(dtype)
            optimizer.step()
        if parameter is last:
            state = [v for v in optimizer.state[last].values() if v.ndim == 4]
            assert all(v.is_contiguous(memory_format=torch.channels_last) for v in state)
    torch.testing.assert_close(last, plain)
    torch.testing.assert_close(strided, plain)


def test_sparse_gradients_are_refused_before_anything_moves(make):
    table, other = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    optimizer = make([other, table.weight])
    other.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"needs dense .* parameter 1 of its group is torch\.sparse_coo: use sparse="):
        optimizer.step()
    assert torch.equal(other, torch.ones(2))


def test_complex_parameters_are_refused(make):
    with pytest.raises(TypeError, match=r"'w' is torch\.complex64: give it another .*view_as_real"):
        make([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])
    with pytest.raises(TypeError, match=r"is torch\.float8_e5m2: give it another optimizer\."):
        make([nn.Parameter(torch.ones(2).to(torch.float8_e5m2), requires_grad=False)])


def test_a_closure_is_run_with_gradients(make):
    weight = nn.Parameter(torch.ones(2))
    optimizer = make([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert not torch.equal(weight, torch.ones(2))


# Groups and exclusions.


def test_a_pattern_may_match_in_any_group(make):
    model = network()
    optimizer = make(
        [{"params": model[0].parameters()}, {"params": model[3].parameters()}],
        exclude_from_weight_decay=["3.weight", "embedding"],
    )
    assert [group["decays"] for group in optimizer.param_groups] == [[True, True], [False, True]]
    assert optimizer.exclusion_rows() == [("3.weight", 1, ("3.weight",)), ("embedding", 0, ())]


def test_groups_may_have_their_own_patterns(make):
    model = network()
    optimizer = make(
        [
            {"params": model[0].named_parameters(prefix="0")},
            {"params": model[3].named_parameters(prefix="3"), "exclude_from_weight_decay": ["3.*"]},
        ],
        exclude_from_weight_decay=["bias"],
    )
    assert [group["decays"] for group in optimizer.param_groups] == [[True, False], [False, False]]
    assert [(row.pattern, row.count) for row in optimizer.exclusion_rows()] == [("bias", 1), ("3.*", 2)]


def test_a_group_added_later(make):
    model = network()
    optimizer = make(model[0].parameters(), exclude_from_weight_decay=["bias"])
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.5})
    assert optimizer.param_groups[1]["decays"] == [True, False]
    with pytest.raises(ValueError, match=r"'lyaer' matches no parameter.*nearest names are: 1\."):
        optimizer.add_param_group({"params": model[1].parameters(), "exclude_from_weight_decay": ["lyaer"]})
    assert len(optimizer.param_groups) == 2
    train(model, optimizer, range(1))


def test_a_pattern_that_matches_nothing_is_refused(make):
    with pytest.raises(ValueError, match=r"exclude_from_weight_decay: '3\.wieght' matches no .*are: 3\.weight"):
        make(network().parameters(), exclude_from_weight_decay=["3.wieght"])


def test_no_list_is_refused_where_one_is_needed(make):
    with pytest.raises(TypeError, match=r"exclude_from_weight_decay must be a list of patterns, got None: write it as"):
        make(network().parameters(), exclude_from_weight_decay=None)


def test_a_kind_needs_the_module(make):
    with pytest.raises(ValueError, match=r"'norm' is a kind .*names\.record\(model\)"):
        make(nn.Linear(2, 2).named_parameters(), exclude_from_weight_decay=["norm"])


def test_names_given_come_before_names_recorded(make):
    layer = nn.LayerNorm(2)
    names.record(layer)
    optimizer = make([("mine.gain", layer.weight)], exclude_from_weight_decay=["layer_norm", "mine"])
    assert [row.examples for row in optimizer.exclusion_rows()] == [("mine.gain",), ("mine.gain",)]


def test_rows_of_an_unknown_setting(make):
    with pytest.raises(ValueError, match="has no 'decay': ask for one of exclude_from_weight_decay"):
        make([nn.Parameter(torch.ones(2))]).exclusion_rows("decay")


def test_rows_of_the_adaptation_list():
    optimizer = Lars(
        network().parameters(), lr=0.1, exclude_from_weight_decay=["bias"], exclude_from_adaptation=["norm"]
    )
    assert [tuple(row[:2]) for row in optimizer.exclusion_rows("exclude_from_adaptation")] == [("norm", 2)]
    assert optimizer.param_groups[0]["decays"] == [True, False, True, False, True, False]
    assert optimizer.param_groups[0]["adapts"] == [True, True, False, False, True, True]


# Nothing waits for the device.


class HostReads(TorchDispatchMode):
    """Remembers every tensor whose value the host asked for."""

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.read.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_step_reads_nothing_but_its_own_counters(make, dtype, lr):
    model = network(dtype)
    optimizer = make(model.parameters(), exclude_from_weight_decay=["bias"])
    optimizer.param_groups[0]["lr"] = lr
    train(model, optimizer, range(1))
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    with torch.no_grad():
        model[0].weight.add_(1)  # so that the master must follow
    with HostReads() as reads:
        optimizer.step()
    assert all(any(tensor is counter for counter in counters) for tensor in reads.read)
    assert all(tensor.device.type == "cpu" for tensor in counters)


def test_a_step_runs_where_there_are_no_values_to_read(make):
    """On the meta device any question about a value raises, also one asked inside a kernel."""
    model = network(torch.bfloat16).to("meta")
    names.record(model)
    optimizer = make(model.parameters(), exclude_from_weight_decay=["norm"])
    train(model, optimizer, range(2))
    assert optimizer.state[model[0].weight]["master"].device.type == "meta"


@contextmanager
def waiting_is_an_error():
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def set_gradients(model, step):
    for index, parameter in enumerate(model.parameters()):
        gradient = torch.cos(torch.arange(float(parameter.numel())) + index + step).reshape(parameter.shape)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr_device", [None, "cpu", "cuda"])
def test_a_step_on_a_gpu_waits_for_nothing_and_agrees_with_the_host(make, dtype, lr_device):
    host, device = network(dtype), network(dtype).to("cuda")
    names.record(device)
    ours, theirs = (make(model.parameters(), exclude_from_weight_decay=["bias"]) for model in (device, host))
    theirs.param_groups[0]["lr"] = 0.05
    ours.param_groups[0]["lr"] = torch.tensor(0.05, device=lr_device) if lr_device else 0.05
    for step in range(4):
        set_gradients(host, step)
        set_gradients(device, step)
        theirs.step()
        with waiting_is_an_error():
            ours.step()
    for a, b in zip(values(device), values(host), strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.gpu
def test_state_saved_on_a_gpu_comes_back_with_its_counters_on_the_host(make):
    model = network().to("cuda")
    optimizer = make(model.parameters())
    set_gradients(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({name: value.cuda() for name, value in state.items()})
    optimizer.load_state_dict(saved)
    set_gradients(model, 1)
    with waiting_is_an_error():
        optimizer.step()
