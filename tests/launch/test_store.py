import errno
import os
import socket
import subprocess
import sys

import pytest

from fleetx.launch.say import LaunchError
from fleetx.launch.store import AttemptStore
from tests.jobs.starting import ROOT
from tests.launch.hosts import UNSHARE, why_not


def test_a_machine_that_cannot_connect_to_itself_is_said_to_be_so(monkeypatch):
    def unreachable(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(LaunchError, match=r"meet at 127\.0\.0\.1.*\(Network is unreachable\)\. Bring the loopback"):
        AttemptStore("127.0.0.1")


def test_so_is_one_that_does_not_have_the_address():
    with pytest.raises(LaunchError, match=r"meet at 192\.0\.2\.1.*\(Cannot assign requested address\)\. Bring the"):
        AttemptStore("192.0.2.1")


LONELY = """
import sys
sys.argv = ["fleetrun", "--log_dir", "log", "train.py"]
from fleetx.launch.__main__ import main
main()
"""


@pytest.mark.middle
def test_a_new_namespace_whose_loopback_is_down(tmp_path):
    """torch would try to connect for 300 seconds."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "train.py").write_text("from fleetx import fleet\nfleet.init()\nprint('alone', fleet.worker_num())\n")
    for script, code, said in ((LONELY, 1, "Bring the loopback interface up"), ("import train", 0, "alone 1")):
        done = subprocess.run(
            [*UNSHARE, sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
