"""Which samples a worker sees: every sample once per epoch, dealt out to the workers batch by batch."""

from collections.abc import Iterator

import torch
from torch import Tensor


class ShardedBatches:
    """Index batches of one worker. The order depends on seed and epoch only, so all workers agree on it.

    A global batch is dealt out with the workers' number as stride. The last batch of an epoch is shorter, and
    nothing is lost or doubled: workers may differ by one sample, which the step weighs correctly. A batch too small
    to give every worker a sample is left out.
    """

    def __init__(self, size: int, global_batch: int, *, rank: int = 0, workers: int = 1, seed: int = 0) -> None:
        if global_batch < workers:
            raise ValueError(
                f"the global batch must give each worker a sample: {global_batch} samples for {workers} workers."
            )
        self.size = size
        self.global_batch = global_batch
        self.rank = rank
        self.workers = workers
        self.seed = seed

    def __len__(self) -> int:
        full, rest = divmod(self.size, self.global_batch)
        return full + (rest >= self.workers)

    def epoch(self, number: int) -> Iterator[Tensor]:
        """The index batches of one epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.size, generator=generator)
        for batch in order.split(self.global_batch)[: len(self)]:
            yield batch[self.rank :: self.workers]
