"""Files that are on the disk when they are said to be, and hashes of what was meant and of what is there."""

import errno
import hashlib
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleetx.checkpoint.errors import Damaged

CHUNK = 2**22
_THREADS = 4


class Digest(NamedTuple):
    """What a file must hold."""

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Digest:
    """Write a new file and bring it to the disk; the digest is that of the pieces, not of what arrived."""
    hashed, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                chunk = memoryview(piece)[start : start + CHUNK]
                hashed.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
        # The system drops its copy in memory, so that reading back reads the disk.
        _advise(descriptor, "POSIX_FADV_DONTNEED")
    finally:
        os.close(descriptor)
    return Digest(size, hashed.hexdigest())


def _advise(descriptor: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, getattr(os, advice))


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a file without its name is lost."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems keep names at once, and know no other way
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and all above it that are missing, and bring their names to the disk."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    if missing:
        folder.mkdir(parents=True)
    for one in missing:
        sync_folder(one.parent)


def require_digest(path: Path, expected: Digest) -> None:
    """Read a file and raise `Damaged` unless it holds exactly what was written."""
    buffer = memoryview(bytearray(min(expected.size, CHUNK)))
    whole, rest = divmod(expected.size, CHUNK)
    _read(path, expected, [*(buffer for _ in range(whole)), buffer[:rest]])


def read_file(path: Path, expected: Digest) -> bytes:
    """The bytes of a file; raises `Damaged` unless they are exactly those that were written."""
    contents = bytearray(expected.size)
    read_into(path, expected, [memoryview(contents)])
    return bytes(contents)


def read_into(path: Path, expected: Digest, pieces: Sequence[memoryview]) -> None:
    """Fill the pieces with a file, one after the other; raises `Damaged` unless it is exactly what was written.

    What is handed out is what was hashed: the file is read once.
    """
    chunks = [piece[start : start + CHUNK] for piece in pieces for start in range(0, len(piece), CHUNK)]
    _read(path, expected, chunks)


def _read(path: Path, expected: Digest, chunks: Sequence[memoryview]) -> None:
    require_size(path, expected.size)
    hashed, done = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            _advise(file.fileno(), "POSIX_FADV_WILLNEED")
            for chunk in chunks:
                left = chunk
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise Damaged(f"{path.name} ends after {done:,} of {expected.size:,} bytes")
                    left, done = left[count:], done + count
                hashed.update(chunk)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror or error})") from error
    if done != expected.size or hashed.hexdigest() != expected.sha256:
        raise Damaged(f"{path.name} does not hold what was written (its SHA-256 differs)")


def require_size(path: Path, size: int) -> None:
    """Raise `Damaged` unless there is a file of that size."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror or error})") from error
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is not a file")
    if found.st_size != size:
        raise Damaged(f"{path.name} has {found.st_size:,} bytes, and {size:,} were written")


def side_by_side(action: Callable[[str], Any], names: Sequence[str]) -> list[Any]:
    """Do the same to several files; hashing one takes one core, and reading and writing wait for the disk.

    Threads of our own: Python's pools refuse work when the program ends, and a save may be going on then.
    """
    waiting, results, errors = deque(names), {}, {}

    def work() -> None:
        while waiting and not errors:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                results[name] = action(name)
            except BaseException as error:
                errors[name] = error

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(names)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    for name in names:
        if name in errors:
            raise errors[name]
    return [results[name] for name in names]
