"""Data sets, their file formats, and how samples are dealt out to workers."""

from fleetx.data.digits import Digits, load_digits
from fleetx.data.idx import FashionMnist, load_fashion_mnist, load_idx
from fleetx.data.imagenet import load_imagenet_from_file
from fleetx.data.loader import Loader
from fleetx.data.make import make_digital, make_idx, make_imagenet
from fleetx.data.randomness import Epoch
from fleetx.data.reading import EpochSamples, SampleError
from fleetx.data.sampling import ShardedBatches
from fleetx.data.text import load_digital_dataset_from_file
from fleetx.data.token_batches import TokenBatches
from fleetx.data.vocabulary import Vocabulary, load_vocabulary

__all__ = [
    "Digits",
    "Epoch",
    "EpochSamples",
    "FashionMnist",
    "Loader",
    "SampleError",
    "ShardedBatches",
    "TokenBatches",
    "Vocabulary",
    "load_digital_dataset_from_file",
    "load_digits",
    "load_fashion_mnist",
    "load_idx",
    "load_imagenet_from_file",
    "load_vocabulary",
    "make_digital",
    "make_idx",
    "make_imagenet",
]
