"""`fleetx doctor`: the examination on the console."""

import json as json_module
from typing import Annotated

import typer

from fleetx.doctor.finding import Report


def doctor_command(json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Versions, devices, links, settings and name clashes; and whether what is installed works."""
    from fleetx.doctor.examining import examine

    report = examine()
    typer.echo(json_module.dumps(report.as_dict(), indent=1) if json else as_text(report))
    if not report.is_healthy:
        raise typer.Exit(1)


def as_text(report: Report) -> str:
    """As a person reads it."""
    lines = []
    for title, facts in report.facts.items():
        shown = {name: value for name, value in facts.items() if value not in (None, [], {})}
        if shown:
            width = max(len(name) for name in shown)
            lines += [title, *(f"  {name.ljust(width)}  {_said(value)}" for name, value in shown.items()), ""]
    lines.append("checks")
    width = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        lines.append(f"  {'ok    ' if check.passed else 'FAILED'}  {check.name.ljust(width)}  {check.detail}".rstrip())
        if not check.passed and check.remedy:
            lines.append(f"          {check.remedy}")
    failed = sum(not check.passed for check in report.checks)
    lines += ["", "all is well" if not failed else f"{failed} of {len(report.checks)} checks failed"]
    return "\n".join(lines)


def _said(value: object) -> str:
    return ", ".join(str(one) for one in value) if isinstance(value, list) else str(value)
