"""LARS: momentum whose step is scaled per layer by the ratio of weight norm to gradient norm."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from fleetx.optim.checks import check_lr, check_number, check_switch
from fleetx.optim.foreach import Tensors, norms, number_on, scale_
from fleetx.optim.groups import Group, State
from fleetx.optim.layerwise import Bucket, LayerwiseOptimizer


def lars_(
    weights: Tensors,
    gradients: Tensors,
    velocities: Tensors,
    *,
    lr: float | Tensor,
    momentum: float,
    coeff: float,
    weight_decay: float,
    epsilon: float,
    adapt: bool,
    lr_in_momentum: bool,
) -> None:
    """``v = momentum·v + local_lr·(g + weight_decay·p)``, ``p = p − v``, in place on one bucket."""
    ratio = lars_ratio(weights, gradients, coeff, weight_decay, epsilon) if adapt else 1.0
    steps = torch._foreach_add(gradients, weights, alpha=weight_decay)
    scale_(steps, lr * ratio if lr_in_momentum else ratio)
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, steps)
    if lr_in_momentum:
        torch._foreach_sub_(weights, velocities)
    else:
        torch._foreach_sub_(weights, torch._foreach_mul(velocities, lr))


def lars_ratio(weights: Tensors, gradients: Tensors, coeff: float, weight_decay: float, epsilon: float) -> Tensor:
    """``coeff·‖p‖ / (‖g‖ + weight_decay·‖p‖ + epsilon)`` of each tensor; 1 where a norm is zero."""
    p, g = norms(weights), norms(gradients)
    return torch.where((p > 0) & (g > 0), coeff * p / (g + weight_decay * p + epsilon), 1.0)


class Lars(LayerwiseOptimizer):
    """LARS as Fleet means it: the learning rate is inside the momentum buffer.

    ::

        local_lr = lr · lars_coeff · ‖p‖ / (‖g‖ + lars_weight_decay·‖p‖ + epsilon)     (lr if a norm is zero)
        v = momentum·v + local_lr · (g + lars_weight_decay·p)
        p = p − v

    Args:
        params: parameters, groups of them, or ``model.named_parameters()``.
        lr: learning rate, a number or a tensor of one element.
        momentum: how much of the last step remains.
        lars_coeff: the length of a step relative to the weights'.
        lars_weight_decay: weight decay; 0 does not switch the adaptation off, only exclusion does.
        epsilon: added to the denominator only.
        exclude_from_weight_decay: patterns (see ``fleetx.optim.exclusion``). What they take has no decay and,
            unless ``exclude_from_adaptation`` says otherwise, moves by plain momentum at ``lr``.
        exclude_from_adaptation: patterns of parameters that move at ``lr`` itself; None means the same list.
        excluded_lr: learning rate of the parameters excluded from adaptation. It belongs to the ``lr`` given
            here: a schedule that halves ``lr`` halves both.
        lr_in_momentum: False keeps lr out of the buffer (``v = momentum·v + ratio·(…)``, ``p = p − lr·v``),
            as some other libraries do. The two differ as soon as lr changes.

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

    _masks: ClassVar[dict[str, str]] = {
        "decays": "exclude_from_weight_decay",
        "adapts": "exclude_from_adaptation",
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        epsilon: float = 0.0,
        exclude_from_weight_decay: Sequence[str] = (),
        *,
        exclude_from_adaptation: Sequence[str] | None = None,
        excluded_lr: float | None = None,
        lr_in_momentum: bool = True,
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
            "lr_in_momentum": lr_in_momentum,
        }
        super().__init__(params, defaults)

    @classmethod
    def replacing(
        cls,
        sgd: Optimizer,
        *,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        epsilon: float = 0.0,
        exclude_from_weight_decay: Sequence[str] = (),
        exclude_from_adaptation: Sequence[str] | None = None,
        excluded_lr: float | None = None,
        lr_in_momentum: bool = True,
    ) -> Self:
        """Take the place of an SGD with momentum, on its own groups: its schedulers now drive this one."""
        _check_replaceable(sgd)
        return cls._sharing(
            sgd,
            lr=sgd.defaults["lr"],
            lars_coeff=lars_coeff,
            lars_weight_decay=lars_weight_decay,
            epsilon=epsilon,
            exclude_from_weight_decay=exclude_from_weight_decay,
            exclude_from_adaptation=exclude_from_adaptation,
            excluded_lr=excluded_lr,
            lr_in_momentum=lr_in_momentum,
        )

    def _check_group(self, group: Group) -> None:
        check_lr(group["lr"])
        check_number("momentum", group["momentum"], below=1, usual="0.9 is usual")
        check_number("lars_coeff", group["lars_coeff"], above=0, usual="0.001 is usual")
        check_number("lars_weight_decay", group["lars_weight_decay"], usual="0.0005 is usual, 0 is none")
        check_number("epsilon", group["epsilon"], usual="0 is usual")
        check_switch("lr_in_momentum", group["lr_in_momentum"])
        if group["excluded_lr"] is not None:
            _fix_excluded_lr_ratio(group)

    def _prepare_state(self, state: State, weights: Tensor) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weights)

    def _traits(self, group: Group, index: int, state: State) -> tuple[Any, ...]:  # noqa: ARG002
        return group["decays"][index], group["adapts"][index]

    def _update(self, group: Group, bucket: Bucket) -> None:
        decays, adapts = bucket.traits
        lr = number_on(group["lr"], like=bucket.weights[0])
        lars_(
            bucket.weights,
            bucket.gradients,
            bucket.collect("momentum_buffer"),
            lr=lr if adapts else lr * group.get("excluded_lr_ratio", 1.0),
            momentum=group["momentum"],
            coeff=group["lars_coeff"],
            weight_decay=group["lars_weight_decay"] if decays else 0.0,
            epsilon=group["epsilon"],
            adapt=adapts,
            lr_in_momentum=group["lr_in_momentum"],
        )


def _fix_excluded_lr_ratio(group: Group) -> None:
    """Keep excluded_lr as a multiple of lr, so that schedules, which know only lr, move both."""
    check_number("excluded_lr", group["excluded_lr"], usual="leave it out to use lr")
    if "excluded_lr_ratio" in group:
        return
    lr = float(group.get("initial_lr", group["lr"]))
    if lr == 0:
        raise ValueError(
            f"excluded_lr={group['excluded_lr']!r} follows the schedule as a multiple of lr, and lr is 0: "
            "give the peak learning rate as lr and let the schedule begin at 0."
        )
    group["excluded_lr_ratio"] = group["excluded_lr"] / lr


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
        for switch in ("nesterov", "maximize", "differentiable"):
            if group[switch]:
                raise ValueError(f"{wrong} {switch} must be False, which LARS does not have, got True: leave it out.")
