"""LARS: momentum whose step is scaled per layer by the ratio of weight norm to gradient norm."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from fleetx.optim.buckets import Bucket
from fleetx.optim.checks import check_lr, check_number, check_switch
from fleetx.optim.foreach import Tensors, scale_
from fleetx.optim.forms import LARS_FORMS, has_ratio, named
from fleetx.optim.groups import Group, State
from fleetx.optim.layerwise import LayerwiseOptimizer
from fleetx.optim.replacing import sharing


def lars_(
    weights: Tensors,
    gradients: Tensors,
    velocities: Tensors,
    ratio: float | Tensor,
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    lr_in_momentum: bool,
) -> None:
    """``v = momentum·v + lr·ratio·(g + weight_decay·p)``, ``p = p − v``, in place on one bucket."""
    steps = torch._foreach_add(gradients, weights, alpha=weight_decay)
    scale_(steps, lr * ratio if lr_in_momentum else ratio)
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, steps)
    if lr_in_momentum:
        torch._foreach_sub_(weights, velocities)
    else:
        torch._foreach_sub_(weights, torch._foreach_mul(velocities, lr))


def lars_ratio(p: Tensor, g: Tensor, coeff: float, weight_decay: float, epsilon: float, raw: float = 1.0) -> Tensor:
    """``coeff·‖p‖ / (‖g‖ + weight_decay·‖p‖ + epsilon)`` of each pair of norms; ``raw`` where one is zero."""
    return torch.where((p > 0) & (g > 0), coeff * p / (g + weight_decay * p + epsilon), raw)


class Lars(LayerwiseOptimizer):
    """LARS; in Fleet's form, which is the default, the learning rate is inside the momentum buffer.

    ::

        local_lr = lr · lars_coeff · ‖p‖ / (‖g‖ + lars_weight_decay·‖p‖ + epsilon)     (lr if a norm is zero)
        v = momentum·v + local_lr · (g + lars_weight_decay·p)
        p = p − v

    On a CUDA device a step is a few kernels for all parameters together and waits for nothing; lr may be a tensor on
    the device, so that a CUDA graph can hold the step.

    Args:
        params: parameters, groups of them, or ``model.named_parameters()``.
        lr: learning rate, a number or a tensor of one element; may be left out if each group has its own.
        momentum: how much of the last step remains.
        lars_coeff: the length of a step relative to the weights'.
        lars_weight_decay: weight decay; 0 does not switch the adaptation off, only exclusion does. A group may say
            ``weight_decay`` instead, and 0 there excludes the group, as torch's users write it.
        epsilon: added to the denominator only; "form" is as the form says: 0, and 1e-8 for timm's.
        exclude_from_weight_decay: patterns (see ``fleetx.optim.exclusion``). What they take has no decay and,
            unless ``exclude_from_adaptation`` says otherwise, moves by plain momentum at ``lr``.
        exclude_from_adaptation: patterns of parameters that move at ``lr`` itself; None means the same list.
        excluded_lr: learning rate of the parameters excluded from adaptation. It belongs to the ``lr`` given
            here: a schedule that halves ``lr`` halves both.
        zero_norm_lr: learning rate of a layer whose weights or gradients are all zero, as a new layer's may be; it
            follows the schedule as ``excluded_lr`` does. None is ``lr`` itself, Fleet's rule.
        lr_in_momentum: False keeps lr out of the buffer (``v = momentum·v + ratio·(…)``, ``p = p − lr·v``),
            as some other libraries do. The two differ as soon as lr changes. None is as the form says.
        form: "fleet", "mlperf", "paper" or "timm"; see ``fleetx.optim.forms`` for their formulas.
        max_grad_norm: shorten all gradients together to this length first; None does not.
        skip_nonfinite: leave the step out if a gradient is inf or NaN.
        maximize: climb, with the gradients negated.
        fused: True and False force and forbid the kernels; None uses them where they can be.

    Example:
        >>> import torch
        >>> from fleetx import names
        >>> from fleetx.optim import Lars
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        >>> names.record(model)
        >>> optimizer = Lars(model.parameters(), lr=0.5, exclude_from_weight_decay=["norm", "bias"])
        >>> for pattern, count, examples in optimizer.exclusion_rows():
        ...     print(pattern, count, *examples)
        norm 2 1.weight 1.bias
        bias 3 0.bias 1.bias 2.bias
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model[0].weight]["momentum_buffer"].shape
        torch.Size([8, 4])
    """

    _buffers = ("momentum_buffer",)
    _counts_steps = False
    _kernels = "lars"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        epsilon: float | Literal["form"] = "form",
        exclude_from_weight_decay: Sequence[str] = (),
        *,
        exclude_from_adaptation: Sequence[str] | None = None,
        excluded_lr: float | None = None,
        zero_norm_lr: float | None = None,
        lr_in_momentum: bool | None = None,
        form: str = "fleet",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "lars_coeff": lars_coeff,
            "lars_weight_decay": lars_weight_decay,
            "epsilon": epsilon,
            "exclude_from_weight_decay": exclude_from_weight_decay,
            "exclude_from_adaptation": exclude_from_adaptation,
            "excluded_lr": excluded_lr,
            "zero_norm_lr": zero_norm_lr,
            "lr_in_momentum": lr_in_momentum,
            "form": form,
            "max_grad_norm": max_grad_norm,
            "skip_nonfinite": skip_nonfinite,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)

    @classmethod
    def replacing(cls, sgd: Optimizer, **settings: Any) -> Self:
        """Take the place of an SGD with momentum, on its own groups: its schedulers now drive this one.

        ``settings`` are those of ``Lars`` except for lr, momentum and maximize, which are the wrapped one's.
        """
        _check_replaceable(sgd)
        return sharing(cls, sgd, ("lr", "momentum", "maximize"), settings)

    def _check_group(self, group: Group) -> None:
        check_lr(group["lr"])
        check_number("momentum", group["momentum"], below=1, usual="0.9 is usual")
        check_number("lars_coeff", group["lars_coeff"], above=0, usual="0.001 is usual")
        check_number("lars_weight_decay", group["lars_weight_decay"], usual="0.0005 is usual, 0 is none")
        form = named(LARS_FORMS, group["form"], "LARS")
        if group["epsilon"] == "form":
            group["epsilon"] = form.epsilon
        check_number("epsilon", group["epsilon"], usual="0 is usual")
        if group["lr_in_momentum"] is None:
            group["lr_in_momentum"] = form.lr_in_momentum
        check_switch("lr_in_momentum", group["lr_in_momentum"])
        super()._check_group(group)

    def _decay_and_adapts(self, group: Group, index: int) -> tuple[float, bool]:
        decay = group["lars_weight_decay"] if group["decays"][index] else 0.0
        adapted = LARS_FORMS[group["form"]].adapted
        listed = group["exclude_from_adaptation"] is not None
        return decay, has_ratio(adapted, listed=listed, kept=group["adapts"][index], decay=decay)

    def _traits(self, group: Group, index: int, state: State) -> tuple[Any, ...]:  # noqa: ARG002
        return self._decay_and_adapts(group, index)

    def _measured_before(self, bucket: Bucket) -> Sequence[str]:
        return ("weights", "gradients") if bucket.traits[1] else ()

    def _direct(self, bucket: Bucket) -> Sequence[str]:  # noqa: ARG002
        return ()

    def _move(self, bucket: Bucket) -> Tensor | None:
        group, (decay, adapts) = bucket.group, bucket.traits
        ratios, lr = None, bucket.lr
        if adapts:
            ratios = lars_ratio(
                bucket.norms["weights"],
                bucket.norms["gradients"],
                group["lars_coeff"],
                decay,
                group["epsilon"],
                group.get("zero_norm_lr_ratio", 1.0),
            )
        else:
            lr = lr * group.get("excluded_lr_ratio", 1.0)
        lars_(
            bucket.weights,
            bucket.gradients,
            bucket.collect("momentum_buffer"),
            1.0 if ratios is None else ratios,
            lr=lr,
            momentum=group["momentum"],
            weight_decay=decay,
            lr_in_momentum=group["lr_in_momentum"],
        )
        return ratios

    def _hyper_key(self, group: Group) -> tuple[Any, ...]:
        return (
            group["momentum"],
            group["lars_coeff"],
            group["lars_weight_decay"],
            group["epsilon"],
            group.get("excluded_lr_ratio", 1.0),
            group.get("zero_norm_lr_ratio", 1.0),
            group["lr_in_momentum"],
            group["form"],
        )

    def _hyper_row(self, group: Group, index: int) -> tuple[float, ...]:
        decay, adapts = self._decay_and_adapts(group, index)
        return (
            group["momentum"],
            group["lars_coeff"],
            decay,
            group["epsilon"],
            1.0 if adapts else group.get("excluded_lr_ratio", 1.0),
            float(adapts),
            float(group["lr_in_momentum"]),
            group.get("zero_norm_lr_ratio", 1.0) if adapts else 1.0,
        )


def _check_replaceable(sgd: Optimizer) -> None:
    if not isinstance(sgd, SGD):
        raise TypeError(
            f"LARS replaces torch.optim.SGD with momentum, got {type(sgd).__name__}: "
            "build the optimizer as torch.optim.SGD(params, lr=..., momentum=0.9)."
        )
    for number, group in enumerate(sgd.param_groups):
        wrong = f"LARS cannot replace this SGD: in group {number}"
        if not group["momentum"] > 0:
            raise ValueError(f"{wrong} momentum must be above 0, got {group['momentum']!r}: give momentum=0.9.")
        if group["weight_decay"] != 0:
            raise ValueError(
                f"{wrong} weight_decay must be 0 since LARS has its own and it would count twice, "
                f"got {group['weight_decay']!r}: give it as lars_weight_decay."
            )
        if group["dampening"] != 0:
            raise ValueError(f"{wrong} dampening must be 0, which is LARS's, got {group['dampening']!r}: leave it out.")
        for switch in ("nesterov", "differentiable"):
            if group[switch]:
                raise ValueError(f"{wrong} {switch} must be False, which LARS does not have, got True: leave it out.")
