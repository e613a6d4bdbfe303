"""Folders with a space in their path, which torch's compiler for the CPU does not quote in its commands.

So it is in torch 2.11 to 2.13, see https://github.com/pytorch/pytorch/pull/191010: folders of libraries, of the
compiler's cache and of temporary files.
"""

import contextlib
import hashlib
import os
import shlex
import sysconfig
from pathlib import Path

import torch

from fleetx.notices import tell_once


def check_compiler_paths() -> None:
    """Let torch's compiler work where torch itself is in such a folder; raise where that cannot be done."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # most of the compiler: not before it is used

    temporary = default_cache_dir()
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or temporary
    paths = {
        "its cache is (TORCHINDUCTOR_CACHE_DIR)": cache,
        "temporary files are (TMPDIR)": temporary,
        "Python's libraries are": sysconfig.get_config_var("LIBDIR") or "",
    }
    wrong = [f"{path!r}, where {what}" for what, path in paths.items() if _is_split(path)]
    if not wrong:
        _give_torch_another_path(Path(cache))
        return
    message = (
        "torch.compile builds code for the CPU only in folders that have no space in their path, and there is one in "
        f"{' and in '.join(wrong)}: use other folders, or do not compile."
    )
    if not torch.cuda.is_available():
        raise RuntimeError(message)
    tell_once("compiler paths", message)


def _give_torch_another_path(cache: Path) -> None:
    """Let the compiler find torch's libraries through a link without a space. It lies in the cache: code does, too."""
    from torch.utils import cpp_extension

    folder = cpp_extension.TORCH_LIB_PATH
    if not _is_split(folder):
        return
    link = cache / f"torch-{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    with contextlib.suppress(FileExistsError):
        cache.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    cpp_extension.TORCH_LIB_PATH = str(link)


def _is_split(path: str) -> bool:
    """Whether a command line would not give the path back when it is split as a shell does it."""
    try:
        return shlex.split(path) not in ([path], [])
    except ValueError:  # a quotation mark that is not closed
        return True
