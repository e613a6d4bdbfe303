"""Learning rates as pure functions of the number of updates done: ``schedule(0)`` is the first update's.

One update is one window: k merged micro-batches count once. Schedules compose by being called::

    schedule = linear_warmup(polynomial_decay(0.5, decay_steps=1000), warmup_steps=100)
    scheduler = as_scheduler(optimizer, schedule)      # then scheduler.step() after each update
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from fleetx.optim.checks import ROUNDING, check_count, check_number

Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """The same learning rate always."""
    check_number("lr", lr, usual="give a number")
    return lambda step: lr  # noqa: ARG005


def polynomial_decay(
    lr: float, decay_steps: int, end_lr: float = 0.0001, power: float = 1.0, *, cycle: bool = False
) -> Schedule:
    """From ``lr`` to ``end_lr`` in ``decay_steps`` updates along ``(1 − t)^power``, then ``end_lr``.

    With ``cycle`` the length doubles, triples, … whenever its end is passed, instead of stopping there.
    """
    check_number("lr", lr, usual="give the learning rate to start from")
    check_count("decay_steps", decay_steps, usual="give the number of updates the decay takes")
    check_number("end_lr", end_lr, usual="give the learning rate to end at")
    check_number("power", power, above=0, usual="1 is linear, 2 is usual for LARS")

    def at(step: int) -> float:
        length = decay_steps * max(1, math.ceil(step / decay_steps)) if cycle else decay_steps
        return (lr - end_lr) * (1 - min(step, length) / length) ** power + end_lr

    return at


def linear_warmup(
    then: float | Schedule, warmup_steps: int, start_lr: float = 0.0, end_lr: float | None = None
) -> Schedule:
    """From ``start_lr`` towards ``end_lr`` in ``warmup_steps`` updates, then ``then`` from its own beginning.

    ``end_lr`` is what ``then`` begins with unless given. The update after the warm-up is ``then(0)``.
    """
    schedule = then if callable(then) else constant(then)
    check_count("warmup_steps", warmup_steps, at_least=0, usual="give the number of updates the warm-up takes")
    check_number("start_lr", start_lr, usual="0 is usual")
    peak = schedule(0) if end_lr is None else end_lr
    check_number("end_lr", peak, usual="leave it out to reach what follows")

    def at(step: int) -> float:
        if step < warmup_steps:
            return start_lr + (peak - start_lr) * step / warmup_steps
        return schedule(step - warmup_steps)

    return at


def cosine_annealing(lr: float, half_period: int, end_lr: float = 0.0) -> Schedule:
    """Half a cosine from ``lr`` to ``end_lr`` in ``half_period`` updates; then it climbs back, and so on."""
    check_number("lr", lr, usual="give the learning rate to start from")
    check_count("half_period", half_period, usual="give the number of updates from the highest rate to the lowest")
    check_number("end_lr", end_lr, usual="0 is usual")
    return lambda step: end_lr + (lr - end_lr) * (1 + math.cos(math.pi * step / half_period)) / 2


def cosine_decay(lr: float, decay_steps: int, end_lr: float = 0.0) -> Schedule:
    """Half a cosine from ``lr`` to ``end_lr`` in ``decay_steps`` updates, then ``end_lr``."""
    check_count("decay_steps", decay_steps, usual="give the number of updates the decay takes")
    wave = cosine_annealing(lr, decay_steps, end_lr)
    return lambda step: wave(min(step, decay_steps))


def noam_decay(d_model: int, warmup_steps: int, lr: float = 1.0) -> Schedule:
    """The Transformer's: ``lr·d_model^−½·min(t^−½, t·warmup_steps^−1½)``; 0 at the first update."""
    check_count("d_model", d_model, usual="give the width of the model")
    check_count("warmup_steps", warmup_steps, usual="4000 is usual")
    check_number("lr", lr, usual="1.0 is usual")

    def at(step: int) -> float:
        rise = step * warmup_steps**-1.5
        return lr * d_model**-0.5 * (min(step**-0.5, rise) if step else rise)

    return at


def piecewise_constant(boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """``values[0]`` before update ``boundaries[0]``, ``values[1]`` from there on, and so on."""
    for boundary in boundaries:
        check_count("each of boundaries", boundary, usual="give the updates at which the rate changes")
    for value in values:
        check_number("each of values", value, usual="give learning rates")
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise ValueError(f"boundaries must rise, got {list(boundaries)!r}: sort them and remove repetitions.")
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"values must be one more than boundaries, got {len(values)} for {len(boundaries)}: "
            "give one rate before the first boundary and one after each."
        )
    edges, rates = tuple(boundaries), tuple(values)
    return lambda step: rates[bisect_right(edges, step)]


def step_decay(lr: float, every: int, factor: float = 0.1) -> Schedule:
    """``lr``, multiplied by ``factor`` after each ``every`` updates."""
    check_number("lr", lr, usual="give the learning rate to start from")
    check_count("every", every, usual="give the number of updates between two steps down")
    check_number("factor", factor, above=0, usual="0.1 is usual")
    return lambda step: lr * factor ** (step // every)


def as_scheduler(optimizer: Optimizer, schedule: Schedule) -> LambdaLR:
    """A torch scheduler: the first group gets ``schedule(updates)``, the others keep their ratio to it.

    A schedule says the learning rate itself, while torch's schedulers multiply what each group began with.
    One schedule over groups of different rates (half for the backbone, say) can only mean that the ratios
    stay, so the first group must begin above 0; which rate it is does not matter if there is only one group.
    """
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function from updates to lr, got {schedule!r}: use constant({schedule!r})."
        )
    first = optimizer.param_groups[0]
    base = float(first.get("initial_lr", first["lr"]))
    if not base > 0:
        raise ValueError(
            f"the first group's lr must be above 0, since other groups keep their ratio to it, got {base!r}: "
            "build the optimizer with the peak learning rate; the schedule decides where it begins."
        )
    return LambdaLR(optimizer, lambda step: _rate(schedule, step) / base)


def _rate(schedule: Schedule, step: int) -> float:
    rate = schedule(step)
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= -ROUNDING):
        raise ValueError(
            f"a schedule gives learning rates of at least 0, got {rate!r} at update {step}: correct the function, or "
            "end it with max(0.0, ...)."
        )
    return number
