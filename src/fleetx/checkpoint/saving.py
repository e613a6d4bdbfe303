"""One save, from the workers' state to a checkpoint that can be trusted.

All workers write into one draft; each brings its files to the disk, reads them back and reports their hashes. Only
then the first worker writes the manifest and renames the draft. Whoever dies on the way leaves a draft, which nobody
takes for a checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetx.checkpoint.durable import require_digest, side_by_side, sync_folder, write_file
from fleetx.checkpoint.errors import CheckpointError, Damaged, explained
from fleetx.checkpoint.folder import CheckpointFolder, draft_name, not_read_back
from fleetx.checkpoint.manifest import MODEL, FileFacts, Job, Manifest
from fleetx.checkpoint.snapshot import HostCopies
from fleetx.checkpoint.state import Collected
from fleetx.checkpoint.tensor_file import outline, write_tensors
from fleetx.checkpoint.workers import Workers
from fleetx.version import __version__

SHARED = "shared.json"


def own_files(rank: int) -> tuple[str, str]:
    """The names of a worker's own files: tensors, and everything else."""
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"


def optimizer_file(rank: int, part: int) -> str:
    """The name of a file with a part of the optimizer's state, which a worker writes."""
    return f"optimizer-{rank:05d}-{part}.safetensors"


def is_of_optimizer(file: str) -> bool:
    """Whether it is such a file."""
    return file.startswith("optimizer-")


@dataclass
class Contents:
    """What this worker writes."""

    step: int
    epoch: int | None
    job: Job
    tensors: dict[str, dict[str, Tensor]]
    texts: dict[str, bytes]
    optimizer_names: set[str]
    # Name and checksum of each weight that all workers should share.
    sums: list[tuple[str, int]]

    def copied_by(self, copies: HostCopies) -> "Contents":
        """The same, independent of what training does next."""
        flat = {f"{file}/{name}": tensor for file, own in self.tensors.items() for name, tensor in own.items()}
        taken = copies.take(flat)
        self.tensors = {file: {name: taken[f"{file}/{name}"] for name in own} for file, own in self.tensors.items()}
        return self


def contents_of(
    collected: Collected,
    *,
    step: int,
    epoch: int | None,
    job: Job,
    weights: int,
    workers: Workers,
    sums: list[tuple[str, int]],
) -> Contents:
    """This worker's part of what was collected; `weights` are the bytes that the first worker writes in any case."""
    tensors_file, text_file = own_files(workers.rank)
    parts = collected.optimizer.tensors
    sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in parts.items()}
    share = share_out(sizes, workers.size, weights)[workers.rank]
    tensors = {tensors_file: collected.mine.tensors}
    texts = {text_file: _as_text(collected.own)}
    # Two files, about as large as that of the weights with Adam, are written and hashed side by side.
    halves = share_out({name: sizes[name] for name in share}, 2, 0)
    tensors |= {
        optimizer_file(workers.rank, number): {name: parts[name] for name in half}
        for number, half in enumerate(halves)
        if half
    }
    if workers.rank == 0:
        tensors[MODEL] = collected.model.tensors
        texts[SHARED] = _as_text(collected.shared)
    for own in tensors.values():
        outline(own)  # raises now, and not beside training
    return Contents(step, epoch, job, tensors, texts, set(parts), sums)


