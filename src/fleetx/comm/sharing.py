"""Small facts that workers tell each other: who failed, what is the most or the least, what the first one decided.

All workers must call these together; a worker alone answers itself.
"""

import socket

import torch
import torch.distributed as dist

from fleetx.comm import beats, world

_LONGEST_HOST_NAME = 255


def any_worker(flag: bool, device: torch.device) -> bool:
    """Whether it is so on any worker."""
    return most(int(flag), device) > 0


def most(number: int, device: torch.device) -> int:
    """The largest of all workers' numbers."""
    return _reduced(number, device, dist.ReduceOp.MAX) if world.size() > 1 else number


def least(number: int, device: torch.device) -> int:
    """The smallest of all workers' numbers."""
    return _reduced(number, device, dist.ReduceOp.MIN) if world.size() > 1 else number


def from_first(text: str, device: torch.device) -> str:
    """What the first worker says; what the others say is not heard."""
    return from_worker(0, text, device)


@beats.waiting()
def from_worker(rank: int, text: str, device: torch.device) -> str:
    """What one worker says; what the others say is not heard."""
    if world.size() == 1:
        return text
    said = text.encode()
    length = torch.tensor([len(said)], device=device)
    dist.broadcast(length, src=rank)
    letters = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if world.rank() == rank:
        letters.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    dist.broadcast(letters, src=rank)
    return bytes(letters.tolist()).decode()


@beats.waiting()
def host_names(device: torch.device) -> list[str]:
    """Of each worker the name of its host."""
    own = socket.gethostname().encode()[:_LONGEST_HOST_NAME]
    letters = torch.tensor(list(own.ljust(_LONGEST_HOST_NAME, b"\0")), dtype=torch.uint8, device=device)
    names = [torch.empty_like(letters) for _ in range(world.size())]
    dist.all_gather(names, letters)
    return [bytes(name.tolist()).rstrip(b"\0").decode(errors="replace") for name in names]


@beats.waiting()
def _reduced(number: int, device: torch.device, operation: dist.ReduceOp.RedOpType) -> int:
    shared = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=operation)
    return int(shared.item())
