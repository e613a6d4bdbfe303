"""Compiled segments: equal to the last bit to the same segments, compiled and saving everything."""

import pytest
import torch

from tests.memory.comparing import STATES, assert_exact, cycled
from tests.memory.zoo import MODELS

pytestmark = [
    pytest.mark.filterwarnings("ignore:::torch"),  # of a compiler that looks at everything
    pytest.mark.filterwarnings("ignore:of the segment that ends at .* only the inputs are saved"),
]
FEW = [("lstm", "mixed"), pytest.param("resnet", "inputs-host", marks=pytest.mark.full)]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.middle
@pytest.mark.parametrize(("model", "state"), FEW)
def test_compiled_segments_equal_the_compiled_plain_run(model, state):
    example = MODELS[model]()
    assert_exact(example, cycled(example.cuts["blocks"], STATES[state]), compile=True)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["inputs", "dear", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_compiled_equals_its_compiled_plain_run(model, state, precision):
    """Dear outputs in low precision: only if the compiler rounds where eager code does."""
    example = MODELS[model]()
    rounding = {"options": {"emulate_precision_casts": True}} if precision == "bf16" and state != "inputs" else {}
    segments = cycled(example.cuts["blocks"], STATES[state])
    assert_exact(example, segments, precision, steps=2, compile=True, **rounding)
