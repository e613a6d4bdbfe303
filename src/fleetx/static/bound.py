"""A program on its device, prepared and compiled: one run is one micro-batch."""

import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetx import inference
from fleetx.fleet import checks
from fleetx.fleet.model import distributed_model, is_prepared, strategy_of
from fleetx.fleet.optimizer import DistributedOptimizer, distributed_optimizer
from fleetx.losses import named_losses
from fleetx.notices import tell_once
from fleetx.numbers import Number
from fleetx.slicing import map_tensors
from fleetx.static.building import is_materialised
from fleetx.static.compiling import forwards_of, require_not_compiled
from fleetx.static.feeding import as_batch, described, inputs_of
from fleetx.static.fetching import Fetch, name_of, resolve
from fleetx.static.program import Program
from fleetx.static.recompiling import CompilationLog
from fleetx.static.skipping import TellingWatch

if TYPE_CHECKING:
    from fleetx.static.planned import PlannedProgram

# Where the programs of a model run; a model lives on one device.
_devices: "weakref.WeakKeyDictionary[nn.Module, torch.device]" = weakref.WeakKeyDictionary()


# Runs of a model's programs change its modes, hooks, gradients and window: one at a time, also from several threads.
_locks: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
_making_lock = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """What a thread holds while it runs a program of this model."""
    with _making_lock:
        return _locks.setdefault(model, threading.RLock())


