"""The guide's loop on one worker: what a window holds, and when it updates."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import LossScaler, NonFiniteError, fleet, gradient_marks, gradients
from fleetx.fleet import checks
from tests import plain

K = 4


def prepare(net, k_steps=K, avg=True, lr=0.1, scheduler=None, make=None, **options):
    strategy = fleet.DistributedStrategy(
        gradient_merge=k_steps > 1, gradient_merge_configs={"k_steps": k_steps, "avg": avg}
    )
    net = fleet.distributed_model(net, strategy)
    inner = make(net) if make else torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    return net, fleet.distributed_optimizer(inner, strategy, scheduler and scheduler(inner), **options)


def data(n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(3, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (3,), generator=generator))
        for _ in range(n)
    ]


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def assert_same(net, reference, exact=False):
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)


def by_hand(losses, updates, make=lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)):
    """Bare torch: each update differentiates the mean of its losses; `losses(net)` gives functions."""
    net = plain.make_net()
    optimizer = make(net)
    for micros in updates:
        net.zero_grad()
        (sum(losses(net, micro) for micro in micros) / len(micros)).backward()
        optimizer.step()
    return net


def test_the_kth_call_updates_and_says_so():
    net, optimizer = prepare(plain.make_net())
    before = weights(net)
    outs = []
    for number, micro in enumerate(data(8)):
        outs.append(optimizer.minimize(plain.mean_loss(net, micro)))
        moved = any(not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
        assert moved == (number >= K - 1)
    assert [bool(out) for out in outs] == [False, False, False, True] * 2
    assert [out.closed for out in outs] == [False, False, False, True] * 2
    micros = data(8)
    assert_same(net, by_hand(plain.mean_loss, [micros[:4], micros[4:]]))
    assert "window still open" in repr(outs[0])
    assert "updated" in repr(outs[3])


def test_without_merge_it_is_bit_equal_to_torch():
    net, optimizer = prepare(plain.make_net(), k_steps=1)
    for micro in data(5):
        optimizer.minimize(plain.mean_loss(net, micro))
    assert_same(net, by_hand(plain.mean_loss, [[micro] for micro in data(5)]), exact=True)


def test_an_eval_forward_in_mid_window_changes_nothing():
    net, optimizer = prepare(plain.make_net())
    for micro in data(4):
        optimizer.minimize(plain.mean_loss(net, micro))
        net.eval()
        with torch.no_grad():
            net(micro[0])
        net(micro[0])  # and one that builds a graph that nobody uses
        net.train()
    assert_same(net, by_hand(plain.mean_loss, [data(4)]))


def test_two_forwards_and_one_backward():
    def contrast(net, micro):
        return (net(micro[0]) - net(micro[0].flip(0))).square().mean()

    net, optimizer = prepare(plain.make_net())
    for micro in data(4):
        optimizer.minimize(contrast(net, micro))
    assert_same(net, by_hand(contrast, [data(4)]))


def test_two_backwards_of_one_forward_are_two_micro_batches():
    net, optimizer = prepare(plain.make_net(), k_steps=2)
    (micro,) = data(1)
    scores = net(micro[0])
    assert not optimizer.minimize(functional.cross_entropy(scores, micro[1]), retain_graph=True)
    assert optimizer.minimize(scores.square().mean())
    losses = [lambda net: plain.mean_loss(net, micro), lambda net: net(micro[0]).square().mean()]
    assert_same(net, by_hand(lambda net, loss: loss(net), [losses]))


@pytest.mark.parametrize("held", [1, 3])
def test_a_flush_averages_by_what_the_window_holds(held):
    net, optimizer = prepare(plain.make_net())
    for micro in data(held):
        optimizer.minimize(plain.mean_loss(net, micro))
    assert optimizer.flush().updated
    assert optimizer.flush() is None
    assert_same(net, by_hand(plain.mean_loss, [data(held)]))


def test_a_flush_weighs_by_items():
    net, optimizer = prepare(plain.make_net(), make=lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = torch.cat([m[0] for m in data(3)]), torch.cat([m[1] for m in data(3)])
    for piece in (slice(0, 1), slice(1, 1), slice(1, 9)):
        optimizer.minimize(plain.mean_loss(net, (x[piece], y[piece])), items=piece.stop - piece.start)
    out = optimizer.flush()
    reference = by_hand(plain.mean_loss, [[(x, y)]], lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    assert_same(net, reference)
    assert out.loss.item() == pytest.approx(plain.mean_loss(plain.make_net(), (x, y)).item(), rel=1e-12)


def test_sums_are_not_divided():
    net, optimizer = prepare(plain.make_net(), avg=False)
    for micro in data(4):
        optimizer.minimize(plain.mean_loss(net, micro))
    reference = plain.make_net()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    sum(plain.mean_loss(reference, micro) for micro in data(4)).backward()
    sgd.step()
    assert_same(net, reference)


def test_unused_and_frozen_parameters_are_left_alone():
    net, optimizer = prepare(plain.make_net(), make=lambda n: torch.optim.AdamW(n.parameters(), weight_decay=0.5))
    frozen, unused = net.frozen.weight.clone(), net.unused.clone()
    for micro in data(8):
        optimizer.minimize(plain.mean_loss(net, micro))
    assert torch.equal(net.frozen.weight, frozen)
    assert torch.equal(net.unused, unused)


def test_a_parameter_used_in_some_micro_batches_only():
    def sometimes(net, micro):
        loss = plain.mean_loss(net, micro)
        return loss + net.unused.sum() if micro[1][0] == 0 else loss

    micros = data(8)
    assert 0 < sum(bool(micro[1][0] == 0) for micro in micros) < 8
    net, optimizer = prepare(plain.make_net())
    for micro in micros:
        optimizer.minimize(sometimes(net, micro))
    assert_same(net, by_hand(sometimes, [micros[:4], micros[4:]]))


def test_parameters_may_be_freed_between_windows():
    net, optimizer = prepare(plain.make_net(), k_steps=2)
    reference = plain.make_net()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        if number == 1:
            net.frozen.requires_grad_(True)
            reference.frozen.requires_grad_(True)
        micros = data(2, seed=number)
        for micro in micros:
            optimizer.minimize(plain.mean_loss(net, micro))
        reference.zero_grad()
        (sum(plain.mean_loss(reference, micro) for micro in micros) / 2).backward()
        sgd.step()
    assert_same(net, reference)


def test_the_schedule_counts_windows_skipped_ones_included():
    net, optimizer = prepare(
        plain.make_net(), k_steps=2, lr=1.0, scheduler=lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    )
    lrs = []
    for number, micro in enumerate(data(8)):
        factor = float("nan") if number == 0 else 1.0
        out = optimizer.minimize(plain.mean_loss(net, micro) * factor)
        if out.closed:
            lrs.append((out.lr, out.skipped))
    assert lrs == [(1.0, True), (0.5, False), (0.25, False), (0.125, False)]


def test_a_torch_scheduler_may_also_be_made_for_the_distributed_optimizer():
    net, optimizer = prepare(plain.make_net(), k_steps=1, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for micro in data(2):
        optimizer.minimize(plain.mean_loss(net, micro))
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_gradients_are_merged_in_fp32_and_masters_moved_for_bf16_weights():
    torch.manual_seed(0)
    net, optimizer = prepare(
        nn.Linear(4, 1, bias=False).bfloat16(), k_steps=2, make=lambda n: torch.optim.SGD(n.parameters(), lr=1e-4)
    )
    start = net.weight.detach().clone()
    for _ in range(200):
        optimizer.minimize(net(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
    assert net.weight.grad.dtype == torch.float32
    (master,) = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(master, start.float() - 100 * 1e-4, rtol=0, atol=1e-5)
    assert torch.equal(net.weight, master.bfloat16())


def test_the_loss_scale_is_invisible_to_the_weights():
    """fp64 with scaling switched on by hand: the scale must cancel exactly (it is a power of two)."""
    net, optimizer = prepare(plain.make_net(), clip_norm=0.3)
    optimizer.engine.scaler = LossScaler(2.0**14)
    plain_net, plain_optimizer = prepare(plain.make_net(), clip_norm=0.3)
    for micro in data(8):
        scaled = optimizer.minimize(plain.mean_loss(net, micro))
        unscaled = plain_optimizer.minimize(plain.mean_loss(plain_net, micro))
    assert_same(net, plain_net, exact=True)
    assert torch.equal(scaled.grad_norm, unscaled.grad_norm)
    assert torch.equal(scaled.loss, unscaled.loss)
    assert (scaled.loss_scale, unscaled.loss_scale) == (2.0**14, 1.0)


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("size", [1e22, 1e30])
def test_gradients_whose_squares_overflow_are_clipped_and_applied(size, at_hand, monkeypatch):
    monkeypatch.setattr(gradients, "is_at_hand", lambda _tensor: at_hand)

    def loss(net, micro):
        return plain.mean_loss(net, (micro[0].to(net.head.weight.dtype), micro[1])) * size

    def make(net):
        return torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = prepare(plain.make_net().float(), k_steps=2, make=make, clip_norm=1.0)
    for micro in data(2):
        out = optimizer.minimize(loss(net, micro))
    reference = plain.make_net()
    (sum(loss(reference, micro) for micro in data(2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    make(reference).step()
    assert out.updated
    assert out.grad_norm.dtype == torch.float32
    assert out.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-6)


def test_an_odd_scale_is_undone_to_the_last_digits():
    net, optimizer = prepare(plain.make_net())
    optimizer.engine.scaler = LossScaler(52428.8)
    for micro in data(8):
        optimizer.minimize(plain.mean_loss(net, micro))
    assert_same(net, by_hand(plain.mean_loss, [data(8)[:4], data(8)[4:]]))


def test_a_run_of_nan_losses_stops_and_says_what_to_do():
    net, optimizer = prepare(plain.make_net(), k_steps=1, nonfinite_limit=3)
    before = weights(net)
    (micro,) = data(1)
    optimizer.minimize(plain.mean_loss(net, micro) * float("nan"))
    optimizer.minimize(plain.mean_loss(net, micro) * float("nan"))
    optimizer.minimize(plain.mean_loss(net, micro) * 0)  # one good window in between starts the count anew
    for _ in range(2):
        assert optimizer.minimize(plain.mean_loss(net, micro) * float("nan")).skipped
    with pytest.raises(NonFiniteError, match=r"in 3 windows in a row \(5 in all\).*learning rate.*nonfinite_limit"):
        optimizer.minimize(plain.mean_loss(net, micro) * float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


class OverflowsAbove(torch.autograd.Function):
    """Gradients above a limit become infinite, as in fp16."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.where(grad.abs() > ctx.limit, float("inf"), grad), None


