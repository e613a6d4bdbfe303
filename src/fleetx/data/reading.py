"""What a loading process does: turns a request (an epoch and some indices) into a batch, or says what is wrong."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import Dataset, Subset, get_worker_info

from fleetx.data.randomness import COLLATING_STREAM, READING_STREAM, Epoch, generators_kept
from fleetx.data.travelling import packed
from fleetx.slicing import batch_size, map_tensors

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
    """Reads whole batches. A bad sample fails the batch, or is replaced by the next good one of the data set.

    The global generators are seeded before each sample and each collation, so that a batch depends on nothing else than
    seed, epoch and samples. The training process gets its own generators back.
    """

    def __init__(self, dataset: EpochSamples | Sequence[Any], collate: Collate, seed: int, on_error: OnError) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.on_error = on_error

    def __getitem__(self, index: Request) -> Reply | Failure:
        epoch = Epoch(self.seed, index.epoch)
        skipped: Counter[str] = Counter()
        in_training_process = get_worker_info() is None
        with generators_kept() if in_training_process else nullcontext():
            try:
                batch = self._collated(index.indices, epoch, skipped) if index.indices else self._empty(epoch)
            except SampleError as bad:
                return Failure(bad.kind, str(bad))
        return Reply(batch if in_training_process else packed(batch), dict(skipped))

    def _collated(self, indices: list[int], epoch: Epoch, skipped: Counter[str]) -> Any:
        samples = self._samples(indices, epoch, skipped)
        epoch.seed_generators(indices[0], COLLATING_STREAM)
        return self.collate(samples)

    def _empty(self, epoch: Epoch) -> Any:
        """A batch like any other but without samples, for a worker that has none in the last batch of an epoch."""
        one, two = (self._collated([0] * samples, epoch, Counter()) for samples in (1, 2))
        # A tensor with a row for each sample is cut to none; a list of the samples themselves is not such a batch.
        if (_rows(one), _rows(two)) == (1, 2):
            return map_tensors(one, lambda tensor: tensor[:0] if tensor.dim() else tensor)
        try:
            return self.collate([])
        except Exception as error:
            raise SampleError(
                "no samples",
                f"the last batch of epoch {epoch.number} has fewer samples than there are workers, and this worker's "
                f"empty share could not be collated ({type(error).__name__}: {error}): let collate= take an empty "
                "list, or make the plan with last='wrap' or 'drop'.",
            ) from error

    def _samples(self, indices: list[int], epoch: Epoch, skipped: Counter[str]) -> list[Any]:
        dataset: Any = self.dataset
        if isinstance(dataset, EpochSamples) or not _reads_many(dataset):
            return [self._good_sample(index, epoch, skipped) for index in indices]
        epoch.seed_generators(indices[0], READING_STREAM)
        return dataset.__getitems__(indices)

    def _good_sample(self, first: int, epoch: Epoch, skipped: Counter[str]) -> Any:
        if not isinstance(self.dataset, EpochSamples):
            epoch.seed_generators(first, READING_STREAM)
            return self.dataset[first]
        size, bad_ones = len(self.dataset), Counter[str]()
        for further in range(size):
            index = (first + further) % size
            epoch.seed_generators(index, READING_STREAM)
            try:
                return self.dataset.sample(index, epoch)
            except SampleError as bad:
                if self.on_error == "raise":
                    raise
                bad_ones[bad.reason] += 1
                if further == 0:  # those that come after it are counted when they are asked for themselves
                    skipped[bad.reason] += 1
        raise SampleError("no good sample", f"every one of the {size} samples is bad: {dict(bad_ones)}.")


def outlive_stop_signals(training_process: int, _number: int) -> None:
    """Ignore SIGTERM and Ctrl-C in this loading process: until all workers have saved, training needs batches.

    SLURM signals all processes of a step, and a terminal all of a job. Only the training process itself may end this
    one by SIGTERM, as torch does. Programs that a data set starts outlive these signals too.
    """
    # A handler would not learn who sent the signal; a thread that waits for it does.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_end_when_told, args=(training_process, signals), daemon=True).start()


def _end_when_told(training_process: int, signals: set[signal.Signals]) -> None:
    while signal.sigwaitinfo(signals).si_pid != training_process:
        pass
    os._exit(0)


def _rows(batch: Any) -> int | None:
    """The rows that all tensors of a batch have; None where it holds anything else, or they differ."""
    try:
        return batch_size(batch)
    except (TypeError, ValueError):
        return None


def _reads_many(dataset: Any) -> bool:
    """Whether a data set reads a batch at once. A `Subset` says so of itself, and does what its data set does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
