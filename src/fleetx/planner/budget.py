"""What a plan may take of a device."""

import torch

from fleetx.units import format_bytes, parse_bytes

MARGIN = 0.05  # of the free memory, left to others


def budget_on(device: torch.device, memory: int | str | None) -> tuple[int, tuple[str, ...]]:
    """The bytes that may be reserved, and what a reader of the plan should know of them.

    Without a budget it is what the device has free, less a margin; a larger budget than that is lowered to it.
    """
    if device.type != "cuda":
        if memory is None:
            raise ValueError(
                "a model on the CPU has no memory budget of its own, got memory=None: give one, for example "
                'memory="8GiB".'
            )
        return parse_bytes(memory), ()
    available = free_on(device)
    if memory is None:
        return available, ()
    wanted = parse_bytes(memory)
    if wanted <= available:
        return wanted, ()
    return available, (
        f"the budget was {format_bytes(wanted)}, but the device has {format_bytes(available)} for this process, "
        f"{MARGIN:.0%} left to others: planned for that.",
    )


def free_on(device: torch.device) -> int:
    """What a process may still take of a GPU, with what it has already, less a margin."""
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return int(free * (1 - MARGIN))
