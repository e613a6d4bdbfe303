"""What the doctor found: facts, and checks that passed or failed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """Something that was tried. `remedy` says what to do if it failed."""

    name: str
    passed: bool
    detail: str = ""
    remedy: str = ""


@dataclass
class Report:
    """All of it."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [asdict(check) for check in self.checks]
        return {"healthy": self.is_healthy, "facts": self.facts, "checks": checks}


def tried(name: str, attempt: Callable[[], str], remedy: str) -> Check:
    """Run an attempt: what it returns is the detail, what it raises is the failure, whatever that is."""
    try:
        return Check(name, True, attempt())
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}".strip(), remedy)
