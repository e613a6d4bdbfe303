"""Amounts of memory as people write them: "30GiB" and back."""

import re
from fractions import Fraction

from fleetx.notices import shown

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES_OF = {unit.lower(): size for unit, size in ({"B": 1} | _BINARY | _DECIMAL).items()}

# At most 18 digits a side: no honest amount has more, and Python refuses very long ones in its own words.
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18})?", re.ASCII)


def parse_bytes(amount: str | int) -> int:
    """The bytes in an amount such as `"30GiB"`, `"1.5 gb"` or a plain int; a part of a byte is dropped."""
    if isinstance(amount, bool) or not isinstance(amount, (str, int)):
        raise TypeError(f"an amount of memory must be text or an int of bytes, {_got(amount)}; {_EXAMPLE}")
    if isinstance(amount, int):
        if amount < 0:
            raise ValueError(f"an amount of memory must not be negative, {_got(amount)}; write 0 or more bytes")
        return int(amount)
    match = _AMOUNT.fullmatch(amount.strip())
    size = _BYTES_OF.get(match[2].lower()) if match else None
    if match is None or size is None:
        rule = 'an amount of memory must be a number and one of the units KiB MiB GiB TiB KB MB GB TB or "B"'
        raise ValueError(f"{rule}, {_got(amount)}{_fault(amount.strip())}; {_EXAMPLE}")
    # Fraction, not float: "0.1GB" is 100000000 bytes and not one less.
    return int(Fraction(match[1]) * size)


def format_bytes(n: int) -> str:
    """An amount for people, in binary units and with at most two decimals: `"1.5 GiB"`."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"format_bytes takes an int of bytes, {_got(n)}; round it with int(...) first")
    if n < 0:
        return "-" + format_bytes(-n)
    text, hundredths = f"{n} B", n * 100
    for unit, size in _BINARY.items():
        if hundredths < 1024 * 100:  # as rounded, so that 1023.999 KiB reads "1 MiB" and never "1024 KiB"
            break
        hundredths = (n * 100 + size // 2) // size
        whole, part = divmod(hundredths, 100)
        text = f"{whole}.{part:02d}".rstrip("0").rstrip(".") + f" {unit}"
    return text


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Two different amounts for people: in bytes if they would read the same otherwise."""
    texts = format_bytes(first), format_bytes(second)
    if first == second or texts[0] != texts[1]:
        return texts
    return f"{first:,} bytes", f"{second:,} bytes"


_EXAMPLE = 'write for example "30GiB", "1.5 GB" or 32212254720'


def _fault(amount: str) -> str:
    """What is wrong with an amount, where that is easily overlooked."""
    if _NUMBER.fullmatch(amount):
        return ", which has no unit"
    return ", which is negative" if amount.startswith("-") else ""


def _got(value: object) -> str:
    return f"got {shown(value)} ({type(value).__name__})"
