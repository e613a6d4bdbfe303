"""A program whose model is planned with the first feed."""

from typing import Any

from torch import Tensor, nn

from fleetx.fleet.first_forward import require_possible
from fleetx.fleet.planning import Planning
from fleetx.planner.feeding import Feeding
from fleetx.planner.plan import Plan
from fleetx.slicing import batch_size
from fleetx.static.compiling import CompiledForwards, CompiledSegments, forwards_of
from fleetx.static.program import Program


class PlannedProgram:
    """Keeps the compiled forwards in step with the plan: they are made anew when that is."""

    def __init__(self, program: Program, planning: Planning) -> None:
        require_possible(planning)
        self.program = program
        self.planning = planning
        self._made_for: Plan | None = None
        self._forwards: CompiledForwards | CompiledSegments | None = None
        planning.door = "a program"

    def forwards(self, batch: dict[str, Tensor]) -> CompiledForwards | CompiledSegments:
        """How this feed is to run; the first one is planned before."""
        if self.planning.plan is None:
            self._plan(batch)
        plan = self.planning.plan
        if self._forwards is None or plan is None or self._made_for is None or plan.states != self._made_for.states:
            program = self.program
            self._made_for = plan
            self._forwards = forwards_of(self.planning.model, compile=program.compile, mode=program.mode)
        return self._forwards

    def _plan(self, batch: dict[str, Tensor]) -> None:
        k_steps = self.planning.optimizer.engine.k_steps
        options: dict[str, Any] = {"mode": self.program.mode} if self.program.compile else {}
        self.planning.begin(
            Feeding(self.planning.model, compute=self.program.compute or _fed),
            batch,
            samples=k_steps * batch_size(batch),
            k_steps=k_steps,
            compile=self.program.compile,
            **options,
        )


def _fed(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)