def test_a_falling_loss_scale_is_no_reason_to_stop():
    net, optimizer = prepare(plain.make_net(), k_steps=1, nonfinite_limit=2)
    optimizer.engine.scaler = LossScaler(1024.0, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    (micro,) = data(1)
    outs = [optimizer.minimize(OverflowsAbove.apply(plain.mean_loss(net, micro), 100.0)) for _ in range(6)]
    assert [(out.loss_scale, out.skipped) for out in outs] == [
        (1024.0, True),
        (512.0, True),
        (256.0, True),
        (128.0, True),
        (64.0, False),
        (64.0, False),
    ]


def test_overflows_at_the_smallest_scale_do_stop():
    net, optimizer = prepare(plain.make_net(), k_steps=1, nonfinite_limit=2)
    optimizer.engine.scaler = LossScaler(1.0)
    (micro,) = data(1)
    optimizer.minimize(OverflowsAbove.apply(plain.mean_loss(net, micro), 0.1))
    with pytest.raises(NonFiniteError, match="in 2 windows in a row"):
        optimizer.minimize(OverflowsAbove.apply(plain.mean_loss(net, micro), 0.1))


def test_a_failing_backward_discards_the_window_and_the_next_one_is_clean():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no gradient today")

    net, optimizer = prepare(plain.make_net())
    micros = data(5)
    optimizer.minimize(plain.mean_loss(net, micros[4]))
    with pytest.raises(RuntimeError, match="no gradient today") as caught:
        optimizer.minimize(Fails.apply(plain.mean_loss(net, micros[0])))
    assert "discarded with its 2 micro-batches" in caught.value.__notes__[0]
    for micro in micros[:4]:
        optimizer.minimize(plain.mean_loss(net, micro))
    assert_same(net, by_hand(plain.mean_loss, [micros[:4]]))


def test_discard_drops_the_window():
    net, optimizer = prepare(plain.make_net())
    optimizer.minimize(plain.mean_loss(net, data(1, seed=9)[0]))
    optimizer.discard()
    assert optimizer.micro_batches_held == 0
    for micro in data(4):
        optimizer.minimize(plain.mean_loss(net, micro))
    assert_same(net, by_hand(plain.mean_loss, [data(4)]))


def test_groups_can_be_added_between_windows():
    net, optimizer = prepare(plain.make_net(), k_steps=1, make=lambda n: torch.optim.SGD(n.head.parameters(), lr=0.1))
    (micro,) = data(1)
    optimizer.minimize(plain.mean_loss(net, micro))
    optimizer.add_param_group({"params": list(net.first.parameters()), "lr": 0.5})
    before = net.first.weight.clone()
    optimizer.minimize(plain.mean_loss(net, micro))
    assert not torch.equal(before, net.first.weight)


def test_a_window_in_progress_is_not_loaded_by_another_worker():
    net, optimizer = prepare(plain.make_net())
    optimizer.minimize(plain.mean_loss(net, data(1)[0]))
    state = optimizer.state_dict()
    state["fleetx"]["window"]["rank"] = 3
    with pytest.raises(ValueError, match=r"worker 3 of 1 saved it, worker 0 of 1 loads it.*flush"):
        optimizer.load_state_dict(state)


def test_two_optimizers_do_not_meet_in_each_others_windows():
    """A generator's loss runs through the discriminator, whose own window must not notice."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 6).double(), plain.make_net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    optimizers = [
        fleet.distributed_optimizer(
            torch.optim.SGD(fleet.distributed_model(m, strategy).parameters(), lr=0.1), strategy
        )
        for m in (generator, critic)
    ]
    start = [p.detach().clone() for p in critic.parameters()]
    noise = torch.randn(4, 3, 3, dtype=torch.float64)
    for number, micro in enumerate(data(2)):
        optimizers[1].minimize(plain.mean_loss(critic, micro))
        if number == 0:
            optimizers[0].minimize(critic(generator(noise[number])).square().mean())
    reference = plain.make_net()
    for p, value in zip(reference.parameters(), start, strict=True):
        assert torch.equal(p, value)
    (sum(plain.mean_loss(reference, micro) for micro in data(2)) / 2).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_same(critic, reference)


def test_an_error_inside_the_update_does_not_leave_a_window_that_never_closes():
    net, optimizer = prepare(plain.make_net())
    step, failures = optimizer.inner.step, iter([MemoryError("no room")])

    def failing():
        for failure in failures:
            raise failure
        return step()

    optimizer.inner.step = failing
    micros = data(8)
    for micro in micros[:3]:
        optimizer.minimize(plain.mean_loss(net, micro))
    with pytest.raises(MemoryError) as caught:
        optimizer.minimize(plain.mean_loss(net, micros[3]))
    assert "discarded with its 4 micro-batches" in caught.value.__notes__[0]
    assert [bool(optimizer.minimize(plain.mean_loss(net, micro))) for micro in micros[4:]] == [False] * 3 + [True]


def test_a_model_that_is_made_low_after_its_optimizer_has_no_masters_and_is_refused():
    net, optimizer = prepare(nn.Linear(6, 1), k_steps=1)
    net.bfloat16()
    with pytest.raises(RuntimeError, match="weight was made torch.bfloat16 after fleet.distributed_optimizer"):
        optimizer.minimize(net(data(1)[0][0].bfloat16()).float().square().mean())


def test_weights_loaded_later_are_not_lost_to_old_masters():
    torch.manual_seed(0)
    net, optimizer = prepare(nn.Linear(4, 2).bfloat16(), k_steps=1, lr=1e-3)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    optimizer.minimize(net(x).float().sum())
    net.load_state_dict({name: torch.full_like(value, 7.0) for name, value in net.state_dict().items()})
    optimizer.minimize(net(x).float().sum())
    assert all((p - 7).abs().max() < 0.1 for p in net.parameters())


def test_weights_written_through_data_are_not_undone_by_masters_and_are_saved_with_them():
    torch.manual_seed(0)
    net, optimizer = prepare(nn.Linear(4, 2).bfloat16(), k_steps=1, lr=1e-3)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    optimizer.minimize(net(x).float().sum())
    masters = [master.detach().clone() for master in optimizer.param_groups[0]["params"]]
    torch.nn.utils.vector_to_parameters(torch.full((10,), 7.0, dtype=torch.bfloat16), net.parameters())
    net.weight.data[0] = masters[0][0]  # which it rounds to: the finer bits stay
    saved = optimizer.state_dict()["fleetx"]["masters"]
    assert torch.equal(saved[0][0], masters[0][0])
    assert torch.equal(saved[0][1], torch.full((4,), 7.0))
    optimizer.minimize(net(x).float().sum())
    assert (net.weight[1] - 7).abs().max() < 0.1
    assert (net.bias - 7).abs().max() < 0.1


def test_a_used_optimizer_keeps_its_momentum_under_masters():
    net = nn.Linear(4, 2).bfloat16()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
    inner.step()
    momenta = [inner.state[p]["momentum_buffer"].float() for p in net.parameters()]
    strategy = fleet.DistributedStrategy()
    optimizer = fleet.distributed_optimizer(inner, strategy) if fleet.distributed_model(net, strategy) else None
    for master, momentum in zip(optimizer.param_groups[0]["params"], momenta, strict=True):
        assert torch.equal(optimizer.state[master]["momentum_buffer"], momentum)
    optimizer.state_dict()


def test_the_optimizer_can_be_copied_pickled_and_hooked():
    net, optimizer = prepare(plain.make_net())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for micro in data(4):
        optimizer.minimize(plain.mean_loss(net, micro))
    assert calls == [1]
    net, optimizer = prepare(plain.make_net())
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.param_groups[0]["lr"] == 0.1
        assert other.micro_batches_held == 0


@pytest.mark.parametrize("empty", [0, torch.tensor(0)])
def test_micro_batches_without_items_weigh_nothing(empty):
    def make(net):
        return torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = prepare(plain.make_net(), k_steps=2, make=make)
    full, padded = data(2)
    optimizer.minimize(functional.cross_entropy(net(padded[0]), torch.full((3,), -100)), items=empty)
    optimizer.minimize(plain.mean_loss(net, full), items=torch.tensor(3))
    assert_same(net, by_hand(plain.mean_loss, [[full]], make))
    for _ in range(2):  # a window without any items has no mean
        out = optimizer.minimize(functional.cross_entropy(net(padded[0]), torch.full((3,), -100)), items=empty)
    assert out.skipped
    assert_same(net, by_hand(plain.mean_loss, [[full]], make))


def test_a_divisor_whose_reciprocal_overflows_skips_the_window():
    """Counts are weights of samples too; these are below what fp32 can divide by."""
    net, optimizer = prepare(plain.make_net().float(), k_steps=2)
    before = weights(net)
    for micro, items in zip(data(2), (0, 1e-39), strict=True):
        out = optimizer.minimize(plain.mean_loss(net, (micro[0].float(), micro[1])), items=items)
    assert out.skipped
    for ours, theirs in zip(net.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [-2, -0.5, float("nan")])
def test_a_negative_count_on_a_device_skips_the_window(count, monkeypatch):
    monkeypatch.setattr(checks, "as_count", lambda items: items)
    net, optimizer = prepare(plain.make_net(), k_steps=2)
    before = weights(net)
    for micro, items in zip(data(2), (3, count), strict=True):
        out = optimizer.minimize(plain.mean_loss(net, micro), items=torch.tensor(items))
    assert out.skipped
    for ours, theirs in zip(net.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)


# Errors ----------------------------------------------------------------------------------------------------


def put_elsewhere(net, _optimizer):
    net.head.weight.grad.data = net.head.weight.grad.data * 2


def write_by_numpy(net, _optimizer):
    values = net.head.weight.grad.numpy()
    values[:, 3] *= 2


UNCOUNTED = [
    lambda net, optimizer: [p.grad.data.mul_(0.5) for p in net.head.parameters()],
    lambda net, optimizer: net.first.weight.grad.data.clamp_(-1e-3, 1e-3),
    lambda net, optimizer: net.norm.bias.grad.detach().data.add_(1),
    write_by_numpy,
    put_elsewhere,
]


@pytest.mark.parametrize(
    "meddle",
    [
        lambda net, optimizer: plain.mean_loss(net, data(1)[0]).backward(),
        lambda net, optimizer: net.zero_grad(),
        lambda net, optimizer: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
        lambda net, optimizer: optimizer.inner.zero_grad(),
        *UNCOUNTED,
    ],
)
@pytest.mark.parametrize("end", ["minimize", "flush"])
def test_meddling_with_gradients_in_mid_window_is_noticed(meddle, end):
    net, optimizer = prepare(plain.make_net())
    for micro in data(2):  # the second time the views of the first serve
        optimizer.minimize(plain.mean_loss(net, micro))
    meddle(net, optimizer)
    with pytest.raises(
        RuntimeError, match=r"of (first|head|norm)\..*was changed outside of the.*clip_norm=.*flush\(\)"
    ):
        optimizer.minimize(plain.mean_loss(net, data(1)[0])) if end == "minimize" else optimizer.flush()


@pytest.mark.parametrize("meddle", [meddle for meddle in UNCOUNTED if meddle is not put_elsewhere])
def test_on_a_device_writes_that_torch_does_not_count_are_noticed_a_window_later(meddle, monkeypatch):
    monkeypatch.setattr(gradient_marks, "is_at_hand", lambda _tensor: False)
    net, optimizer = prepare(plain.make_net(), k_steps=2)
    first, *others = data(3)
    optimizer.minimize(plain.mean_loss(net, first))
    meddle(net, optimizer)
    for micro in others:
        optimizer.minimize(plain.mean_loss(net, micro))
    with pytest.raises(RuntimeError, match="of a parameter was changed outside of the optimizer in the window before"):
        optimizer.minimize(plain.mean_loss(net, first))


def test_gradients_that_are_read_nan_or_of_other_dtypes_are_not_taken_for_changed():
    torch.manual_seed(0)
    net = nn.Sequential(plain.Complex(), nn.Linear(3, 3).double(), nn.Linear(3, 1).float())
    net.register_parameter("none", nn.Parameter(torch.ones(0)))
    net, optimizer = prepare(net, k_steps=3)
    for factor in (1.0, float("nan"), 1.0):
        hidden = net[1](net[0](torch.ones(2, 6, dtype=torch.float64)))
        out = optimizer.minimize(net[2](hidden.float()).sum() * factor + net.none.sum())
        assert sum(float(p.grad.abs().sum().numpy()) for p in net.parameters()) != 0
    assert out.skipped


def scaled_step(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


STEPS_OF_THE_LOOP = [
    lambda sgd: sgd.step(),
    lambda sgd: (sgd.zero_grad(), sgd.step(lambda: None)),
    scaled_step,
]


def with_bfloat16(_strategy, net):
    net.bfloat16()


def with_lars(strategy, _net):
    strategy.lars = True


def with_fused(_strategy, net):
    net.float()


def with_copy(_strategy, _net):
    """Copies and pickles lose an optimizer's hooks."""


@pytest.mark.parametrize("step", STEPS_OF_THE_LOOP)
@pytest.mark.parametrize(
    ("change", "held"), [(None, 1), (None, K), (with_bfloat16, K), (with_fused, K), (with_lars, 1), (with_copy, K)]
)
def test_the_wrapped_optimizer_is_not_stepped_by_the_loop(step, change, held):
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K})
    net = plain.make_net()
    if change is not None:
        change(strategy, net)
    net = fleet.distributed_model(net, strategy)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=change is with_fused or None)
    optimizer = fleet.distributed_optimizer(sgd, strategy)
    if change is with_copy:
        optimizer, net = copy.deepcopy((optimizer, net))
        sgd = optimizer.inner
    dtype = next(net.parameters()).dtype
    for x, y in data(held):
        optimizer.minimize(functional.cross_entropy(net(x.to(dtype)), y))
    before = weights(net)
    error, message = RuntimeError, r"SGD\.step\(\) is not for the loop.*takes the place of loss\.backward\(\)"
    if (step, change) == (scaled_step, with_bfloat16):  # torch's own words: the masters have no gradients
        error, message = AssertionError, "No inf checks"
    with pytest.raises(error, match=message):
        step(sgd)
    for ours, theirs in zip(net.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)
    assert not hasattr(sgd, "grad_scale")


