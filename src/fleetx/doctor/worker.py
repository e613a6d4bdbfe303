"""One of two workers: adds its number to the other's."""

import torch
import torch.distributed as dist

from fleetx import fleet


def main() -> None:
    """Sums 1 and 2 over the workers."""
    fleet.init(backend="gloo")
    number = torch.tensor([fleet.worker_index() + 1])
    dist.all_reduce(number)
    if fleet.is_first_worker():
        print(f"sum {number.item()}", flush=True)  # noqa: T201 - what the doctor reads


if __name__ == "__main__":
    main()
