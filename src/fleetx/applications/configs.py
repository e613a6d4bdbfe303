"""The training flags of the guide's scripts."""

import argparse
import math
from collections.abc import Sequence


def parse_train_configs(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags of a training script from `arguments`, or from the command line.

    The default `lr` is that of ResNet-50 with momentum at batch 256; Adam and LAMB on BERT want about 1e-4.

    >>> parse_train_configs(["--lr", "0.4", "--batch_size", "64"])
    Namespace(lr=0.4, momentum=0.9, beta1=0.9, beta2=0.997, epsilon=1e-09, batch_size=64)
    """
    # Abbreviations are off: a flag of the user's own script must not be taken for one of these.
    parser = argparse.ArgumentParser(description="Training settings", allow_abbrev=False)
    parser.add_argument("--lr", type=_positive, default=0.1, help="learning rate (%(default)s)")
    parser.add_argument("--momentum", type=_fraction, default=0.9, help="of SGD and LARS (%(default)s)")
    parser.add_argument("--beta1", type=_fraction, default=0.9, help="of Adam and LAMB (%(default)s)")
    parser.add_argument("--beta2", type=_fraction, default=0.997, help="of Adam and LAMB (%(default)s)")
    parser.add_argument("--epsilon", type=_positive, default=1e-9, help="of Adam and LAMB (%(default)s)")
    parser.add_argument("--batch_size", type=_count, default=32, help="samples per worker (%(default)s)")
    return parser.parse_args(arguments)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
