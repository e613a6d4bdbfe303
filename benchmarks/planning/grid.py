"""Plans that a person would make by hand, and random ones: what the planner's choice is measured against."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fleetx.planner.chain import State, evaluate
from fleetx.planner.costs import Profile
from fleetx.planner.plan import Plan

BY_HAND, AT_RANDOM = 12, 10
KEPT, AGAIN, AWAY = State("everything"), State("inputs"), State("inputs", "host")
_LETTERS = {KEPT: "k", AGAIN: "a", AWAY: "h"}
_WORTH_A_TRY = 1.05  # of the budget: predictions may be wrong


class Rival(NamedTuple):
    """A plan of somebody else's."""

    name: str
    micro_batch: int
    states: tuple[State, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without its name; a letter for each state."""
        return {"micro_batch": self.micro_batch, "states": "".join(_LETTERS[state] for state in self.states)}

    @classmethod
    def from_dict(cls, name: str, values: Mapping[str, Any]) -> "Rival":
        """From what JSON gave."""
        meant = {letter: state for state, letter in _LETTERS.items()}
        return cls(name, values["micro_batch"], tuple(meant[letter] for letter in values["states"]))


def rivals(profile: Profile, global_batch: int, memory: int, *, one_forward: bool, seed: int = 0) -> list[Rival]:
    """At most twelve by hand and ten at random.

    Predictions only choose which micro-batches are worth a try; whether a plan fits is found by running it.
    """
    sizes = [global_batch] if one_forward else _powers_of_two(global_batch)
    by_hand = []
    for name, asked in _patterns(profile):
        states = _possible(profile, asked)
        fitting = [size for size in sizes if _may_fit(profile, size, size < global_batch, states, memory)]
        by_hand += [Rival(f"{name}, {size}", size, states) for size in fitting[-2:]]
    return by_hand[-BY_HAND:] + _at_random(profile, sizes, global_batch, memory, random.Random(seed))


def as_plan(rival: Rival, chosen: Plan) -> Plan:
    """A rival in the form of the chosen plan, so that both run the same way."""
    k_steps = math.ceil(chosen.global_batch / rival.micro_batch)
    return replace(chosen, micro_batch=rival.micro_batch, k_steps=k_steps, states=rival.states, measured=None)


def _powers_of_two(global_batch: int) -> list[int]:
    return [2**power for power in range(global_batch.bit_length()) if 2**power <= global_batch]


def _patterns(profile: Profile) -> Iterator[tuple[str, tuple[State, ...]]]:
    """None, all, every n-th block; and with offload, where there is a link."""
    count = len(profile.segments)
    yield "all kept", (KEPT,) * count
    yield "all computed again", (AGAIN,) * count
    for every in (2, 3):
        yield f"every {every}. kept", _every(count, every, AGAIN)
    if profile.bandwidth:
        yield "all computed again, on the host", _last_stays((AWAY,) * count)
        yield "every 2. kept, others on the host", _last_stays(_every(count, 2, AWAY))


def _possible(profile: Profile, states: Sequence[State]) -> tuple[State, ...]:
    """Where nothing of a segment can wait on the host, as of the first one, its inputs stay."""
    offered = [{option.state for option in stage.options} for stage in profile.chain(1).stages]
    return tuple(
        state if state in there else state._replace(home="device") for state, there in zip(states, offered, strict=True)
    )


def _every(count: int, every: int, other: State) -> tuple[State, ...]:
    return tuple(KEPT if number % every == every - 1 else other for number in range(count))


def _last_stays(states: Sequence[State]) -> tuple[State, ...]:
    return tuple(states[:-1]) + tuple(state._replace(home="device") for state in states[-1:])


def _at_random(
    profile: Profile, sizes: Sequence[int], global_batch: int, memory: int, draw: random.Random
) -> list[Rival]:
    found: list[Rival] = []
    ways = [KEPT, AGAIN, *([AWAY] if profile.bandwidth else [])]
    for _ in range(50 * AT_RANDOM):
        if len(found) == AT_RANDOM:
            break
        weights = [draw.random() for _ in ways]
        states = _last_stays(draw.choices(ways, weights, k=len(profile.segments)))
        fitting = [size for size in sizes if _may_fit(profile, size, size < global_batch, states, memory)]
        if fitting:
            size = draw.choice(fitting[-3:])
            found.append(Rival(f"random {len(found) + 1}, {size}", size, states))
    return found


def _may_fit(profile: Profile, size: int, merged: bool, states: Sequence[State], memory: int) -> bool:
    chain = profile.chain(size, merged=merged)
    choice = []
    for stage, state in zip(chain.stages, states, strict=True):
        numbers = [number for number, option in enumerate(stage.options) if option.state == state]
        if not numbers:
            return False
        choice.append(numbers[0])
    return profile.reserve.of(evaluate(chain, choice).peak) <= memory * _WORTH_A_TRY
