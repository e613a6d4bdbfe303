"""A vocabulary file: one token per line, `token` or `token<tab>id`; without an id the line's number from 0 counts."""

import codecs
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REQUIRED = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
SPECIAL = (*REQUIRED, "[UNK]")
# What an id can stand for.
NOTHING, SPECIAL_TOKEN, ORDINARY_TOKEN = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by name, and which ids are what."""

    ids: dict[str, int]
    size: int
    """One more than the largest id."""
    kinds: np.ndarray
    """For each id below `size` whether it stands for nothing, a special token or an ordinary one."""
    special: np.ndarray
    """For each id whether it is a special token, which is never masked."""
    ordinary: np.ndarray
    """The ids of all other tokens."""

    def __getitem__(self, token: str) -> int:
        return self.ids[token]


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Read and check a vocabulary file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such vocabulary file.")
    ids = _usual(path) or _careful(path)
    missing = [token for token in REQUIRED if token not in ids]
    if missing:
        raise ValueError(f"{path}: a vocabulary needs {' '.join(REQUIRED)}; {' '.join(missing)} is missing.")
    return _build(ids, path)


def _usual(path: Path) -> dict[str, int] | None:
    """The ids of a file in which everything is right, at the speed that is worth for 30,000 lines; else None."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    lines = text.removesuffix("\n").split("\n")
    if "\r" in text or not all(lines):
        return None
    if "\t" not in text:
        ids = {token: number for number, token in enumerate(lines)}
        return ids if len(ids) == len(lines) else None
    pairs = [line.split("\t") for line in lines]
    if not all(len(pair) == 2 and pair[0] and pair[1].isdecimal() for pair in pairs):
        return None
    ids = {token: int(number) for token, number in pairs}
    return ids if len(ids) == len(lines) == len(set(ids.values())) else None


def _careful(path: Path) -> dict[str, int]:
    """The same line by line; raises with the place of what is wrong."""
    ids: dict[str, int] = {}
    taken: dict[int, str] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            token, value = _parse(line, number, f"{path}:{number + 1}")
            if token in ids or value in taken:
                first = f"{token!r} has id {ids[token]}" if token in ids else f"id {value} is {taken[value]!r}"
                raise ValueError(f"{path}:{number + 1}: a token and its id occur once, but {first} already.")
            ids[token], taken[value] = value, token
    return ids


def _parse(line: bytes, number: int, where: str) -> tuple[str, int]:
    try:
        token, *rest = line.decode().rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: the vocabulary must be UTF-8 ({error}).") from None
    if not token or len(rest) > 1 or (rest and not rest[0].strip().isdecimal()):
        raise ValueError(f"{where}: expected `token` or `token<tab>id`, got {line[:80]!r}.")
    return token, int(rest[0]) if rest else number


def _build(ids: dict[str, int], path: Path) -> Vocabulary:
    size = max(ids.values()) + 1
    if size > 2**24:
        raise ValueError(f"{path}: ids must be below 2**24, the largest is {size - 1}.")
    kinds = np.full(size, NOTHING, dtype=np.uint8)
    kinds[list(ids.values())] = ORDINARY_TOKEN
    kinds[[ids[token] for token in SPECIAL if token in ids]] = SPECIAL_TOKEN
    ordinary = np.flatnonzero(kinds == ORDINARY_TOKEN)
    if not len(ordinary):
        raise ValueError(f"{path}: the vocabulary holds special tokens only.")
    return Vocabulary(ids, size, kinds, kinds == SPECIAL_TOKEN, ordinary)
