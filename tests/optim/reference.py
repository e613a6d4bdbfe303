"""LARS and LAMB once more, in fp64 numpy, one parameter at a time: what the tests compare with."""

import numpy as np


def lars_step(
    p, g, v, *, lr, momentum, coeff, weight_decay, epsilon, decays, adapts, lr_in_momentum=True, excluded_lr=None
):
    """Return the new (p, v)."""
    decay = weight_decay if decays else 0.0
    p_norm, g_norm = np.sqrt(np.sum(p * p)), np.sqrt(np.sum(g * g))
    ratio = 1.0
    if adapts and p_norm > 0 and g_norm > 0:
        ratio = coeff * p_norm / (g_norm + decay * p_norm + epsilon)
    if not adapts and excluded_lr is not None:
        lr = excluded_lr
    if lr_in_momentum:
        v = momentum * v + lr * ratio * (g + decay * p)
        return p - v, v
    v = momentum * v + ratio * (g + decay * p)
    return p - lr * v, v


def lamb_step(p, g, m, s, t, *, lr, betas, eps, weight_decay, decays, always_adapt):
    """Return the new (p, m, s) of step t, counted from 1."""
    decay = weight_decay if decays else 0.0
    m = betas[0] * m + (1 - betas[0]) * g
    s = betas[1] * s + (1 - betas[1]) * g * g
    r = (m / (1 - betas[0] ** t)) / (np.sqrt(s / (1 - betas[1] ** t)) + eps) + decay * p
    p_norm, r_norm = np.sqrt(np.sum(p * p)), np.sqrt(np.sum(r * r))
    ratio = 1.0
    if (decay > 0 or always_adapt) and p_norm > 0 and r_norm > 0:
        ratio = p_norm / r_norm
    return p - lr * ratio * r, m, s


def paddle_cosine_rule(step, last, *, lr, t_max):
    """The next value from the last one, as Paddle's CosineAnnealingDecay.get_lr computes it (eta_min 0)."""
    if step == 0:
        return lr
    if (step - 1 - t_max) % (2 * t_max) == 0:
        return last + lr * (1 - np.cos(np.pi / t_max)) / 2
    return (1 + np.cos(np.pi * step / t_max)) / (1 + np.cos(np.pi * (step - 1) / t_max)) * last
