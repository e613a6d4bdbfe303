"""Text that is already numbers: one sample per line, `token_ids;sent_ids;pos_ids;label`, in gzip or plain files."""

import gzip
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from fleetx.data.reading import OnError, SampleError
from fleetx.data.vocabulary import NOTHING, SPECIAL_TOKEN, Vocabulary

# A line longer than this is none of numbers: without an end a small gzip file could fill the memory.
MOST_BYTES = 2**26
TOO_LONG = "longer than max_seq_len"


class DigitalText(NamedTuple):
    """All samples of a folder, in few large arrays: loading processes share them without copying."""

    tokens: np.ndarray
    """The tokens of all samples, one after the other; 2 bytes each for vocabularies up to 65,536."""
    starts: np.ndarray
    """Where each sample starts, and where the last one ends."""
    firsts: np.ndarray
    """How many tokens of each sample belong to its first sentence."""
    follows: np.ndarray
    """The label: whether the second sentence follows the first."""
    skipped: dict[str, int]


class Line(NamedTuple):
    """One checked sample."""

    tokens: np.ndarray
    first: int
    follows: int


def read_folder(folder: Path, vocabulary: Vocabulary, max_seq_len: int, on_error: OnError) -> DigitalText:
    """Read and check all files of a folder, in the order of their names (or one file)."""
    tokens, kind = (array("H"), np.uint16) if vocabulary.size <= 2**16 else (array("I"), np.uint32)
    ends, firsts, follows = array("q", [0]), array("i"), array("b")
    skipped: Counter[str] = Counter()
    for path in _files(folder):
        for line in _samples(path, vocabulary, on_error, skipped):
            if len(line.tokens) > max_seq_len:
                skipped[TOO_LONG] += 1
                continue
            tokens.frombytes(line.tokens.astype(kind).tobytes())
            ends.append(len(tokens))
            firsts.append(line.first)
            follows.append(line.follows)
    if not firsts:
        raise ValueError(f"{folder}: no sample is left of the files there (skipped: {dict(skipped)}).")
    return DigitalText(np.array(tokens), np.array(ends), np.array(firsts), np.array(follows), dict(skipped))


def parse_line(line: bytes, vocabulary: Vocabulary) -> Line:
    """One sample; raises `SampleError` with what is wrong."""
    return _usual(line, vocabulary) or _careful(line, vocabulary)


def _usual(line: bytes, vocabulary: Vocabulary) -> Line | None:
    """A sample that is right and written as usual; for any other None.

    Nearly all are, and most of a line is known beforehand: positions count from 0, and sentences are zeros and ones.
    Comparing that much is several times faster than reading it.
    """
    fields = line.rstrip(b"\r\n").split(b";")
    if len(fields) != 4 or fields[0].translate(None, b"0123456789 "):
        return None
    tokens = np.fromstring(fields[0], np.int64, sep=" ")
    length, first = len(tokens), fields[1].count(b"0")
    if not 0 < first <= length:
        return None
    sentences = (b"0 " * first + b"1 " * (length - first))[:-1]
    if fields[1] != sentences or fields[2] != _counted(length) or fields[3] not in (b"0", b"1"):
        return None
    if tokens.max() >= vocabulary.size:
        return None
    kinds = vocabulary.kinds[tokens]
    # The least is NOTHING for an unknown id; the most is SPECIAL_TOKEN where nothing could be masked.
    if kinds.min() == NOTHING or kinds.max() == SPECIAL_TOKEN:
        return None
    return Line(tokens, first, int(fields[3]))


@lru_cache(maxsize=4096)
def _counted(length: int) -> bytes:
    return b" ".join(b"%d" % number for number in range(length))


def _careful(line: bytes, vocabulary: Vocabulary) -> Line:
    """A sample in any permitted spelling, or what is wrong with it."""
    fields = line.rstrip(b"\r\n").split(b";")
    if len(fields) != 4:
        raise _malformed(f"expected `token_ids;sent_ids;pos_ids;label`, found {len(fields)} fields in {line[:80]!r}.")
    tokens, sentences, positions = (_integers(field, what) for field, what in zip(fields, _FIELDS, strict=False))
    length = len(tokens)
    if not length == len(sentences) == len(positions):
        raise _malformed(
            "token_ids, sent_ids and pos_ids must be equally long, "
            f"got {length}, {len(sentences)} and {len(positions)} numbers."
        )
    first = sentences.count(0)
    if sentences != [0] * first + [1] * (length - first) or first == 0:
        raise _malformed("sent_ids must be 0 for the first sentence, then 1 for the second.")
    if positions != list(range(length)):
        raise _malformed(f"pos_ids must count from 0 to {length - 1}: batches leave positions out, models count them.")
    if fields[3].strip() not in (b"0", b"1"):
        raise _malformed(f"the label must be 1 (the second sentence follows the first) or 0, got {fields[3][:20]!r}.")
    _check_tokens(tokens, vocabulary)
    return Line(np.array(tokens), first, int(fields[3]))


_FIELDS = ("token_ids", "sent_ids", "pos_ids")


def _integers(field: bytes, what: str) -> list[int]:
    words = field.split()
    # One look at all digits first: `int` alone would take signs and underscores.
    if not b"".join(words).isdigit():
        odd = next((word for word in words if not word.isdigit()), b"")
        raise _malformed(f"{what} must be numbers separated by spaces, got {odd[:20]!r}.")
    return list(map(int, words))


def _check_tokens(tokens: list[int], vocabulary: Vocabulary) -> None:
    for token in tokens:
        if token >= vocabulary.size or vocabulary.kinds[token] == NOTHING:
            raise SampleError(
                "unknown token id", f"token id {token} is not in the vocabulary of {len(vocabulary.ids)} tokens."
            )
    if vocabulary.special[tokens].all():
        raise _malformed("a sample needs a token that is not special: there is nothing to mask.")


def _malformed(message: str) -> SampleError:
    return SampleError("malformed line", message)


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder of samples.")
    files = sorted(path for path in folder.iterdir() if not path.is_dir() and not path.name.startswith("."))
    if not files:
        raise FileNotFoundError(f"{folder}: the folder holds no files; expected *.gz or plain text.")
    return files


def _samples(path: Path, vocabulary: Vocabulary, on_error: OnError, skipped: Counter[str]) -> Iterator[Line]:
    number = 0
    if not path.is_file():
        odd = SampleError(
            "no plain file", "a pipe, a device or a broken link is among the files of samples: remove it."
        )
        _report(odd, str(path), on_error, skipped)
        return
    try:
        with _open(path) as file:
            for number, line in enumerate(iter(partial(file.readline, MOST_BYTES), b""), start=1):
                if len(line) == MOST_BYTES:
                    endless = SampleError(
                        "endless line", f"a line has {MOST_BYTES:,} bytes or more: the file is broken."
                    )
                    _report(endless, f"{path}:{number}", on_error, skipped)
                    return
                try:
                    yield parse_line(line, vocabulary)
                except SampleError as bad:
                    _report(bad, f"{path}:{number}", on_error, skipped)
        if number == 0:
            _report(SampleError("empty file", "the file is empty."), str(path), on_error, skipped)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        broken = SampleError("truncated file", f"the gzip file is damaged after this line ({error}): fetch it again.")
        _report(broken, f"{path}:{number}", on_error, skipped)


def _report(bad: SampleError, where: str, on_error: OnError, skipped: Counter[str]) -> None:
    if on_error == "raise":
        raise ValueError(f"{where}: {bad}") from None
    skipped[bad.reason] += 1


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
