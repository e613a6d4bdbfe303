"""Every model of the zoo, cut in every way: equal to the plain run to the last bit."""

import pytest

from fleetx import memory
from tests.memory.comparing import STATES, assert_exact, cycled
from tests.memory.zoo import MODELS

CUTS = [(name, cut) for name, make in MODELS.items() for cut in make().cuts]
PRECISIONS = ["fp32", "fp64", "bf16"]


@pytest.mark.parametrize(("model", "cut"), CUTS, ids=lambda value: value)
def test_recompute_equals_the_plain_run(model, cut):
    example = MODELS[model]()
    assert_exact(example, example.cuts[cut])


@pytest.mark.parametrize("state", ["inputs-host", "dear", "dear-host", "everything-host"])
@pytest.mark.parametrize("model", MODELS)
def test_every_state_of_a_segment_equals_the_plain_run(model, state):
    example = MODELS[model]()
    assert_exact(example, cycled(example.cuts["blocks"], STATES[state]))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_other_precisions_equal_the_plain_run(model, precision):
    example = MODELS[model]()
    assert_exact(example, cycled(example.cuts["blocks"], STATES["mixed"]), precision)


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("model", "cut"), CUTS, ids=lambda value: value)
def test_every_cut_in_every_state_and_precision_equals_the_plain_run(model, cut, state, precision):
    example = MODELS[model]()
    assert_exact(example, cycled(example.cuts[cut], STATES[state]), precision)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:in the segment that ends at .* a torch.autograd.Function is called")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_can_be_cut_at_each_output_that_is_listed(model):
    batch = MODELS[model]().batch(0)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    for cut in memory.outputs(MODELS[model]().model, *args, **kwargs):
        if ".attention.self" not in cut:  # BERT computes its projections in one product unless somebody watches them
            assert_exact(MODELS[model](), [cut], steps=2)
