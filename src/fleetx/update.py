"""Moves the weights, or leaves everything as it was when the gradients are unusable."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from fleetx.apart import compiled_apart
from fleetx.buffers import WindowBuffers
from fleetx.masters import MasterWeights
from fleetx.names import label
from fleetx.notices import tell_once
from fleetx.numbers import LOW_PRECISION
from fleetx.optim import Lamb, Lars, TrustRatios


class Updater:
    """An optimizer with its schedule, and with fp32 masters where it needs them."""

    def __init__(self, optimizer: Optimizer, scheduler: Any | None = None) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.masters = _masters_for(optimizer)
        self._compiled_step: Callable[[], Any] | None = None
        self._ratios_taken: TrustRatios | None = None
        self._last_epoch = getattr(scheduler, "last_epoch", None)
        self._guard_step()

    def parameters(self) -> list[Tensor]:
        """The model's parameters that the optimizer moves."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.masters.originals(parameters) if self.masters else parameters

    @property
    def lr(self) -> float | Tensor:
        """The learning rate of the first group, as the next update will use it."""
        lr = self.optimizer.param_groups[0]["lr"]
        return lr.clone() if isinstance(lr, Tensor) else lr  # a schedule changes a tensor in place

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.parameters()[0].device

    def update(self, finite: Tensor, buffers: WindowBuffers) -> None:
        """Apply the gradients if they are `finite`, or else put the buffers back; the schedule counts either way."""
        self._require_masters()
        if self.masters:
            self.masters.take_gradients()
        if self._skips_on_device(finite):
            self._step_on_device(finite)
            buffers.restore(unless=finite)
        elif finite.item():
            self._step()
        else:
            buffers.restore()
        if self.masters:
            self.masters.publish()
        if self.scheduler is not None:
            self._step_schedule(self.scheduler)

    @property
    def trust_ratios(self) -> TrustRatios | None:
        """The trust ratios handed out last; None if the optimizer has none."""
        return self.optimizer.trust_ratios if isinstance(self.optimizer, Lars | Lamb) else None

    def take_trust_ratios(self) -> TrustRatios | None:
        """The trust ratios, once each time that they were handed out."""
        before, self._ratios_taken = self._ratios_taken, self.trust_ratios
        return None if self._ratios_taken is before else self._ratios_taken

    def load_schedule(self, state: dict[str, Any]) -> None:
        """Continue the schedule."""
        assert self.scheduler is not None
        self.scheduler.load_state_dict(state)
        self._last_epoch = getattr(self.scheduler, "last_epoch", None)

    def _step(self) -> None:
        # Looked up each time: schedules and others wrap an optimizer's step.
        with self._step_guard.open():
            (self._compiled_step or self.optimizer.step)()

    def _guard_step(self) -> None:
        """Refuse steps of others. One guard for each optimizer, however often it is wrapped."""
        hooks = getattr(self.optimizer, "_optimizer_step_pre_hooks", None)  # none without torch's own __init__
        known = next((hook for hook in (hooks or {}).values() if isinstance(hook, _StepGuard)), None)
        self._step_guard = known or _StepGuard(self.parameters)
        if known is None and hooks is not None:
            self.optimizer.register_step_pre_hook(self._step_guard)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guard_step()  # a copied optimizer has no hooks

    def _require_masters(self) -> None:
        """Masters stand in the groups in the place of low-precision parameters: none of these may be left there."""
        if getattr(self.optimizer, "keeps_masters", False):
            return
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.dtype in LOW_PRECISION:
                raise RuntimeError(
                    f"{label(parameter)} was made {parameter.dtype} after fleet.distributed_optimizer, so it has no "
                    "fp32 master, and small updates would be lost. Convert the model before, or give "
                    "amp_configs={'use_pure_bf16': True}."
                )

    def _step_schedule(self, scheduler: Any) -> None:
        if getattr(scheduler, "last_epoch", None) != self._last_epoch:
            raise RuntimeError(
                "the scheduler was stepped by somebody else too, so the learning rate moves twice per window. "
                "Leave out your scheduler.step(), or do not give scheduler= to fleet.distributed_optimizer."
            )
        # torch warns when a schedule moves before its optimizer: here that is a skipped first window.
        scheduler.optimizer._opt_called = True
        scheduler.step()
        self._last_epoch = getattr(scheduler, "last_epoch", None)

    def compile(self) -> None:
        """Compile the optimizer's step where that is possible and of use."""
        if not _gains_by_compiling(self.optimizer):
            return
        for group in self.optimizer.param_groups:
            # A float would be part of the compiled code, and each new learning rate would compile it anew.
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)
        self._compiled_step = compiled_apart(self.optimizer.step)

    def _skips_on_device(self, finite: Tensor) -> bool:
        """Whether the optimizer can leave out a step by itself, so that the host need not know."""
        return finite.is_cuda and _takes_found_inf(self.optimizer) and not _lacks_momentum(self.optimizer)

    def _step_on_device(self, finite: Tensor) -> None:
        optimizer: Any = self.optimizer
        optimizer.grad_scale = None
        optimizer.found_inf = (~finite).float()
        try:
            self._step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


