"""Memory on the host: blocks never overlap, what is in use is counted, and no more is held than a step needed."""

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleetx.memory import arena as host_memory
from fleetx.memory.arena import ALIGNMENT, SMALL_SLAB, HostArena, Slab, _free_of_container
from fleetx.notices import _told

SIZES = st.one_of(st.integers(1, 5000), st.integers(1, SMALL_SLAB), st.sampled_from([512, 4096, SMALL_SLAB // 4]))
ACTIONS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60)


def aligned(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


@settings(max_examples=60)
@given(ACTIONS)
def test_blocks_never_overlap_and_are_counted(actions):
    arena = HostArena(pin_for=None)
    blocks = []
    for takes, size, choice in actions:
        if takes or not blocks:
            block = arena.take(size)
            assert block.memory.numel() >= size
            assert block.memory.data_ptr() % ALIGNMENT == 0
            blocks.append(block)
        else:
            arena.give_back(blocks.pop(choice % len(blocks)))
        assert arena.in_use == sum(block.size for block in blocks)
        assert arena.in_use <= arena.most_in_use
        assert arena.in_use <= arena.reserved
        spans = sorted((block.memory.data_ptr(), block.memory.data_ptr() + block.size) for block in blocks)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for slab in arena.slabs:
            taken = sum(block.size for block in blocks if block.slab is slab)
            assert taken + sum(length for _, length in slab.free) == slab.memory.numel()
    for block in blocks:
        arena.give_back(block)
    assert arena.in_use == 0
    assert all(slab.is_idle for slab in arena.slabs)


@settings(max_examples=40)
@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(2, 4))
@example([1, 8388097, 8388097, 9713665], 2)  # where the first one fits into the place of the second
@example([512, 8 * 2**20, 8 * 2**20, 20 * 2**20], 4)
def test_equal_steps_hold_no_more_than_they_need(sizes, steps):
    """However the blocks come back."""
    arena = HostArena(pin_for=None)
    for step in range(steps):
        blocks = [arena.take(size) for size in sizes]
        for block in blocks[::-1] if step % 2 else blocks:
            arena.give_back(block)
        assert arena.in_use == 0
        # Small tensors share slabs, of which the last one may be nearly empty.
        assert arena.reserved <= arena.most_in_use * 1.05 + SMALL_SLAB


@settings(max_examples=40)
@given(st.lists(st.lists(SIZES, min_size=1, max_size=8), min_size=2, max_size=6))
def test_changing_steps_hold_no_more_than_the_largest_and_the_present_one(steps):
    arena = HostArena(pin_for=None)
    most = 0
    for sizes in steps:
        blocks = [arena.take(size) for size in sizes]
        most = max(most, arena.in_use)
        for block in blocks:
            arena.give_back(block)
    assert arena.reserved <= 3 * most + SMALL_SLAB


@settings(max_examples=40)
@given(st.lists(SIZES, min_size=1, max_size=20), st.integers(ALIGNMENT, 2 * SMALL_SLAB))
def test_a_limit_is_kept_and_refused_before_anything_is_allocated(sizes, limit):
    arena = HostArena(pin_for=None, limit=limit)
    for size in sizes:
        before, slabs = arena.in_use, list(arena.slabs)
        try:
            arena.take(size)
        except MemoryError as error:
            assert "host_memory" in str(error)  # noqa: PT017
            assert arena.in_use == before
            assert all(slab in slabs for slab in arena.slabs)
            return
        assert arena.reserved <= limit


def grown_in_each_step(arena, steps):
    """How many slabs come anew in each of these steps, which are tensors of these sizes, or some after others."""
    counts = []
    for parts in steps:
        before = set(map(id, arena.slabs))
        kept = list(arena.slabs)  # so that no new one has the name of one that is gone
        for sizes in parts:
            blocks = [arena.take(size) for size in sizes]
            for block in reversed(blocks):
                arena.give_back(block)
        counts.append(sum(id(slab) not in before for slab in arena.slabs))
        del kept
    return counts


@pytest.mark.parametrize(
    "steps",
    [
        [[[171 * 12300] * 24], [[169 * 12300] * 24]],  # micro-batches that differ by a sample or two
        [[[1000] * 4, [20 * 2**20] * 4]],  # never there together
        [[[20 * 2**20] * 4, [1000] * 4, [8 * 2**20] * 8]],
    ],
    ids=["around the border", "small, then large", "large, small, large"],
)
def test_what_comes_again_and_again_is_pinned_once(steps):
    arena = HostArena(pin_for=None)
    counts = grown_in_each_step(arena, steps * 5)
    assert sum(counts[: 2 * len(steps)]) > 0
    assert sum(counts[3 * len(steps) :]) == 0


def test_before_a_limit_is_exceeded_what_is_idle_is_given_back():
    large = SMALL_SLAB + 2**20
    arena = HostArena(pin_for=None, limit=large)
    arena.give_back(arena.take(1000))
    block = arena.take(large)
    assert arena.reserved == large
    arena.give_back(block)
    assert arena.take(1000).slab.is_shared is False  # there is room in what is idle


def test_before_a_limit_is_exceeded_small_and_large_tensors_share():
    large = SMALL_SLAB // 2
    arena = HostArena(pin_for=None, limit=SMALL_SLAB + large)
    blocks = [arena.take(size) for size in (512, large, large)]
    assert [block.slab.is_shared for block in blocks] == [True, False, True]
    with pytest.raises(MemoryError, match="host_memory"):
        arena.take(large)
    arena.give_back(blocks.pop(1))
    assert arena.take(700).slab.is_shared


def test_a_limit_below_a_small_slab_can_be_used():
    arena = HostArena(pin_for=None, limit=4096)
    blocks = [arena.take(1000) for _ in range(4)]
    with pytest.raises(MemoryError, match="may use 4 KiB"):
        arena.take(1)
    for block in blocks:
        arena.give_back(block)
    arena.take(4096)


def test_more_than_the_machine_has_is_refused():
    with pytest.raises(MemoryError, match="are free"):
        HostArena(pin_for=None).take(2**60)


def test_memory_is_given_back_to_the_system_but_blocks_live_on():
    arena = HostArena(pin_for=None)
    block = arena.take(5000)
    block.memory.fill_(7)
    arena.release()
    assert arena.reserved == 0
    assert block.memory.sum() == 7 * block.size
    arena.give_back(block)
    assert arena.in_use == 0


def test_blocks_may_come_back_at_any_moment():
    """Tensors are forgotten by finalizers: in the middle of anything, in any thread."""
    arena = HostArena(pin_for=None)

    class Holder:
        def __init__(self):
            self.block = arena.take(700)
            self.me = self  # only the collector finds it

        def __del__(self):
            arena.give_back(self.block)

    failures = []

    def work():
        try:
            for _ in range(300):
                Holder()
                block = arena.take(512)
                value = threading.get_ident() % 200
                block.memory.fill_(value)
                assert bool((block.memory == value).all())
                arena.give_back(block)
        except Exception as error:
            failures.append(error)

    threshold = gc.get_threshold()
    gc.set_threshold(5, 5, 5)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert not failures
    assert arena.in_use == 0
    assert all(slab.is_idle for slab in arena.slabs)


def test_what_only_the_first_step_needed_is_given_back_once():
    arena = HostArena(pin_for=None)
    sizes = [SMALL_SLAB, SMALL_SLAB, SMALL_SLAB]
    for step_sizes in (sizes, sizes[:2], sizes[:2], sizes[:1], sizes[:2]):
        for block in [arena.take(size) for size in step_sizes]:
            arena.give_back(block)
    assert arena.reserved == 2 * SMALL_SLAB


def test_a_container_may_have_less_than_the_machine(tmp_path):
    assert _free_of_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert _free_of_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("5000\n")
    assert _free_of_container(tmp_path) == 4000


def test_tensors_of_any_type_fit():
    arena = HostArena(pin_for=None)
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.complex64):
        block = arena.take(24)
        assert block.memory[: 8 * 3].view(dtype).numel() == 24 // dtype.itemsize


def test_what_the_last_step_had_is_found_at_once(monkeypatch):
    """However many blocks there are: each is asked for room once."""
    arena = HostArena(pin_for=None)
    sizes = [SMALL_SLAB + ALIGNMENT * number for number in range(40)] * 2
    for _ in range(2):
        for block in [arena.take(size) for size in sizes]:
            arena.give_back(block)
    asked, take = [], Slab.take
    monkeypatch.setattr(Slab, "take", lambda slab, size: (asked.append(slab), take(slab, size))[1])
    blocks = [arena.take(size) for size in reversed(sizes)]
    assert len(asked) == len(sizes) == len({id(block.slab) for block in blocks})
    assert all(block.size == block.slab.memory.numel() for block in blocks)


def test_slabs_that_were_given_back_to_the_system_are_not_used_again():
    arena = HostArena(pin_for=None)
    before = arena.take(SMALL_SLAB)
    arena.give_back(before)
    assert arena.in_use == 0
    arena.release()
    assert arena.take(SMALL_SLAB).slab is not before.slab


class FakeCuda:
    """CUDA's list of registered memory."""

    def __init__(self, monkeypatch):
        self.registered, self.errors = set(), 0
        self.capturing = self.is_busy = self.refuses = False
        monkeypatch.setattr(host_memory, "_cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(host_memory, "_kept", [])

    def synchronize(self, _device):
        assert not self.capturing
        if self.is_busy:
            raise RuntimeError("operation not permitted when stream is capturing")

    def cudaHostRegister(self, pointer, _size, _flags):  # noqa: N802
        self.registered.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer):  # noqa: N802
        self.errors += self.refuses
        if not self.refuses:
            self.registered.remove(pointer)
        return int(self.refuses)

    def cudaGetLastError(self):  # noqa: N802
        self.errors -= 1


def pinned_once():
    made = HostArena(pin_for=torch.device("cuda"))
    made.take(SMALL_SLAB)
    return made


def test_pinned_memory_is_unregistered_when_nobody_has_it(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    made = pinned_once()
    assert len(cuda.registered) == 1
    del made
    assert not cuda.registered
    assert not host_memory._registered


def test_while_a_graph_is_captured_pinned_memory_stays_and_goes_with_the_next(monkeypatch):
    """Whoever waited for the device there would break the capture; memory that goes registered breaks later copies."""
    cuda = FakeCuda(monkeypatch)
    made, other = pinned_once(), pinned_once()
    cuda.capturing = True
    del made
    assert len(cuda.registered) == 2
    assert [memory.data_ptr() in cuda.registered for memory, _ in host_memory._registered] == [True]
    cuda.capturing = False
    del other
    assert not cuda.registered
    assert not host_memory._registered


def test_what_cannot_be_unregistered_while_others_capture_is_later(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    made, other = pinned_once(), HostArena(pin_for=torch.device("cuda"))
    cuda.is_busy = True
    made.release()
    assert len(cuda.registered) == len(host_memory._registered) == 1
    cuda.is_busy = False
    other.take(SMALL_SLAB)  # the next time that memory is pinned
    assert not host_memory._registered
    assert len(cuda.registered) == 1


def test_memory_that_cuda_does_not_let_go_of_stays_and_no_kernel_is_blamed(monkeypatch, caplog):
    cuda = FakeCuda(monkeypatch)
    _told.clear()
    made = pinned_once()
    cuda.refuses = True
    del made
    assert cuda.errors == 0
    assert [memory.data_ptr() for memory in host_memory._kept] == [*cuda.registered]
    assert "CUDA would not unpin 16 MiB of host memory" in caplog.text
