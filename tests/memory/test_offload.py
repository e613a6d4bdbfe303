"""The way to the host and back, on a machine without a GPU: the same code, copying at once."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.memory.offload import Offloader, Trip, is_worth_moving


@pytest.fixture
def offloader():
    return Offloader(torch.device("cpu"))


def trip(segment=0, lag=1, lead=1):
    return Trip(segment, segment + lag, segment + lead)


def parked(offloader, *shape, segment=0, lag=1, lead=1, **options):
    tensor = torch.randn(*shape)
    return tensor.clone(), offloader.park(tensor, trip(segment, lag, lead), **options)


def test_a_tensor_comes_back_as_it_was(offloader):
    for tensor in (
        torch.randn(3, 4),
        torch.randn(8, 6)[::2, 1:4],
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 3).expand(4, 3),
        torch.arange(6),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor(2.0),
        torch.ones(5, dtype=torch.bool),
    ):
        view = offloader.park(tensor, trip(), at_once=True)
        back = view.fetch()
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.storage_offset() == tensor.storage_offset()
        assert back.dtype == tensor.dtype
        del view
    assert offloader.arena.in_use == 0


def test_tensors_that_share_memory_share_their_copy(offloader):
    whole = torch.randn(10, 4)
    views = [offloader.park(part, trip()) for part in (whole, whole[2:5], whole.t(), whole.detach())]
    assert offloader.traffic.to_host == 160
    offloader.release_due(1)
    parts = [view.fetch() for view in views]
    assert torch.equal(parts[1], whole[2:5])
    assert offloader.traffic.to_device == 160
    assert parts[0].untyped_storage().data_ptr() == parts[2].untyped_storage().data_ptr()


def test_a_tensor_that_was_written_to_is_another_one(offloader):
    tensor = torch.zeros(4)
    first = offloader.park(tensor, trip())
    offloader.finish(tensor.untyped_storage().data_ptr())
    tensor.add_(1)
    second = offloader.park(tensor, trip())
    assert first.fetch().sum() == 0
    assert second.fetch().sum() == 4


def test_a_write_that_concerns_nobody_any_more_stops_nobody(offloader):
    tensor = torch.zeros(4)
    view = offloader.park(tensor, trip())
    tensor.add_(1)
    offloader.release_due(5)  # of another forward
    with pytest.raises(RuntimeError, match="written in place while its copy was on the way"):
        view.fetch()


def test_memory_that_others_still_use_moves_once(offloader):
    tensor = torch.randn(4)
    views = []
    for segment in range(3):
        views.append(offloader.park(tensor, trip(segment)))
        offloader.release_due(segment + 1)
    assert offloader.traffic.tensors == 1
    offloader.prefetch(3)
    for view in reversed(views):
        assert torch.equal(view.fetch(), tensor)
    assert offloader.traffic.to_device == 16
    tensor.add_(1)
    changed = offloader.park(tensor, trip(4), at_once=True)
    assert offloader.traffic.tensors == 2
    assert torch.equal(changed.fetch(), tensor)


def test_another_tensor_in_the_same_memory_is_another_tensor(offloader):
    memory = bytearray(16)
    first = torch.frombuffer(memory, dtype=torch.float32)
    view = offloader.park(first, trip(), at_once=True)
    del first
    second = torch.frombuffer(memory, dtype=torch.float32).fill_(7)
    assert second._version == 1
    third = torch.frombuffer(memory, dtype=torch.float32)
    again = offloader.park(third, trip(), at_once=True)
    assert again.parked is not view.parked
    assert again.fetch().sum() == 28


@pytest.mark.parametrize(
    "view",
    [
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.empty(4).untyped_storage(),
    ],
    ids=["conjugate", "negative", "without memory"],
)
def test_what_is_more_than_its_memory_stays(view, monkeypatch):
    monkeypatch.setattr("fleetx.memory.offload.SMALLEST", 1)
    if isinstance(view, torch.UntypedStorage):  # as FSDP does with parameters that are not needed
        tensor = torch.empty(0).set_(view, 0, (4,))
        view.resize_(0)
        view = tensor
    assert not is_worth_moving(view)


def test_a_write_while_the_copy_is_under_way_is_noticed(offloader):
    tensor = torch.zeros(4)
    offloader.park(tensor, trip())
    view = offloader.park(tensor, trip())
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="written in place while its copy was on the way"):
        view.fetch()


def test_memory_is_let_go_when_the_copies_are_made(offloader):
    view = offloader.park(torch.randn(4), trip())
    memory = weakref.ref(view.parked.source)
    offloader.release_due(0)
    assert memory() is not None
    offloader.release_due(1)
    assert memory() is None
    assert view.fetch().shape == (4,)


def test_what_nobody_wants_is_forgotten_without_the_collector(offloader):
    gc.disable()
    try:
        views = [parked(offloader, 5, segment=segment)[1] for segment in range(4)]
        assert offloader.arena.in_use == 4 * 512
        offloader.release_due(9)
        views.pop(1)
        assert offloader.arena.in_use == 3 * 512
        offloader.prefetch(3)  # brings the one below, too
        views[2].fetch()
        assert offloader.traffic.tensors == 4
        views.clear()
        assert offloader.arena.in_use == 0
        assert not offloader._segments
    finally:
        gc.enable()


AHEAD = [(0, [0, 1, 1, 2, 3]), (1, [1, 1, 2, 3, 3]), (2, [1, 1, 3, 3, 3]), (9, [3] * 5)]


@pytest.mark.parametrize(("lead", "asked_for"), AHEAD)
def test_segments_below_are_asked_for_ahead(offloader, lead, asked_for):
    views = {number: parked(offloader, 5, segment=number, lead=lead, at_once=True)[1] for number in (0, 1, 4)}
    counted = []
    for number in (5, 4, 2, 1, 0):
        offloader.prefetch(number)
        offloader.prefetch(number)
        if number in views:
            views[number].fetch()
        counted.append(offloader.traffic.to_device // 20)
    assert counted == asked_for


def test_what_has_not_left_yet_is_used_where_it_is(offloader):
    expected, view = parked(offloader, 5, lag=3)
    offloader.release_due(2)
    assert torch.equal(view.fetch(), expected)
    assert offloader.traffic.to_device == 0
    offloader.release_due(3)
    assert torch.equal(view.fetch(), expected)
    assert offloader.traffic.to_device == 20


def test_fetching_again_brings_it_again(offloader):
    expected, view = parked(offloader, 5, at_once=True)
    for _ in range(3):
        assert torch.equal(view.fetch(), expected)
    assert offloader.traffic.to_device == 3 * 20


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4), st.booleans()), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_any_order_of_fetching_gives_what_was_parked(tensors, random):
    offloader = Offloader(torch.device("cpu"))
    waiting = []
    for size, segment, at_once in tensors:
        waiting.append(parked(offloader, size, segment=segment, at_once=at_once))
        if random.random() < 0.3:
            offloader.release_due(random.randrange(6))
        if random.random() < 0.3:
            offloader.prefetch(random.randrange(6))
        if random.random() < 0.2:
            waiting.pop(random.randrange(len(waiting)))
    random.shuffle(waiting)
    while waiting:
        expected, view = waiting.pop()
        for _ in range(random.choice([1, 1, 2])):
            assert torch.equal(view.fetch(), expected)
        del view
    assert offloader.arena.in_use == 0


def test_views_of_something_far_larger_stay():
    whole = torch.randn(1000)
    assert is_worth_moving(whole)
    assert not is_worth_moving(whole[:10])
    assert not is_worth_moving(torch.empty(0))
    assert not is_worth_moving(torch.eye(3).to_sparse())


def test_a_limit_is_told_of():
    offloader = Offloader(torch.device("cpu"), limit=2**20)
    offloader.park(torch.zeros(2**10), trip())
    with pytest.raises(MemoryError, match="may use 1 MiB"):
        offloader.park(torch.zeros(2**20), trip())