class _StepGuard:
    """A hook that lets only an update of a window step the optimizer, once the step has something to apply."""

    def __init__(self, parameters: Callable[[], list[Tensor]]) -> None:
        self._parameters = parameters
        self._is_open = False

    @contextmanager
    def open(self) -> Generator[None]:
        """While this is active, the optimizer may be stepped."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._is_open:
            return
        has_closure = len(args) > 1 or bool(kwargs)  # the first argument is the optimizer
        if not has_closure and all(parameter.grad is None for parameter in self._parameters()):
            return  # it moves nothing: some loops step once before their schedule
        for left_behind in ("grad_scale", "found_inf"):  # by a GradScaler: the next window's update would heed them
            vars(optimizer).pop(left_behind, None)
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name}.step() is not for the loop once fleet.distributed_optimizer was given the {name}: minimize() "
            "steps it at the end of each window, and this call would apply the same gradients again, or some that no "
            "window has averaged. Leave out the call, and GradScaler's step(optimizer) too: optimizer.minimize(loss) "
            "takes the place of loss.backward() and of both."
        )


def described(updater: Updater) -> list[str]:
    """Everything that must be the same on all workers for their weights to stay the same, in words."""
    optimizer = updater.optimizer
    lines = [type(optimizer).__name__]
    if updater.scheduler is not None:
        known = _plain(getattr(updater.scheduler, "state_dict", dict)())
        lines.append(f"schedule {type(updater.scheduler).__name__} with {known}")
    for number, group in enumerate(optimizer.param_groups):
        settings = sorted((name, value) for name, value in group.items() if name not in ("params", "param_names"))
        shown = ", ".join(f"{name} {_plain(value)}" for name, value in settings)
        lines.append(f"group {number} of {len(group['params'])} parameters with {shown}")
        kept = [" ".join(sorted(optimizer.state[p])) if p in optimizer.state else "none" for p in group["params"]]
        lines.append(f"state of group {number}: {'; '.join(kept)}")
    return lines


def _plain(value: Any) -> Any:
    """The value in numbers and names; of anything else its class, since what it shows may be its address."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=str)}
    return value if isinstance(value, bool | int | float | str) else type(value).__name__


def _masters_for(optimizer: Optimizer) -> MasterWeights | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    low = [p for p in parameters if p.dtype in LOW_PRECISION]
    if not low or getattr(optimizer, "keeps_masters", False):
        return None
    size = sum(p.numel() for p in low) * 4 / 2**20
    tell_once("masters", f"{len(low)} parameters are {low[0].dtype}: fp32 master weights take {size:,.1f} MiB more.")
    return MasterWeights(optimizer)


def _takes_found_inf(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _lacks_momentum(optimizer: Optimizer) -> bool:
    """torch's fused SGD leaves its momentum uninitialised when it skips the very first step."""
    if not isinstance(optimizer, SGD):
        return False
    return any(
        group["momentum"] and p.grad is not None and optimizer.state[p].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _gains_by_compiling(optimizer: Optimizer) -> bool:
    """Whether the update can be compiled, and is not a kernel of its own already."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return False
    if isinstance(optimizer, Lars | Lamb) and _takes_found_inf(optimizer):
        return False
    if isinstance(optimizer, Lamb):
        # It reads its step count on the host, to correct the bias: compiled code would be made anew for each step.
        return False
    if any(parameter.dim() == 0 for group in optimizer.param_groups for parameter in group["params"]):
        # torch 2.13 compiles the first gradient of a parameter without dimensions into the code as a constant.
        tell_once("scalar-update", "a parameter without dimensions cannot be updated by compiled code: eager update.")
        return False
    return True
