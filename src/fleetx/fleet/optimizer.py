"""`distributed_optimizer`: the optimizer of the guide's loop, with `minimize` and `flush`."""

import atexit
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleetx import inference, names
from fleetx.amp import LossScaler, low_dtype
from fleetx.buffers import WindowBuffers
from fleetx.comm import world
from fleetx.comm.batch_norms import count_synchronized
from fleetx.comm.groups import GroupSettings
from fleetx.comm.guard import ParameterGuard
from fleetx.comm.reducer import ReducerSettings
from fleetx.fleet import checks, oom
from fleetx.fleet.model import models_of, require_joined, runnable
from fleetx.fleet.wrappers import require_alone
from fleetx.nonfinite import NonFiniteWatch
from fleetx.notices import tell_once
from fleetx.numbers import LOW_PRECISION, Number
from fleetx.optim import Lamb, Lars, Muon, TrustRatios
from fleetx.outcome import Outcome
from fleetx.step import TrainingStep
from fleetx.strategy import DistributedStrategy
from fleetx.update import Updater, described
from fleetx.window import Window

if TYPE_CHECKING:
    from fleetx.convergence import NoiseScale
    from fleetx.fleet.planning import Planning
    from fleetx.planner import Plan


def distributed_optimizer(
    optimizer: Optimizer,
    strategy: DistributedStrategy | None = None,
    scheduler: Any | None = None,
    *,
    clip_norm: float | None = None,
    nonfinite_limit: int = 10,
    compare_every: int = 100,
    noise_scale: "NoiseScale | None" = None,
) -> "DistributedOptimizer":
    """Wrap a torch optimizer as the strategy says.

    `lars` and `lamb` replace it and share its groups, so that schedulers made for it keep working. `scheduler` is
    stepped once per window. `clip_norm` limits the norm of all gradients together. After `nonfinite_limit` windows
    in a row without a finite loss or gradient the run stops with an error. After every `compare_every` windows the
    workers make sure that they hold the same weights; 0 leaves that out. `noise_scale` measures how large a batch is
    worth having: see `fleetx.convergence`.
    """
    return DistributedOptimizer(
        optimizer,
        strategy,
        scheduler=scheduler,
        clip_norm=clip_norm,
        nonfinite_limit=nonfinite_limit,
        compare_every=compare_every,
        noise_scale=noise_scale,
    )


