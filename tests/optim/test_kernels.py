import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_pass_their_tests_in_tritons_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        HERE / "interpreted.py",
    ]
    done = subprocess.run(
        command, cwd=HERE.parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_importing_fleetx_imports_neither_triton_nor_the_compiler():
    program = "import sys, fleetx, fleetx.optim; print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
