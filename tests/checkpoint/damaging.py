"""Ways to damage a checkpoint, for tests that must find every one of them caught."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

from fleetx.checkpoint.manifest import _canonical, _checksum

MANIFEST = "manifest.json"
IMPOSSIBLE = [
    *(None, True, -1, 2**70, 1e300, "", "x", [], [1], {}, {"a": 1}, {"pairs": [[1]]}, {"dict": 3}, {"size": ["x"]}),
    *({"tensor": {"in": "own", "name": "none"}}, {"bytes": "*"}, {"dtype": "torch.no"}, {"array": 3}),
]


def damage(path, kind, seed=0):
    """Damage the checkpoint in folder `path` in one of the ways of `KINDS`; says what was done."""
    path = Path(path)
    return KINDS[kind](path, random.Random(f"{kind} {seed}"))


def rewrite(path, file, change):
    """Change the JSON of a file in place, and the manifest with it: all hashes are right."""
    tree = json.loads((path / file).read_bytes())
    change(tree)
    if file == MANIFEST:
        _write_manifest(path, tree)
    else:
        rewrite_text(path, file, lambda _: json.dumps(tree).encode("ascii"))


def rewrite_text(path, file, change):
    """The same with the bytes of a file that is not the manifest."""
    contents = change((path / file).read_bytes())
    (path / file).write_bytes(contents)
    body = json.loads((path / MANIFEST).read_bytes())
    body["files"][file] |= {"size": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    _write_manifest(path, body)


def _write_manifest(path, body):
    body.pop("checksum", None)
    (path / MANIFEST).write_bytes(_canonical(body | {"checksum": _checksum(body)}))


def change_anything(tree, rng):
    """Put something else in any place of a tree of JSON, or take it away; says what was done."""
    places = list(_places(tree))
    depth = rng.choice(sorted({len(place) for place, _ in places}))
    place, holder = rng.choice([found for found in places if len(found[0]) == depth])
    if rng.random() < 0.3:
        del holder[place[-1]]
        return f"{place} deleted"
    holder[place[-1]] = value = rng.choice(IMPOSSIBLE)
    return f"{place} is {value}"


def _places(tree, path=()):
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key), tree
        yield from _places(tree[key], (*path, key))


def _files(path, *, manifest=True):
    return sorted(file for file in path.iterdir() if manifest or file.name != MANIFEST)


def _any_file(path, rng, **options):
    """A file, the larger the likelier, as a fault of the disk would hit it; but each has its chance."""
    files = [file for file in _files(path, **options) if file.stat().st_size]
    return rng.choices(files, [file.stat().st_size + 1000 for file in files])[0]


def _flip_bit(path, rng):
    file = _any_file(path, rng)
    data = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"{file.name}: bit {bit} of byte {place}"


def _truncate(path, rng):
    file = _any_file(path, rng)
    size = rng.choice([0, 1, rng.randrange(file.stat().st_size), file.stat().st_size - 1])
    with file.open("r+b") as opened:
        opened.truncate(size)
    return f"{file.name}: cut to {size} bytes"


def _zero_block(path, rng):
    """A block that was never written: holes read as zeros, and the size is right."""
    file = _any_file(path, rng)
    data = bytearray(file.read_bytes())
    block = rng.choice([1, 16, 512, 4096])
    # A block that is zero anyhow would not be a fault.
    starts = [start for start in range(0, len(data), block) if any(data[start : start + block])]
    start = rng.choice(starts)
    data[start : start + block] = bytes(len(data[start : start + block]))
    file.write_bytes(data)
    return f"{file.name}: {block} bytes from {start} on are zero"


def _swap_blocks(path, rng):
    """Blocks in each other's place: every byte is there, but not where it was."""
    file = _any_file(path, rng)
    data = bytearray(file.read_bytes())
    block = max(1, min(512, len(data) // 2))
    pairs = [(0, start) for start in range(block, len(data) - block + 1, block) if data[:block] != data[start:][:block]]
    if not pairs:
        return _flip_bit(path, rng)
    first, second = rng.choice(pairs)
    data[first : first + block], data[second : second + block] = (
        data[second : second + block],
        data[first : first + block],
    )
    file.write_bytes(data)
    return f"{file.name}: blocks at {first} and {second} swapped"


def _remove_file(path, rng):
    file = rng.choice(_files(path))
    file.unlink()
    return f"{file.name}: removed"


def _append(path, rng):
    file = _any_file(path, rng)
    junk = rng.randbytes(rng.randrange(1, 600))
    with file.open("ab") as opened:
        opened.write(junk)
    return f"{file.name}: {len(junk)} bytes more"


def _add_file(path, rng):
    name = rng.choice(["junk.bin", "rank-00099.safetensors", "model.safetensors.tmp", "core"])
    (path / name).write_bytes(rng.randbytes(100))
    return f"{name}: added"


def _half(path, rng):
    """As if a copy or a rename of many files had stopped in the middle: some files, no manifest."""
    files = _files(path, manifest=False)
    for file in [path / MANIFEST, *rng.sample(files, rng.randrange(1, len(files)))]:
        file.unlink()
    return "only some of the files are there"


def _empty_folder(path, rng):
    for file in _files(path):
        file.unlink()
    return "nothing is there"


def _foreign_manifest(path, rng):
    """The manifest of another checkpoint of the same job, or of nobody."""
    others = [other for other in path.parent.iterdir() if other != path and (other / MANIFEST).exists()]
    if others:
        shutil.copyfile(rng.choice(others) / MANIFEST, path / MANIFEST)
        return "the manifest is another checkpoint's"
    (path / MANIFEST).write_text('{"format": "something else"}\n', encoding="utf-8")
    return "the manifest is nobody's"


def _folder_for_file(path, rng):
    file = rng.choice(_files(path))
    file.unlink()
    file.mkdir()
    return f"{file.name}: a folder stands in its place"


def _endless_file(path, rng):
    """Whoever reads it waits, or never comes to an end."""
    file = rng.choice(_files(path))
    file.unlink()
    if rng.random() < 0.5:
        os.mkfifo(file)
        return f"{file.name}: a pipe stands in its place"
    file.symlink_to("/dev/zero")
    return f"{file.name}: a link to an endless device stands in its place"


KINDS = {
    "flipped bit": _flip_bit,
    "truncated file": _truncate,
    "zeroed block": _zero_block,
    "swapped blocks": _swap_blocks,
    "missing file": _remove_file,
    "junk at the end": _append,
    "strange file": _add_file,
    "half a folder": _half,
    "empty folder": _empty_folder,
    "foreign manifest": _foreign_manifest,
    "folder for a file": _folder_for_file,
    "endless file": _endless_file,
}
