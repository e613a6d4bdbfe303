"""Which samples a worker sees: every sample once per epoch, dealt out to the workers batch by batch."""

from collections.abc import Iterator
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fleetx.comm import world
from fleetx.comm.launched import torch_variables
from fleetx.data.checks import whole_number
from fleetx.data.randomness import Epoch, check_seed
from fleetx.notices import tell_once

Last = Literal["keep", "wrap", "drop"]


class BatchPlan(Protocol):
    """The index batches of one worker, for any epoch."""

    @property
    def seed(self) -> int:
        """What shuffling, and every other random decision, starts from."""
        ...

    def epoch(self, number: int) -> Iterator[Tensor]:
        """The index batches of one epoch."""
        ...

    def count(self, number: int) -> int:
        """How many batches that epoch has: the same on every worker."""
        ...

    def samples(self, number: int, batches: int) -> int:
        """How many samples the first batches of that epoch hold, on all workers together."""
        ...

    def identity(self) -> dict[str, int | str | bool]:
        """What must be unchanged for a saved position to mean the same batch."""
        ...


class ShardedBatches:
    """Index batches of one worker. The order depends on seed and epoch only, so all workers agree on it.

    A global batch is dealt out with the workers' number as stride; which samples it holds does not depend on their
    number. `last` says what becomes of the end of an epoch:

    - `"keep"`: nothing is lost or doubled. The last batch is shorter, and workers may differ by one sample, which the
      step weighs correctly. With fewer samples than workers some have none, and their batch is empty.
    - `"wrap"`: filled to a whole global batch with the epoch's first samples, so that all workers have equally many.
    - `"drop"`: only full batches.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        *,
        rank: int | None = None,
        workers: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "keep",
    ) -> None:
        self.rank, self.workers = place(rank, workers)
        self._asked_job = rank is None and workers is None
        size = whole_number("size", size, "give the number of samples, len(dataset)")
        global_batch = whole_number("global_batch", global_batch, "give the samples of one batch, over all workers")
        if size < 1:
            raise ValueError(f"a data set needs at least one sample, this one has {size}.")
        if global_batch < self.workers:
            raise ValueError(
                f"the global batch must give each worker a sample: {global_batch} samples for {self.workers} workers."
            )
        if last not in get_args(Last):
            raise ValueError(f"last must be one of {', '.join(map(repr, get_args(Last)))}, got {last!r}.")
        if last == "wrap" and global_batch % self.workers:
            raise ValueError(
                f"last='wrap' gives all workers equally many samples, and a global batch of {global_batch} cannot be "
                f"shared equally by {self.workers} workers: make it a multiple of {self.workers}, or use last='keep'."
            )
        if last == "drop" and size < global_batch:
            raise ValueError(
                f"last='drop' gives only full batches, and {size} samples do not fill one of {global_batch}: "
                "make the batch smaller or use last='keep'."
            )
        self.size = size
        self.global_batch = global_batch
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        self.last = last
        self._sizes = self._batch_sizes()
        if self._sizes[-1] < self.workers:
            tell_once(
                "sharding-empty",
                f"the last batch of an epoch has {self._sizes[-1]} samples for {self.workers} workers: those without "
                "any get an empty batch. Step takes part with it; for minimize, whose mean loss is NaN there, weigh by "
                "samples (items=), or use last='wrap' or 'drop'.",
            )

    def __len__(self) -> int:
        return len(self._sizes)

    def count(self, number: int) -> int:
        """Every epoch has equally many batches."""
        del number
        return len(self)

    def samples(self, number: int, batches: int) -> int:
        """Samples of the first batches, on all workers together."""
        del number
        return sum(self._sizes[:batches])

    def epoch(self, number: int) -> Iterator[Tensor]:
        """The index batches of one epoch."""
        if self._asked_job:
            require_same_job(self.workers)
        order = Epoch(self.seed, number).order(self.size) if self.shuffle else torch.arange(self.size)
        wanted = sum(self._sizes)
        if wanted > self.size:
            order = order.repeat(-(-wanted // self.size))
        for batch in order[:wanted].split(self._sizes):
            yield batch[self.rank :: self.workers]

    def identity(self) -> dict[str, int | str | bool]:
        """The number of workers is not part of it: the same global batch, dealt to more or fewer, is the same batch."""
        return {
            "size": self.size,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "last": self.last,
        }

    def _batch_sizes(self) -> list[int]:
        full, rest = divmod(self.size, self.global_batch)
        sizes = [self.global_batch] * full
        if rest == 0 or self.last == "drop":
            return sizes
        return [*sizes, self.global_batch if self.last == "wrap" else rest]


def place(rank: int | None, workers: int | None) -> tuple[int, int]:
    """This worker's number and how many there are; what is not given is asked of the job.

    Before `fleet.init()` its launcher is asked: a loader made that early must not read everything on every worker.
    """
    told = {} if world.is_joined() else torch_variables()
    waiting = {"RANK", "WORLD_SIZE"} <= told.keys()
    number = (int(told["RANK"]) if waiting else world.rank()) if rank is None else rank
    count = (world.launched_size() if waiting else world.size()) if workers is None else workers
    number = whole_number("rank", number, "leave it out to ask the job")
    count = whole_number("workers", count, "leave it out to ask the job")
    if not 0 <= number < count:
        raise ValueError(f"a worker's number is from 0 to workers - 1: got rank {number} of {count} workers.")
    return number, count


def require_same_job(workers: int) -> None:
    """Batches that the driver of a job has made, and handed on to its workers, would be the same on each of them."""
    if world.is_joined() and workers != world.size():
        raise RuntimeError(
            f"index batches must be made on the worker that reads them: these were dealt out to {workers}, and the job "
            f"has {world.size()} workers. Make plan and loader in the function that each worker runs, after "
            "fleet.init(), or give rank= and workers=."
        )
