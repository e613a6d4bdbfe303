"""Counts what is compiled for a program, and tells why something was compiled again."""

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from fleetx.notices import tell_once
from fleetx.static.announcing import announcing
from fleetx.static.compiling import graphs_so_far
from fleetx.static.feeding import kinds

_numbers = itertools.count()
# Without and with the state that the first update makes.
EXPECTED_UPDATES = 2


class CompilationLog:
    """The graphs of one program. One line tells of each forward or update that had to be compiled again, and why."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self.graphs = 0
        self._model = model
        self._enabled = enabled
        self._number = next(_numbers)
        # What each set of fetched outputs was compiled for last.
        self._facts: dict[tuple[str, ...], dict[str, str]] = {}
        self._updates = 0

    @contextmanager
    def forward(self, outputs: tuple[str, ...], batch: Mapping[str, Tensor]) -> Generator[None]:
        """Around one forward."""
        if not self._enabled:
            yield
            return
        before = graphs_so_far()
        with announcing("the forward"):
            yield
        if added := graphs_so_far() - before:
            self.graphs += added
            facts = self._circumstances(batch)
            if self._facts:
                self._tell(self._reason(outputs, facts))
            self._facts[outputs] = facts

    @contextmanager
    def update(self) -> Generator[None]:
        """Around one backward, and the update if it ends its window."""
        if not self._enabled:
            yield
            return
        before = graphs_so_far()
        with announcing("backward and update"):
            yield
        if added := graphs_so_far() - before:
            self.graphs += added
            self._updates += 1
            if self._updates > EXPECTED_UPDATES:
                self._tell(
                    "the update, because a setting or the state of the optimizer was changed, or other parameters "
                    "have gradients."
                )

    def _circumstances(self, batch: Mapping[str, Tensor]) -> dict[str, str]:
        modules, parameters = list(self._model.modules()), list(self._model.parameters())
        return kinds(batch) | {
            "modules in training": f"{sum(m.training for m in modules)} of {len(modules)}",
            "trainable parameters": f"{sum(p.requires_grad for p in parameters)} of {len(parameters)}",
        }

    def _reason(self, outputs: tuple[str, ...], now: dict[str, str]) -> str:
        if outputs not in self._facts:
            asked = f"the outputs of {', '.join(outputs)}" if outputs else "no outputs of modules"
            return (
                f"the forward, because the fetch list asks for {asked}. Each set of outputs is compiled once: ask for "
                "the same set in every run."
            )
        last = self._facts[outputs]
        changed = [
            f"{name} {last.get(name, 'left out')} → {now.get(name, 'left out')}"
            for name in last | now
            if last.get(name) != now.get(name)
        ]
        if not changed:
            return "the forward, for a reason beyond feed and fetch list: TORCH_LOGS=recompiles names it."
        return f"the forward, because of {', '.join(changed)}. A size that has changed is free from now on, but for 1."

    def _tell(self, reason: str) -> None:
        message = f"the program has been compiled again ({self.graphs} graphs so far): {reason}"
        tell_once(f"recompiled-{self._number}-{self.graphs}", message)
