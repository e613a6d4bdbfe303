"""Looking at checkpoints without a job: which are whole, and what is wrong with the others."""

from pathlib import Path
from typing import NamedTuple

from fleetx.checkpoint import manifest as manifests
from fleetx.checkpoint.durable import require_digest
from fleetx.checkpoint.errors import CheckpointError, Damaged
from fleetx.checkpoint.folder import CheckpointFolder
from fleetx.checkpoint.manifest import Manifest


class Inspected(NamedTuple):
    """A checkpoint, its manifest if that can be read, and what is wrong with it, or None."""

    path: Path
    manifest: Manifest | None
    problem: str | None


def inspect(path: str | Path, *, any_name: bool = True) -> Inspected:
    """Read every byte of a checkpoint. Without `any_name` it must still be called as it was when it was saved."""
    path, manifest = Path(path), None
    try:
        manifest = manifests.read_manifest(path)
        manifests.require_listed(path, manifest, any_name)
        for name, facts in manifest.files.items():
            require_digest(path / name, facts.digest)
    except Damaged as damage:
        return Inspected(path, manifest, str(damage))
    return Inspected(path, manifest, None)


def survey(folder: str | Path) -> list[Inspected]:
    """Inspect all checkpoints of a folder, the newest first; or a single one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoints are in a folder, and {folder} is none. Give the folder of a job.")
    if (folder / manifests.FILE).exists():  # it is a checkpoint itself
        return [inspect(folder)]
    return [inspect(found.path, any_name=False) for found in CheckpointFolder(folder, keep=None).found()]
