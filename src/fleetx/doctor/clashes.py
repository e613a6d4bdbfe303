"""Other things called fleetx: another distribution, or a file or folder of that name that Python would find first."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import fleetx
from fleetx.doctor.finding import Check

_NAME = "fleetx"


def clashes() -> dict[str, Any]:
    """Where FleetX runs from, and what else has its name."""
    return {"running from": _shown(_own()), "others": [_shown(path) for path in others()]}


def check_clashes() -> list[Check]:
    """That the name is FleetX's alone, and that no other distribution wrote into its folder."""
    return [_check_places(), _check_distributions()]


def _check_places() -> Check:
    """FleetX itself in a second place is no stranger: who puts a clone on the path means that one. But it is said."""
    found = others()
    strangers = [path for path in found if not _is_where_pip_has_it(path)]
    detail = "nothing else"
    if strangers:
        detail = ", ".join(_shown(path) for path in strangers)
    elif found:
        detail = (
            f"FleetX twice: imported from {_shown(_own())}, which is first on the path, and not from "
            f"{_shown(found[0].parent)}, where pip has it installed; to use that one take the first off PYTHONPATH"
        )
    remedy = "rename or remove it, or start Python in another folder: whichever comes first on the path is imported"
    return Check("the name fleetx is ours alone", not strangers, detail, remedy)


def _check_distributions() -> Check:
    providers = sorted(set(importlib.metadata.packages_distributions().get(_NAME, [])))
    strangers = [name for name in providers if name.lower() != _NAME]
    detail = ", ".join(providers) or _installed_elsewhere()
    remedy = f"pip uninstall {' '.join(strangers)}, then install fleetx anew: both write into the same folder"
    return Check("one distribution provides it", not strangers, detail, remedy if strangers else "")


def others() -> list[Path]:
    """Modules or packages of the same name elsewhere on Python's path."""
    folders = [Path(entry or ".").resolve() for entry in dict.fromkeys(sys.path)]
    candidates = [folder / name for folder in folders for name in (f"{_NAME}/__init__.py", f"{_NAME}.py")]
    return [one for one in candidates if one.is_file() and not one.samefile(_own() / "__init__.py")]


def _is_where_pip_has_it(path: Path) -> bool:
    """Whether this is the installed FleetX, which another one on the path hides."""
    try:
        installed = importlib.metadata.distribution(_NAME).locate_file(f"{_NAME}/__init__.py")
    except importlib.metadata.PackageNotFoundError:
        return False
    folder = _editable_folder()
    place = Path(str(installed)) if folder is None else folder / "src" / _NAME / "__init__.py"
    return place.is_file() and path.samefile(place)


def _installed_elsewhere() -> str:
    """How FleetX came here if no distribution lists its files: installed editable, or not at all."""
    folder = _editable_folder()
    if folder is None:
        return "not installed, imported from a folder"
    if folder in _own().parents:
        return f"{_NAME}, installed editable from {_shown(folder)}"
    return f"imported from {_shown(_own())}, though pip has it installed editable from {_shown(folder)}"


def _editable_folder() -> Path | None:
    """The folder that pip has installed FleetX from without copying it (PEP 610); None if it has not."""
    try:
        origin = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    described = json.loads(origin or "{}")
    if not described.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(described["url"]).path)).resolve()


def _own() -> Path:
    return Path(fleetx.__file__).resolve().parent


def _shown(path: Path) -> str:
    """With the home folder as ~: reports are sent to others."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
