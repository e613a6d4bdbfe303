"""`checkpoints = "auto"`: a plan that is made with the first real batch, checked by the first updates, and made anew.

All workers have the same plan: budgets are the least of all, peaks the largest, and the first worker decides.
"""

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fleetx.clock import host_seconds
from fleetx.comm import sharing, world
from fleetx.fleet.consumption import Consumption
from fleetx.memory import Applied, applied_to
from fleetx.notices import tell_once
from fleetx.planner.agreement import Agreement
from fleetx.planner.budget import budget_on, free_on
from fleetx.planner.costs import Profile
from fleetx.planner.driver import Driver, Request
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit, Words
from fleetx.planner.plan import Plan
from fleetx.planner.profile import NO_LOSS
from fleetx.planner.updating import tensors_of
from fleetx.planner.verify import MOST_PLANS, allowed
from fleetx.slicing import Batch
from fleetx.strategy import DistributedStrategy
from fleetx.units import format_bytes

Door = Literal["minimize", "Step", "a program"]
_LOSS_UNSEEN = "minimize() sees no loss function: what that takes is not planned. fleetx.Step plans it too."
CHECKED = 2  # updates; before the first one the optimizer has no state yet
SMALLER = 0.9  # of the peak that ran out of memory
WORDS = Words(
    memory="recompute_configs.memory_budget={!r}",
    global_batch="batches of {}",
    k_steps="gradient_merge_configs.k_steps={}",
    smaller="with gradient_merge_configs.k_steps={} or more",
    whole="without gradient_merge and recompute_configs.global_batch it is whole",
    whole_instead="without gradient_merge it is whole",
    checkpoints="recompute_configs.checkpoints",
)

# Where the caller cuts: a batch is a micro-batch there.
WORDS_OF_SLICES = WORDS._replace(smaller="in batches of so many, with gradient_merge_configs.k_steps={}")

_plannings: "weakref.WeakKeyDictionary[nn.Module, Planning]" = weakref.WeakKeyDictionary()