def test_a_step_without_gradients_a_schedule_and_loaded_states_are_no_steps_of_the_loop():
    net, optimizer = prepare(plain.make_net(), k_steps=1, lr=1.0)
    sgd = optimizer.inner
    schedule = torch.optim.lr_scheduler.SequentialLR(
        sgd,
        [torch.optim.lr_scheduler.LinearLR(sgd, total_iters=2), torch.optim.lr_scheduler.StepLR(sgd, 1)],
        milestones=[2],
    )
    sgd.step()  # as loops do that step once before their schedule
    for micro in data(3):
        optimizer.minimize(plain.mean_loss(net, micro))
        schedule.step()
    state = copy.deepcopy((sgd.state_dict(), optimizer.state_dict()))
    sgd.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    assert optimizer.minimize(plain.mean_loss(net, data(1)[0])).updated
    again = fleet.distributed_optimizer(sgd, optimizer.strategy)  # a cell of a notebook that is run twice
    assert again.minimize(plain.mean_loss(net, data(1)[0])).updated
    with pytest.raises(RuntimeError, match="is not for the loop"):
        sgd.step()


def test_a_gradient_at_the_address_of_the_one_it_replaces_is_noticed():
    net, optimizer = prepare(nn.Linear(6, 1, bias=False).double())
    inputs = data(1)[0][0]
    for _ in range(50):
        optimizer.minimize(net(inputs).square().mean())
        before, net.weight.grad = id(net.weight.grad), None
        net.weight.grad = torch.ones_like(net.weight)
        with pytest.raises(RuntimeError, match="was changed outside of the optimizer"):
            optimizer.minimize(net(inputs).square().mean())
        assert id(net.weight.grad) != before
        optimizer.discard()


