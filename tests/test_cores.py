"""Which cores a process may use, read from kernels of several kinds that are written down here."""

import os

import pytest

from fleetx.control_groups import group_folders
from fleetx.cores import Cores, cores

VERSION_1 = "29 25 0:26 {root} {point}/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
VERSION_2 = "30 25 0:27 {root} {point}/all rw - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Write down what a kernel says: the group of this process, mounts, and files of groups; gives its /proc."""

    def write(group, mounts, files, root="/"):
        proc, point = tmp_path / "proc", tmp_path / "a mount"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(group)
        escaped = str(point).replace(" ", "\\040")
        text = "".join(mount.format(root=root, point=escaped) for mount in mounts)
        (proc / "self" / "mountinfo").write_text(f"25 1 8:1 / / rw - ext4 /dev/root rw\n{text}")
        for name, content in files.items():
            (point / name).parent.mkdir(parents=True, exist_ok=True)
            (point / name).write_text(content)
        return proc

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return write


def version_1(quota, folder=""):
    where = f"cpu,cpuacct/{folder}"
    return {f"{where}/cpu.cfs_quota_us": f"{quota}\n", f"{where}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("group", "files", "root", "quota"),
    [
        ("0::/\n", {}, "/", None),
        ("0::/a/b\n", {"all/a/b/cpu.max": "max 100000\n", "all/a/cpu.max": "max 100000\n"}, "/", None),
        ("0::/a/b\n", {"all/a/b/cpu.max": "800000 100000\n"}, "/", 8.0),
        ("0::/a/b\n", {"all/a/b/cpu.max": "800000 100000\n", "all/a/cpu.max": "25000 50000\n"}, "/", 0.5),
        ("0::/a/b\n", {"all/a/b/cpu.max": "50000 100000\n", "all/cpu.max": "800000 100000\n"}, "/", 0.5),
        # a container with a namespace of its own, and one without, which sees less than the path says
        ("0::/\n", {"all/cpu.max": "150000 100000\n"}, "/", 1.5),
        ("0::/docker/x\n", {"all/cpu.max": "150000 100000\n"}, "/docker/x", 1.5),
        ("0::/docker/x/in\n", {"all/in/cpu.max": "150000 100000\n"}, "/docker/x", 1.5),
        ("0::/\n", {"all/cpu.max": "150000 100000\n"}, "/../..", 1.5),
        ("0::/../y\n", {"all/cpu.max": "150000 100000\n"}, "/", 1.5),
        # version 1, alone and with an empty version 2 next to it
        ("3:cpu,cpuacct:/a\n", version_1(300000, "a"), "/", 3.0),
        ("5:cpuset:/z\n3:cpu,cpuacct:/a\n0::/\n", version_1(300000), "/", 3.0),
        ("3:cpu,cpuacct:/a\n", version_1(-1, "a"), "/", None),
        ("3:cpuset:/a\n", version_1(300000, "a"), "/", None),
    ],
)
def test_the_smallest_quota_of_all_groups_counts(kernel, group, files, root, quota):
    found = cores(kernel(group, [VERSION_1, VERSION_2], files, root))
    assert found == Cores(machine=64, affinity=16, quota=quota)


@pytest.mark.parametrize("content", [b"", b"\n", b"many 100000", b"1 0", b"0 100000", b"-1 -1", b"1e5 1e5", b"\xff 1"])
def test_files_that_make_no_sense_set_no_limit(kernel, content):
    files = {"all/a/cpu.max": "", **version_1("", "a")}
    proc = kernel("0::/a\n3:cpu:/a\nnonsense\n:\n\n", [VERSION_1, VERSION_2, "nonsense\n", "- - -\n"], files)
    for file in files:
        if "period" not in file:
            (proc.parent / "a mount" / file).write_bytes(content)
    assert cores(proc).quota is None


def test_a_kernel_that_says_nothing_sets_no_limit(tmp_path):
    assert cores(tmp_path).quota is None
    assert group_folders("cpu", proc=tmp_path) == []


@pytest.mark.parametrize(
    ("found", "usable", "shares", "text"),
    [
        (Cores(8, 8), 8, [8, 4, 2, 1], "8 of 8"),
        (Cores(8, 1), 1, [1, 1, 1, 1], "1 of 8 (1 in the CPU set)"),
        (Cores(8, 8, 3.5), 3, [3, 1, 1, 1], "3 of 8 (a quota of 3.5)"),
        (Cores(64, 16, 0.5), 1, [1, 1, 1, 1], "1 of 64 (16 in the CPU set, a quota of 0.5)"),
    ],
)
def test_workers_share_what_is_usable(found, usable, shares, text):
    assert found.usable == usable
    assert [found.share(workers) for workers in (1, 2, 3, 16)] == shares
    assert str(found) == text
