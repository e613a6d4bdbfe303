"""Batches measured in tokens: as many samples as fit when all are padded to the longest of them."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fleetx.data.randomness import Epoch, check_seed
from fleetx.data.sampling import place, require_same_job


class TokenBatches:
    """Index batches of one worker: a batch grows while (samples + 1) x longest is at most `tokens`.

    All workers form the same batches from the epoch's order and take turns. If the last turn has too few batches, the
    largest of them are halved until there is one for each worker, so nothing is lost or doubled; where there are fewer
    samples than workers, the last workers' batches are empty.
    """

    def __init__(
        self,
        lengths: Callable[[Epoch], np.ndarray],
        tokens: int,
        *,
        rank: int | None = None,
        workers: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.rank, self.workers = place(rank, workers)
        self._asked_job = rank is None and workers is None
        self.lengths = lengths
        self.tokens = tokens
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        self._planned: dict[int, list[Tensor]] = {}

    def epoch(self, number: int) -> Iterator[Tensor]:
        """The index batches of one epoch."""
        if self._asked_job:
            require_same_job(self.workers)
        return iter(self._plan(number)[self.rank :: self.workers])

    def count(self, number: int) -> int:
        """Epochs may differ, since their order does."""
        return len(self._plan(number)) // self.workers

    def samples(self, number: int, batches: int) -> int:
        """Samples of the first batches, on all workers together."""
        return sum(map(len, self._plan(number)[: batches * self.workers]))

    def identity(self) -> dict[str, int | str | bool]:
        """Workers take turns, so their number belongs to it."""
        size = len(self.lengths(Epoch(self.seed, 0)))
        return {
            "size": size,
            "tokens": self.tokens,
            "workers": self.workers,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _plan(self, number: int) -> list[Tensor]:
        if number not in self._planned:
            # Two are kept: the epoch that is trained on and the one that is already read ahead.
            self._planned = {epoch: plan for epoch, plan in self._planned.items() if abs(epoch - number) == 1}
            epoch = Epoch(self.seed, number)
            lengths = self.lengths(epoch)
            order = epoch.order(len(lengths)) if self.shuffle else torch.arange(len(lengths))
            batches = order.split(grow(lengths[order.numpy()], self.tokens))
            self._planned[number] = _for_all_workers(list(batches), self.workers)
        return self._planned[number]


def grow(lengths: np.ndarray, tokens: int) -> list[int]:
    """How many of the samples, in their order, each batch takes."""
    sizes: list[int] = []
    count = longest = 0
    for length in lengths.tolist():
        if count and (count + 1) * max(longest, length) > tokens:
            sizes.append(count)
            count = longest = 0
        count, longest = count + 1, max(longest, length)
    return [*sizes, count]


def _for_all_workers(batches: list[Tensor], workers: int) -> list[Tensor]:
    whole = len(batches) // workers * workers
    full, rest = batches[:whole], batches[whole:]
    while rest and len(rest) < workers:
        largest = max(range(len(rest)), key=lambda number: len(rest[number]))
        if len(rest[largest]) == 1:
            nothing = rest[largest][:0]
            return [*full, *rest, *[nothing] * (workers - len(rest))]
        rest[largest : largest + 1] = rest[largest].tensor_split(2)
    return [*full, *rest]