def test_freezing_in_mid_window_is_noticed():
    net, optimizer = prepare(plain.make_net())
    optimizer.minimize(plain.mean_loss(net, data(1)[0]))
    net.first.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen or freed while the window held 1"):
        optimizer.minimize(plain.mean_loss(net, data(1)[0]))


def test_a_loss_of_another_model_is_refused():
    _, optimizer = prepare(plain.make_net())
    with pytest.raises(ValueError, match="reached none of the optimizer's parameters"):
        optimizer.minimize(plain.mean_loss(plain.make_net(), data(1)[0]))


def test_a_backward_of_the_users_own_is_explained():
    net, optimizer = prepare(plain.make_net())
    loss = plain.mean_loss(net, data(1)[0])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as caught:
        optimizer.minimize(loss)
    assert any("Leave out your own loss.backward()" in note for note in caught.value.__notes__)


def test_gradients_may_be_off_around_minimize():
    net, optimizer = prepare(plain.make_net(), k_steps=1)
    loss = plain.mean_loss(net, data(1)[0])
    with torch.no_grad():
        assert optimizer.minimize(loss).grad_norm > 0


def test_sparse_gradients_and_lbfgs_are_refused():
    net, optimizer = prepare(nn.Embedding(4, 2, sparse=True), k_steps=1)
    with pytest.raises(TypeError, match=r"weight of shape.*sparse.*Set sparse=False"):
        optimizer.minimize(net(torch.tensor([1])).sum())
    with pytest.raises(TypeError, match="LBFGS evaluates the loss several times"):
        fleet.distributed_optimizer(torch.optim.LBFGS(net.parameters()))


