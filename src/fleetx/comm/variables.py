"""Reading what batch systems and MPI put into the environment."""

import re
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20000, 12000  # below 32768, where Linux begins to take ports for connections


def whole_number(environment: Mapping[str, str], variable: str, remedy: str, default: int | None = None) -> int:
    """The variable's value; `remedy` ends the message if it is no number."""
    text = environment.get(variable, "" if default is None else str(default))
    # No more digits than a number of SLURM has: Python refuses thousands of them with an error of its own.
    if not re.fullmatch(r"[0-9]{1,19}", text):
        found = repr(text) if variable in environment else "not set"
        raise ValueError(f"{variable} must be a whole number, and it is {found}. {remedy}")
    return int(text)


def port_of_job(number: int) -> str:
    """A port that all workers of a job find by its number, and seldom that of another job on the same host."""
    return str(_FIRST_PORT + number % _PORTS)
