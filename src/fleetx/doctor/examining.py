"""The whole examination, part by part."""

from collections.abc import Callable
from typing import Any

from fleetx.doctor import allocator, clashes, devices, space, trials, versions
from fleetx.doctor.finding import Check, Report

FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": versions.versions,
    "devices": devices.devices,
    "links": devices.links,
    "settings": allocator.allocator,
    "names": clashes.clashes,
    "room": space.space,
}
CHECKS: dict[str, Callable[[], list[Check]]] = {
    "the name fleetx": lambda: clashes.check_clashes(),
    "room": lambda: space.check_space(),
    "packages": lambda: trials.packages(),
    "a step": lambda: [trials.step_on(device) for device in devices.all_devices()],
    "two workers": lambda: [trials.two_workers()],
}


def examine() -> Report:
    """All facts and all checks. What cannot be had, or not be checked, is a check that failed; the rest goes on."""
    report = Report()
    for name, ask in FACTS.items():
        try:
            report.facts[name] = ask()
        except Exception as error:  # a broken driver, say: that is what the doctor is for
            report.facts[name] = {}
            report.checks.append(_broken(name, error))
    for name, check in CHECKS.items():
        try:
            report.checks += check()
        except Exception as error:  # what a check itself needs may be broken, too
            report.checks.append(_broken(name, error))
    return report


def _broken(name: str, error: Exception) -> Check:
    return Check(name, False, f"{type(error).__name__}: {error}", "report this")
