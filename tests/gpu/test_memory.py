"""Recompute and offload on a CUDA device: bits, streams, pinned memory, and what is left after failures."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetx import memory
from fleetx.memory import Segment, offload
from tests.jobs.starting import ROOT, start
from tests.memory.comparing import STATES, Example, assert_exact, cycled, step
from tests.memory.zoo import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:of the segment that ends at .* only the inputs are saved"),
]
MIB = 2**20


@pytest.fixture(autouse=True)
def _deterministic():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _move_small_tensors(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1)


def on_device(example):
    """The example on the GPU."""

    def moved(value):
        return value.detach().cuda().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    batch = example.batch
    return Example(example.model.cuda(), lambda step: pytree.tree_map(moved, batch(step)), example.cuts, example.loss)


@pytest.mark.usefixtures("_move_small_tensors")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["inputs", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_equals_the_plain_run(model, state, precision):
    example = on_device(MODELS[model]())
    assert_exact(example, cycled(example.cuts["blocks"], STATES[state]), precision)


@pytest.mark.usefixtures("_move_small_tensors")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["inputs", "inputs-host", "everything-host"])
@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_compiled_segments_equal_the_compiled_plain_run(model, state, precision):
    example = on_device(MODELS[model]())
    assert_exact(example, cycled(example.cuts["blocks"], STATES[state]), precision, compile=True)


@pytest.mark.usefixtures("_move_small_tensors")
@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_compiled_segments_with_dear_outputs_differ_in_the_last_bits_only(model):
    """What is computed again is computed together with the backward, and the compiler sums in another order there."""
    example = on_device(MODELS[model]())
    plain = copy.deepcopy(example.model)
    memory.apply(plain, example.cuts["blocks"], save="everything", compile=True)
    memory.apply(example.model, cycled(example.cuts["blocks"], STATES["mixed"]), compile=True)
    outcomes = []
    for one in (plain, example.model):
        torch.manual_seed(0)
        outcomes.append(step(one, example.batch(0), example.loss, "fp32"))
    theirs, mine = (torch.cat([g.flatten() for g in one.gradients.values()]) for one in outcomes)
    assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


class Block(nn.Module):
    """Much memory, some work, and random numbers."""

    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.relu(self.wide(x))))


def stack(blocks=8, width=512):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 1)).cuda()


def trained(model, batches):
    torch.manual_seed(1)
    for batch in batches:
        model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(params=["quick", "slow"])
def _copies(request, monkeypatch):
    """Copies that come late: whatever does not wait for them shows."""
    if request.param == "slow":
        for name, stream in (("_send", "out_stream"), ("_bring", "in_stream")):
            monkeypatch.setattr(offload.Offloader, name, after_a_nap(getattr(offload.Offloader, name), stream))


def after_a_nap(copy, stream):
    def late(self, *arguments):
        with torch.cuda.stream(getattr(self, stream)):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
        return copy(self, *arguments)

    return late


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize(("lag", "lead"), [(1, 1), (1, 0), (2, 3), (20, 20)])
@pytest.mark.parametrize("save", ["inputs", "dear", "everything"])
def test_copies_beside_the_computation_are_exact(save, lag, lead):
    """Large tensors and batches that change: the copies really run beside the kernels, and blocks are used again."""
    model = stack()
    batches = [torch.randn(size, 512, device="cuda") for size in (8192, 4096, 12000, 8192, 8192)]
    expected = trained(copy.deepcopy(model), batches)
    away = {"home": "host", "lag": lag, "lead": lead}
    segments = [Segment(str(number), save=save, **(away if number % 3 else {})) for number in range(8)]
    applied = memory.apply(model, segments)
    for mine, theirs in zip(trained(model, batches), expected, strict=True):
        assert torch.equal(mine, theirs)
    figures = applied.statistics()
    assert figures["bytes_to_host"] > 100 * MIB
    assert applied.experience.offloader.arena.in_use == 0


def peak(model, batch):
    for _ in range(2):
        model.zero_grad()
        gc.collect()  # else memory of earlier tests may be freed in between, and count for us
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(batch).square().mean().backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_falls_as_more_is_computed_again_and_moved():
    batch, names = torch.randn(16384, 512, device="cuda"), [str(i) for i in range(8)]
    peaks = [peak(stack(), batch)]
    for state in ({"save": "inputs"}, {"save": "inputs", "home": "host"}):
        model = stack()
        memory.apply(model, names, **state)
        peaks.append(peak(model, batch))
    assert peaks[0] > 2 * peaks[1]
    assert peaks[1] - peaks[2] > 3 * batch.nbytes  # of seven inputs


def test_pinned_memory_is_made_to_measure_and_kept():
    model, batch = stack(), torch.randn(10_001, 512, device="cuda")
    applied = memory.apply(model, [str(i) for i in range(8)], home="host")
    trained(model, [batch] * 3)
    slabs = list(applied.experience.offloader.arena.slabs)
    trained(model, [batch] * 3)
    assert slabs == applied.experience.offloader.arena.slabs
    figures = applied.statistics()
    assert figures["host_reserved"] <= 1.05 * figures["host_peak"]


def test_copies_with_time_to_spare_expose_no_wait():
    model = stack(width=1024)
    batch = torch.randn(4096, 1024, device="cuda")  # 16 MiB to move in the time of 2 x 34 GFLOP
    applied = memory.apply(model, [str(i) for i in range(8)], home="host")
    trained(model, [batch] * 5)
    before = applied.statistics()["exposed_ms"]
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    trained(model, [batch] * 10)
    end.record()
    end.synchronize()
    assert applied.statistics()["exposed_ms"] - before < 0.05 * begin.elapsed_time(end)


class Greedy:
    """A hook that asks for more memory than there is when it is called for the n-th time."""

    def __init__(self, calls):
        self.calls_left = calls

    def __call__(self, module, args):
        self.calls_left -= 1
        if self.calls_left == 0:
            torch.empty(2**50, device="cuda")


@pytest.mark.parametrize("run", [1, 2], ids=["forward", "backward"])
def test_out_of_memory_in_the_middle_leaves_nothing_and_the_next_step_works(run):
    model, batch = stack(), torch.randn(8192, 512, device="cuda")
    expected = trained(copy.deepcopy(model), [batch])
    applied = memory.apply(model, [str(i) for i in range(8)], home="host")
    trained(model, [batch])
    model.zero_grad(set_to_none=True)
    gc.collect()
    held = torch.cuda.memory_allocated()
    hook = model[4].narrow.register_forward_pre_hook(Greedy(run))
    with pytest.raises(torch.OutOfMemoryError):
        trained(model, [batch])
    hook.remove()
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert applied.experience.offloader.arena.in_use == 0
    assert torch.cuda.memory_allocated() <= held
    for mine, theirs in zip(trained(model, [batch]), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_forward_without_a_backward_gives_its_memory_back():
    model, batch = stack(), torch.randn(8192, 512, device="cuda")
    applied = memory.apply(model, [str(i) for i in range(8)], home="host")
    trained(model, [batch])
    output = model(batch)
    held = torch.cuda.memory_allocated()
    assert applied.experience.offloader.arena.in_use > 0
    del output
    assert applied.experience.offloader.arena.in_use == 0
    assert torch.cuda.memory_allocated() < held
    expected = trained(copy.deepcopy(stack()), [batch])
    model.zero_grad()
    for mine, theirs in zip(trained(model, [batch]), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_synchronised_batch_norm_of_two_workers_equals_the_plain_run(tmp_path):
    start(ROOT / "tests/gpu/synchronised_norms.py", tmp_path, workers=2, launcher="torchrun")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_the_first_attention_of_a_process_is_repeated_as_it_was():
    """It makes torch choose the order of its kernels: what was noted before that is another order."""
    start(ROOT / "tests/gpu/first_attention.py", launcher=None)
