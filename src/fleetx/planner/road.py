"""From a model to its plan, whoever asks: one way to cut it after the other is measured, planned and tried."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch.optim import Optimizer

from fleetx.planner import cache
from fleetx.planner.blocks import ways_to_cut
from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding
from fleetx.planner.fitting import DoesNotFit, first_that_fits
from fleetx.planner.plan import Plan
from fleetx.planner.profile import key_of, measure
from fleetx.planner.racing import fastest_in_reality
from fleetx.planner.tryout import Tryout
from fleetx.planner.verify import Make, Tried, Verified, doubt_about_time, tried_out, until_verified
from fleetx.slicing import Batch


def _as_measured(profile: Profile) -> Profile:
    return profile


@dataclass(frozen=True)
class Road:
    """A model, and how it is measured; for as many plans as are asked for.

    `everywhere` and `largest` ask the other workers: whether something is so on all of them, and for the largest of
    their numbers. What all have to decide alike is decided with these.
    """

    feeding: Feeding
    sample: Batch
    optimizer: Optimizer | None = None
    compile: bool = False
    bandwidth: float | None = None
    cached: bool = True
    everywhere: Callable[[bool], bool] = bool
    largest: Callable[[int], int] = int
    races: bool | None = None  # whether real times decide between plans; None: on a GPU, where they can be told
    _profiles: dict[tuple[str, ...], Profile] = field(init=False, repr=False, default_factory=dict)

    def ways(self) -> Iterator[list[str]]:
        """Where the model may be cut: at its blocks, or inside of them too."""
        return ways_to_cut(self.feeding, self.sample)

    def profile_at(self, cuts: Sequence[str]) -> Profile:
        """What the model costs if it is cut at these modules; measured once."""
        key = tuple(cuts)
        if key not in self._profiles:
            self._profiles[key] = measure(
                self.feeding,
                self.sample,
                cuts,
                optimizer=self.optimizer,
                compile=self.compile,
                bandwidth=self.bandwidth,
                cached=self.cached,
                everywhere=self.everywhere,
            )
        return self._profiles[key]

    def first_plan(
        self,
        ways: Iterable[list[str]],
        make: Make,
        *,
        complete: Callable[[Profile], Profile] = _as_measured,
        verify: bool = True,
    ) -> Verified:
        """The plan of the first way to cut that has one, after real micro-batches unless `verify` is False.

        `complete` adds to a profile what only this training has. The plan refuses other models.
        """

        tryout = Tryout(self.feeding, self.sample)

        def attempt(cuts: Sequence[str]) -> Verified:
            profile = complete(self.profile_at(cuts))
            if verify:
                tried = until_verified(profile, tryout, make, self.largest)
                return self._with_doubt(self._fastest(tried, make, tryout), cuts)
            plan = make(profile)
            return Verified(plan, profile, plan.peak)

        found = first_that_fits(ways, attempt)
        return found._replace(plan=found.plan.of(self.feeding.model))

    def _fastest(self, tried: Verified, make: Make, tryout: Tryout) -> Verified:
        """The fastest in reality of this plan and those that may be faster."""
        races = self.feeding.device.type == "cuda" if self.races is None else self.races
        if not races:
            return tried

        def run(plan: Plan) -> Tried:
            return tried_out(plan, tried.profile, tryout, self.largest)

        return fastest_in_reality(tried, make, run, self._slowest)

    def _slowest(self, plan: Plan) -> float:
        """The seconds of an update on the slowest worker, for which the others wait; 0 if it was not timed."""
        return self.largest(0 if plan.measured is None else round(plan.measured.seconds * 1e9)) / 1e9

    def _with_doubt(self, tried: Verified, cuts: Sequence[str]) -> Verified:
        """With a note on a time that is far off, here and in later plans; what a busy machine measured is not kept."""
        slowest = self._slowest(tried.plan)
        doubt = doubt_about_time(tried.plan, slowest) if slowest else None
        if doubt is None:
            return tried
        if self.cached:
            cache.forget(
                key_of(self.feeding, self.sample, cuts, self.optimizer, self.compile, bandwidth=self.bandwidth)
            )
        plan, profile = tried.plan, tried.profile
        return tried._replace(
            plan=replace(plan, notes=(*plan.notes, doubt)), profile=replace(profile, notes=(*profile.notes, doubt))
        )


def with_curve(tried: Verified, make: Make) -> Verified:
    """With what other budgets would give; that takes longer than the plan itself, so only the chosen one has it."""
    with suppress(DoesNotFit):  # with what it took there may be no room for it: then nothing is said of others
        return tried._replace(plan=replace(tried.plan, curve=make(tried.profile, prefer=tried.prefer).curve))
    return tried
