"""Steps by kernels: what is launched, in which order, and with which tables.

LARS reads weights and gradients, decides, and moves: 7 passes over the parameters' memory. LAMB moves its moments,
decides, and moves the weights: 10. Where LAMB clips or checks by itself it reads the gradients once more before, since
its moments cannot be taken back.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetx.optim.plan import Fresh, Lot, Place, Plan, Tuning
from fleetx.optim.watching import Entry

if TYPE_CHECKING:
    from fleetx.optim.layerwise import LayerwiseOptimizer

MOST_PLANS = 8
HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Switches:
    """What a step does besides its formula; each is compiled into the kernels."""

    scaled: bool
    skippable: bool
    checked: bool
    clipped: bool


@dataclass(frozen=True)
class Job:
    """One step: its tables and the tensors that came with it."""

    plan: Plan
    fresh: Fresh
    hypers: Tensor
    max_norm: Tensor
    grad_scale: Tensor
    found_inf: Tensor
    switches: Switches


class FusedStep:
    """Steps of one optimizer; keeps the plans of the lists of parameters that had gradients."""

    def __init__(self, tuning: Tuning | None = None) -> None:
        self.tuning = tuning or Tuning()
        self._plans: dict[Any, Plan] = {}
        self._uncompiled: Callable[[LayerwiseOptimizer], None] | None = None
        self.last: Plan | None = None

    def __call__(self, optimizer: "LayerwiseOptimizer") -> None:
        """Move every parameter that has a gradient; the host waits for nothing."""
        if "torch._dynamo" not in sys.modules:
            return self._step(optimizer)
        # A compiled step calls the kernels as they are. Nobody who does not compile should import the compiler for it.
        if self._uncompiled is None:
            self._uncompiled = torch.compiler.disable(self._step)
        return self._uncompiled(optimizer)

    def _step(self, optimizer: "LayerwiseOptimizer") -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = list(map(attrgetter("grad"), parameters))
        present = tuple([gradient is not None for gradient in gradients])
        if set(map(attrgetter("layout"), compress(gradients, present))) - {torch.strided}:
            optimizer._refuse_sparse_gradients()
        # What the loops below walk over is all a step costs the host: they are kept free of Python frames.
        key = (tuple(map(id, parameters)), present)
        plan = self._plans.get(key)
        arranged = None if plan is None else plan.accept(optimizer, gradients)
        if plan is None or arranged is None:
            places = _places(optimizer)
            if not places:
                return
            plan = self._make(key, optimizer, places)
            arranged = plan.accept(optimizer, gradients)
            assert arranged is not None
        self._run(optimizer, plan, plan.fresh([group["lr"] for group in optimizer.param_groups]))
        del arranged  # copies of gradients live until the kernels were launched

    def _make(self, key: Any, optimizer: "LayerwiseOptimizer", places: list[Place]) -> Plan:
        if places[0].parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a graph is being captured, and the optimizer has not stepped with these parameters and gradients yet: "
                "run a few steps before the capture, as torch's notes on CUDA graphs say."
            )
        while len(self._plans) >= MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = Plan(optimizer, places, self.tuning)
        return self._plans[key]

    def _run(self, optimizer: "LayerwiseOptimizer", plan: Plan, fresh: Fresh) -> None:
        for parameter, stand_in in plan.scattered:
            stand_in.copy_(parameter)
        job = _job(optimizer, plan, fresh)
        with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
            _follow(plan)
            RUNNERS[optimizer._kernels](job)
        for parameter, stand_in in plan.scattered:
            parameter.copy_(stand_in)
        # Kernels write behind autograd's back: who kept a parameter for backward must hear of it.
        torch.autograd.graph.increment_version(plan.parameters)
        self.last = plan
        if optimizer._watch.wants:
            self._observe(optimizer, plan)

    def _observe(self, optimizer: "LayerwiseOptimizer", plan: Plan) -> None:
        """Hand the ratios over, as they lie on the device."""
        if plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if optimizer._watch.every is None:
                return
            raise RuntimeError(
                "trust ratios are collected by the host at each step, which a graph has not: call "
                "observe_trust_ratios(None) before the capture."
            )
        ratios = torch.where(plan.flags[:1] == 0, plan.ratios, float("nan"))  # NaN: the step was left out
        optimizer._watch.record(Entry(plan.numbers, ratios), optimizer._read_ratios)


def _places(optimizer: "LayerwiseOptimizer") -> list[Place]:
    flat = (
        (group, index, p) for group, own in enumerate(optimizer.param_groups) for index, p in enumerate(own["params"])
    )
    return [
        Place(number, group, index, parameter)
        for number, (group, index, parameter) in enumerate(flat)
        if parameter.grad is not None and parameter.numel()
    ]


FusedStep.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


def _job(optimizer: "LayerwiseOptimizer", plan: Plan, fresh: Fresh) -> Job:
    groups = optimizer.param_groups
    max_norm = groups[0]["max_grad_norm"]
    key = (max_norm, [optimizer._hyper_key(group) for group in groups])
    rows = [optimizer._hyper_row(groups[m.group], m.index) for m in plan.members] if plan.needs(key) else ()
    hypers, limit = plan.settings(key, rows, max_norm)
    scale = _number_on(optimizer._signed_scale(), plan)
    found_inf = _number_on(getattr(optimizer, "found_inf", None), plan)
    switches = Switches(
        scaled=scale is not None,
        skippable=found_inf is not None,
        checked=groups[0]["skip_nonfinite"],
        clipped=max_norm is not None,
    )
    none = plan.one
    return Job(
        plan,
        fresh,
        hypers,
        limit,
        none if scale is None else scale,
        none if found_inf is None else found_inf,
        switches,
    )


def _number_on(value: Any, plan: Plan) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=plan.device)
    return value.detach().reshape(()).to(plan.device, torch.float32, non_blocking=True)


# Launches.


def _lars(job: Job) -> None:
    kernels, plan, switches = _kernels(), job.plan, job.switches
    own = _lars_kernels()
    for lot in plan.lots:
        _squares(job, lot, of_weights=True)
    _reduce(plan)
    own.lars_decide_kernel[(1,)](
        plan.sums,
        job.hypers,
        plan.group_of,
        job.fresh.lrs,
        job.max_norm,
        job.grad_scale,
        job.found_inf,
        plan.flags,
        plan.coefficients,
        plan.ratios,
        plan.count,
        kernels.DECIDED_AT_ONCE,
        switches.scaled,
        switches.skippable,
        switches.checked,
        switches.clipped,
    )
    for lot in plan.lots:
        own.lars_apply_kernel[(lot.blocks,)](
            plan.blocks,
            plan.sizes,
            plan.weight_at,
            job.fresh.gradient_at,
            plan.state_at["momentum_buffer"],
            plan.low_at,
            plan.flags,
            plan.coefficients,
            lot.first,
            plan.count,
            plan.tuning.block,
            plan.tuning.rounds,
            lot.aligned,
            _dtype(lot.weight),
            _dtype(lot.gradient),
            _dtype(lot.low),
            num_warps=plan.tuning.warps,
        )


def _lamb(job: Job) -> None:
    kernels, plan, switches = _kernels(), job.plan, job.switches
    own = _lamb_kernels()
    if switches.checked or switches.clipped:
        for lot in plan.lots:
            _squares(job, lot, of_weights=False)
        _reduce(plan)
    own.lamb_begin_kernel[(1,)](
        plan.sums,
        job.hypers,
        plan.state_at["step"],
        job.max_norm,
        job.grad_scale,
        job.found_inf,
        plan.flags,
        plan.coefficients,
        plan.count,
        kernels.DECIDED_AT_ONCE,
        switches.scaled,
        switches.skippable,
        switches.checked,
        switches.clipped,
    )
    means, squares = plan.state_at["exp_avg"], plan.state_at["exp_avg_sq"]
    for lot in plan.lots:
        own.lamb_moments_kernel[(lot.blocks,)](
            plan.blocks,
            plan.sizes,
            plan.weight_at,
            job.fresh.gradient_at,
            means,
            squares,
            plan.flags,
            plan.coefficients,
            plan.partials_p,
            plan.partials_g,
            lot.first,
            plan.count,
            plan.tuning.block,
            plan.tuning.rounds,
            lot.aligned,
            _dtype(lot.weight),
            _dtype(lot.gradient),
            num_warps=plan.tuning.warps,
        )
    _reduce(plan)
    own.lamb_decide_kernel[(-(-plan.count // kernels.DECIDED_AT_ONCE),)](
        plan.sums,
        job.hypers,
        plan.group_of,
        job.fresh.lrs,
        plan.coefficients,
        plan.ratios,
        plan.count,
        kernels.DECIDED_AT_ONCE,
    )
    for lot in plan.lots:
        own.lamb_apply_kernel[(lot.blocks,)](
            plan.blocks,
            plan.sizes,
            plan.weight_at,
            means,
            squares,
            plan.low_at,
            plan.flags,
            plan.coefficients,
            lot.first,
            plan.count,
            plan.tuning.block,
            plan.tuning.rounds,
            lot.aligned,
            _dtype(lot.weight),
            _dtype(lot.low),
            num_warps=plan.tuning.warps,
        )


RUNNERS = {"lars": _lars, "lamb": _lamb}


def _follow(plan: Plan) -> None:
    """Let masters take over what others wrote into the low-precision weights."""
    for lot in plan.lots:
        if lot.low is not None:
            _kernels().follow_kernel[(lot.blocks,)](
                plan.blocks,
                plan.sizes,
                plan.weight_at,
                plan.low_at,
                lot.first,
                plan.tuning.block,
                plan.tuning.rounds,
                lot.aligned,
                _dtype(lot.weight),
                _dtype(lot.low),
                num_warps=plan.tuning.warps,
            )


def _squares(job: Job, lot: Lot, *, of_weights: bool) -> None:
    kernels, plan = _kernels(), job.plan
    kernels.squares_kernel[(lot.blocks,)](
        plan.blocks,
        plan.sizes,
        plan.weight_at,
        job.fresh.gradient_at,
        job.grad_scale,
        plan.partials_p,
        plan.partials_g,
        lot.first,
        plan.tuning.block,
        plan.tuning.rounds,
        lot.aligned,
        job.switches.scaled,
        _dtype(lot.weight),
        _dtype(lot.gradient),
        of_weights,
        num_warps=plan.tuning.warps,
    )


def _reduce(plan: Plan) -> None:
    kernels = _kernels()
    kernels.reduce_kernel[(plan.count,)](
        plan.spans, plan.partials_p, plan.partials_g, plan.sums, plan.count, kernels.SUMMED_AT_ONCE
    )


@cache
def _dtype(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else _kernels().DTYPES[str(dtype).removeprefix("torch.")]


# Whether it can be done here.


@cache
def _kernels() -> Any:
    """The kernels; Triton is imported by the first step that uses them, and by nobody else."""
    from fleetx.optim import kernels

    return kernels


@cache
def _lars_kernels() -> Any:
    from fleetx.optim import lars_kernels

    return lars_kernels


@cache
def _lamb_kernels() -> Any:
    from fleetx.optim import lamb_kernels

    return lamb_kernels


def obstacle(parameters: Sequence[Tensor]) -> str | None:
    """Why kernels cannot serve these parameters; None if they can."""
    devices = set(map(attrgetter("device"), parameters))
    if len(devices) > 1:
        return f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))})"
    if strange := set(map(type, parameters)) - {nn.Parameter, Tensor}:
        return f"a parameter is a {strange.pop().__name__}, and not a plain tensor"
    kind = devices.pop().type if devices else "cpu"
    if kind not in ("cuda", "cpu"):
        return f"the parameters are on {kind}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if kind == "cpu" and not _kernels().INTERPRETED:
        return "the parameters are on the host"
    return None
