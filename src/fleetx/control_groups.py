"""Where the kernel shows the limits of this process's control groups: in containers, and under batch systems."""

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Mount(NamedTuple):
    """A place where a hierarchy of control groups can be seen, from the group `root` downwards."""

    root: PurePosixPath
    point: Path


def group_folders(controller: str, pid: int | str = "self", proc: Path = Path("/proc")) -> list[list[Path]]:
    """The folder of the process's group for `controller`, followed by those of the groups around it.

    One list for each hierarchy: a system may have both versions of control groups. What cannot be read or understood
    is left out.
    """
    chains = []
    for line in read_text(proc / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        chains.append(_visible(PurePosixPath(group), _mounts(controller if controllers else "", proc)))
    return [chain for chain in chains if chain]


def _visible(group: PurePosixPath, mounts: list[_Mount]) -> list[Path]:
    """The group's folder and those around it, as far as a mount shows them."""
    for mount in mounts:
        if group.is_relative_to(mount.root) and ".." not in group.parts:
            inside = group.relative_to(mount.root)
            return [mount.point / above for above in (inside, *inside.parents)]
    # A container may see less than its own path says: then the root of what it sees is the nearest group.
    return [mount.point for mount in mounts[:1]]


def _mounts(controller: str, proc: Path) -> list[_Mount]:
    """Where the hierarchy of a controller is mounted; version 2 has one hierarchy for all of them, here ""."""
    found = []
    for line in read_text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), [*after.split(), "", "", ""]
        if len(fields) < 5 or kind[0] != ("cgroup" if controller else "cgroup2"):
            continue
        if not controller or controller in kind[2].split(","):
            found.append(_Mount(PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4]))))
    return found


def _unescaped(text: str) -> str:
    r"""The kernel writes a space in a path as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_text(file: Path) -> str:
    """What the kernel says there; nothing on another kernel, or if it is not for us to see."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
