"""From a request to a plan: find blocks, measure, search, run candidates, correct, choose.

`fleetx.plan`, strategies with `checkpoints = "auto"` and programs come here. `Driver.plan` is the order of it all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from fleetx.planner import asked, cache
from fleetx.planner.agreement import ALONE, Agreement
from fleetx.planner.allocator import with_batch_there, with_others
from fleetx.planner.blocks import ways_to_cut
from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import OF_PLAN, DoesNotFit, Words
from fleetx.planner.plan import Plan
from fleetx.planner.profile import NO_LOSS, key_of, measure
from fleetx.planner.racing import fastest_in_reality
from fleetx.planner.tryout import Tryout
from fleetx.planner.verify import Tried, Verified, doubt_about_time, tried_out, until_verified
from fleetx.slicing import Batch


@dataclass(frozen=True)
class Request:
    """A model, how it is trained, and what a plan for it may take."""

    feeding: Feeding
    sample: Batch
    memory: int
    global_batch: int
    optimizer: Optimizer | None = None
    host_memory: int | None = None
    k_steps: int | None = None
    one_forward: bool = False
    even: bool = False
    compile: bool = False
    bandwidth: float | None = None
    cached: bool = True
    checkpoints: Sequence[str] | None = None  # modules to cut at; None: found by the planner
    verify: bool = True  # run candidates on real micro-batches
    races: bool | None = None  # whether real times decide between plans; None: on a GPU, where they can be told
    words: Words = OF_PLAN
    # What only this training has:
    trainer: Any = None  # whose tensors are those of the training; None: the optimizer
    more_bytes: Mapping[str, int] = field(default_factory=dict)  # that are always on the device, by kind
    keeps_gradients: bool = False  # also where there is one micro-batch, as in the buckets of several workers
    batch_times: float = 1.0  # a batch is so many times the sample
    notes: tuple[str, ...] = ()
    no_loss: str = NO_LOSS  # what is said of a model that gave none

    @property
    def question(self) -> dict[str, Any]:
        """What is asked of a profile; see `plan_for`."""
        names = ("memory", "host_memory", "global_batch", "k_steps", "one_forward", "even", "words")
        return {name: getattr(self, name) for name in names}


class Driver:
    """Makes the plan for a request; with an agreement, all workers make the same one together."""

    def __init__(self, request: Request, agreement: Agreement = ALONE) -> None:
        self.request = request
        self.agreement = agreement
        self._tryout = Tryout(request.feeding, request.sample)

    def plan(self) -> Verified:
        """The plan of the first way to cut the model that has one; it refuses other models."""
        failures = []
        for cuts in self._ways():
            try:
                found = self._plan_at(cuts)
            except DoesNotFit as error:
                failures.append(error.with_traceback(None))  # it would hold the batch
            else:
                return self._with_curve(found._replace(plan=found.plan.of(self.request.feeding.model)))
        raise min(failures, key=lambda error: math.inf if error.least_memory is None else error.least_memory)

    def _ways(self) -> Iterable[list[str]]:
        """Where the model may be cut: at its blocks, then inside of them too; or where the user says."""
        if self.request.checkpoints is not None:
            return [list(self.request.checkpoints)]
        # The first worker's for all: another one's batch may be cut elsewhere, and all must measure the same.
        return self.agreement.first(list(ways_to_cut(self.request.feeding, self.request.sample)))

    def _plan_at(self, cuts: Sequence[str]) -> Verified:
        profile = self._completed(self.measured(cuts))
        if not self.request.verify:
            plan = self.plan_from(profile, curve=True)
            return Verified(plan, profile, plan.peak)
        found = until_verified(profile, self)
        if self._races():
            found = fastest_in_reality(found, self)
        return self._with_doubt(found, cuts)

    def measured(self, cuts: Sequence[str]) -> Profile:
        """What the model costs if it is cut at these modules."""
        asked_for = self.request
        return measure(
            asked_for.feeding,
            asked_for.sample,
            cuts,
            optimizer=asked_for.optimizer,
            compile=asked_for.compile,
            bandwidth=asked_for.bandwidth,
            cached=asked_for.cached,
            agreement=self.agreement,
        )

    def _completed(self, profile: Profile) -> Profile:
        """With what only this training has: another model on the device, say, or a whole batch."""
        asked_for, device = self.request, self.request.feeding.device
        asked.check_smallest(asked_for.global_batch, asked_for.k_steps, asked_for.words, profile.smallest)
        trainer = asked_for.optimizer if asked_for.trainer is None else asked_for.trainer
        fixed = with_others(profile.fixed, asked_for.feeding.model, trainer, asked_for.sample, device)
        notes = [asked_for.no_loss if note == NO_LOSS else note for note in profile.notes]
        profile = replace(profile, fixed={**fixed, **asked_for.more_bytes}, notes=(*notes, *asked_for.notes))
        if asked_for.keeps_gradients:
            profile = replace(profile, gradient_parts=())
        return with_batch_there(profile, asked_for.sample, device, asked_for.batch_times)

    def plan_from(self, profile: Profile, prefer: int | None = None, *, curve: bool = False) -> Plan:
        """The fastest plan that fits; with so many micro-batches if these are preferred and among the fastest."""
        return self.agreement.plan_for(profile, **self.request.question, prefer=prefer, curve=curve)

    def run(self, plan: Plan, profile: Profile) -> Tried:
        """The plan after real micro-batches."""
        return tried_out(plan, profile, self._tryout, self.agreement)

    def slowest(self, plan: Plan) -> float:
        """The seconds of an update on the slowest worker, for which the others wait; 0 if it was not timed."""
        return self.agreement.largest(0 if plan.measured is None else round(plan.measured.seconds * 1e9)) / 1e9

    def _races(self) -> bool:
        return self.request.feeding.device.type == "cuda" if self.request.races is None else self.request.races

    def _with_doubt(self, found: Verified, cuts: Sequence[str]) -> Verified:
        """With a note on a time that is far off, here and in later plans; what a busy machine measured is not kept."""
        slowest = self.slowest(found.plan)
        doubt = doubt_about_time(found.plan, slowest) if slowest else None
        if doubt is None:
            return found
        one = self.request
        if one.cached:
            cache.forget(key_of(one.feeding, one.sample, cuts, one.optimizer, one.compile, bandwidth=one.bandwidth))
        plan, profile = found.plan, found.profile
        return found._replace(
            plan=replace(plan, notes=(*plan.notes, doubt)), profile=replace(profile, notes=(*profile.notes, doubt))
        )

    def _with_curve(self, found: Verified) -> Verified:
        """With what other budgets would give; that takes longer than the plan itself, so only the chosen one has it."""
        if found.plan.curve:
            return found
        with suppress(DoesNotFit):  # with what it took there may be no room for it: then nothing is said of others
            curve = self.plan_from(found.profile, found.prefer, curve=True).curve
            return found._replace(plan=replace(found.plan, curve=curve))
        return found