class DistributedOptimizer(Optimizer):
    """Merges micro-batches, reduces over the workers, and moves the weights once per window."""

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: DistributedStrategy | None = None,
        *,
        scheduler: Any | None = None,
        clip_norm: float | None = None,
        nonfinite_limit: int = 10,
        compare_every: int = 100,
        noise_scale: "NoiseScale | None" = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups and state are those of the wrapped one. Everything is checked before
        # anything is changed, so that a call that failed can be repeated.
        inference.refuse_mode("fleet.distributed_optimizer")
        checks.require_steppable(optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("this optimizer is distributed already: once is enough.")
        strategy = runnable(strategy)
        require_joined()
        checks.require_prepared(optimizer, strategy)
        checks.require_scheduler_of(optimizer, scheduler)
        checks.require_positive("clip_norm", clip_norm)
        watch = NonFiniteWatch(nonfinite_limit)
        guard = ParameterGuard(compare_every)
        self.strategy = strategy
        self.inner = _replacement(optimizer, strategy)
        self.engine = _engine(self.inner, strategy, scheduler, clip_norm, watch, guard, noise_scale)
        guard.watch(self.engine.updater.parameters)
        if strategy.compile:
            self.engine.updater.compile()
        # A schedule made for this object moves after the first window, updated or skipped: torch need not warn.
        self._opt_called = True
        self._checked_alone = False
        self.planning = _planning(self.engine.updater.parameters(), strategy)
        if self.planning is not None:
            self.planning.attach(self)
        strategy.freeze("fleet.distributed_optimizer")
        atexit.register(_mention_open_window, weakref.ref(self))

    # What torch and its schedulers expect of an optimizer ------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters between windows; they take part from the next window on."""
        if self.engine.window.held:
            raise RuntimeError("a window is in progress: call flush() before adding parameters.")
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        low = any(tensor.dtype in LOW_PRECISION for tensor in tensors)
        if low or self.engine.updater.masters or isinstance(self.inner, Lars | Lamb):
            raise ValueError(
                "parameters cannot be added to LARS, to LAMB, or to an optimizer that keeps fp32 master weights. "
                "Make it with all of them, frozen ones included, and set requires_grad when they should train."
            )
        checks.require_prepared_parameters(tensors, self.strategy)
        self.inner.add_param_group({**param_group, "params": params})
        self.engine.buffers.watch(models_of(tensors))

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Called before each update, by the wrapped optimizer."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Called after each update, by the wrapped optimizer."""
        return self.inner.register_step_post_hook(hook)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature
        """Nothing to do between windows; in the middle of one it would lose micro-batches, so it raises."""
        if self.engine.window.held:
            raise RuntimeError(
                f"zero_grad() in the middle of a window would lose {self.engine.window.held} merged micro-batches. "
                "The window clears its gradients by itself: leave the call out, or drop the window with discard()."
            )

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:  # type: ignore[override]  # noqa: ARG002
        """Not this way: `minimize` must run the backward that it reduces and unscales."""
        raise RuntimeError(
            "a distributed optimizer is not stepped: write optimizer.minimize(loss) in place of loss.backward() and "
            "optimizer.step(). It scales the loss, merges micro-batches, reduces and updates."
        )

    # The guide's loop ------------------------------------------------------------------------------------

    def minimize(self, loss: Tensor, *, items: Number | None = None, retain_graph: bool = False) -> Outcome:
        """Backward of one micro-batch, and the update when the window is full; true if the weights moved.

        `items` is the number of items (tokens, unpadded samples) that this loss averages over, where that varies.
        """
        inference.refuse_mode("minimize")
        checks.require_scalar(loss)
        if items is not None:
            items = checks.as_count(items)
            self._require_items_possible()
        self.require_alone()
        try:
            return self.engine.minimize(loss, items, retain_graph)
        except torch.OutOfMemoryError as error:
            oom.explain(error, self.engine.updater.parameters(), self, self.strategy)
            raise

    def flush(self) -> Outcome | None:
        """Update with what a short last window holds, averaged by that; None if it holds nothing on any worker.

        All workers must call it, at the end of an epoch, say. A worker that has had fewer batches than the others waits
        here and takes part in their windows without adding anything, so that all end the epoch together.
        """
        inference.refuse_mode("flush")
        return self.engine.flush()

    def discard(self) -> None:
        """Drop the micro-batches merged so far."""
        self.engine.window.discard()

    def require_alone(self) -> None:
        """Refuse, once, a model that another wrapper reduces as well."""
        if not self._checked_alone and world.size() > 1:
            require_alone(self.engine.updater.parameters())
        self._checked_alone = True

    @property
    def nonfinite_windows(self) -> int:
        """Windows so far whose loss or gradient was not finite for other reasons than the loss scale."""
        return self.engine.watch.total

    @property
    def micro_batches_held(self) -> int:
        """Micro-batches merged into the window in progress."""
        return self.engine.window.held

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 without scaling."""
        return 1.0 if self.engine.scaler is None else self.engine.scaler.scale

    @property
    def plan(self) -> "Plan | None":
        """What the planner chose with the first batch, where checkpoints = "auto" leaves the choice to it."""
        return None if self.planning is None else self.planning.plan

    def overview(self, width: int | None = None) -> str:
        """The strategy as used, what each exclusion pattern took, the all-reduces of an update once there was one, and
        the plan; no box is wider than `width`."""
        tables = [self.inner.exclusion_table()] if isinstance(self.inner, Lars | Lamb | Muon) else []
        if self.engine.window.reducer is not None:
            tables.append(str(self.engine.window.reducer))
        norms = count_synchronized(models_of(self.engine.updater.parameters()))
        tables += [f"BatchNorm layers over {world.size()} workers: {norms}"] if norms else []
        return "\n".join([self.strategy.overview(width), *tables, *([] if self.plan is None else [str(self.plan)])])

    @property
    def trust_ratios(self) -> TrustRatios | None:
        """The trust ratios of LARS or LAMB handed out last, every ``trust_ratios_every`` windows; else None."""
        return self.engine.updater.trust_ratios

    # Saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with a `fleetx` entry: window, masters, scale, schedule, counts.

        A window in progress holds this worker's own gradients: then every worker saves its own.
        """
        return self.state_in_use(copy=True)

    def state_in_use(self, copy: bool = False) -> dict[str, Any]:
        """The same, with tensors that are still in use: for who copies them to the host at once."""
        engine = self.engine
        masters, scaler, scheduler = engine.updater.masters, engine.scaler, engine.updater.scheduler
        return self.inner.state_dict() | {
            "fleetx": {
                "k_steps": engine.k_steps,
                "names": self._names(),
                "window": engine.window.state_dict(copy)
                | {"buffers": engine.buffers.state_dict(copy) if engine.window.held else None},
                "watch": engine.watch.state_dict(),
                "masters": masters.state_dict(copy) if masters else None,
                "scaler": scaler.state_dict() if scaler else None,
                "scheduler": scheduler.state_dict() if scheduler else None,
            }
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, in the middle of a window too."""
        self.check_state_dict(state_dict)
        ours, engine = state_dict["fleetx"], self.engine
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "fleetx"})
        if engine.updater.masters is not None:
            engine.updater.masters.load_state_dict(ours["masters"])
        if engine.scaler is not None:
            engine.scaler.load_state_dict(ours["scaler"])
        if engine.updater.scheduler is not None:
            engine.updater.load_schedule(ours["scheduler"])
        engine.watch.load_state_dict(ours["watch"])
        engine.window.load_state_dict(ours["window"])
        engine.buffers.load_state_dict(ours["window"].get("buffers"))
        engine.is_first = False
        engine.is_of_step = engine.is_of_step and not engine.window.held

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise if `load_state_dict` would refuse the state; nothing is changed."""
        if "fleetx" not in state_dict:
            raise ValueError(
                "this state dict has no 'fleetx' entry: it was saved by a plain optimizer. "
                "Load it into that optimizer before you give it to fleet.distributed_optimizer, or into its `inner`."
            )
        ours = state_dict["fleetx"]
        engine = self.engine
        parts = {
            "masters": engine.updater.masters,
            "scaler": engine.scaler,
            "scheduler": engine.updater.scheduler,
        }
        for name, part in parts.items():
            if (part is None) != (ours[name] is None):
                has, saved = ("has", "has not") if part else ("has not", "has")
                raise ValueError(
                    f"this optimizer {has} a {name} and the state dict {saved}: they come from different strategies. "
                    "Save and load with the same strategy and scheduler."
                )
        if ours["window"]["held"] and ours["k_steps"] != engine.k_steps:
            raise ValueError(
                f"the window in progress is one of {ours['k_steps']} micro-batches, and this optimizer merges "
                f"{engine.k_steps}. Load it with the k_steps it was saved with, or save after flush()."
            )
        if displaced := names.displacement(ours.get("names", []), self._names()):
            raise ValueError(f"this state dict is of another order of parameters: {displaced}.")
        engine.window.check_state(ours["window"])

    def _names(self) -> list[list[str | None]]:
        infos = map(names.info, self.engine.updater.parameters())
        return names.in_groups(self.param_groups, [info.name if info else None for info in infos])

    def _require_items_possible(self) -> None:
        if not self.engine.average:
            raise ValueError(checks.ITEMS_OR_SUM)
        if self.strategy.fp16_allreduce:
            raise ValueError(
                "minimize(items=...) sends gradients multiplied by their counts, which overflows with fp16_allreduce. "
                "Use fleetx.Step, which knows the counts beforehand, or bf16_allreduce."
            )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r})"


