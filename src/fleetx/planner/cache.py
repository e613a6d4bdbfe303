"""Profiles on disk, found again by everything that they depend on."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fleetx.notices import tell_once
from fleetx.planner.costs import Profile
from fleetx.planner.facts import fact, facts_of_model, facts_of_sample, surroundings
from fleetx.planner.feeding import Feeding
from fleetx.slicing import Batch
from fleetx.version import __version__

FORMAT = 10
_REMEDY = "let XDG_CACHE_HOME name a folder that can be written to."


def folder() -> Path:
    """Where profiles are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fleetx" / "profiles"


def key_of(feeding: Feeding, sample: Batch, cuts: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Changes with the model's structure and code, the shapes, the dtypes, the device, the versions, the settings."""
    facts = {
        **facts_of_model(feeding.model),
        "loss": "" if feeding.loss_fn is None else fact(feeding.loss_fn),
        "compute": "" if feeding.compute is None else fact(feeding.compute),
        "sample": facts_of_sample(sample),
        "precision": str(feeding.precision),
        "cuts": list(cuts),
        "surroundings": surroundings(feeding.device),
        "versions": [torch.__version__, __version__, FORMAT],
        "settings": {name: str(value) for name, value in settings.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def load(key: str) -> Profile | None:
    """The profile with this key; one that cannot be read is said to be so, once, and measured anew."""
    path = folder() / f"{key}.json"
    try:
        profile = Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
        profile.check()
        return profile
    except (FileNotFoundError, NotADirectoryError):  # where no folder can be, `save` says so
        return None
    except Exception as error:  # whatever the file has become
        tell_once(
            f"planner.cache.{key}",
            f"the saved profile {path.name} cannot be read ({type(error).__name__}) and is measured anew; "
            f"delete it if this comes again: {path}",
        )
        return None


def save(key: str, profile: Profile) -> None:
    """Keep a profile; where the disk does not allow that, it is measured again next time."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(profile.as_dict(), file)
        Path(file.name).replace(folder() / f"{key}.json")
    except OSError as error:
        tell_once("planner.cache.save", f"the profile could not be kept for next time ({error}): {_REMEDY}")


def forget(key: str) -> None:
    """Measure anew next time."""
    with suppress(OSError):  # it was never kept, or cannot be changed here
        (folder() / f"{key}.json").unlink()
