"""What a loading process does: turns a request (an epoch and some indices) into a batch, or says what is wrong."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import Dataset, get_worker_info

from fleetx.data.randomness import Epoch
from fleetx.data.travelling import packed

OnError = Literal["raise", "skip"]
Collate = Callable[[list[Any]], Any]


class SampleError(Exception):
    """A sample that cannot be used. `kind` is the error that the user sees when bad samples are not skipped."""

    def __init__(self, reason: str, message: str, kind: type[Exception] = ValueError) -> None:
        super().__init__(message)
        self.reason = reason
        self.kind = kind


@runtime_checkable
class EpochSamples(Protocol):
    """Samples that differ from epoch to epoch; all their randomness must come from `epoch.rng(index)`."""

    def __len__(self) -> int:
        """How many samples."""
        ...

    def sample(self, index: int, epoch: Epoch) -> Any:
        """One sample as that epoch sees it; raises `SampleError`."""
        ...


class Request(NamedTuple):
    """One batch to read."""

    epoch: int
    indices: list[int]


class Reply(NamedTuple):
    """A batch, and how many samples were skipped on the way, by reason."""

    batch: Any
    skipped: dict[str, int]


class Failure(NamedTuple):
    """A bad sample, in a form that survives the way between processes with its message intact."""

    kind: type[Exception]
    message: str


class BatchReader(Dataset[Reply | Failure]):
    """Reads whole batches. A bad sample fails the batch, or is replaced by the next good one of the data set."""

    def __init__(self, dataset: EpochSamples | Sequence[Any], collate: Collate, seed: int, on_error: OnError) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.on_error = on_error

    def __getitem__(self, index: Request) -> Reply | Failure:
        epoch = Epoch(self.seed, index.epoch)
        skipped: Counter[str] = Counter()
        try:
            samples = [self._good_sample(number, epoch, skipped) for number in index.indices]
        except SampleError as bad:
            return Failure(bad.kind, str(bad))
        batch = self.collate(samples)
        return Reply(batch if get_worker_info() is None else packed(batch), dict(skipped))

    def _good_sample(self, index: int, epoch: Epoch, skipped: Counter[str]) -> Any:
        if not isinstance(self.dataset, EpochSamples):
            return self.dataset[index]
        size, bad_ones = len(self.dataset), Counter[str]()
        for further in range(size):
            try:
                return self.dataset.sample((index + further) % size, epoch)
            except SampleError as bad:
                if self.on_error == "raise":
                    raise
                bad_ones[bad.reason] += 1
                if further == 0:  # those that come after it are counted when they are asked for themselves
                    skipped[bad.reason] += 1
        raise SampleError("no good sample", f"every one of the {size} samples is bad: {dict(bad_ones)}.")