class BoundProgram:
    """What an executor made of a program."""

    def __init__(self, program: Program, device: torch.device) -> None:
        program.check()
        self.program = program
        self.device = device
        self.model = program.require_model()
        if not is_materialised(self.model):
            raise RuntimeError(
                "the model has no weights yet: run exe.run(default_startup_program()) once before; or of a program of "
                "your own exe.run(StartupProgram(program))."
            )
        if program.compile:
            require_not_compiled(self.model)
        else:
            tell_once("eager", "the program was made with compile=False: it runs eagerly.")
        self._settle()
        if not is_prepared(self.model):
            distributed_model(self.model, program.strategy)
        self._require_strategy_of_model()
        self.optimizer = self._make_optimizer()
        self.forwards = forwards_of(self.model, compile=program.compile, mode=program.mode)
        self.planned = _planned_program(self)
        self.log = CompilationLog(self.model, enabled=program.compile)
        self._resolved: dict[str, Fetch] = {}
        self._inputs = inputs_of(program)
        self._loss_names: tuple[str, ...] = tuple(getattr(self.model, "losses", ()))

    def run(self, feed: Mapping[str, Any], wanted: list[Any]) -> list[Any]:
        """One micro-batch with everything that was asked for. An error before the update leaves the window alone."""
        if self.optimizer is not None:
            inference.refuse_mode("a program that trains")
        fetches = [self._resolve(name_of(want)) for want in wanted]
        self._require_possible(fetches)
        self._require_in_place()
        batch = as_batch(self._inputs.check(feed), self.device, getattr(self.model, "host_inputs", ()))
        outputs = tuple(sorted({fetch.name for fetch in fetches if fetch.kind == "output"}))
        if self.planned is not None:
            self.forwards = self.planned.forwards(batch)
        evaluating = _evaluating(self.model) if self.optimizer is None else nullcontext()
        # What is fetched stays hooked until the update is done: a segment that is repeated must find itself unchanged.
        with evaluating, self.forwards.fetching(outputs, batch) as taps:
            with self.log.forward(outputs, batch):
                total, losses = self._forward(batch, fetches)
            values: dict[Fetch, Any] = {Fetch("output", name): value for name, value in taps.items()}
            values |= {Fetch("loss", name): loss.detach() for name, loss in losses.items()}
            if self.program.compile:
                # Compiled backwards reuse memory, and torch overlooks that a detached result shares it.
                values = {fetch: map_tensors(value, Tensor.clone) for fetch, value in values.items()}
            self._require_computed(fetches, values)
            if total is not None and self.optimizer is not None:
                with self.log.update():
                    values |= self._update(self.optimizer, total, batch, fetches)
        return [self._value(fetch, values) for fetch in fetches]

    def _forward(self, batch: dict[str, Tensor], fetches: list[Fetch]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What is minimised, and all losses by name; nothing where only outputs of a test program are wanted."""
        trains, compute = self.optimizer is not None, self.program.compute
        try:
            with nullcontext() if trains else torch.no_grad():
                result = self.model(**batch) if compute is None else compute(self.model, batch)
                if not trains and not any(fetch.kind == "loss" for fetch in fetches):
                    return None, {}
                losses = named_losses(result, needs_gradient=trains)
        except Exception as error:
            error.add_note(f"FleetX: the feed was {described(batch)}; the model's weights are {self._weights()}.")
            raise
        return losses.total, losses.values | {"loss": losses.total}  # "loss" is what is minimised

    def _update(
        self, optimizer: DistributedOptimizer, total: Tensor, batch: dict[str, Tensor], fetches: list[Fetch]
    ) -> dict[Fetch, Any]:
        """Backward, and the update if the window is full; gives the fetched gradients, None while it is not."""
        values: dict[Fetch, Any] = {fetch: None for fetch in fetches if fetch.kind == "gradient"}

        def observe(divisor: Number) -> None:
            for fetch in values:
                grad = self.model.get_parameter(fetch.name).grad
                values[fetch] = None if grad is None else grad / divisor

        optimizer.require_alone()
        optimizer.engine.minimize(total, self._items(batch), observe=observe if values else None)
        return values

    def _items(self, batch: dict[str, Tensor]) -> Number | None:
        if self.program.items is None:
            return None
        counts = self.program.items(batch)
        if isinstance(counts, Mapping):
            if len(counts) != 1:
                raise ValueError(
                    f"items gave counts for {', '.join(counts)}: a program weighs each micro-batch with one count, "
                    "since it does not see the whole window. Use fleetx.Step for losses with counts of their own."
                )
            (counts,) = counts.values()
        return checks.as_count(counts)

    def _value(self, fetch: Fetch, values: dict[Fetch, Any]) -> Any:
        if fetch.kind == "parameter":
            return self.model.get_parameter(fetch.name).detach().clone()
        if fetch.kind == "buffer":
            return self.model.get_buffer(fetch.name).detach().clone()
        return values[fetch]

    def _resolve(self, name: str) -> Fetch:
        # Looking through all names of a large model takes longer than some steps.
        if name not in self._resolved:
            self._resolved[name] = resolve(name, self.model, self._loss_names)
        return self._resolved[name]

    def _require_possible(self, fetches: list[Fetch]) -> None:
        for fetch in fetches:
            if fetch.kind != "gradient":
                continue
            if self.optimizer is None:
                raise ValueError(
                    f"{fetch} cannot be fetched: a program without an optimizer has no gradients. Fetch it from the "
                    "program that trains."
                )
            if not self.model.get_parameter(fetch.name).requires_grad:
                raise ValueError(
                    f"{fetch} cannot be fetched: the parameter is frozen (requires_grad is False) and has no gradient."
                )

    def _require_computed(self, fetches: list[Fetch], values: dict[Fetch, Any]) -> None:
        for fetch in fetches:
            if fetch.kind in ("loss", "output") and fetch not in values:
                computed = ", ".join(map(str, values)) or "nothing that can be fetched"
                hint = "Its module was not called" if fetch.kind == "output" else "The model did not return that loss"
                if fetch.kind == "output" and self.program.compile:
                    hint += ", or lies behind a graph break where torch before 2.13 cannot see it (compile=False can)"
                raise ValueError(f"this run did not compute {fetch}, only {computed}. {hint}.")

    def _require_strategy_of_model(self) -> None:
        theirs = next((strategy_of(parameter) for parameter in self.model.parameters()), None)
        if self.program.strategy is not None and theirs is not None and theirs != self.program.strategy:
            raise ValueError(
                "the model was prepared with another strategy, by another program or by fleet.distributed_model. Give "
                "all programs of a model the same strategy, or build a second model."
            )

    def _require_in_place(self) -> None:
        parameter = next(self.model.parameters(), None)
        if parameter is not None and parameter.device != self.device:
            raise RuntimeError(
                f"the model was moved to {parameter.device} after its program had been bound to {self.device}. Move "
                f"it back with model.to({str(self.device)!r}): the optimizer's state has stayed there."
            )

    def _settle(self) -> None:
        known = _devices.setdefault(self.model, self.device)
        if known != self.device:
            raise RuntimeError(
                f"the programs of this model run on {known}, and a model lives on one device. Run this one there too, "
                f"or build a second model for {self.device}."
            )
        self.model.to(self.device)

    def _make_optimizer(self) -> DistributedOptimizer | None:
        program = self.program
        if program.optimizer is None:
            return None
        inner = program.optimizer(self.model.parameters())
        scheduler = program.scheduler(inner) if program.scheduler is not None else None
        optimizer = distributed_optimizer(inner, program.strategy, scheduler, clip_norm=program.clip_norm)
        optimizer.engine.watch = TellingWatch(optimizer.engine.watch.limit)
        if program.items is not None and not optimizer.engine.average:
            raise ValueError(checks.ITEMS_OR_SUM)
        if program.compile:
            optimizer.engine.updater.compile()
        return optimizer

    def _weights(self) -> str:
        found = {str(p.dtype).removeprefix("torch.") for p in self.model.parameters() if p.is_floating_point()}
        return " and ".join(sorted(found)) or "none"


def _planned_program(bound: BoundProgram) -> "PlannedProgram | None":
    planning = None if bound.optimizer is None else bound.optimizer.planning
    if planning is None:
        return None
    from fleetx.static.planned import PlannedProgram  # the planner, which most programs do without

    return PlannedProgram(bound.program, planning)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """As `model.eval()`: no dropout, and batch statistics as they were learned; afterwards each module as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
