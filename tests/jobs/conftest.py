import pytest

from tests.jobs.running import Running


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def running(tmp_path):
    """Makes a `Running`, and leaves nothing of it behind."""
    jobs = []

    def begin(*args, **environment):
        jobs.append(Running(args[0], tmp_path, *args[1:], **environment))
        return jobs[0]

    yield begin
    for job in jobs:
        job.launcher.kill()
        job.launcher.wait()
