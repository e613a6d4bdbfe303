"""LAMB: Adam whose step is scaled per layer by the ratio of weight norm to step norm."""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from fleetx.optim.checks import check_lr, check_number, check_switch
from fleetx.optim.foreach import Tensors, norms, number_on, scale_
from fleetx.optim.groups import Group, State
from fleetx.optim.layerwise import Bucket, LayerwiseOptimizer


def lamb_(
    weights: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adapt: bool,
    step: float,
) -> None:
    """``m``, ``s`` are Adam's moments, ``r`` its step with decay; ``p = p − lr·‖p‖/‖r‖·r``, in place."""
    beta1, beta2 = betas
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, eps)
    steps = torch._foreach_div(means, 1 - beta1**step)
    torch._foreach_div_(steps, denominators)
    torch._foreach_add_(steps, weights, alpha=weight_decay)

    scale_(steps, lr * lamb_ratio(weights, steps) if adapt else lr)
    torch._foreach_sub_(weights, steps)


def lamb_ratio(weights: Tensors, steps: Tensors) -> Tensor:
    """``‖p‖ / ‖r‖`` of each tensor; 1 where a norm is zero."""
    p, r = norms(weights), norms(steps)
    return torch.where((p > 0) & (r > 0), p / r, 1.0)


class Lamb(LayerwiseOptimizer):
    """LAMB as Fleet means it: bias correction is inside the ratio.

    ::

        m = b1·m + (1−b1)·g        s = b2·s + (1−b2)·g²
        r = (m / (1−b1^t)) / (√(s / (1−b2^t)) + eps) + lamb_weight_decay·p
        p = p − lr · ratio · r     ratio = ‖p‖/‖r‖     (1 if a norm is zero)

    A parameter without decay (excluded, or ``lamb_weight_decay=0``) has ratio 1, unless ``always_adapt``.

    Args:
        params: parameters, groups of them, or ``model.named_parameters()``.
        lr: learning rate, a number or a tensor of one element.
        betas: how much of the moments remains.
        eps: added to the denominator; above 0, else a gradient of zero gives 0/0.
        lamb_weight_decay: weight decay.
        exclude_from_weight_decay: patterns (see ``fleetx.optim.exclusion``) of parameters without decay.
        always_adapt: keep the ratio for parameters without decay too.

    Example:
        >>> import torch
        >>> from fleetx.optim import Lamb
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = Lamb(model.named_parameters(), lr=0.01, exclude_from_weight_decay=["bias"])
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.exclusion_rows()
        [ExclusionRow(pattern='bias', count=2, examples=('0.bias', '2.bias'))]
        >>> sorted(optimizer.state[model[0].weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        lamb_weight_decay: float = 0.01,
        exclude_from_weight_decay: Sequence[str] = (),
        always_adapt: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "lamb_weight_decay": lamb_weight_decay,
            "exclude_from_weight_decay": exclude_from_weight_decay,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults)

    @classmethod
    def replacing(
        cls,
        adam: Optimizer,
        *,
        lamb_weight_decay: float = 0.01,
        exclude_from_weight_decay: Sequence[str] = (),
        always_adapt: bool = False,
    ) -> Self:
        """Take the place of an Adam or AdamW, on its own groups: its schedulers now drive this one.

        lr, betas and eps are the wrapped one's.
        """
        _check_replaceable(adam, lamb_weight_decay)
        return cls._sharing(
            adam,
            lr=adam.defaults["lr"],
            lamb_weight_decay=lamb_weight_decay,
            exclude_from_weight_decay=exclude_from_weight_decay,
            always_adapt=always_adapt,
        )

    def _check_group(self, group: Group) -> None:
        check_lr(group["lr"])
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}: (0.9, 0.999) is usual.")
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_number(name, beta, below=1, usual="(0.9, 0.999) is usual")
        check_number("eps", group["eps"], above=0, usual="1e-6 is usual")
        check_number("lamb_weight_decay", group["lamb_weight_decay"], usual="0.01 is usual, 0 is none")
        check_switch("always_adapt", group["always_adapt"])

    def _prepare_state(self, state: State, weights: Tensor) -> None:
        if "step" not in state:
            # On the host, as torch's own: reading it there waits for nothing.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weights)
            state["exp_avg_sq"] = torch.zeros_like(weights)
        state["step"] += 1

    def _traits(self, group: Group, index: int, state: State) -> tuple[Any, ...]:
        return group["decays"][index], state["step"].item()

    def _update(self, group: Group, bucket: Bucket) -> None:
        decays, step = bucket.traits
        weight_decay = group["lamb_weight_decay"] if decays else 0.0
        lamb_(
            bucket.weights,
            bucket.gradients,
            bucket.collect("exp_avg"),
            bucket.collect("exp_avg_sq"),
            lr=number_on(group["lr"], like=bucket.weights[0]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=weight_decay,
            adapt=weight_decay > 0 or group["always_adapt"],
            step=step,
        )


def _check_replaceable(adam: Optimizer, lamb_weight_decay: float) -> None:
    if not isinstance(adam, Adam | AdamW):
        raise TypeError(
            f"LAMB replaces torch.optim.Adam or AdamW, got {type(adam).__name__}: "
            "build the optimizer as torch.optim.AdamW(params, lr=..., weight_decay=0)."
        )
    kind = type(adam).__name__
    for number, group in enumerate(adam.param_groups):
        wrong = f"LAMB cannot replace this {kind}: in group {number}"
        decay = group["weight_decay"]
        # AdamW's own default is 0.01, as LAMB's: the same decay said twice is one decay.
        decoupled = isinstance(adam, AdamW) or group.get("decoupled_weight_decay", False)
        if decay != 0 and not (decoupled and decay == group.get("lamb_weight_decay", lamb_weight_decay)):
            allowed = f"0 or lamb_weight_decay ({lamb_weight_decay!r})" if decoupled else "0"
            raise ValueError(
                f"{wrong} weight_decay must be {allowed} since LAMB has its own and it would count twice, "
                f"got {decay!r}: give {kind} weight_decay=0 and say the decay as lamb_weight_decay alone."
            )
        for switch in ("amsgrad", "maximize", "differentiable", "capturable"):
            if group[switch]:
                raise ValueError(f"{wrong} {switch} must be False, which LAMB does not have, got True: leave it out.")
