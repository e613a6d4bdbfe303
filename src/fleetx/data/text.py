"""BERT's pre-training text in the guide's form: masked tokens, and second sentences that follow or do not."""

from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from fleetx.data.checks import whole_number
from fleetx.data.digital import DigitalText, read_folder
from fleetx.data.loader import Loader, Loading, check_loading, check_on_error
from fleetx.data.masking import mask_tokens, most_masked
from fleetx.data.randomness import SWAP_STREAM, Epoch
from fleetx.data.reading import OnError
from fleetx.data.sampling import Last, ShardedBatches, place
from fleetx.data.token_batches import TokenBatches
from fleetx.data.vocabulary import Vocabulary, load_vocabulary
from fleetx.notices import tell_once

NO_POSITION, NO_LABEL = -1, -100
FOLLOWS, SWAPPED = 0, 1


def load_digital_dataset_from_file(
    data_dir: str | Path,
    vocab_path: str | Path,
    batch_size: int,
    max_seq_len: int,
    in_tokens: bool = False,
    *,
    vocab_size: int | None = None,
    swap_sentences: bool = True,
    buffer: int = 1000,
    pad_to_longest: bool | None = None,
    on_error: OnError = "raise",
    shuffle: bool = True,
    last: Last = "keep",
    seed: int = 0,
    rank: int | None = None,
    workers: int | None = None,
    **loading: Unpack[Loading],
) -> Loader:
    """Batches of one worker, from the files of a folder with lines `token_ids;sent_ids;pos_ids;label`.

    A batch of n samples, padded to length l, is a dict of int64 tensors, m being 15 % of l, rounded up:

    - `input_ids`, `token_type_ids`, `attention_mask` (1 for tokens, 0 for padding), each (n, l). Positions are checked
      to count from 0 and left out;
    - `masked_positions` (n, m), padded with -1, and `masked_labels` (n, m), padded with -100;
    - `next_sentence_labels` (n,): 0 where the second sentence follows and 1 where it does not. That is what heads of
      published BERT weights mean; the files' label has it the other way round.

    l is `max_seq_len`, so that shapes stay the same, or the batch's longest with `pad_to_longest` (the default for
    `in_tokens`). `batch_size` counts samples per worker, with `in_tokens` padded tokens. Longer samples are dropped and
    counted in `loader.skipped`.

    With `swap_sentences` half of the samples get another one's second sentence in every epoch, exchanged among
    `buffer` consecutive ones, cut where the two would be too long; samples whose label is 0 already count as such.
    Masking and exchange depend on seed, epoch and sample only. The whole folder is held in memory, 2 bytes per token.

    `vocab_size` is that of the model: a vocabulary with a larger id is refused. Ids may have gaps.

    A bad line or file is an error with its place, or with `on_error="skip"` left out and counted.
    """
    check_on_error(on_error)
    check_loading(loading, load_digital_dataset_from_file)
    _check_sizes(batch_size, max_seq_len, in_tokens, buffer)
    if in_tokens and last != "keep":
        raise ValueError(f"last={last!r} is for batches counted in samples; in_tokens keeps everything.")
    count = place(rank, workers)[1]
    vocabulary = load_vocabulary(vocab_path)
    _check_vocabulary(vocabulary, vocab_path, vocab_size)
    text = read_folder(Path(data_dir), vocabulary, max_seq_len, on_error)
    longest = in_tokens if pad_to_longest is None else pad_to_longest
    samples = TextSamples(text, vocabulary, max_seq_len, buffer=buffer if swap_sentences else 0, pad_to_longest=longest)
    if in_tokens:
        plan = TokenBatches(samples.lengths, batch_size, rank=rank, workers=workers, seed=seed, shuffle=shuffle)
    else:
        plan = ShardedBatches(
            len(samples), batch_size * count, rank=rank, workers=workers, seed=seed, shuffle=shuffle, last=last
        )
    return Loader(samples, plan, collate=samples.collate, **loading)


class TextSample(NamedTuple):
    """One sequence as the model sees it."""

    tokens: np.ndarray
    first: int
    positions: np.ndarray
    originals: np.ndarray
    label: int


