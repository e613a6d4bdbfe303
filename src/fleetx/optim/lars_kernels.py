"""The kernels of LARS; ``fleetx.optim.kernels`` says how lists of tensors are cut and which tables there are."""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl

from fleetx.optim.kernels import memory, read, unscaling, verdict, write


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["grad_scale", "found_inf"])
def lars_decide_kernel(
    sums, hypers, group_of, lrs, max_norm, grad_scale, found_inf, flags, coefficients, ratios, count,
    AT_ONCE: tl.constexpr, SCALED: tl.constexpr, SKIPPABLE: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Trust ratios, and from them what the last kernel multiplies with; one program for all tensors."""
    _, clip = verdict(sums, max_norm, found_inf, flags, count, AT_ONCE, SKIPPABLE, CHECKED, CLIPPED)
    factor = clip * unscaling(grad_scale, SCALED)
    at = count * 0
    while at < count:
        tensor = at + tl.arange(0, AT_ONCE)
        real = tensor < count
        lr = tl.load(lrs + tl.load(group_of + tensor, mask=real, other=0))
        momentum = tl.load(hypers + tensor, mask=real, other=0.0)
        coeff = tl.load(hypers + count + tensor, mask=real, other=0.0)
        decay = tl.load(hypers + 2 * count + tensor, mask=real, other=0.0)
        epsilon = tl.load(hypers + 3 * count + tensor, mask=real, other=0.0)
        lr *= tl.load(hypers + 4 * count + tensor, mask=real, other=0.0)
        adapts = tl.load(hypers + 5 * count + tensor, mask=real, other=0.0) != 0
        lr_inside = tl.load(hypers + 6 * count + tensor, mask=real, other=0.0) != 0
        raw = tl.load(hypers + 7 * count + tensor, mask=real, other=0.0)
        p = tl.sqrt(tl.load(sums + tensor, mask=real, other=0.0))
        g = tl.sqrt(tl.load(sums + count + tensor, mask=real, other=0.0)) * clip
        usable = adapts & (p > 0) & (g > 0)
        below = tl.where(usable, g + decay * p + epsilon, 1.0)
        ratio = tl.where(usable, coeff * p / below, raw)
        length = tl.where(lr_inside, lr * ratio, ratio)
        tl.store(coefficients + tensor, momentum, mask=real)
        tl.store(coefficients + count + tensor, length * factor, mask=real)
        tl.store(coefficients + 2 * count + tensor, length * decay, mask=real)
        tl.store(coefficients + 3 * count + tensor, tl.where(lr_inside, 1.0, lr), mask=real)
        tl.store(ratios + tensor, ratio, mask=real)
        at += AT_ONCE


@triton.jit
def _lars(
    weights, gradients, velocities, low, momentum, of_g, of_p, outer, left,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    for turn in tl.static_range(ROUNDS):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < left
        p = read(weights + at, inside, MASKED, WEIGHT)
        g = read(gradients + at, inside, MASKED, WEIGHT)
        v = read(velocities + at, inside, MASKED, WEIGHT)
        v = momentum * v + (of_g * g + of_p * p)
        p = p - outer * v
        write(velocities + at, v, inside, MASKED)
        write(weights + at, p, inside, MASKED)
        if LOW is not None:
            write(low + at, p.to(LOW), inside, MASKED)


@triton.jit(do_not_specialize=["first", "count"])
def lars_apply_kernel(
    blocks, sizes, weight_at, gradient_at, velocity_at, low_at, flags, coefficients, first, count,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Move velocities and weights."""
    block = first + (tl.num_programs(0) - 1 - tl.program_id(0))  # backwards: what was read last is still cached
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * (BLOCK * ROUNDS)
    if tl.load(flags) == 0:
        left = tl.load(sizes + tensor) - start
        weights = memory(weight_at, tensor, start, WEIGHT, ALIGNED)
        gradients = memory(gradient_at, tensor, start, GRADIENT, ALIGNED)
        velocities = memory(velocity_at, tensor, start, WEIGHT, ALIGNED)
        low = weights
        if LOW is not None:
            low = memory(low_at, tensor, start, LOW, ALIGNED)
        momentum = tl.load(coefficients + tensor).to(WEIGHT)
        of_g = tl.load(coefficients + count + tensor).to(WEIGHT)
        of_p = tl.load(coefficients + 2 * count + tensor).to(WEIGHT)
        outer = tl.load(coefficients + 3 * count + tensor).to(WEIGHT)
        if left >= BLOCK * ROUNDS:
            _lars(weights, gradients, velocities, low, momentum, of_g, of_p, outer, left,
                  BLOCK, ROUNDS, False, WEIGHT, LOW)  # fmt: skip
        else:
            _lars(weights, gradients, velocities, low, momentum, of_g, of_p, outer, left,
                  BLOCK, ROUNDS, True, WEIGHT, LOW)  # fmt: skip
