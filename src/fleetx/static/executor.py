"""The executor: feeds arrays by name, runs the compiled step, gives back what was asked for by name.

Forward and backward are compiled as one graph and its gradient, the update by itself, since `backward` cannot live
inside a graph. What is fetched from inside the model is an extra output of the compiled forward, so each set of fetched
outputs has a compilation of its own.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetx.batch_step import named_losses
from fleetx.fleet.model import distributed_model, is_prepared
from fleetx.fleet.optimizer import DistributedOptimizer, distributed_optimizer
from fleetx.notices import tell_once
from fleetx.static.building import is_materialised, materialise
from fleetx.static.compiling import CompiledForwards, compile_update
from fleetx.static.fetching import Fetch, as_array, resolve
from fleetx.static.places import CPUPlace, Place
from fleetx.static.program import Program, StartupProgram, default_main_program


class Executor:
    """Runs programs on one device."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or CPUPlace()

    def run(
        self,
        program: Program | StartupProgram | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] = (),
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run a program once. The main program: one micro-batch; the one that fills the window also updates."""
        if isinstance(program, StartupProgram):
            main = program.main
            materialise(main.require_model(), self.place.device, main.seed)
            return []
        program = program or default_main_program()
        values = self._bound(program).run(feed or {}, list(fetch_list))
        return [as_array(value) for value in values] if return_numpy else values

    def compilations(self, program: Program | None = None) -> int:
        """Graphs compiled for a program so far, forwards and updates."""
        return self._bound(program or default_main_program()).forwards.compilations

    def _bound(self, program: Program) -> "BoundProgram":
        device = self.place.device
        if device not in program.bound:
            program.bound[device] = BoundProgram(program, device)
        return program.bound[device]


class BoundProgram:
    """A program on its device, prepared and compiled."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.model = program.require_model()
        if not is_materialised(self.model):
            raise RuntimeError("the model has no weights yet: run exe.run(default_startup_program()) once before.")
        self.program = program
        self.device = device
        self.model.to(device)
        if not is_prepared(self.model):
            distributed_model(self.model, program.strategy)
        self.optimizer = self._make_optimizer()
        if not program.compile:
            tell_once("eager", "the program was made with compile=False: it runs eagerly.")
        self.forwards = CompiledForwards(self.model, enabled=program.compile, mode=program.mode)
        self._resolved: dict[Any, Fetch] = {}
        self._inputs = program.inputs
        self._loss_names: tuple[str, ...] = tuple(getattr(self.model, "losses", ()))

    def run(self, feed: Mapping[str, Any], wanted: list[Any]) -> list[Any]:
        """One micro-batch with everything that was asked for."""
        fetches = [self._resolve(want) for want in wanted]
        batch = self._batch(feed)
        outputs = tuple(sorted({fetch.name for fetch in fetches if fetch.kind == "output"}))
        values: dict[Fetch, Any] = {}
        with self.forwards.fetching(outputs) as taps:
            if self.optimizer is None:
                with torch.no_grad():
                    losses = self._losses(batch) if self._needs_loss(fetches) else self._forward_only(batch)
            else:
                losses = self._train(batch, fetches, values)
            values |= {Fetch("output", name): value for name, value in taps.items()}
        values |= {Fetch("loss", name): loss for name, loss in losses.items()}
        return [self._value(fetch, values) for fetch in fetches]

    def _resolve(self, want: Any) -> Fetch:
        # Looking through all names of a large model takes longer than some steps.
        key = want if isinstance(want, str) else getattr(want, "name", None)
        if key not in self._resolved:
            self._resolved[key] = resolve(want, self.model, self._loss_names)
        return self._resolved[key]

    def _train(self, batch: dict[str, Any], fetches: list[Fetch], values: dict[Fetch, Any]) -> dict[str, Tensor]:
        assert self.optimizer is not None
        losses = self._losses(batch)
        gradients = [fetch.name for fetch in fetches if fetch.kind == "gradient"]
        values |= {Fetch("gradient", name): None for name in gradients}

        def observe(divisor: Any) -> None:
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            for name in gradients:
                grad = parameters[name].grad
                values[Fetch("gradient", name)] = None if grad is None else grad / divisor

        out = self.optimizer.engine.minimize(losses["loss"], observe=observe if gradients else None)
        # The loss of this very feed; the window's mean is what the update saw.
        del out
        return {name: loss.detach() for name, loss in losses.items()}

    def _losses(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        compute = self.program.compute
        result = self.model(**batch) if compute is None else compute(self.model, batch)
        losses = named_losses(result, needs_gradient=self.optimizer is not None)
        total = sum(list(losses.values())[1:], start=next(iter(losses.values())))
        return {"loss": total} | losses

    def _forward_only(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        self.model(**batch)
        return {}

    def _needs_loss(self, fetches: list[Fetch]) -> bool:
        return any(fetch.kind == "loss" for fetch in fetches)

    def _value(self, fetch: Fetch, values: dict[Fetch, Any]) -> Any:
        if fetch.kind == "parameter":
            return self.model.get_parameter(fetch.name).detach().clone()
        if fetch.kind == "buffer":
            return self.model.get_buffer(fetch.name).detach().clone()
        if fetch not in values:
            raise ValueError(f"this program did not compute {fetch.name!r}: it computed {_listed(values)}.")
        return values[fetch]

    def _batch(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        known = self._inputs
        for name in feed:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ValueError(
                    f"the program has no input {name!r}"
                    + (f", do you mean {near[0]!r}?" if near else ".")
                    + f" It takes {', '.join(known)}."
                )
        return {name: _tensor(value).to(self.device, non_blocking=True) for name, value in feed.items()}

    def _make_optimizer(self) -> DistributedOptimizer | None:
        program = self.program
        if program.optimizer is None:
            return None
        inner = program.optimizer(self.model.parameters())
        scheduler = program.scheduler(inner) if program.scheduler is not None else None
        optimizer = distributed_optimizer(inner, program.strategy, scheduler, clip_norm=program.clip_norm)
        if program.compile:
            compile_update(optimizer)
        return optimizer


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _listed(values: dict[Fetch, Any]) -> str:
    return ", ".join(fetch.name for fetch in values) or "nothing that can be fetched"