class Planning:
    """The plan of one model."""

    def __init__(self, model: nn.Module, strategy: DistributedStrategy, on_change: Callable[[Applied], None]) -> None:
        self.strategy = strategy
        self.plan: Plan | None = None
        self.door: Door = "minimize"
        self.replanned = 0
        self._model = weakref.ref(model)
        self._optimizer: Any = lambda: None
        self._on_change = on_change  # told when another plan is on the model
        self._profile: Profile | None = None
        self._together: Any = None
        self._question: dict[str, Any] = {}
        self._unchecked = CHECKED
        self._consumption: Consumption | None = None
        self._compile_options: dict[str, Any] = {}
        _plannings[model] = self

    @property
    def model(self) -> nn.Module:
        """What is planned."""
        model = self._model()
        assert model is not None
        return model

    @property
    def chooses_k_steps(self) -> bool:
        """Whether the planner says how batches are cut; else the user does."""
        return bool(self._question) and self._question["k_steps"] is None

    @property
    def optimizer(self) -> Any:
        """What moves the model's weights; None until it is made."""
        return self._optimizer()

    def attach(self, optimizer: Any) -> None:
        """From now on this distributed optimizer's updates are watched."""
        self._optimizer = weakref.ref(optimizer)
        optimizer.engine.on_update.append(self.after_update)

    # The first batch -------------------------------------------------------------------------------------

    def begin(
        self,
        feeding: Feeding,
        batch: Batch,
        *,
        samples: int,
        k_steps: int | None,
        compile: bool | None = None,
        **compile_options: Any,
    ) -> None:
        """Measure, plan, try the plan on this batch, and put it on the model; all workers together, and once.

        An update sees so many `samples` of this worker, in `k_steps` micro-batches, or in as many as the planner
        chooses if that is None. `batch` may be any part of them.
        """
        if self.plan is not None:
            return
        began = host_seconds()
        configs, device = self.strategy.recompute_configs, feeding.device
        self._compile_options = compile_options
        budget, notes = budget_on(device, configs.memory_budget)
        self._together = Together(device)
        request = Request(
            feeding,
            batch,
            memory=sharing.least(budget, device),
            global_batch=sharing.most(samples, device),
            optimizer=self.optimizer.inner,
            k_steps=k_steps,
            compile=self.strategy.compile if compile is None else compile,
            bandwidth=None if configs.enable_offload else 0.0,
            words=WORDS if self.door == "Step" else WORDS_OF_SLICES,
            trainer=self.optimizer,
            more_bytes=self._more_bytes(),
            keeps_gradients=world.size() > 1,  # in the buckets that are sent
            notes=notes,
            no_loss=_LOSS_UNSEEN if self.door == "minimize" else NO_LOSS,
        )
        found = Driver(request, self._together).plan()
        self._profile = found.profile
        self._question = request.question | {"prefer": found.prefer}
        self._consumption = Consumption(device)
        self._put_on(replace(found.plan, planning_seconds=host_seconds() - began))

    def _more_bytes(self) -> dict[str, int]:
        """What only this job has: masters, and compressed gradients."""
        more = {}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.optimizer.engine.updater.masters is not None:
            more["master weights"] = sum(4 * p.numel() for p in parameters if p.element_size() < 4)
        if world.size() > 1 and (self.strategy.fp16_allreduce or self.strategy.bf16_allreduce):
            more["compressed gradients"] = sum(2 * p.numel() for p in parameters)
        return more

    # Afterwards ------------------------------------------------------------------------------------------

    def watched(self) -> AbstractContextManager[None]:
        """Around an update of `Step`, while the plan is still to be checked."""
        if self._consumption is None or not self._unchecked or self.optimizer is None:
            return nullcontext()
        if self.plan is not None and self.plan.compile and not self._consumption.on_gpu:
            return nullcontext()  # where tensors are counted one by one, torch runs nothing that is compiled
        return self._consumption.counting(tensors_of(self.model, self.optimizer))

    def after_update(self) -> None:
        """Compare what an update took with the prediction; plan anew if it took too much. Nothing is done twice."""
        if self.plan is None or self._consumption is None or not self._unchecked:
            return
        taken = self._consumption.taken()
        if taken is None:
            return
        peak = sharing.most(taken.peak, self._consumption.device)
        plan = self.plan = self._compared(self.plan, peak, taken.seconds)
        self._unchecked -= 1
        if peak > allowed(plan):
            self._plan_anew(plan, peak)
        self._consumption.begin()

    def _compared(self, plan: Plan, peak: int, seconds: float | None) -> Plan:
        if seconds is None:
            seconds = plan.seconds if plan.measured is None else plan.measured.seconds
        return plan.with_measurement(peak, seconds)

    def _plan_anew(self, plan: Plan, peak: int) -> None:
        assert self._profile is not None
        if self.replanned >= MOST_PLANS:
            tell_once(
                "planning.peak",
                f"updates take {peak / plan.peak - 1:.1%} more memory than planned, after {MOST_PLANS} new plans; a "
                "lower recompute_configs.memory_budget leaves room for that.",
            )
            return
        self.replanned += 1
        self._unchecked = CHECKED
        # More each time: another plan is wrong by another amount.
        profile = self._profile.corrected(plan.micro_batch, (peak - plan.peak) * self.replanned)
        try:
            made = self._made(profile)
        except DoesNotFit as error:
            tell_once("planning.fit", f"updates take {peak / plan.peak - 1:.1%} more memory than planned, and {error}")
            return  # with the profile of the plan that stays, so that a smaller one is found if memory runs out
        self._profile = profile
        self._put_on(made)

    def shrink(self, failure: BaseException | None) -> None:
        """A plan that needs less, the same on all workers; if there is none, memory has run out for good."""
        assert self.plan is not None
        assert self._consumption is not None
        device, now = self._consumption.device, self.plan.peak
        if device.type == "cuda":
            torch.cuda.empty_cache()
            now = min(now, free_on(device))  # another process may have taken the rest
        budget = sharing.least(min(int(now * SMALLER), self._question["memory"]), device)
        try:
            made = self._smaller(budget)
        except DoesNotFit as error:
            out = failure or torch.OutOfMemoryError("another worker ran out of memory.")
            out.add_note(f"FleetX: no smaller plan is possible: {error}")
            raise out from None
        self._question["memory"] = budget
        self._unchecked = CHECKED
        tell_once("planning.oom", f"memory ran out; the step is done again within {format_bytes(made.peak)}.")
        note = f"it took the place of a plan for {format_bytes(self.plan.peak)}, with which memory ran out."
        self._put_on(made)
        self.plan = replace(made, notes=(*made.notes, note))

    # How -------------------------------------------------------------------------------------------------

    def _made(self, profile: Profile, **changed: Any) -> Plan:
        """The first worker's plan. Like those of `fleetx.plan` it refuses other models, wherever it may be loaded."""
        return self._together.plan_for(profile, **{**self._question, **changed}).of(self.model)

    def _smaller(self, budget: int) -> Plan:
        """A plan within a budget, or if there is none any that takes less than the present one."""
        assert self.plan is not None
        assert self._profile is not None
        try:
            return self._made(self._profile, memory=budget)
        except DoesNotFit as error:
            if error.least_memory is None or error.least_memory >= self.plan.peak:
                raise
            return self._made(self._profile, memory=error.least_memory)

    def _put_on(self, plan: Plan) -> None:
        self.take_off()
        self.plan = plan
        for note in plan.notes:  # nobody may ever print the plan
            tell_once(f"planning.note.{note}", f"a note of the plan: {note}")
        if self._question["k_steps"] is None:
            self.optimizer.engine.k_steps = plan.k_steps
        applied = plan.apply(self.model, **(self._compile_options if plan.compile else {}))
        if applied_to(self.model) is not None:  # and not a plan that keeps everything
            self._on_change(applied)
        if self._consumption is not None:
            if self._consumption.on_gpu:
                torch.cuda.empty_cache()  # blocks of the sizes of another plan
            self._consumption.begin()

    def take_off(self) -> None:
        """Take the plan off the model."""
        present = applied_to(self.model)
        if present is not None:
            present.remove()