def test_a_window_in_progress_needs_its_k_steps():
    net, optimizer = prepare(plain.make_net())
    optimizer.minimize(plain.mean_loss(net, data(1)[0]))
    _, other = prepare(plain.make_net(), k_steps=2)
    with pytest.raises(ValueError, match="is one of 4 micro-batches, and this optimizer merges 2"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_window_in_progress_needs_the_parameters_that_it_trained(frozen):
    net, optimizer = prepare(plain.make_net(), k_steps=2)
    net.head.requires_grad_(frozen)
    optimizer.minimize(plain.mean_loss(net, data(1)[0]))
    state = optimizer.state_dict()
    net, optimizer = prepare(plain.make_net(), k_steps=2)
    net.head.requires_grad_(not frozen)
    here = "trained, and it is frozen now" if frozen else "frozen, and it is trained now"
    with pytest.raises(ValueError, match=rf"saved with head\.weight {here}.*flush\(\)"):
        optimizer.load_state_dict(state)


def test_a_schedule_stepped_twice_is_noticed():
    net, optimizer = prepare(plain.make_net(), k_steps=1, scheduler=lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1))
    optimizer.minimize(plain.mean_loss(net, data(1)[0]))
    optimizer.engine.updater.scheduler.step()
    with pytest.raises(RuntimeError, match="stepped by somebody else"):
        optimizer.minimize(plain.mean_loss(net, data(1)[0]))


