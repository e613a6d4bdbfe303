"""Why a plan was chosen, in words: merge or one forward, and what is to be known beside."""

from fleetx.planner.costs import Profile
from fleetx.planner.search import Found, Search
from fleetx.planner.solver import least_memory
from fleetx.units import format_bytes

_SHOWN = 5e-4  # the least gain that does not read as 0.0%


def reason(
    search: Search, best: Found, alone: Found | None, found: list[Found], one_forward: bool, k_steps: int | None
) -> str:
    """Merge or one forward, and why."""
    batch, cut = f"{search.global_batch:,}", best.cut
    if one_forward:
        return f"one forward of {batch} was asked for; {_repeats(search, best)}."
    if k_steps is not None:
        return f"{k_steps:,} micro-batches were asked for; {_repeats(search, best)}."
    if cut.k_steps == 1:
        merged = next((one for one in found if one.cut.k_steps > 1), None)
        if merged is None:
            return f"one forward; {_repeats(search, best)}."
        how_fast = _compared(merged.seconds / best.seconds - 1)
        return (
            f"one forward is {how_fast} merging {merged.cut.micro_batch:,} × {merged.cut.k_steps:,}; "
            f"{_repeats(search, best)}."
        )
    if alone is None:
        least = least_memory(search.chain(search.global_batch), search.host_memory)
        needed = "is not possible" if least is None else f"needs {_amount(search, least)}"
        return f"merged, because one forward of {batch} {needed}; {_repeats(search, best)}."
    how_fast = _compared(alone.seconds / best.seconds - 1)
    return f"merged, {how_fast} one forward of {batch}, for which {_repeats(search, alone)}."


def notes(profile: Profile, best: Found, keeps_whole: str) -> tuple[str, ...]:
    """What was noticed while measuring, and what the plan means for the training; `keeps_whole` says how not to cut."""
    said = list(profile.notes)
    if best.cut.k_steps > 1 and profile.couples_samples:
        said.append(f"batch norms see {best.cut.micro_batch:,} samples at a time, not the whole batch; {keeps_whole}.")
    if best.cut.k_steps > 1 and profile.loss_couples_samples:
        said.append(
            "the loss of a few samples is no sum or mean over parts of them, as contrastive losses are none: merged "
            f"micro-batches train something else than the whole batch; {keeps_whole}."
        )
    return tuple(said)


def _compared(gain: float) -> str:
    """Nothing is "0.0% faster"; and slower may be what was not so in reality."""
    if gain <= -_SHOWN:
        return f"by prediction {-gain / (1 + gain):.1%} slower than"
    return f"{gain:.1%} faster than" if gain >= _SHOWN else "as fast as"


def _amount(search: Search, least: int) -> str:
    return f"at least {format_bytes(search.profile.reserve.of(least))}"


def _repeats(search: Search, found: Found) -> str:
    states = search.states(found)
    again = sum(state.save != "everything" for state in states)
    in_part = sum(state.save == "dear" for state in states)
    away = sum(state.home == "host" for state in states)
    if not again and not away:
        return "all activations are kept"
    said = []
    if again:
        said.append("all segments are" if again == len(states) else f"{again} of {len(states)} segments {_be(again)}")
        said[0] += " computed again"
        if in_part:
            said[0] += " in part" if in_part == again else f", {in_part} of them in part"
    if away:
        said.append(f"{away} {'waits' if away == 1 else 'wait'} on the host")
    return " and ".join(said)


def _be(count: int) -> str:
    return "is" if count == 1 else "are"
