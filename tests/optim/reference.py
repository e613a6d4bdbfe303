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


# The named forms, once more: all parameters of an optimizer together, since clipping looks at all of them.

LARS_FORMS = ("fleet", "mlperf", "paper", "timm")
LAMB_FORMS = ("fleet", "mlperf", "paper", "timm", "nvlamb")


def length(*arrays):
    return np.sqrt(sum(np.sum(np.square(array)) for array in arrays))


def clipped(gradients, limit):
    """All gradients, shortened so that they are at most `limit` long together."""
    if limit is None:
        return gradients
    return [g / max(1.0, length(*gradients) / limit) for g in gradients]


class Reference:
    """One optimizer over a list of arrays; `step` takes a gradient, or None, for each."""

    def __init__(self, values, excluded, unadapted, excluded_lr, zero_norm_lr):
        """The last two are multiples of lr; `unadapted` is the list for adaptation, None if there is none."""
        self.values = [np.array(value, dtype=np.float64) for value in values]
        self.excluded = excluded
        self.unadapted = unadapted
        self.excluded_lr, self.zero_norm_lr = excluded_lr, zero_norm_lr

    def adapts(self, i, by_form):
        return by_form if self.unadapted is None else not self.unadapted[i]

    def step(self, gradients, lr):
        present = [i for i, g in enumerate(gradients) if g is not None and g.size]
        chosen = clipped([gradients[i] for i in present], self.limit)
        for i, g in zip(present, chosen, strict=True):
            self.move(i, g, lr)


class LarsReference(Reference):
    """LARS in one of its forms."""

    def __init__(self, values, excluded, *, form, momentum, coeff, decay, epsilon, limit, **common):
        super().__init__(values, excluded, **common)
        self.form, self.momentum, self.coeff, self.decay, self.epsilon = form, momentum, coeff, decay, epsilon
        self.limit = limit
        self.velocities = [np.zeros_like(value) for value in self.values]

    def move(self, i, g, lr):
        p, v = self.values[i], self.velocities[i]
        decay = 0.0 if self.excluded[i] else self.decay
        by_form = {
            "fleet": not self.excluded[i],
            "mlperf": not self.excluded[i],
            "paper": True,
            "timm": decay != 0.0,
        }
        epsilon = self.epsilon
        if epsilon == "form":
            epsilon = 1e-8 if self.form == "timm" else 0.0
        ratio = 1.0
        if not self.adapts(i, by_form[self.form]):
            lr = lr * self.excluded_lr
        elif length(p) > 0 and length(g) > 0:
            ratio = self.coeff * length(p) / (length(g) + decay * length(p) + epsilon)
        else:
            ratio = self.zero_norm_lr
        if self.form == "timm":
            v = self.momentum * v + ratio * (g + decay * p)
            p = p - lr * v
        else:
            v = self.momentum * v + lr * ratio * (g + decay * p)
            p = p - v
        self.values[i], self.velocities[i] = p, v

    def state(self, i):
        return {"momentum_buffer": self.velocities[i]}


class LambReference(Reference):
    """LAMB in one of its forms."""

    def __init__(self, values, excluded, *, form, betas, eps, decay, limit, bias_correction=True, **common):
        super().__init__(values, excluded, **common)
        self.form, self.betas, self.eps, self.decay, self.limit = form, betas, eps, decay, limit
        self.bias_correction = bias_correction
        self.means = [np.zeros_like(value) for value in self.values]
        self.squares = [np.zeros_like(value) for value in self.values]
        self.counts = [0 for _ in self.values]

    def move(self, i, g, lr):
        self.counts[i] += 1
        p, (b1, b2), t = self.values[i], self.betas, self.counts[i]
        decay = 0.0 if self.excluded[i] else self.decay
        by_form = {
            "fleet": decay != 0.0,
            "mlperf": not self.excluded[i],
            "paper": True,
            "timm": decay != 0.0,
            "nvlamb": True,
        }
        m = b1 * self.means[i] + (1 - b1) * g
        s = b2 * self.squares[i] + (1 - b2) * g * g
        unbiased = (m / (1 - b1**t), s / (1 - b2**t)) if self.bias_correction else (m, s)
        r = unbiased[0] / (np.sqrt(unbiased[1]) + self.eps) + decay * p
        ratio = 1.0
        if not self.adapts(i, by_form[self.form]):
            lr = lr * self.excluded_lr
        else:
            ratio = length(p) / length(r) if length(p) > 0 and length(r) > 0 else self.zero_norm_lr
        self.values[i], self.means[i], self.squares[i] = p - lr * ratio * r, m, s

    def state(self, i):
        return {"exp_avg": self.means[i], "exp_avg_sq": self.squares[i], "step": np.array(float(self.counts[i]))}
