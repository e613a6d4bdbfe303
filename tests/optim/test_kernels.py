import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreting import assert_passes_interpreted, needs_triton

HERE = Path(__file__).parent


@pytest.mark.middle
@needs_triton
def test_the_kernels_pass_their_tests_in_tritons_interpreter():
    assert_passes_interpreted(HERE / "interpreted.py")


@pytest.mark.full
@needs_triton
def test_the_kernels_pass_their_longest_tests_too():
    assert_passes_interpreted(HERE / "interpreted.py", marked="full")


@pytest.mark.middle
def test_importing_fleetx_imports_neither_triton_nor_the_compiler():
    program = "import sys, fleetx, fleetx.optim; print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
