"""The allocator's settings: what is chosen for the user, and that the user's own choices stay."""

import pytest
import torch

from fleetx.notices import _told
from fleetx.planner import allocator
from fleetx.planner.costs import EXACTLY, Reserve
from tests.planner.profiles import transformer

CUDA = torch.device("cuda")
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def changed(monkeypatch):
    """What the allocator is told, on a machine that may have none."""
    told = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return told


def test_segments_grow_where_nobody_said_otherwise(changed):
    allocator.let_segments_grow(CUDA)
    assert changed == ["expandable_segments:True"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_other_settings_of_the_user_stay(changed, monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    allocator.let_segments_grow(CUDA)
    assert changed == ["max_split_size_mb:64,expandable_segments:True"]


@pytest.mark.parametrize("value", ["True", "False"])
def test_who_chose_is_obeyed(changed, monkeypatch, value):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{value}")
    allocator.let_segments_grow(CUDA)
    assert changed == []


def test_another_allocator_and_the_cpu_are_left_alone(changed, monkeypatch):
    allocator.let_segments_grow(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    allocator.let_segments_grow(CUDA)
    assert changed == []


def test_what_cannot_be_switched_on_is_said(changed, monkeypatch, caplog):
    def refuse(_settings):
        raise RuntimeError("not on this platform")

    _told.discard("allocator.segments")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    allocator.let_segments_grow(CUDA)
    assert any("not on this platform" in record.message for record in caplog.records)


def test_what_is_reserved_for_tensors_is_within_what_may_be_reserved():
    reserve = Reserve(1.02, 40 * 2**20)
    for memory in (41 * 2**20, 10**9, 2**35 + 1):
        assert memory - 2 <= reserve.of(reserve.leaves(memory)) <= memory
    assert reserve.leaves(1000) == 0
    assert EXACTLY.of(EXACTLY.leaves(123)) == 123
    assert allocator.reserve_on(torch.device("cpu")) == EXACTLY


def test_on_a_cpu_nobody_else_is_counted():
    model = torch.nn.Linear(2, 2)
    fixed = {"parameters": 24}
    counted = allocator.with_others(fixed, model, None, torch.ones(2, 2), torch.device("cpu"))
    assert counted == fixed
    assert counted is not fixed


class Gpu:
    """A device on which all tensors are."""

    type = "cuda"

    def __eq__(self, other):
        return True

    __hash__ = None


def test_a_batch_that_is_on_the_device_stays_there_whole():
    profile, batch = transformer(2), {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}
    there = allocator.with_batch_there(profile, batch, Gpu(), times=2.5)
    assert there.fixed["whole batch"] == 2.5 * 4 * (8 * 4 + 8)
    assert there.chain(64).fixed["batch"] == 0 < profile.chain(64).fixed["batch"]
    assert allocator.with_batch_there(profile, batch, CUDA) == profile  # it is elsewhere
    assert allocator.with_batch_there(profile, batch, torch.device("cpu")) == profile  # where nobody moves batches
