"""Loaders as a PyTorch user writes them, without FleetX: what our own are measured against.

They do the same work on the same files: decoding, crop, resampling and flip of images; parsing, masking, exchange of
second sentences and padding of text. What they leave out are checks of the files, sharding and an exact resume.
"""

import gzip
import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

IMAGE_SIZE = 224
MASK_SHARE = 0.15
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")


class PlainImages(Dataset[tuple[Tensor, int]]):
    """Pillow for everything. `draft` decodes large files at a fraction of their size, as our loader does."""

    def __init__(self, path: Path, draft: bool) -> None:
        lines = [line.rsplit(maxsplit=1) for line in path.read_text().splitlines()]
        self.samples = [(path.with_suffix("") / name, int(label)) for name, label in lines]
        self.draft = draft

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            left, top, wide, high = _random_crop(*image.size)
            across = down = 1.0
            if self.draft:
                width, height = image.size
                image.draft("RGB", (width * 2 * IMAGE_SIZE // wide + 1, height * 2 * IMAGE_SIZE // high + 1))
                across, down = image.size[0] / width, image.size[1] / height
            box = (left * across, top * down, (left + wide) * across, (top + high) * down)
            picture = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR, box=box).convert("RGB")
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous(), label


def _random_crop(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


class TextSample:
    """A masked sequence, in lists."""

    def __init__(self, tokens: list[int], kinds: list[int], positions: list[int], words: list[int], label: int) -> None:
        self.tokens = tokens
        self.kinds = kinds
        self.positions = positions
        self.words = words
        self.label = label


class PlainText(Dataset[TextSample]):
    """Lines parsed into lists when it is made; masked and exchanged when a sample is asked for."""

    def __init__(self, folder: Path, vocab_path: Path, max_seq_len: int) -> None:
        with vocab_path.open(encoding="utf-8") as lines:
            vocab = dict(line.rstrip("\n").split("\t") for line in lines)
        self.special = {int(vocab[name]) for name in SPECIAL}
        self.mask, self.pad = int(vocab["[MASK]"]), int(vocab["[PAD]"])
        self.words = [int(number) for name, number in vocab.items() if name not in SPECIAL]
        self.max_seq_len = max_seq_len
        self.samples: list[tuple[list[int], list[int], int]] = []
        for path in sorted(folder.iterdir()):
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                for line in file:
                    tokens, kinds, positions, (label,) = ([int(word) for word in f.split()] for f in line.split(";"))
                    if len(positions) <= max_seq_len:
                        self.samples.append((tokens, kinds, label))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> TextSample:
        tokens, kinds, label = self.samples[index]
        first = kinds.count(0)
        tokens, follows = list(tokens), label == 1
        if random.random() < 0.5:
            others, other_kinds, _ = random.choice(self.samples)
            second = others[other_kinds.count(0) :][: self.max_seq_len - first]
            tokens, kinds, follows = tokens[:first] + second, [0] * first + [1] * len(second), False
        candidates = [place for place, token in enumerate(tokens) if token not in self.special]
        positions = sorted(random.sample(candidates, max(1, round(MASK_SHARE * len(candidates)))))
        words = [tokens[place] for place in positions]
        for place in positions:
            draw = random.random()
            if draw < 0.8:
                tokens[place] = self.mask
            elif draw < 0.9:
                tokens[place] = random.choice(self.words)
        return TextSample(tokens, kinds, positions, words, 0 if follows else 1)

    def collate(self, samples: list[TextSample]) -> dict[str, Tensor]:
        """Pad and stack."""
        n, length, masked = len(samples), self.max_seq_len, math.ceil(MASK_SHARE * self.max_seq_len)
        batch = {
            "input_ids": torch.full((n, length), self.pad),
            "token_type_ids": torch.zeros(n, length, dtype=torch.int64),
            "attention_mask": torch.zeros(n, length, dtype=torch.int64),
            "masked_positions": torch.full((n, masked), -1),
            "masked_labels": torch.full((n, masked), -100),
            "next_sentence_labels": torch.tensor([sample.label for sample in samples]),
        }
        for row, sample in enumerate(samples):
            end, count = len(sample.tokens), len(sample.positions)
            batch["input_ids"][row, :end] = torch.tensor(sample.tokens)
            batch["token_type_ids"][row, :end] = torch.tensor(sample.kinds)
            batch["attention_mask"][row, :end] = 1
            batch["masked_positions"][row, :count] = torch.tensor(sample.positions)
            batch["masked_labels"][row, :count] = torch.tensor(sample.words)
        return batch