def _engine(
    inner: Optimizer,
    strategy: DistributedStrategy,
    scheduler: Any,
    clip_norm: float | None,
    watch: NonFiniteWatch,
    guard: ParameterGuard,
    noise: "NoiseScale | None",
) -> TrainingStep:
    updater = Updater(inner, scheduler)
    merge = strategy.gradient_merge_configs
    k_steps = merge.k_steps if strategy.gradient_merge else 1
    average = merge.avg or not strategy.gradient_merge
    scaler = _scaler(strategy)
    checks_made = f"nonfinite_limit {watch.limit}, compare_every {guard.every}"
    measured = "no noise scale" if noise is None else f"noise scale every {noise.every}"
    settings = f"k_steps {k_steps}, avg {average}, clip_norm {clip_norm}, {checks_made}, {measured}"
    return TrainingStep(
        window=Window(
            updater.parameters,
            _reducer_settings(strategy),
            partial(_terms, settings, updater, scaler),
            late=None if noise is None else partial(_measured, noise, updater),
        ),
        updater=updater,
        k_steps=k_steps,
        average=average,
        scaler=scaler,
        clip_norm=clip_norm,
        watch=watch,
        guard=guard,
        buffers=WindowBuffers(models_of(updater.parameters())),
        noise=noise,
    )


