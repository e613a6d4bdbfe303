"""The manifest: what a checkpoint holds, file by file. It is written last, and what it does not name is never read."""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleetx.checkpoint.durable import Digest, require_size
from fleetx.checkpoint.errors import Damaged
from fleetx.checkpoint.tensor_file import Outline, payload
from fleetx.names import displacement

FILE = "manifest.json"
MODEL = "model.safetensors"
FORMAT = "fleetx checkpoint 1"
_LARGEST = 2**28


@dataclass(frozen=True)
class FileFacts:
    """What one file must hold: size, hash, and of a safetensors file its tensors."""

    size: int
    sha256: str
    tensors: Outline | None = None

    @property
    def digest(self) -> Digest:
        """Size and hash."""
        return Digest(self.size, self.sha256)


@dataclass(frozen=True)
class Job:
    """Who a checkpoint is for: a name, if one was given, and what must fit together to be loaded.

    `optimizers` gives for each its class, the sizes of its groups, and the names in them, which older ones lack.
    """

    name: str | None
    optimizers: dict[str, list[Any]]


@dataclass(frozen=True)
class Manifest:
    """Everything there is to know about a checkpoint without reading its files."""

    name: str
    serial: int
    step: int
    epoch: int | None
    workers: int
    job: Job
    files: dict[str, FileFacts]
    written: dict[str, str]

    def to_bytes(self) -> bytes:
        """As a file holds it: JSON in one certain form, with a checksum of itself."""
        body = {"format": FORMAT, **asdict(self)}
        return _canonical(body | {"checksum": _checksum(body)})

    def file(self, name: str) -> FileFacts:
        """The facts of one file; raises `Damaged` if a checkpoint lacks it."""
        if name not in self.files:
            raise Damaged(f"its manifest lists no {name}")
        return self.files[name]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises `Damaged` unless every byte of it is as it was written."""
    path = folder / FILE
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would block, and a device may never end
            raise Damaged(f"{FILE} is not a file")
        if found.st_size > _LARGEST:
            raise Damaged(f"{FILE} has {found.st_size:,} bytes, which no manifest has")
        contents = path.read_bytes()
    except FileNotFoundError:
        if not folder.is_dir():
            raise Damaged("there is no such folder: not all workers share the file system, or it was removed") from None
        raise Damaged(f"there is no {FILE}: the save was not finished, or something was removed") from None
    except OSError as error:
        raise Damaged(f"{FILE} cannot be read ({error.strerror or error})") from error
    return parse(contents)


def parse(contents: bytes) -> Manifest:
    """A manifest from its bytes."""
    try:
        body = json.loads(contents)
        if not isinstance(body, dict):
            raise ValueError("not an object")
        if body.get("format", FORMAT) != FORMAT and _canonical(body) == contents:
            raise Damaged(f"it was written as {body['format']!r}, and this version of FleetX reads {FORMAT!r}")
        checksum = body.pop("checksum")
        # The bytes themselves are compared too: another spelling of the same values was not written by us.
        if checksum != _checksum(body) or _canonical(body | {"checksum": checksum}) != contents:
            raise ValueError("its checksum differs")
        return _from_json(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{FILE} does not hold what was written ({error or type(error).__name__})") from error


def require_listed(folder: Path, manifest: Manifest, any_name: bool = False) -> None:
    """Raise `Damaged` unless the folder holds the manifest's files, each of the right size, and nothing else.

    Hidden files are let be: file systems and backup tools leave them anywhere.
    """
    if folder.name != manifest.name and not any_name:
        raise Damaged(f"its manifest is that of {manifest.name}: it was renamed or copied, or is not all there")
    for name, facts in manifest.files.items():
        require_size(folder / name, facts.size)
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise Damaged(f"the folder cannot be read ({error.strerror or error})") from error
    strangers = {name for name in entries if not name.startswith(".")} - {FILE, *manifest.files}
    if strangers:
        raise Damaged(f"{', '.join(sorted(strangers)[:3])} is not in its manifest: somebody else wrote there")


def difference(manifest: Manifest, here: Job, models: Outline) -> str | None:
    """Why a checkpoint is not one of this job, whose models have these tensors; None if it is."""
    saved = manifest.job
    if here.name is not None and saved.name != here.name:
        whose = "a job without a name" if saved.name is None else f"another job, {saved.name!r}"
        return f"it is of {whose}, and this one is {here.name!r}"
    saved_models = manifest.file(MODEL).tensors or {}
    if saved_models != models:
        return f"it is of another model: {_first_difference(saved_models, models)}"
    kinds, kinds_here = ({name: its[:2] for name, its in job.optimizers.items()} for job in (saved, here))
    if kinds != kinds_here:
        return f"it is of another optimizer: {_first_difference(kinds, kinds_here)}"
    for name, its in here.optimizers.items():
        if displaced := displacement((*saved.optimizers[name], [])[2], its[2]):
            return f"it is of another order of parameters: of {name}, {displaced}"
    return None


def _first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    for name, value in here.items():
        if name not in saved:
            return f"{name} is not in it"
        if saved[name] != value:
            return f"{name} is {saved[name]} there and {value} here"
    return f"{next(name for name in saved if name not in here)} is not here"


def _from_json(body: dict[str, Any]) -> Manifest:
    files = {_plain_name(name): _facts(facts) for name, facts in body["files"].items()}
    job, workers = body["job"], int(body["workers"])
    if not 1 <= workers <= len(files) or min(int(body["step"]), int(body["serial"])) < 0:
        raise ValueError("its counts are impossible")
    if job["name"] is not None and not isinstance(job["name"], str):
        raise ValueError("the name of its job is none")
    return Manifest(
        name=_plain_name(body["name"]),
        serial=int(body["serial"]),
        step=int(body["step"]),
        epoch=None if body["epoch"] is None else int(body["epoch"]),
        workers=workers,
        job=Job(job["name"], {name: _optimizer(its) for name, its in job["optimizers"].items()}),
        files=files,
        written=dict(body["written"]),
    )


def _optimizer(its: Any) -> list[Any]:
    if not isinstance(its, list) or len(its) not in (2, 3):
        raise ValueError("an optimizer of its job is none")
    if len(its) == 3 and any(not isinstance(name, str | None) for names in its[2] for name in names):
        raise ValueError("the names of an optimizer's parameters are none")
    return its


def _facts(facts: dict[str, Any]) -> FileFacts:
    tensors = facts["tensors"]
    if tensors is not None and payload(tensors) > facts["size"]:
        raise ValueError("its tensors are larger than their file")
    return FileFacts(int(facts["size"]), str(facts["sha256"]), None if tensors is None else dict(tensors))


def _plain_name(name: str) -> str:
    """A manifest names files beside it and no others."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file beside it")
    return name


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