def test_a_call_that_failed_can_be_repeated():
    strategy = fleet.DistributedStrategy(lars=True)
    net = plain.make_net()
    with pytest.raises(TypeError, match="nn.Module"):
        fleet.distributed_model(None, strategy)
    strategy.lars_configs = {"lars_coeff": 0.1}
    net = fleet.distributed_model(net, strategy)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="nonfinite_limit"):
        fleet.distributed_optimizer(sgd, strategy, nonfinite_limit=0)
    fleet.distributed_optimizer(sgd, strategy)


def test_groups_for_lars_come_at_the_start():
    strategy = fleet.DistributedStrategy(lars=True)
    net = fleet.distributed_model(plain.make_net(), strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9), strategy)
    with pytest.raises(ValueError, match=r"cannot be added to LARS.*frozen ones included"):
        optimizer.add_param_group({"params": net.first.parameters()})


@pytest.mark.middle
def test_an_open_window_at_the_end_is_mentioned(tmp_path):
    from tests.jobs.starting import start

    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom fleetx import fleet\n"
        "s = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={'k_steps': 4})\n"
        "m = fleet.distributed_model(torch.nn.Linear(2, 2), s)\n"
        "o = fleet.distributed_optimizer(torch.optim.SGD(m.parameters(), lr=0.1), s)\n"
        "o.minimize(m(torch.ones(1, 2)).sum())\n"
    )
    done = start(script, launcher=None)
    assert "ended with 1 micro-batch in an open window" in done.stderr