class TextSamples:
    """Sequences with masks and second sentences as each epoch draws them."""

    def __init__(
        self, text: DigitalText, vocabulary: Vocabulary, max_seq_len: int, *, buffer: int, pad_to_longest: bool
    ) -> None:
        self.text = text
        self.vocabulary = vocabulary
        self.max_seq_len = max_seq_len
        self.buffer = buffer
        self.pad_to_longest = pad_to_longest
        self.skipped = text.skipped
        self._exchanged: dict[tuple[Epoch, int], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.text.firsts)

    def sample(self, index: int, epoch: Epoch) -> TextSample:
        """One sample as that epoch sees it."""
        other = self._second_of(index, epoch)
        first, second = self._sentences(index)
        label = FOLLOWS if self.text.follows[index] else SWAPPED
        if other != index:
            label = SWAPPED
            second = shortened(self._sentences(other)[1], self.max_seq_len - len(first))
        tokens = np.concatenate([first, second]).astype(np.int64)
        seen, positions, originals = mask_tokens(tokens, self.vocabulary, epoch.rng(index))
        return TextSample(seen, len(first), positions, originals, label)

    def lengths(self, epoch: Epoch) -> np.ndarray:
        """How long each sample is in that epoch."""
        seconds = np.diff(self.text.starts) - self.text.firsts
        if self.buffer:
            blocks = range(-(-len(self) // self.buffer))
            seconds = seconds[np.concatenate([self._exchange(block, epoch) for block in blocks])]
        return np.minimum(self.text.firsts + seconds, self.max_seq_len)

    def collate(self, samples: list[TextSample]) -> dict[str, Tensor]:
        """Pad and stack."""
        length = max(len(sample.tokens) for sample in samples) if self.pad_to_longest else self.max_seq_len
        shape, masks = (len(samples), length), (len(samples), most_masked(length))
        ids = np.full(shape, self.vocabulary["[PAD]"])
        types, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        positions, originals = np.full(masks, NO_POSITION), np.full(masks, NO_LABEL)
        for row, sample in enumerate(samples):
            end, count = len(sample.tokens), len(sample.positions)
            ids[row, :end] = sample.tokens
            types[row, sample.first : end] = 1
            attention[row, :end] = 1
            positions[row, :count] = sample.positions
            originals[row, :count] = sample.originals
        arrays = {
            "input_ids": ids,
            "token_type_ids": types,
            "attention_mask": attention,
            "masked_positions": positions,
            "masked_labels": originals,
            "next_sentence_labels": np.array([sample.label for sample in samples]),
        }
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def _sentences(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.text.starts[index], self.text.starts[index + 1]
        middle = start + self.text.firsts[index]
        return self.text.tokens[start:middle], self.text.tokens[middle:end]

    def _second_of(self, index: int, epoch: Epoch) -> int:
        if not self.buffer:
            return index
        block = index // self.buffer
        if (epoch, block) not in self._exchanged:
            if any(known != epoch for known, _ in self._exchanged):
                self._exchanged.clear()
            self._exchanged[epoch, block] = self._exchange(block, epoch)
        return int(self._exchanged[epoch, block][index % self.buffer])

    def _exchange(self, block: int, epoch: Epoch) -> np.ndarray:
        """For each sample of a block, whose second sentence it gets."""
        members = np.arange(block * self.buffer, min((block + 1) * self.buffer, len(self)))
        begin, end = members[0], members[-1] + 1
        follows = self.text.follows[begin:end] == 1
        paired = np.diff(self.text.starts[begin : end + 1]) > self.text.firsts[begin:end]
        candidates = members[follows & paired]
        wanted = max(0, len(members) // 2 - int((~follows).sum()))
        if min(wanted, len(candidates)) < 2:
            return members
        chosen = epoch.rng(block, SWAP_STREAM).permutation(candidates)[:wanted]
        # A ring: everybody passes the second sentence on, so nobody keeps the own one.
        givers = members.copy()
        givers[chosen - begin] = np.roll(chosen, 1)
        return givers


def shortened(sentence: np.ndarray, room: int) -> np.ndarray:
    """The sentence, cut to fit; its last token, the separator, stays."""
    return sentence if len(sentence) <= room else np.append(sentence[: room - 1], sentence[-1])


def _check_vocabulary(vocabulary: Vocabulary, path: str | Path, vocab_size: int | None) -> None:
    """Refuse one that the model has too few embeddings for; say so if it has gaps, since these may be a slip."""
    tokens, largest = len(vocabulary.ids), vocabulary.size - 1
    if vocab_size is not None and largest >= whole_number("vocab_size", vocab_size, "30522 is BERT's"):
        raise ValueError(
            f"{path}: ids must be below the model's vocab_size of {vocab_size}, and the largest of its {tokens} tokens "
            f"is {largest}. Build the model with vocab_size={largest + 1}, or give the vocabulary that it was made for."
        )
    if vocabulary.size > tokens:
        tell_once(
            f"vocabulary-gap-{path}",
            f"{path}: {tokens} tokens have ids up to {largest}, so some ids stand for nothing: a model needs "
            f"vocab_size={largest + 1} for it.",
        )


def _check_sizes(batch_size: int, max_seq_len: int, in_tokens: bool, buffer: int) -> None:
    whole_number("batch_size", batch_size, "it counts samples, or tokens with in_tokens=True")
    whole_number("max_seq_len", max_seq_len, "512 is usual")
    whole_number("buffer", buffer, "1000 is the default")
    if batch_size < 1 or max_seq_len < 1 or buffer < 1:
        raise ValueError(
            f"batch_size, max_seq_len and buffer must be at least 1, got {batch_size}, {max_seq_len} and {buffer}."
        )
    if in_tokens and batch_size < max_seq_len:
        raise ValueError(
            f"with in_tokens batch_size counts tokens, and must hold one sample of max_seq_len={max_seq_len}: "
            f"got {batch_size}. Raise it, or count samples with in_tokens=False."
        )
