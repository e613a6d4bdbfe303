"""The step on a CUDA device: same numbers, low precision, and no waiting for the device."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import NonFiniteError, fleet
from tests import plain
from tests.jobs.starting import ROOT, start

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def merging(**settings):
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4}, **settings)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 3)).cuda()


def samples(n=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    return x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()


class NoWaiting:
    """Fails where the host waits for the device inside."""

    def __enter__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", plain.CASES, ids=lambda case: case.name)
def test_micro_batches_equal_the_big_batch_in_fp64(case):
    from tests.jobs.exactness_worker import strategy_for, wrapped_optimizer

    reference, losses = plain.train(case, workers=1)
    strategy = strategy_for(case)
    net = fleet.distributed_model(plain.make_net().cuda(), strategy)
    optimizer = fleet.distributed_optimizer(wrapped_optimizer(case, net), strategy, clip_norm=case.clip_norm)
    step = X.Step(net, optimizer, functional.cross_entropy)
    # Batches stay on the host: slices are moved one by one.
    reported = [step(batch).loss.item() for batch in plain.batches(case, workers=1)]
    assert reported == pytest.approx(losses, rel=1e-12)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value.cpu(), reference[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "amp", [None, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"use_pure_bf16": True}, {"use_pure_fp16": True}]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_a_step_with_a_fused_optimizer_never_waits_and_learns(amp, make):
    net = small()
    strategy = merging(**({"amp": True, "amp_configs": amp} if amp else {}))
    step = X.Step(net, make(net.parameters()), functional.cross_entropy, strategy, clip_norm=10.0)
    batch = tuple(tensor.cuda() for tensor in samples())
    outs = [step(batch) for _ in range(3)]
    with NoWaiting():
        outs += [step(batch) for _ in range(60)]
    assert outs[-1].loss.item() < 0.5 * outs[0].loss.item()
    assert all(out.updated for out in outs[-10:])
    if amp and amp.get("dtype") == "float16":
        assert outs[-1].loss_scale > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ],
)
@pytest.mark.parametrize("bad_window", [0, 2])
def test_a_skipped_window_leaves_no_trace(make, bad_window):
    """The first one too: torch's fused SGD would start from uninitialised momentum."""
    nets = [small(), small()]
    steps = [X.Step(net, make(net.parameters()), functional.cross_entropy, merging()) for net in nets]
    x, y = samples()
    for number in range(5):
        images = x + 0.01 * number
        if number == bad_window:
            broken = images.clone()
            broken[20] = float("nan")
            out = steps[0]((broken, y))
            assert (out.updated, out.skipped) == (False, True)
            continue
        for step in steps:
            assert step((images, y)).updated
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_skipped_window_leaves_buffers_as_they_were_and_never_waits():
    net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).cuda()
    step = X.Step(net, torch.optim.AdamW(net.parameters(), fused=True), functional.cross_entropy, merging())
    x, y = (tensor.cuda() for tensor in samples())
    for _ in range(3):
        step((x, y))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    broken = x.clone()
    broken[20] = float("nan")
    with NoWaiting():
        out = step((broken, y))
    assert out.skipped
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("names", [("common", "rare"), ("common",)])
def test_counts_on_the_device_mute_losses_without_items_and_are_never_waited_for(names):
    net = plain.make_two_heads().cuda()
    step = X.Step(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
        compute=lambda model, micro: {name: plain.weighed_losses(model, micro)[name] for name in names},
        items=lambda micro: {name: plain.weighed_items(micro)[name] for name in names},
        strategy=merging(),
    )
    batches = [tuple(tensor.cuda() for tensor in batch) for batch in plain.weighed_batches(1)]
    outs = [step(batch) for batch in batches[:2]]
    with NoWaiting():
        outs += [step(batch) for batch in batches[2:]]
    assert all(outs)
    reference = plain.train_weighed(1, names)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value.cpu(), reference[name], rtol=1e-11, atol=1e-11)


def test_fp16_overflow_shrinks_the_scale_and_training_goes_on():
    net = small()
    strategy = merging(
        amp=True, amp_configs={"init_loss_scaling": 2.0**40, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    )
    step = X.Step(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True), functional.cross_entropy, strategy)
    outs = [step(samples()) for _ in range(60)]
    skipped = [out.skipped for out in outs]
    assert skipped[0]
    assert not any(skipped[-10:])
    assert outs[-1].loss_scale < 2.0**40
    assert outs[-1].loss.item() < outs[0].loss.item()


def test_nan_losses_stop_the_run_one_window_late():
    net = small()
    step = X.Step(
        net,
        torch.optim.AdamW(net.parameters(), fused=True),
        compute=lambda model, batch: model(batch[0]).sum() * float("nan"),
        strategy=merging(),
        nonfinite_limit=3,
    )
    before = copy.deepcopy(net.state_dict())
    for _ in range(3):
        assert step(samples()).skipped
    with pytest.raises(NonFiniteError, match="in 3 windows in a row"):
        step(samples())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_low_precision_gradients_are_merged_in_fp32():
    net = small().bfloat16()
    strategy = merging()
    net = fleet.distributed_model(net, strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), strategy)
    x, y = samples()
    for images, labels in zip(x.chunk(4), y.chunk(4), strict=True):
        optimizer.minimize(functional.cross_entropy(net(images.cuda().bfloat16()).float(), labels.cuda()))
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}


def test_lars_and_lamb_train_with_every_precision():
    for amp in ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"use_pure_bf16": True}, {"use_pure_fp16": True}):
        for name in ("lars", "lamb"):
            net = small()
            strategy = merging(amp=True, amp_configs=amp, **{name: True})
            if name == "lars":
                strategy.lars_configs = {"lars_coeff": 0.1, "exclude_from_weight_decay": ["norm", "bias"]}
                inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
            else:
                inner = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-6)
            step = X.Step(net, inner, functional.cross_entropy, strategy)
            losses = [step(samples()).loss.item() for _ in range(40)]
            assert losses[-1] < 0.5 * losses[0], (amp, name, losses[0], losses[-1])


def test_channels_last_convolutions_keep_their_strides():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4))
    net = net.cuda().to(memory_format=torch.channels_last)
    step = X.Step(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True),
        functional.cross_entropy,
        merging(amp=True, amp_configs={"dtype": "bfloat16"}),
    )
    images = torch.randn(32, 3, 8, 8).to(memory_format=torch.channels_last)
    out = step((images, torch.randint(0, 4, (32,))))
    assert out.updated
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_two_workers_on_one_device(tmp_path):
    """gloo carries CUDA tensors too: the reducer's streams and buckets, without a second device."""
    start(ROOT / "tests/gpu/two_workers.py", tmp_path, workers=2, launcher="torchrun")
    ours = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    reference, losses = plain.train(plain.Case("adam", ragged=True), workers=2)
    for state, reported in ours:
        assert reported == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(value.cpu(), reference[name], rtol=1e-11, atol=1e-11)
