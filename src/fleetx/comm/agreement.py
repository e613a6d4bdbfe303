"""Makes sure that all workers mean the same thing before they exchange numbers."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from fleetx.comm import beats, sharing, world


@beats.waiting()
def require_agreement(lines: Sequence[str], device: torch.device, what: str) -> None:
    """Raise on all workers if the lines differ on any of them from those of worker 0. All workers must call it."""
    if world.size() == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.int32, device=device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = torch.zeros(world.size(), dtype=torch.int32, device=device)
    differs[world.rank()] = (mine != first).any()
    dist.all_reduce(differs)
    others = [str(rank) for rank, flag in enumerate(differs.tolist()) if flag]
    if others:
        theirs = sharing.from_first("\n".join(lines), device).split("\n")
        raise ValueError(
            f"the workers differ in {what}: {_difference(lines, theirs, others)}. Build model, optimizer and strategy "
            "from the same code and settings on every worker."
        )


def _difference(lines: Sequence[str], first: Sequence[str], others: Sequence[str]) -> str:
    for mine, theirs in zip_longest(lines, first):
        if mine != theirs:
            return f"worker 0 has {theirs or 'nothing more'}, and worker {world.rank()} has {mine or 'nothing more'}"
    who = f"worker {others[0]} has" if len(others) == 1 else f"workers {', '.join(others)} have"
    return (
        f"{who} other values than worker 0, or the same in another order. Worker 0 begins with {'; '.join(first[:4])}"
    )
