"""The reducer in a group of one: its layout, views and bookkeeping. Several workers: tests/jobs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleetx.comm.groups import GroupSettings
from fleetx.comm.reducer import Reducer, ReducerSettings


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduce(parameters, loss, settings=None, extras=(1.0, 2.0)):
    reducer = Reducer(parameters, len(extras), settings or ReducerSettings())
    with reducer.overlapping(extras):
        loss.backward()
    return reducer, reducer.finish()


def test_gradients_keep_value_shape_and_strides(group):
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    scalar, transposed, empty = (
        nn.Parameter(torch.ones(())),
        nn.Parameter(torch.randn(4, 6).t()),
        nn.Parameter(torch.ones(0)),
    )
    parameters = [*conv.parameters(), scalar, transposed, empty]
    x = torch.randn(2, 3, 5, 5)

    def loss():
        return conv(x).square().sum() * scalar + transposed.square().sum() + empty.sum()

    expected = torch.autograd.grad(loss(), parameters)
    reducer, extras = reduce(parameters, loss())
    assert [float(extra) for extra in extras] == [1.0, 2.0]
    for parameter, grad in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, grad)
        assert parameter.grad.stride() == parameter.stride()
    assert sum(payload.numel() for payload in reducer.payloads) == sum(p.numel() for p in parameters)


def test_dtypes_travel_apart_and_low_precision_in_fp32(group):
    double, half = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    half.grad_dtype = torch.float32
    reducer, _ = reduce([double, half], (double.sum() + half.double().sum()) * 3)
    assert reducer.bucket_count == 2
    assert (double.grad.dtype, half.grad.dtype) == (torch.float64, torch.float32)
    assert half.grad.tolist() == [3.0] * 3


def test_it_fits_its_own_parameters_as_they_are(group):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    reducer = Reducer(list(first.parameters()), 0, ReducerSettings())
    assert reducer.fits(list(first.parameters()))
    assert not reducer.fits(list(second.parameters()))
    assert not reducer.fits([first.weight])
    assert reducer.fits(list(first.bfloat16().parameters()))  # which travel in fp32
    assert not reducer.fits(list(first.double().parameters()))


def test_unfused_sends_one_message_each(group):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    reducer, _ = reduce(parameters, sum(p.sum() for p in parameters), ReducerSettings(fuse=False))
    assert (reducer.bucket_count, reducer.messages) == (5, 5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"bucket_mib": 0.25, "last_bucket_mib": 0.125},
            "5 all-reduces, fused into 3 per update (200 KiB, 200 KiB, 100.03 KiB)",
        ),
        (
            {"wire_dtype": torch.float16},
            "5 all-reduces, fused into 2 per update (250 KiB, 28 B), rounded to float16 on the way",
        ),
        (
            {"groups": GroupSettings(count=3)},
            "5 all-reduces, fused into 1 per update (500.03 KiB), over 3 process groups of which 1 are used",
        ),
        (
            {"fuse": False},
            "5 all-reduces per update, not fused, as fuse_all_reduce_ops = False "
            "(100 KiB, 100 KiB, 100 KiB, 100 KiB, 100.03 KiB)",
        ),
    ],
)
def test_it_says_how_gradients_travel(group, settings, said):
    parameters = [nn.Parameter(torch.ones(25 * 1024)) for _ in range(5)]
    assert str(Reducer(parameters, 2, ReducerSettings(**settings))) == said


def test_of_many_messages_it_shows_some(group):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(12)]
    assert str(Reducer(parameters, 0, ReducerSettings(fuse=False))).endswith("8 B, 8 B, ...)")


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_compression_rounds_gradients_but_not_the_counts(group, wire):
    parameter = nn.Parameter(torch.ones(3))
    count = 1_234_567.0
    _, extras = reduce([parameter], (parameter * 1.001).sum(), ReducerSettings(wire_dtype=wire), extras=(count,))
    assert float(extras[0]) == count
    assert parameter.grad.tolist() == [torch.tensor(1.001, dtype=wire).item()] * 3


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_complex_gradients_travel_as_pairs_of_real_numbers(group, wire):
    weight = nn.Parameter(torch.tensor([[1 + 2j, 3 - 1j, 2j], [4, 5j, 6]], dtype=torch.complex64).t())
    real = nn.Parameter(torch.ones(3))
    loss = (weight.abs().square().sum() + real.sum()) / 2
    (expected,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    reducer, extras = reduce([real, weight], loss, ReducerSettings(wire_dtype=wire))
    assert torch.equal(weight.grad, expected)
    assert weight.grad.stride() == weight.stride()
    assert [extra.tolist() for extra in extras] == [1.0, 2.0]
    assert not any(payload.is_complex() for payload in reducer.payloads)


def test_a_parameter_without_gradient_stays_without(group):
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reduce([used, unused], used.sum())
    assert used.grad is not None
    assert unused.grad is None


def test_hooks_are_gone_after_the_window(group):
    parameter = nn.Parameter(torch.ones(2))
    reducer, _ = reduce([parameter], parameter.sum())
    parameter.sum().backward()
    assert reducer.messages == 1
    assert not parameter._post_accumulate_grad_hooks


def test_a_sparse_gradient_is_refused(group):
    embedding = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(TypeError, match=r"sparse.*Set sparse=False"):
        reduce(list(embedding.parameters()), embedding(torch.tensor([1])).sum())


def test_reentrant_checkpointing_of_a_shared_module_is_refused(group):
    from torch.utils.checkpoint import checkpoint

    shared, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    hidden = checkpoint(shared, checkpoint(shared, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        reduce(list(shared.parameters()), hidden.sum(), ReducerSettings(fuse=False))
