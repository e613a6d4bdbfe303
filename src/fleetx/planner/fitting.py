"""What is said if no plan is within the budget."""

import math
from typing import NamedTuple

from fleetx.planner.search import Search
from fleetx.units import format_apart, format_bytes, parse_bytes


class Words(NamedTuple):
    """What the settings are called where the question comes from: remedies speak of these."""

    memory: str = "memory={!r}"  # with an amount
    host_memory: str = "host_memory"
    one_forward: str = "one_forward"
    global_batch: str = "global_batch={}"  # with a number
    k_steps: str = "k_steps={}"  # with a number
    smaller: str = "with k_steps={} or more"  # how micro-batches become smaller, with their number
    whole: str = "one_forward=True keeps it whole"
    whole_instead: str = "one_forward=True in place of k_steps keeps it whole"
    checkpoints: str = "checkpoints=[...]"


OF_PLAN = Words()


class DoesNotFit(ValueError):  # noqa: N818 - it reads as what it says
    """No plan is within the budget; says the least memory that would do, and the largest batch."""

    def __init__(self, message: str, least_memory: int | None, largest_micro_batch: int) -> None:
        super().__init__(message)
        self.least_memory = least_memory
        self.largest_micro_batch = largest_micro_batch  # 0 if not even one sample fits


def does_not_fit(
    search: Search,
    memory: int,
    one_forward: bool,
    k_steps: int | None = None,
    words: Words = OF_PLAN,
) -> DoesNotFit:
    """The error for a search that found nothing within a budget."""
    least, largest = search.least_memory(), search.largest_micro_batch(memory)
    whole = f"{search.global_batch:,} samples in one forward need" if one_forward else "one sample at a time needs"
    if not one_forward and (k_steps is not None or search.cuts[0].micro_batch > 1):
        whole = f"micro-batches of {search.cuts[0].micro_batch:,} samples need"
    is_of_update = least is not None and search.needed_to_update() >= least
    if is_of_update:
        whole = "weights, gradients and the update of the optimizer need"
    if least is None:
        rule, remedies = _never(search, words)
    else:
        needed, budget = format_apart(least, memory)
        rule = f"{whole} at least {needed} on the device, and the budget is {budget}"
        remedies = [f"give {words.memory.format(_enough(least))} or more"]
    if one_forward and largest:
        remedies.append(f"take at most {largest:,} samples in one forward, with {words.global_batch.format(largest)}")
        if k_steps is None:
            remedies.append(f"leave out {words.one_forward}, so that smaller micro-batches are merged")
        else:
            remedies.append(f"merge micro-batches of at most so many, {_smaller(search, largest, words)}")
    elif k_steps is not None and largest:
        remedies.append(f"take at most {largest:,} samples per micro-batch, {_smaller(search, largest, words)}")
    elif is_of_update:
        remedies.append("take an optimizer that needs less, or a smaller model")
    elif not one_forward or not remedies:
        remedies.append("take a smaller model or shorter inputs")
    if not search.profile.segments and not is_of_update:
        remedies.append(f"name modules to cut at with {words.checkpoints}, for no blocks were found")
    return DoesNotFit(f"{rule}: {', or '.join(remedies)}.", least, largest)


def _smaller(search: Search, largest: int, words: Words) -> str:
    """How to have micro-batches of at most this size."""
    return words.smaller.format(math.ceil(search.global_batch / largest))


def _never(search: Search, words: Words) -> tuple[str, list[str]]:
    """Rule and remedies if no memory on the device is enough: some segment was measured only as sent to the host."""
    if search.host_memory is None:
        return "what a segment sends to the host must be back in time, and the copies of one are too slow", []
    limit = format_bytes(search.host_memory)
    return f"no plan is possible with {limit} of host memory, however much the device has", [
        f"give more {words.host_memory}"
    ]


def _enough(least: int) -> str:
    """An amount to write down: no less than this, in spite of rounding."""
    text, unit = format_bytes(least), 1
    while parse_bytes(text) < least:
        least += unit
        text, unit = format_bytes(least), unit * 2
    return text