def _terms(settings: str, updater: Updater, scaler: LossScaler | None) -> list[str]:
    """What must be the same on all workers beside the parameters, in words."""
    return [settings, "no loss scale" if scaler is None else scaler.described(), *described(updater)]


def _measured(noise: "NoiseScale", updater: Updater) -> Tensor:
    """What travels with the gradients of a window."""
    return noise.numbers(updater.parameters())


def _mention_open_window(reference: "weakref.ref[DistributedOptimizer]") -> None:
    optimizer = reference()
    if optimizer is None or not optimizer.micro_batches_held or hasattr(sys, "last_type"):
        return  # a run that failed has told more than that
    held = optimizer.micro_batches_held
    tell_once(
        "open-window",
        f"the run ended with {held} micro-batch{'' if held == 1 else 'es'} in an open window, which moved nothing: "
        "call optimizer.flush() at the end of an epoch. (What was saved with a checkpoint is not lost.)",
    )


def _planning(parameters: list[Tensor], strategy: DistributedStrategy) -> "Planning | None":
    """That of the model with these parameters, if the planner decides for it."""
    if not strategy.recompute or strategy.recompute_configs.checkpoints != "auto":
        return None
    from fleetx.fleet.planning import plannings_with  # the planner, which most runs do without

    return next(plannings_with(parameters), None)


def _replacement(optimizer: Optimizer, strategy: DistributedStrategy) -> Optimizer:
    """LARS or LAMB in the place of the wrapped optimizer, on its own groups."""
    if not (strategy.lars or strategy.lamb):
        return optimizer
    replacing, configs = (
        (Lars.replacing, strategy.lars_configs) if strategy.lars else (Lamb.replacing, strategy.lamb_configs)
    )
    replacement = replacing(optimizer, **configs.settings())
    replacement.observe_trust_ratios(configs.trust_ratios_every)
    return replacement


def _reducer_settings(strategy: DistributedStrategy) -> ReducerSettings:
    wire = torch.float16 if strategy.fp16_allreduce else torch.bfloat16 if strategy.bf16_allreduce else None
    return ReducerSettings(
        bucket_mib=strategy.fuse_grad_size_in_MB,
        last_bucket_mib=strategy.last_comm_group_size_MB,
        fuse=strategy.fuse_all_reduce_ops,
        wire_dtype=wire,
        groups=GroupSettings(
            count=strategy.nccl_comm_num,
            hierarchical=strategy.use_hierarchical_allreduce,
            inner_ranks=strategy.hierarchical_allreduce_inter_nranks,
        ),
    )


def _scaler(strategy: DistributedStrategy) -> LossScaler | None:
    configs = strategy.amp_configs
    if not strategy.amp or low_dtype(configs) is torch.bfloat16:
        return None
    return LossScaler(
        init_loss_scaling=configs.init_loss_scaling,
        incr_every_n_steps=configs.incr_every_n_steps,
        decr_every_n_nan_or_inf=configs.decr_every_n_nan_or_inf,
        incr_ratio=configs.incr_ratio,
        decr_ratio=configs.decr_ratio,
        use_dynamic_loss_scaling=configs.use_dynamic_loss_scaling,
    )
