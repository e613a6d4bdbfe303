"""The small real data set inside the package: 1,797 handwritten digits (see digits.md for its origin)."""

import gzip
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Digits(NamedTuple):
    """Images of shape (n, 1, 8, 8) with values from 0 to 1, and their labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


FOLDS = 5


def load_digits(fold: int = FOLDS - 1) -> Digits:
    """Hold out every fifth digit for the test: about 1,438 to train on, 359 to test with. The five folds share none."""
    if fold not in range(FOLDS):
        raise ValueError(f"fold must be from 0 to {FOLDS - 1}, got {fold!r}: each holds out another fifth.")
    packed = files("fleetx.data").joinpath("digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode("ascii").splitlines()
    rows = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.int64))
    images, labels = (rows[:, :64] / 16.0).reshape(-1, 1, 8, 8), rows[:, 64]
    held_out = torch.arange(len(rows)) % FOLDS == fold
    return Digits(images[~held_out], labels[~held_out], images[held_out], labels[held_out])