def test_misuse_is_explained():
    net, optimizer = prepare(plain.make_net())
    (micro,) = data(1)
    loss = plain.mean_loss(net, micro)
    with pytest.raises(RuntimeError, match=r"optimizer.minimize\(loss\) in place of loss.backward"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"not a float"):
        optimizer.minimize(3.0)
    with pytest.raises(TypeError, match=r"fleetx.Step"):
        optimizer.minimize({"a": loss})
    with pytest.raises(TypeError, match=r"dict of counts needs fleetx.Step"):
        optimizer.minimize(loss, items={"a": 1})
    with pytest.raises(ValueError, match=r"shape \(3, 3\).*mean"):
        optimizer.minimize(net(micro[0]))
    with pytest.raises(ValueError, match="no trainable parameter"):
        optimizer.minimize(loss.detach())
    for wrong in (-1, True, "many", float("nan"), float("inf"), 1e300, 10**400):
        with pytest.raises(ValueError, match="items must be a number from 0 to 2.*53"):
            optimizer.minimize(loss, items=wrong)
    optimizer.zero_grad()
    optimizer.minimize(loss)
    with pytest.raises(RuntimeError, match=r"would lose 1 merged micro-batches.*discard"):
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="all micro-batches of a window or for none"):
        optimizer.minimize(plain.mean_loss(net, micro), items=3)
    with pytest.raises(RuntimeError, match="flush"):
        optimizer.add_param_group({"params": []})