def planning_of(model: nn.Module) -> Planning | None:
    """The planning of a model whose strategy says "auto"."""
    return _plannings.get(model)


def plannings_with(parameters: list[Tensor]) -> Iterator[Planning]:
    """Those whose models have any of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    for model, planning in list(_plannings.items()):
        if any(id(parameter) in wanted for parameter in model.parameters()):
            yield planning


class Together(Agreement):
    """All workers of a job."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def everywhere(self, so_here: bool) -> bool:
        """Whether something is so on all workers."""
        return bool(sharing.least(int(so_here), self._device))

    def largest(self, number: int) -> int:
        """The largest of all workers' numbers."""
        return sharing.most(number, self._device)

    def first(self, names: list[list[str]]) -> list[list[str]]:
        """The first worker's."""
        return json.loads(sharing.from_first(json.dumps(names), self._device))

    def plan_for(self, profile: Profile, **question: Any) -> Plan:
        """The first worker's plan, or why it has none."""
        said = ""
        if world.rank() == 0:
            try:
                said = super().plan_for(profile, **question).to_json()
            except DoesNotFit as error:
                said = json.dumps({"does not fit": [str(error), error.least_memory, error.largest_micro_batch]})
        heard = sharing.from_first(said, self._device)
        if heard.startswith('{"does not fit"'):
            raise DoesNotFit(*json.loads(heard)["does not fit"])
        return Plan.from_json(heard)
