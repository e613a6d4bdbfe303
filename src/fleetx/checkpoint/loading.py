"""Finding the newest checkpoint that every worker can trust, and reading it.

All workers look at the same candidates in the same order. Each reads what it needs and checks a share of the rest; a
candidate is taken when nobody found anything wrong with it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fleetx.checkpoint import manifest as manifests
from fleetx.checkpoint.durable import read_file, require_digest, side_by_side
from fleetx.checkpoint.errors import Damaged, OfAnotherJob
from fleetx.checkpoint.manifest import MODEL, Job, Manifest
from fleetx.checkpoint.saving import SHARED, is_of_optimizer, own_files
from fleetx.checkpoint.tensor_file import Outline, read_tensors
from fleetx.checkpoint.trees import TensorSource, decode
from fleetx.checkpoint.workers import Workers

Tree = dict[str, Any]


class PassedOver(NamedTuple):
    """A checkpoint that was not taken, and why."""

    path: Path
    reason: str
    is_whole: bool = False  # and only of another job

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass
class Reading:
    """The files of one checkpoint that a worker needs, read and checked."""

    path: Path
    manifest: Manifest
    texts: dict[str, Tree] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    decoded: dict[str, Tree] = field(default_factory=dict)

    def shared(self) -> Tree:
        """What all workers have in common."""
        return self._decoded(SHARED, {})

    def own(self, rank: int) -> Tree:
        """The own state of a worker."""
        tensors, text = own_files(rank)
        return self._decoded(text, self.tensors[tensors])

    def encoded_own(self, rank: int) -> Tree:
        """The same as JSON, without its tensors."""
        return self.texts[own_files(rank)[1]]["dict"]

    def _decoded(self, text: str, own: Mapping[str, Tensor]) -> Tree:
        if text not in self.decoded:
            optimizer: dict[str, Tensor] = {}
            for name in filter(is_of_optimizer, self.tensors):
                optimizer |= self.tensors[name]
            tensors = TensorSource({"model": self.tensors[MODEL], "optimizer": optimizer, "own": own})
            self.decoded[text] = decode(self.texts[text], tensors)
        return self.decoded[text]


def newest(
    names: list[str],
    folder: Path,
    workers: Workers,
    job: Job,
    models: Outline,
    *,
    require_sound: Callable[[Reading], None],
    any_name: bool = False,
) -> tuple[Reading | None, list[PassedOver]]:
    """The first of the named checkpoints that is whole and of this job, and those before it with what is wrong.

    `require_sound` raises `Damaged` for contents that cannot be put back; `any_name` takes a copy under another name.
    """
    passed: list[PassedOver] = []
    for name in names:
        reading: Reading | None = None
        reason, checksum, is_damaged = None, None, False
        try:
            reading, checksum = _read(folder / name, workers, job, models, any_name)
            require_sound(reading)
        except Damaged as damage:
            reason, is_damaged = str(damage), not isinstance(damage, OfAnotherJob)
        answers = workers.exchange([reason, checksum, is_damaged])
        reason = _verdict(answers)
        if reason is None:
            return reading, passed
        is_whole = all(why is not None and not damaged for why, _, damaged in answers)
        passed.append(PassedOver(folder / name, reason, is_whole))
    return None, passed


def _verdict(answers: list[list[Any]]) -> str | None:
    """One reason for all workers, or None if nobody objects and all have read the same."""
    reasons = {rank: reason for rank, (reason, *_) in enumerate(answers) if reason is not None}
    if reasons:
        rank, reason = next(iter(reasons.items()))
        everybody = len(reasons) == len(answers)
        return reason if everybody else f"{reason} (found by worker {rank})"
    if len({checksum for _, checksum, _ in answers}) > 1:
        return "workers see different checkpoints of this name: they do not share one file system"
    return None


def _read(path: Path, workers: Workers, job: Job, models: Outline, any_name: bool) -> tuple[Reading, str]:
    manifest = manifests.read_manifest(path)
    manifests.require_listed(path, manifest, any_name)
    if (why := manifests.difference(manifest, job, models)) is not None:
        raise OfAnotherJob(why)
    reading = Reading(path, manifest)
    needed = files_needed(manifest, workers.rank, workers.size)
    # Everything is checked by somebody, also what nobody needs.
    others = sorted(set(sorted(manifest.files)[workers.rank :: workers.size]) - needed)

    def read(name: str) -> None:
        facts = manifest.file(name)
        if name not in needed:
            require_digest(path / name, facts.digest)
        elif facts.tensors is None:
            reading.texts[name] = _json(name, read_file(path / name, facts.digest))
        else:
            reading.tensors[name] = read_tensors(path / name, facts.digest, facts.tensors)

    side_by_side(read, [*sorted(needed), *others])
    return reading, hashlib.sha256(manifest.to_bytes()).hexdigest()


def _json(name: str, contents: bytes) -> Tree:
    try:
        return json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is no JSON that a save writes ({error})") from error


def files_needed(manifest: Manifest, rank: int, workers: int) -> set[str]:
    """What a worker loads: the shared files, its own, and for another number of workers some of the others'."""
    shared = {MODEL, SHARED, *filter(is_of_optimizer, manifest.files)}
    if manifest.workers == workers:
        return shared | set(own_files(rank))
    texts = {own_files(other)[1] for other in range(manifest.workers)}
    mine = own_files(rank) if rank < manifest.workers else ()
    return shared | texts | set(own_files(0)) | set(mine)