def test_sums_and_items_exclude_each_other():
    net, optimizer = prepare(plain.make_net(), avg=False)
    with pytest.raises(ValueError, match="avg=False adds them up"):
        optimizer.minimize(plain.mean_loss(net, data(1)[0]), items=3)


def test_state_of_another_strategy_is_refused():
    _, optimizer = prepare(plain.make_net())
    state = optimizer.state_dict()
    _, other = prepare(plain.make_net(), scheduler=lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1))
    with pytest.raises(ValueError, match="has a scheduler and the state dict has not"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="saved by a plain optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(plain.make_net().parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("cpu"), lambda: torch.amp.GradScaler("cpu", 512.0)])
@pytest.mark.parametrize("door", ["minimize", "step"])
def test_a_loss_that_a_grad_scaler_multiplied_is_refused(make, door):
    net, optimizer = prepare(plain.make_net(), k_steps=1)
    scaler = make()

    def scaled(model, micro):
        return scaler.scale(plain.mean_loss(model, micro))

    step = X.Step(net, optimizer, compute=scaled)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    (micro,) = data(1)
    with pytest.raises(RuntimeError, match="a GradScaler multiplied it by (65536|512): the weights would move"):
        step(micro) if door == "step" else optimizer.minimize(scaled(net, micro))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert optimizer.minimize(plain.mean_loss(net, micro) * 512.0)
    assert optimizer.minimize(plain.mean_loss(net, micro) * torch.tensor(65536.0))  # a weight like any other, later on


def test_casts_of_old_weights_do_not_outlive_an_update_inside_the_users_autocast():
    def train(together):
        torch.manual_seed(0)
        net, optimizer = prepare(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), k_steps=2, lr=0.1)
        x = torch.linspace(-1, 1, 32).reshape(8, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16) if together else nullcontext():
            for _ in range(20):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = (net(x).float() - 1).square().mean()
                optimizer.minimize(loss)
        return [parameter.detach() for parameter in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


@pytest.mark.parametrize("door", ["minimize", "step"])
def test_an_autocast_around_the_whole_step_reaches_no_backward(door):
    class Partly(nn.Module):
        """The head stays out of low precision."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.body(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.head(hidden.tanh())

    def train(net, update):
        x = torch.linspace(-1, 1, 48).reshape(8, 6)
        for _ in range(3):
            update(net, (x, x[:, :1].cos()))
        return net

    torch.manual_seed(0)
    reference = Partly()
    net, optimizer = prepare(copy.deepcopy(reference), k_steps=1)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    step = X.Step(net, optimizer, functional.mse_loss)

    def ours(net, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(batch) if door == "step" else optimizer.minimize(functional.mse_loss(net(batch[0]), batch[1]))
            assert torch.is_autocast_enabled("cpu")

    def theirs(net, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.mse_loss(net(batch[0]), batch[1])
        sgd.zero_grad()
        loss.backward()
        sgd.step()

    assert_same(train(net, ours), train(reference, theirs), exact=True)
