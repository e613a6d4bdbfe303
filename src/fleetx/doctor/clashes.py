"""Other things called fleetx: another distribution, or a file or folder of that name that Python would find first."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import fleetx
from fleetx.doctor.finding import Check

_NAME = "fleetx"


def clashes() -> dict[str, Any]:
    """Where FleetX runs from, and what else has its name."""
    return {"running from": _shown(_own()), "others": [_shown(path) for path in others()]}


def check_clashes() -> list[Check]:
    """That the name is FleetX's alone, and that no other distribution wrote into its folder."""
    found = others()
    remedy = "rename or remove it, or start Python in another folder: whichever comes first on the path is imported"
    one_place = Check(
        "the name fleetx is ours alone", not found, ", ".join(_shown(path) for path in found) or "nothing else", remedy
    )
    providers = sorted(set(importlib.metadata.packages_distributions().get(_NAME, [])))
    strangers = [name for name in providers if name.lower() != _NAME]
    detail = ", ".join(providers) or "not installed, imported from a folder"
    remedy = f"pip uninstall {' '.join(strangers)}, then install fleetx anew: both write into the same folder"
    return [one_place, Check("one distribution provides it", not strangers, detail, remedy if strangers else "")]


def others() -> list[Path]:
    """Modules or packages of the same name elsewhere on Python's path."""
    folders = [Path(entry or ".").resolve() for entry in dict.fromkeys(sys.path)]
    candidates = [folder / name for folder in folders for name in (f"{_NAME}/__init__.py", f"{_NAME}.py")]
    return [one for one in candidates if one.is_file() and one.resolve().parent != _own()]


def _own() -> Path:
    return Path(fleetx.__file__).resolve().parent


def _shown(path: Path) -> str:
    """With the home folder as ~: reports are sent to others."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