def share_out(sizes: Mapping[str, int], workers: int, head_start: int) -> list[list[str]]:
    """Who writes which of the shared tensors: about equally many bytes each; the first has `head_start` already.

    >>> share_out({"a": 4, "b": 3, "c": 3}, workers=2, head_start=4)
    [['b'], ['a', 'c']]
    """
    load = [head_start] + [0] * (workers - 1)
    shares: list[list[str]] = [[] for _ in range(workers)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        load[rank] += sizes[name]
        shares[rank].append(name)
    return shares


def write(folder: CheckpointFolder, workers: Workers, collected: Contents | Exception) -> Path:
    """Write one checkpoint together with the other workers; gives its path.

    A worker that could not collect its contents takes part too, with the reason: the others must not wait for it.
    """
    steps = workers.each(lambda: _step_of(collected))
    assert isinstance(collected, Contents)
    contents = collected
    what = f"the checkpoint of step {contents.step}"
    if len(set(steps)) > 1:
        raise CheckpointError(f"all workers must save the same step, and they save {', '.join(map(str, steps))}.")
    _require_same_weights(contents.sums, workers)

    def begin() -> str:
        with explained(what, folder.path):
            return folder.open_draft(contents.step)

    def fill() -> dict[str, Any]:
        with explained(what, folder.path):
            return {name: asdict(facts) for name, facts in _write_files(folder.path / draft, contents).items()}

    def finish() -> str:
        with explained(what, folder.path):
            manifest = _manifest(draft, contents, workers.size, reports)
            folder.publish(draft, manifest)
            return manifest.name

    draft = workers.first(begin)
    try:
        reports = workers.each(fill)
        name = workers.first(finish)
    except BaseException:  # also when it is interrupted from the keyboard
        if workers.rank == 0:
            folder.discard(draft)
        raise
    return folder.path / name


def _step_of(contents: Contents | Exception) -> int:
    if isinstance(contents, Exception):
        raise contents
    return contents.step


def _require_same_weights(sums: list[tuple[str, int]], workers: Workers) -> None:
    """Weights are saved once for all: those of a worker that drifted away would be lost without a word."""
    if len(set(workers.exchange(hash(tuple(number for _, number in sums))))) == 1:
        return
    everybody = [dict(map(tuple, theirs)) for theirs in workers.exchange(sums)]
    differing = sorted({rank for rank, theirs in enumerate(everybody) if theirs != everybody[0]})
    names = [name for name, _ in sums if len({theirs.get(name) for theirs in everybody}) > 1]
    raise CheckpointError(
        f"all workers must hold the same weights, and worker {', '.join(map(str, differing))} differs from worker 0 in "
        f"{len(names)} of {len(sums)} parameters ({', '.join(names[:3])}). Weights must change only through the "
        "optimizer, with the same settings on all workers; or give compare_every=0 to fleet.distributed_optimizer if "
        "they are meant to differ."
    )


def _write_files(draft: Path, contents: Contents) -> dict[str, FileFacts]:
    def put(name: str) -> FileFacts:
        if name in contents.texts:
            return FileFacts(*write_file(draft / name, [contents.texts[name]]))
        tensors = contents.tensors[name]
        return FileFacts(*write_tensors(draft / name, tensors), outline(tensors))

    names = [*contents.tensors, *contents.texts]
    facts = dict(zip(names, side_by_side(put, names), strict=True))
    sync_folder(draft)
    try:
        side_by_side(lambda name: require_digest(draft / name, facts[name].digest), names)
    except Damaged as damage:
        raise not_read_back(draft, damage) from damage
    return facts


def _manifest(draft: str, contents: Contents, workers: int, reports: list[dict[str, Any]]) -> Manifest:
    files = {name: FileFacts(**facts) for report in reports for name, facts in report.items()}
    written = {name for file in filter(is_of_optimizer, files) for name in files[file].tensors or ()}
    if written != contents.optimizer_names:
        raise CheckpointError(
            "all workers must hold the same optimizer state, and "
            f"{len(written ^ contents.optimizer_names)} tensors of it were written by none of them, or by one that "
            "alone has them. Build model and optimizer from the same code on every worker."
        )
    name, serial = draft_name(draft)
    return Manifest(
        name=name,
        serial=serial,
        step=contents.step,
        epoch=contents.epoch,
        workers=workers,
        job=contents.job,
        files=files,
        written={
            "fleetx": __version__,
            "torch": torch.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def _as_text(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, allow_nan=False).encode("ascii")
