import io
import os
import subprocess
import sys

import pytest

from fleetx.launch.logs import require_folder
from fleetx.launch.say import LaunchError, show
from tests.waiting import GUARD


def test_nobody_need_listen():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as console:
        show("lost\n", console)
        show("lost too\n", console)
    closed = io.StringIO()
    closed.close()
    show("lost\n", closed)


@pytest.mark.middle
def test_a_reader_who_has_seen_enough_does_not_change_the_exit_code(tmp_path):
    script = "import sys; from fleetx.launch.say import say, show; sys.stdin.read(); say('x'); show('y', sys.stdout)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe) as job:
        job.stdout.close()
        job.stderr.close()
        job.stdin.close()  # now it speaks
        assert job.wait(GUARD) == 0


def test_a_folder_for_logs_that_is_none_is_refused(tmp_path):
    require_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(
        LaunchError, match=r"--log_dir .*file must be a folder to write to, and it is not \(File exists"
    ):
        require_folder(tmp_path / "file")
