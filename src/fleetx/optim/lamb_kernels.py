"""The kernels of LAMB; ``fleetx.optim.kernels`` says how lists of tensors are cut and which tables there are."""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl

from fleetx.optim.kernels import memory, read, unscaling, verdict, write


@triton.jit
def _unbiasing(beta, step):
    """``1 − beta^step``."""
    some = beta > 0
    return 1.0 - tl.where(some, tl.exp(step * tl.log(tl.where(some, beta, 1.0))), 0.0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["grad_scale", "found_inf"])
def lamb_begin_kernel(
    sums, hypers, step_at, max_norm, grad_scale, found_inf, flags, coefficients, count,
    AT_ONCE: tl.constexpr, SCALED: tl.constexpr, SKIPPABLE: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Count the step unless it is left out, and prepare what the moments need; one program for all tensors."""
    skip, clip = verdict(sums, max_norm, found_inf, flags, count, AT_ONCE, SKIPPABLE, CHECKED, CLIPPED)
    factor = clip * unscaling(grad_scale, SCALED)
    at = count * 0
    while at < count:
        tensor = at + tl.arange(0, AT_ONCE)
        real = tensor < count
        counters = tl.load(step_at + tensor, mask=real, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(counters, mask=real, other=0.0).to(tl.float64) + (1.0 - skip)
        tl.store(counters, step.to(tl.float32), mask=real)
        beta1 = tl.load(hypers + tensor, mask=real, other=0.0)
        beta2 = tl.load(hypers + count + tensor, mask=real, other=0.0)
        corrects = tl.load(hypers + 5 * count + tensor, mask=real, other=0.0) != 0
        step = tl.where(step > 0, step, 1.0)  # a first step that is left out divides by nothing
        tl.store(coefficients + tensor, 0.0 * beta1 + factor, mask=real)
        tl.store(coefficients + count + tensor, beta1, mask=real)
        tl.store(coefficients + 2 * count + tensor, 1.0 - beta1, mask=real)
        tl.store(coefficients + 3 * count + tensor, beta2, mask=real)
        tl.store(coefficients + 4 * count + tensor, 1.0 - beta2, mask=real)
        unbias1 = tl.where(corrects, 1.0 / _unbiasing(beta1, step), 1.0)
        unbias2 = tl.where(corrects, 1.0 / tl.sqrt(_unbiasing(beta2, step)), 1.0)
        tl.store(coefficients + 5 * count + tensor, unbias1, mask=real)
        tl.store(coefficients + 6 * count + tensor, unbias2, mask=real)
        # eps and weight decay, beside the rest
        tl.store(coefficients + 7 * count + tensor, tl.load(hypers + 2 * count + tensor, mask=real), mask=real)
        tl.store(coefficients + 8 * count + tensor, tl.load(hypers + 3 * count + tensor, mask=real), mask=real)
        at += AT_ONCE


@triton.jit
def _direction(p, m, s, unbias1, unbias2, eps, decay):
    return (m * unbias1) / (tl.sqrt(s) * unbias2 + eps) + decay * p


@triton.jit
def _moments(
    weights, gradients, means, squares, factor, beta1, rest1, beta2, rest2, unbias1, unbias2, eps, decay, left,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    of_p = tl.zeros((BLOCK,), WEIGHT)
    of_r = tl.zeros((BLOCK,), WEIGHT)
    for turn in tl.static_range(ROUNDS):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < left
        p = read(weights + at, inside, MASKED, WEIGHT)
        g = read(gradients + at, inside, MASKED, WEIGHT) * factor
        m = read(means + at, inside, MASKED, WEIGHT)
        s = read(squares + at, inside, MASKED, WEIGHT)
        m = beta1 * m + rest1 * g
        s = beta2 * s + rest2 * g * g
        write(means + at, m, inside, MASKED)
        write(squares + at, s, inside, MASKED)
        r = _direction(p, m, s, unbias1, unbias2, eps, decay)
        of_p += p * p
        of_r += r * r  # beyond the end everything is 0, and so is r
    return tl.sum(of_p, axis=0), tl.sum(of_r, axis=0)


@triton.jit(do_not_specialize=["first", "count"])
def lamb_moments_kernel(
    blocks, sizes, weight_at, gradient_at, mean_at, square_at, flags, coefficients, partials_p, partials_r,
    first, count,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Move the moments; per chunk: the squares of weights and of directions."""
    block = first + tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * (BLOCK * ROUNDS)
    if tl.load(flags) == 0:
        left = tl.load(sizes + tensor) - start
        weights = memory(weight_at, tensor, start, WEIGHT, ALIGNED)
        gradients = memory(gradient_at, tensor, start, GRADIENT, ALIGNED)
        means = memory(mean_at, tensor, start, WEIGHT, ALIGNED)
        squares = memory(square_at, tensor, start, WEIGHT, ALIGNED)
        factor = tl.load(coefficients + tensor).to(WEIGHT)
        beta1 = tl.load(coefficients + count + tensor).to(WEIGHT)
        rest1 = tl.load(coefficients + 2 * count + tensor).to(WEIGHT)
        beta2 = tl.load(coefficients + 3 * count + tensor).to(WEIGHT)
        rest2 = tl.load(coefficients + 4 * count + tensor).to(WEIGHT)
        unbias1 = tl.load(coefficients + 5 * count + tensor).to(WEIGHT)
        unbias2 = tl.load(coefficients + 6 * count + tensor).to(WEIGHT)
        eps = tl.load(coefficients + 7 * count + tensor).to(WEIGHT)
        decay = tl.load(coefficients + 8 * count + tensor).to(WEIGHT)
        if left >= BLOCK * ROUNDS:
            p, r = _moments(weights, gradients, means, squares, factor, beta1, rest1, beta2, rest2, unbias1, unbias2,
                            eps, decay, left, BLOCK, ROUNDS, False, WEIGHT)  # fmt: skip
            tl.store(partials_p + block, p.to(tl.float64))
            tl.store(partials_r + block, r.to(tl.float64))
        else:
            p, r = _moments(weights, gradients, means, squares, factor, beta1, rest1, beta2, rest2, unbias1, unbias2,
                            eps, decay, left, BLOCK, ROUNDS, True, WEIGHT)  # fmt: skip
            tl.store(partials_p + block, p.to(tl.float64))
            tl.store(partials_r + block, r.to(tl.float64))


@triton.jit(do_not_specialize=["count"])
def lamb_decide_kernel(sums, hypers, group_of, lrs, coefficients, ratios, count, AT_ONCE: tl.constexpr):
    """Trust ratios, and step lengths from them."""
    tensor = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    real = tensor < count
    lr = tl.load(lrs + tl.load(group_of + tensor, mask=real, other=0))
    adapts = tl.load(hypers + 4 * count + tensor, mask=real, other=0.0) != 0
    lr *= tl.load(hypers + 6 * count + tensor, mask=real, other=0.0)
    raw = tl.load(hypers + 7 * count + tensor, mask=real, other=0.0)
    p = tl.sqrt(tl.load(sums + tensor, mask=real, other=0.0))
    r = tl.sqrt(tl.load(sums + count + tensor, mask=real, other=0.0))
    usable = adapts & (p > 0) & (r > 0)
    ratio = tl.where(usable, p / tl.where(usable, r, 1.0), raw)
    tl.store(ratios + tensor, ratio, mask=real)
    tl.store(coefficients + 9 * count + tensor, lr * ratio, mask=real)


@triton.jit
def _lamb(
    weights, means, squares, low, unbias1, unbias2, eps, decay, length, left,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    for turn in tl.static_range(ROUNDS):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < left
        p = read(weights + at, inside, MASKED, WEIGHT)
        m = read(means + at, inside, MASKED, WEIGHT)
        s = read(squares + at, inside, MASKED, WEIGHT)
        # Computed again: three numbers are read either way, and none is written in between.
        p = p - length * _direction(p, m, s, unbias1, unbias2, eps, decay)
        write(weights + at, p, inside, MASKED)
        if LOW is not None:
            write(low + at, p.to(LOW), inside, MASKED)


@triton.jit(do_not_specialize=["first", "count"])
def lamb_apply_kernel(
    blocks, sizes, weight_at, mean_at, square_at, low_at, flags, coefficients, first, count,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Move the weights."""
    block = first + (tl.num_programs(0) - 1 - tl.program_id(0))  # backwards: what was read last is still cached
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * (BLOCK * ROUNDS)
    if tl.load(flags) == 0:
        left = tl.load(sizes + tensor) - start
        weights = memory(weight_at, tensor, start, WEIGHT, ALIGNED)
        means = memory(mean_at, tensor, start, WEIGHT, ALIGNED)
        squares = memory(square_at, tensor, start, WEIGHT, ALIGNED)
        low = weights
        if LOW is not None:
            low = memory(low_at, tensor, start, LOW, ALIGNED)
        unbias1 = tl.load(coefficients + 5 * count + tensor).to(WEIGHT)
        unbias2 = tl.load(coefficients + 6 * count + tensor).to(WEIGHT)
        eps = tl.load(coefficients + 7 * count + tensor).to(WEIGHT)
        decay = tl.load(coefficients + 8 * count + tensor).to(WEIGHT)
        length = tl.load(coefficients + 9 * count + tensor).to(WEIGHT)
        if left >= BLOCK * ROUNDS:
            _lamb(weights, means, squares, low, unbias1, unbias2, eps, decay, length, left,
                  BLOCK, ROUNDS, False, WEIGHT, LOW)  # fmt: skip
        else:
            _lamb(weights, means, squares, low, unbias1, unbias2, eps, decay, length, left,
                  BLOCK, ROUNDS, True, WEIGHT, LOW)  # fmt: skip
