"""LAMB: Adam whose step is scaled per layer by the ratio of weight norm to step norm."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from fleetx.optim.buckets import Bucket
from fleetx.optim.checks import check_betas, check_lr, check_number, check_switch
from fleetx.optim.foreach import Tensors, scale_
from fleetx.optim.forms import LAMB_FORMS, has_ratio, named
from fleetx.optim.groups import Group, State
from fleetx.optim.layerwise import LayerwiseOptimizer
from fleetx.optim.replacing import sharing


def lamb_direction_(
    weights: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    bias_correction: bool = True,
) -> list[Tensor]:
    """Move Adam's moments ``m`` and ``s``, in place; gives ``r``, Adam's step with decay."""
    beta1, beta2 = betas
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step) if bias_correction else 1.0)
    torch._foreach_add_(denominators, eps)
    steps = torch._foreach_div(means, 1 - beta1**step if bias_correction else 1.0)
    torch._foreach_div_(steps, denominators)
    torch._foreach_add_(steps, weights, alpha=weight_decay)
    return list(steps)


def lamb_ratio(p: Tensor, r: Tensor, raw: float = 1.0) -> Tensor:
    """``‖p‖/‖r‖`` of each pair of norms; ``raw`` where one of them is zero."""
    return torch.where((p > 0) & (r > 0), p / r, raw)


class Lamb(LayerwiseOptimizer):
    """LAMB; in Fleet's form, which is the default, bias correction is inside the ratio.

    ::

        m = b1·m + (1−b1)·g        s = b2·s + (1−b2)·g²
        r = (m / (1−b1^t)) / (√(s / (1−b2^t)) + eps) + lamb_weight_decay·p
        p = p − lr · ratio · r     ratio = ‖p‖/‖r‖     (1 if a norm is zero)

    A parameter without decay (excluded, or ``lamb_weight_decay=0``) has ratio 1, unless ``always_adapt``.

    On a CUDA device a step is a few kernels for all parameters together and waits for nothing; lr may be a tensor on
    the device, so that a CUDA graph can hold the step.

    Args:
        params: parameters, groups of them, or ``model.named_parameters()``.
        lr: learning rate, a number or a tensor of one element.
        betas: how much of the moments remains.
        eps: added to the denominator; above 0, else a gradient of zero gives 0/0.
        lamb_weight_decay: weight decay. A group may say ``weight_decay`` instead, and 0 there excludes the group.
        exclude_from_weight_decay: patterns (see ``fleetx.optim.exclusion``) of parameters without decay.
        always_adapt: keep the ratio for parameters without decay too.
        exclude_from_adaptation: patterns of parameters that have ratio 1; None leaves it to the form.
        excluded_lr: learning rate of the parameters that have no ratio. It belongs to the ``lr`` given here: a
            schedule that halves ``lr`` halves both.
        zero_norm_lr: learning rate of a layer whose weights or steps are all zero; it follows the schedule too. None
            is ``lr`` itself, Fleet's rule.
        form: "fleet", "mlperf", "paper", "timm" or "nvlamb"; see ``fleetx.optim.forms`` for their formulas.
        bias_correction: False leaves out the divisions by ``1 − b^t``.
        max_grad_norm: shorten all gradients together to this length first; None does not, "form" is as the form says.
        skip_nonfinite: leave the step out if a gradient is inf or NaN.
        maximize: climb, with the gradients negated.
        fused: True and False force and forbid the kernels; None uses them where they can be.

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

    _buffers = ("exp_avg", "exp_avg_sq")
    _counts_steps = True
    _kernels = "lamb"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        lamb_weight_decay: float = 0.01,
        exclude_from_weight_decay: Sequence[str] = (),
        always_adapt: bool = False,
        *,
        exclude_from_adaptation: Sequence[str] | None = None,
        excluded_lr: float | None = None,
        zero_norm_lr: float | None = None,
        form: str = "fleet",
        bias_correction: bool = True,
        max_grad_norm: float | Literal["form"] | None = "form",
        skip_nonfinite: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "lamb_weight_decay": lamb_weight_decay,
            "exclude_from_weight_decay": exclude_from_weight_decay,
            "always_adapt": always_adapt,
            "exclude_from_adaptation": exclude_from_adaptation,
            "excluded_lr": excluded_lr,
            "zero_norm_lr": zero_norm_lr,
            "form": form,
            "bias_correction": bias_correction,
            "max_grad_norm": max_grad_norm,
            "skip_nonfinite": skip_nonfinite,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)

    @classmethod
    def replacing(cls, adam: Optimizer, **settings: Any) -> Self:
        """Take the place of an Adam or AdamW, on its own groups: its schedulers now drive this one.

        ``settings`` are those of ``Lamb`` except for lr, betas, eps and maximize, which are the wrapped one's. Where
        some groups of an AdamW have decay, those without are excluded from it.
        """
        _check_replaceable(adam, settings.get("lamb_weight_decay", 0.01))
        bare = [group for group in adam.param_groups if group["weight_decay"] == 0]
        meant = [] if len(bare) == len(adam.param_groups) else bare
        return sharing(cls, adam, ("lr", "betas", "eps", "maximize"), settings, without_decay=meant)

    def _check_group(self, group: Group) -> None:
        check_lr(group["lr"])
        check_betas(group["betas"])
        check_number("eps", group["eps"], above=0, usual="1e-6 is usual")
        check_number("lamb_weight_decay", group["lamb_weight_decay"], usual="0.01 is usual, 0 is none")
        check_switch("always_adapt", group["always_adapt"])
        if group["always_adapt"] and group["exclude_from_adaptation"]:
            raise ValueError(
                "always_adapt=True gives everybody a trust ratio, and exclude_from_adaptation="
                f"{list(group['exclude_from_adaptation'])!r} takes it from some: leave one of them out."
            )
        check_switch("bias_correction", group["bias_correction"])
        form = named(LAMB_FORMS, group["form"], "LAMB")
        if group["max_grad_norm"] == "form":
            group["max_grad_norm"] = form.max_grad_norm
        super()._check_group(group)

    def _decay_and_adapts(self, group: Group, index: int) -> tuple[float, bool]:
        decay = group["lamb_weight_decay"] if group["decays"][index] else 0.0
        adapts = has_ratio(
            LAMB_FORMS[group["form"]].adapted,
            listed=group["exclude_from_adaptation"] is not None,
            kept=group["adapts"][index],
            decay=decay,
            always=group["always_adapt"],
        )
        return decay, adapts

    def _traits(self, group: Group, index: int, state: State) -> tuple[Any, ...]:
        return *self._decay_and_adapts(group, index), state["step"].item() + 1

    def _measured_before(self, bucket: Bucket) -> Sequence[str]:  # noqa: ARG002
        return ()

    def _direct(self, bucket: Bucket) -> Sequence[str]:
        group, (decay, adapts, step) = bucket.group, bucket.traits
        for state in bucket.states:
            state["step"] += 1
        bucket.steps = lamb_direction_(
            bucket.weights,
            bucket.gradients,
            bucket.collect("exp_avg"),
            bucket.collect("exp_avg_sq"),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=decay,
            step=step,
            bias_correction=group["bias_correction"],
        )
        return ("weights", "steps") if adapts else ()

    def _move(self, bucket: Bucket) -> Tensor | None:
        """``p = p − lr·ratio·r``."""
        group = bucket.group
        ratios, lr = None, bucket.lr
        if bucket.traits[1]:
            raw = group.get("zero_norm_lr_ratio", 1.0)
            ratios = lamb_ratio(bucket.norms["weights"], bucket.norms["steps"], raw)
        else:
            lr = lr * group.get("excluded_lr_ratio", 1.0)
        scale_(bucket.steps, lr if ratios is None else lr * ratios)
        torch._foreach_sub_(bucket.weights, bucket.steps)
        return ratios

    def _hyper_key(self, group: Group) -> tuple[Any, ...]:
        return (
            *group["betas"],
            group["eps"],
            group["lamb_weight_decay"],
            group["always_adapt"],
            group["bias_correction"],
            group.get("excluded_lr_ratio", 1.0),
            group.get("zero_norm_lr_ratio", 1.0),
            group["form"],
        )

    def _hyper_row(self, group: Group, index: int) -> tuple[float, ...]:
        decay, adapts = self._decay_and_adapts(group, index)
        beta1, beta2 = group["betas"]
        return (
            beta1,
            beta2,
            group["eps"],
            decay,
            float(adapts),
            float(group["bias_correction"]),
            1.0 if adapts else group.get("excluded_lr_ratio", 1.0),
            group.get("zero_norm_lr_ratio", 1.0) if adapts else 1.0,
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
        for switch in ("amsgrad", "differentiable", "capturable"):
            if group[switch]:
                raise ValueError(f"{wrong} {switch} must be False, which LAMB does not have, got True: leave it out.")
