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


def examine() -> Report:
    """All facts and all checks. A fact that cannot be had is a check that failed; the rest goes on."""
    report = Report()
    for name, ask in FACTS.items():
        try:
            report.facts[name] = ask()
        except Exception as error:  # a broken driver, say: that is what the doctor is for
            report.facts[name] = {}
            report.checks.append(Check(name, False, f"{type(error).__name__}: {error}", "report this"))
    report.checks += clashes.check_clashes()
    report.checks += space.check_space()
    report.checks += trials.packages()
    report.checks += [trials.step_on(device) for device in devices.all_devices()]
    report.checks.append(trials.two_workers())
    return report
