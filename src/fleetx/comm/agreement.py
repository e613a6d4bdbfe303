"""Makes sure that all workers mean the same thing before they exchange numbers."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fleetx.comm import world


def require_agreement(lines: Sequence[str], device: torch.device, what: str) -> None:
    """Raise on all workers if the lines differ on any of them from those of worker 0. All workers must call it."""
    if world.size() == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.int32, device=device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = (mine != first).any().int()
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if differs.item():
        shown = "; ".join(line for line in lines[:4] if line)
        raise ValueError(
            f"the workers differ in {what}: at least one of them has other values, or the same in another order, than "
            f"worker 0. Worker {world.rank()} has {len(lines)} entries, beginning with {shown}. "
            "Build model, optimizer and strategy from the same code and settings on every worker."
        )
