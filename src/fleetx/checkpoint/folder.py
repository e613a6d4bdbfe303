"""The folder of a job's checkpoints: drafts, publication by renaming, and which ones are kept.

save-000017-step-1200/    a checkpoint; whatever has another name is not one
.saving-000018-…/         a draft: a save in progress, or one that was interrupted
.deleting-save-…/         on its way out
"""

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fleetx.checkpoint import locking
from fleetx.checkpoint import manifest as manifests
from fleetx.checkpoint.durable import make_folder, require_digest, sync_folder, write_file
from fleetx.checkpoint.errors import CheckpointError, Damaged
from fleetx.checkpoint.manifest import Manifest

_NAME = re.compile(r"save-(\d{6,})-step-(\d+)")
_DRAFT = re.compile(r"\.saving-(\d{6,})-.+")
_REMNANT = re.compile(r"\.(saving|deleting)-.+")
_drafts_here: set[str] = set()


class Found(NamedTuple):
    """Something in the folder that is a checkpoint, or looks like one."""

    path: Path
    serial: int


class CheckpointFolder:
    """Writes, finds and removes checkpoints. Only the first worker of a job uses it to write."""

    def __init__(self, path: Path, keep: int | None) -> None:
        self.path = path
        self.keep = keep
        self.damaged: set[str] = set()
        # Whether what is there is this job's own: only then may it be replaced.
        self.is_ours = False
        self._was_empty = False  # when this job began
        self._hold: locking.Hold | None = None

    def begin_empty(self) -> None:
        """There is nothing to go on with; what another job saves here before this one does is not this one's."""
        self.is_ours = self._was_empty = True

    def found(self) -> list[Found]:
        """Everything that looks like a checkpoint, the newest first; nothing has been checked yet."""
        return sorted((f for f in map(_as_found, _entries(self.path)) if f), key=lambda f: f.serial, reverse=True)

    def drafts(self) -> list[Path]:
        """Saves that were interrupted, and those that another process is at."""
        return [entry for entry in _entries(self.path) if _DRAFT.fullmatch(entry.name)]

    def claim(self) -> None:
        """Keep the folder for this job from now on, if it is there; one that can only be read is nobody's."""
        if self.path.is_dir():
            with contextlib.suppress(OSError):
                self._hold = locking.hold(self.path)

    def open_draft(self, step: int) -> str:
        """A new, empty draft; gives its name."""
        make_folder(self.path)
        self._hold = locking.hold(self.path)
        self._require_ours()
        self._sweep()
        serial = 1 + max(self._serials(), default=0)
        name = f".saving-{serial:06d}-step-{step}-{uuid.uuid4().hex[:8]}"
        (self.path / name).mkdir()
        _drafts_here.add(name)
        return name

    def publish(self, draft: str, manifest: Manifest) -> None:
        """Make a draft, whose files are all written, the newest checkpoint; then remove those that are one too many."""
        contents = manifest.to_bytes()
        folder, final = self.path / draft, self.path / manifest.name
        digest = write_file(folder / manifests.FILE, [contents])
        try:
            require_digest(folder / manifests.FILE, digest)
        except Damaged as damage:
            raise not_read_back(folder, damage) from damage
        sync_folder(folder)
        folder.rename(final)
        sync_folder(self.path)
        _drafts_here.discard(draft)
        try:
            manifests.require_listed(final, manifests.read_manifest(final))
        except Damaged as damage:
            raise not_read_back(final, damage) from damage
        self.is_ours, self._was_empty = True, False
        self._prune(manifest)

    def discard(self, draft: str) -> None:
        """Remove a draft that came to nothing."""
        _drafts_here.discard(draft)
        shutil.rmtree(self.path / draft, ignore_errors=True)

    def _require_ours(self) -> None:
        finished = [found.path.name for found in self.found()]
        if finished and (self._was_empty or not self.is_ours):
            raise CheckpointError(
                f"saves go on where a run was resumed, and {self.path} holds checkpoints of an earlier run "
                f"({finished[0]} is the newest), which would be removed little by little. Call resume() before the "
                "first save to go on with that run, or give another folder to begin a new one."
            )

    def _serials(self) -> Iterable[int]:
        for entry in _entries(self.path):
            if match := _NAME.match(entry.name) or _DRAFT.fullmatch(entry.name):
                yield int(match[1])

    def _sweep(self) -> None:
        """Remove what interrupted saves left. Nobody else writes here while this process holds the folder."""
        for entry in _entries(self.path):
            if _REMNANT.fullmatch(entry.name) and entry.name not in _drafts_here:
                shutil.rmtree(entry, ignore_errors=True)

    def _prune(self, newest: Manifest) -> None:
        """Remove checkpoints older than the last `keep` good ones; never those of another job, nor renamed ones."""
        if self.keep is None:
            return
        models, kept = newest.file(manifests.MODEL).tensors or {}, 0
        for found in self.found():
            theirs = _manifest_of(found.path)
            is_copy = found.serial < 0
            if is_copy or (theirs is not None and manifests.difference(theirs, newest.job, models) is not None):
                continue
            if kept >= self.keep:
                self._remove(found.path)
            elif theirs is not None and found.path.name not in self.damaged:
                kept += 1

    def _remove(self, path: Path) -> None:
        going = path.with_name(f".deleting-{path.name}")
        try:
            # Renamed first: half a checkpoint must never stand under a checkpoint's name.
            path.rename(going)
            shutil.rmtree(going)
        except OSError as error:
            logging.getLogger("fleetx").warning(
                f"the old checkpoint {path} could not be removed ({error.strerror or error}): remove it yourself."
            )


def draft_name(draft: str) -> tuple[str, int]:
    """The name and serial number that a draft's checkpoint will have."""
    serial, step = re.fullmatch(r"\.saving-(\d+)-step-(\d+)-\w+", draft).groups()  # type: ignore[union-attr]
    return f"save-{serial}-step-{step}", int(serial)


def not_read_back(path: Path, damage: Damaged) -> CheckpointError:
    """The error for a file that did not survive being written."""
    return CheckpointError(
        f"a checkpoint must read back as it was written, and {path} does not: {damage}. Do not trust this disk; give a "
        "folder on another one. Checkpoints saved before were not touched."
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []


def _as_found(entry: Path) -> Found | None:
    if match := _NAME.fullmatch(entry.name):
        return Found(entry, int(match[1]))
    # A copy under another name is reported, but no guess is made at how new it is.
    is_strange = not entry.name.startswith(".") and (entry / manifests.FILE).exists()
    return Found(entry, -1) if is_strange else None


def _manifest_of(path: Path) -> Manifest | None:
    try:
        return manifests.read_manifest(path)
    except Damaged:
        return None
