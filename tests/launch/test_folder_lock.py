import fcntl
import os
import re

import pytest

from fleetx.launch import folder_lock
from fleetx.launch.folder_lock import LOCK, locked
from fleetx.launch.say import LaunchError

MASTER = "the job that meets at 10.0.0.1:6170"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(folder_lock, "_WAIT", 0.0)


def test_a_second_job_in_the_same_folder_is_refused_until_the_first_has_ended(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with locked(tmp_path, "job a", "node1"):
        said = rf"link is in use by another job \(job a, process {os.getpid()} on node1, since .*\).*with --log_dir"
        with pytest.raises(LaunchError, match=said), locked(tmp_path / "link", "job b", "node1"):
            pass
    with locked(tmp_path, "job b", "node1"):
        assert (tmp_path / LOCK).read_text().startswith("job b, process ")


def test_machines_of_one_job_share_a_folder_and_nobody_else_does(tmp_path):
    with locked(tmp_path, MASTER, "node1", is_shared=True):
        with locked(tmp_path, MASTER, "node2", is_shared=True):
            assert "on node1" in (tmp_path / LOCK).read_text()
        for other in (f"{MASTER}1", "job a"):
            with pytest.raises(LaunchError, match=re.escape(MASTER)), locked(tmp_path, other, "node2", is_shared=True):
                pass
    with locked(tmp_path, "job a", "node1"), pytest.raises(LaunchError), locked(tmp_path, "job a", "node1"):
        pass  # the user may have given both the same --job_id


def test_a_name_that_the_last_job_left_there_blocks_nobody(tmp_path):
    (tmp_path / LOCK).write_text("job a, process 1 on node1, since yesterday\n" * 9)
    with locked(tmp_path, "job b", "node1"):
        assert (tmp_path / LOCK).read_text().count("\n") == 1


@pytest.mark.parametrize("fault", ["no locks", "read-only", "a link", "no folder"])
def test_a_file_system_that_cannot_lock_is_used_without_and_that_is_said(tmp_path, monkeypatch, capsys, fault):
    def fails(*_):
        raise OSError(37, "No locks available")

    folder = tmp_path
    if fault == "no locks":
        monkeypatch.setattr(fcntl, "flock", fails)
    elif fault == "read-only":
        monkeypatch.setattr(os, "open", fails)
    elif fault == "a link":
        (tmp_path / "other").write_text("kept")
        (tmp_path / LOCK).symlink_to(tmp_path / "other")
    else:
        folder = tmp_path / "none"
    with locked(folder, "job a", "node1"):
        said = rf"fleetrun: --log_dir {re.escape(str(folder))} cannot be locked \(.+\): the logs of another job"
        assert re.match(said, capsys.readouterr().err)
    assert fault != "a link" or (tmp_path / "other").read_text() == "kept"


def test_a_lock_that_another_user_has_made_is_respected(tmp_path, monkeypatch):
    really = os.open

    def others(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return really(path, flags, *mode)

    with locked(tmp_path, "job a", "node1"):
        monkeypatch.setattr(os, "open", others)
        with pytest.raises(LaunchError, match="job a, process"), locked(tmp_path, "job b", "node1"):
            pass
    with locked(tmp_path, "job b", "node1"):
        pass
