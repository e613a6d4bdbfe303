"""Starts pytest on files whose kernels Triton's interpreter runs: that is decided once for a whole process."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.jobs.starting import ROOT

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def assert_passes_interpreted(*files, marked=None):
    """All tests of these files, or only those that are marked so."""
    only = [] if marked is None else ["-m", marked]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *only, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True, scope="module")
def scalars_count():
    """Newer versions of numpy refuse to take arrays of one number for a number, and the interpreter's scalars are.

    For files that run interpreted: they import it.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield
