"""The planner on a CUDA device: what is planned fits, measured by the allocator; memory that really runs out."""

import gc

import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet
from fleetx.doctor.examining import examine
from fleetx.planner.feeding import Feeding
from fleetx.planner.tryout import Tryout

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32")]
MIB = 2**20


@pytest.fixture(autouse=True)
def _gpu(tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norm(hidden)))))


def make(width=512, depth=12):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 8)).cuda()


def batches(count=4, size=64):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 128, 512, generator=generator), torch.randn(size, 128, 8, generator=generator))
        for _ in range(count)
    ]


def trained(configs, cap_after_first=None):
    made = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    if configs is not None:
        made.recompute = True
        made.recompute_configs = {"checkpoints": "auto", **configs}
    model = make()
    step = X.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), nn.functional.mse_loss, made)
    torch.manual_seed(3)
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(step(batch).loss.item())
        if number == 0 and cap_after_first is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(cap_after_first(step.plan) / total)
    # Not on the device: there they would count as others', and their places as gaps.
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}, step.plan


def same(ours, plain):
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], value) for name, value in plain[1].items())


@pytest.mark.parametrize("budget", ["900MiB", "1300MiB", None])
@pytest.mark.parametrize("offload", [False, True])
def test_a_planned_run_gives_the_same_bits_within_its_budget(budget, offload):
    plain = trained(None)
    torch.cuda.empty_cache()
    ours = trained({"memory_budget": budget, "enable_offload": offload})
    same(ours, plain)
    plan = ours[2]
    assert plan.verified
    assert plan.measured.peak <= 1.03 * plan.memory
    if budget is not None:
        assert any(state.save != "everything" or state.home == "host" for state in plan.states)


@pytest.mark.parametrize("one_forward", [False, True])
@pytest.mark.parametrize("share", [0.45, 0.7, 1.0])
def test_the_predicted_peak_is_what_the_allocator_reserves(share, one_forward):
    model, (sample, *_) = make(), batches(1)
    settings = {"loss_fn": nn.functional.mse_loss, "global_batch": 96, "one_forward": one_forward}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    most = X.plan(model, sample, optimizer=optimizer, one_forward=True, loss_fn=nn.functional.mse_loss, global_batch=96)
    memory = int(most.peak * share)
    first = X.plan(model, sample, optimizer=optimizer, memory=memory, **settings)
    checked = Tryout(Feeding(model, nn.functional.mse_loss), sample).run(first)
    # Blocks are large beside a budget this small: what is allowed for gaps between them may not be needed.
    assert 0.9 * first.peak <= checked.measured.peak <= 1.05 * first.peak
    plan = X.plan(model, sample, optimizer=optimizer, memory=memory, verify=True, **settings)
    assert plan.measured.peak == pytest.approx(plan.peak, rel=0.05)
    assert plan.measured.peak <= plan.memory


def test_a_step_that_really_runs_out_of_memory_is_done_again():
    plain = trained(None)
    torch.cuda.empty_cache()
    ours = trained(
        {"memory_budget": "1300MiB", "oom_retry": True, "enable_offload": True},
        cap_after_first=lambda plan: plan.measured.peak * 0.8,
    )
    same(ours, plain)
    assert ours[2].peak < 1300 * MIB * 0.9


def test_a_budget_that_the_device_does_not_have_is_lowered_and_said_so():
    model, (sample, *_) = make(), batches(1)
    plan = X.plan(model, sample, loss_fn=nn.functional.mse_loss, memory="9000GiB")
    assert plan.memory <= torch.cuda.get_device_properties(0).total_memory
    assert any("planned for that" in note for note in plan.notes)


def test_a_sample_on_the_device_means_that_batches_are_there_whole():
    model, (sample, *_) = make(), batches(1)
    there = tuple(part.cuda() for part in sample)
    plan = X.plan(model, there, loss_fn=nn.functional.mse_loss, global_batch=256)
    assert plan.peak_by_kind["whole batch"] == 256 * 128 * (512 + 8) * 4
    assert "batch" not in plan.peak_by_kind


@pytest.mark.filterwarnings("ignore:::torch")  # its compiler's own
@pytest.mark.filterwarnings("ignore:of the segment that ends at .* only the inputs are saved")
def test_compiled_segments_are_planned():
    model, (sample, *_) = make(), batches(1)
    plan = X.plan(model, sample, loss_fn=nn.functional.mse_loss, memory="1GiB", global_batch=64, compile=True)
    checked = Tryout(Feeding(model, nn.functional.mse_loss), sample).run(plan)
    assert checked.measured.peak <= 1.05 * plan.memory
    # Not those of a device that waits for the host; other programs on the same device make steps longer, not shorter.
    assert plan.seconds <= 1.5 * checked.measured.seconds


def test_the_doctor_finds_the_device_and_its_link():
    report = examine()
    assert report.is_healthy, [check for check in report.checks if not check.passed]
    assert any("GB/s" in text for text in report.facts["links"].values())
