"""What can go wrong with a checkpoint, in words: rule, value, remedy."""

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read. Whatever was saved before is untouched."""


class Damaged(Exception):  # noqa: N818 - a finding, not an error: the search goes on with an older checkpoint
    """Why a checkpoint is passed over."""


class OfAnotherJob(Damaged):
    """It may be whole, but does not fit to what is there."""


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST}
_INTACT = "Checkpoints saved before are intact, and training can go on."


@contextmanager
def explained(what: str, folder: Path) -> Generator[None]:
    """Around the writing of a checkpoint: say what an error of the system means here, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} was not saved: {_meaning(error, folder)} {_INTACT}") from error


def _meaning(error: OSError, folder: Path) -> str:
    said = f"{error.strerror or error}" + (f", at {error.filename}" if error.filename else "")
    if error.errno in _NO_ROOM:
        return (
            f"there must be room for one checkpoint more than are kept, and {folder} has {_free(folder)} free "
            f"({said}). Free some space, raise the quota, or give a smaller keep=."
        )
    if error.errno in _FORBIDDEN:
        return f"{folder} must be writable, and it is not ({said}). Change its permissions or give another folder."
    if error.errno in _NOT_A_FOLDER:
        return f"{folder} must be a folder, and something else is in the way ({said}). Give another folder."
    if error.errno == errno.ENOENT:
        return (
            f"all workers must see one and the same folder, and something in {folder} is gone ({said}). Give a folder "
            "on a file system that all workers share, and let nobody else clean it up."
        )
    return f"writing to {folder} failed ({said}). Look at that disk, or give another folder."


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"
    except OSError:
        return "an unknown amount"
