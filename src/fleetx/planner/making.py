"""From a profile and budgets to a plan, with what a person wants to know of it. Pure; no device."""

import math

from fleetx.planner.chain import evaluate
from fleetx.planner.costs import Profile
from fleetx.planner.fitting import OF_PLAN, Words, does_not_fit
from fleetx.planner.plan import Plan, Purchase, RunnerUp
from fleetx.planner.reasons import notes, reason
from fleetx.planner.search import Cut, Found, Search, check_batch, cuts_of
from fleetx.planner.table import summary

GIB = 2**30
CLOSE = 0.08  # part of the speed: which of two plans is faster in reality may be the other way round
TOLERATED = 1.5  # times as long: what real times preferred may be predicted to take so much, and no more
_RUNNERS_UP = 3
_GAIN = 0.002  # part of the speed: what gains less is not looked for at other budgets
_STEPS = (-4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128)  # GiB more or less, or eighths of a small budget


def plan_for(
    profile: Profile,
    *,
    memory: int,
    global_batch: int,
    host_memory: int | None = None,
    one_forward: bool = False,
    k_steps: int | None = None,
    prefer: int | None = None,
    even: bool = False,
    curve: bool = True,
    words: Words = OF_PLAN,
) -> Plan:
    """The fastest plan that fits: `memory` is what the device may reserve, `host_memory` what offload may use.

    `one_forward` keeps the batch whole, for losses that couple its samples. `k_steps` cuts it into so many
    micro-batches, neither more nor fewer; `prefer` takes so many if that is not far slower. `even` allows only
    micro-batches of equal size. `curve=False` leaves out what other budgets would give. `words` are for messages.
    """
    check_batch(global_batch)
    whole = Cut(global_batch, 1)
    if k_steps is not None:
        k_steps = min(k_steps, global_batch)  # fewer samples than slices: one in each, as batches are cut
    one_forward = one_forward or k_steps == 1
    if one_forward:
        cuts = [whole]
    elif k_steps is not None:
        cuts = [Cut(math.ceil(global_batch / k_steps), k_steps, -global_batch % k_steps)]
    else:
        cuts = [cut for cut in cuts_of(global_batch, even=even) if cut == whole or cut.least >= profile.smallest]
    search = Search(profile, global_batch, host_memory, cuts)
    found = search.best(memory, wanted=1 + _RUNNERS_UP)
    if not found:
        raise does_not_fit(search, memory, one_forward, k_steps, words)
    preferred = [one for one in found if one.cut.k_steps == prefer and one.seconds < TOLERATED * found[0].seconds]
    found = preferred + [one for one in found if one not in preferred]
    best = found[0]
    alone = None
    if k_steps is None:
        alone = next((one for one in found if one.cut == whole), None) or search.at(whole, memory)
    chain = search.chain(best.cut.micro_batch)
    cost = evaluate(chain, best.solution.choice)
    peak = profile.reserve.of(cost.peak)
    by_kind = cost.peak_by_kind | {"allocator": peak - cost.peak}
    return Plan(
        micro_batch=best.cut.micro_batch,
        k_steps=best.cut.k_steps,
        global_batch=global_batch,
        names=tuple(stage.name for stage in chain.stages),
        states=search.states(best),
        memory=memory,
        host_memory=host_memory,
        peak=peak,
        peak_by_kind={kind: size for kind, size in by_kind.items() if size},
        host_bytes=cost.host_bytes,
        seconds=best.seconds,
        samples_per_s=global_batch / best.seconds,
        reason=reason(search, best, alone, found, one_forward, k_steps),
        one_forward=one_forward,
        compile=profile.compiled,
        runners_up=tuple(_runner_up(search, one) for one in found[1 : 1 + _RUNNERS_UP]),
        curve=_curve(search, memory, best) if curve else (),
        timeline=cost.points,
        fixed_bytes=chain.fixed_bytes,
        update_seconds=profile.update_seconds,
        device=profile.device,
        notes=notes(profile, best, words.whole if k_steps is None else words.whole_instead),
    )


def _runner_up(search: Search, found: Found) -> RunnerUp:
    cut, words = found.cut, summary(search.states(found))
    peak = search.profile.reserve.of(found.solution.peak)
    return RunnerUp(cut.micro_batch, cut.k_steps, search.global_batch / found.seconds, peak, words)


def _curve(search: Search, memory: int, best: Found) -> tuple[Purchase, ...]:
    """What less and more memory would give; budgets lie further and further apart, until nothing is gained any more."""
    step = GIB if memory >= 8 * GIB else max(1, memory // 8)
    plenty = search.best(2**60, gain=_GAIN)
    limit = plenty[0].seconds if plenty else 0.0
    bought: list[Purchase] = []
    like = best.cut
    for factor in _STEPS:
        budget = memory + factor * step
        found = [best] if factor == 0 else search.best(budget, gain=_GAIN, like=like)
        fastest = found[0] if found else None
        if fastest is not None:
            like = fastest.cut
            speed = search.global_batch / fastest.seconds
            if factor < 0:  # less memory is not faster, only searched in another way
                speed = min(speed, search.global_batch / best.seconds)
            if bought and speed < bought[-1].samples_per_s:  # a search that was cut short
                bought.append(bought[-1]._replace(memory=budget))
            else:
                bought.append(Purchase(budget, speed, fastest.cut.micro_batch, fastest.cut.k_steps))
            if factor >= 0 and fastest.seconds <= limit * 1.0005:
                break
    return tuple(bought)
