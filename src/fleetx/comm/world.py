"""Who this process is among the workers of the job."""

import torch.distributed as dist

from fleetx.comm.launched import torch_variables


def is_joined() -> bool:
    """Whether a process group is up in this process."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This worker's number, 0 when it works alone."""
    return dist.get_rank() if is_joined() else 0


def size() -> int:
    """How many workers train together, 1 when this one works alone."""
    return dist.get_world_size() if is_joined() else 1


def is_first() -> bool:
    """Whether this is worker 0, by what its launcher says if it has not joined the others yet."""
    return rank() == 0 if is_joined() else torch_variables().get("RANK", "0") == "0"


def launched_size() -> int:
    """How many workers the launcher says it started, whether or not this one has joined them yet."""
    return int(torch_variables().get("WORLD_SIZE", "1"))
