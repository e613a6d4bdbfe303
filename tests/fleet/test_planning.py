"""`checkpoints = "auto"` with a budget: planned with the first batch, same numbers, through every door."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet, memory
from fleetx.fleet import planning as planning_module
from fleetx.fleet.consumption import Consumption, Taken
from fleetx.notices import _told
from fleetx.planner import agreement, cache, driver
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.lines import Line
from fleetx.planner.plan import Plan, fingerprint_of
from fleetx.planner.tryout import Tryout
from fleetx.planner.verify import Verified
from fleetx.units import parse_bytes
from tests.fleet.planned import (
    BUDGET,
    Net,
    RunsOut,
    batches,
    by_minimize,
    by_step,
    prepared,
    same,
    state,
    strategy,
)

pytestmark = pytest.mark.usefixtures("work_clock")

DOORS = {"Step": by_step, "minimize": by_minimize}


def trained(made, door, greed=None, data=None):
    model, optimizer = prepared(made)
    model.greed = greed
    torch.manual_seed(3)
    losses = DOORS[door](model, optimizer, data or batches())
    return state(model, losses), optimizer, model


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("offload", [False, True])
def test_a_planned_run_gives_the_bits_of_a_plain_one(door, offload):
    plain, _, _ = trained(strategy(None), door)
    ours, optimizer, model = trained(strategy({"enable_offload": offload}), door)
    same(ours, plain)
    plan = optimizer.plan
    assert plan.memory == parse_bytes(BUDGET)
    assert (plan.micro_batch, plan.k_steps) == (8, 2)
    assert plan.verified
    assert plan.measured.peak <= 1.03 * plan.memory
    assert any(one.save != "everything" for one in plan.states)
    assert memory.applied_to(model).cut_modules() == [segment.until for segment in plan.segments()]
    assert "2 micro-batches were asked for" in optimizer.overview()


def test_micro_batches_that_a_batch_norm_refuses_are_refused_before_the_first_step():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3))
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    step = X.Step(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss, strategy({}))
    with pytest.raises(ValueError, match=r"2 samples or more, got 2 .* take gradient_merge_configs.k_steps=1 or less"):
        step((torch.randn(2, 4), torch.randn(2, 4)))


def test_the_first_forward_of_a_loop_is_planned_already(monkeypatch):
    model, optimizer = prepared(strategy({}))
    (x, y), *_ = batches(1, size=8)
    with torch.no_grad():
        model(x)
    assert optimizer.plan is None  # nobody can minimise that
    seen = []
    for block in model.blocks:
        block.wide.register_forward_hook(lambda *_: seen.append(1))
    loss = nn.functional.mse_loss(model(x), y)
    assert optimizer.plan is not None
    seen.clear()  # what comes now is recomputed
    optimizer.minimize(loss)
    assert sum(one.save != "everything" for one in optimizer.plan.states) == len(seen) > 0


def test_a_forward_before_the_optimizer_is_made_is_left_alone():
    made = strategy({})
    model = fleet.distributed_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), made)
    model(torch.ones(2, 4)).sum().backward()
    assert memory.applied_to(model) is None


def test_copies_of_a_model_that_is_still_to_be_planned_are_plain_models():
    model, optimizer = prepared(strategy({}))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(batches(1)[0][0]).sum().backward()
        assert memory.applied_to(other) is None
    assert optimizer.plan is None


def test_the_planner_cuts_batches_where_a_global_batch_is_given():
    model, optimizer = prepared(strategy({"global_batch": 64, "memory_budget": "1200KiB"}, k_steps=1))
    losses = by_step(model, optimizer, batches(3, size=64))
    assert optimizer.plan.k_steps > 1
    assert optimizer.engine.k_steps == optimizer.plan.k_steps
    assert optimizer.plan.measured.peak <= 1.03 * parse_bytes("1200KiB")
    assert losses[-1] < losses[0]


def test_without_a_global_batch_the_given_micro_batch_is_planned():
    model, optimizer = prepared(strategy({"memory_budget": "1300KiB"}, k_steps=1))
    with pytest.raises(DoesNotFit, match="64 samples in one forward need at least") as caught:
        by_step(model, optimizer, batches(1, size=64))
    assert 0 < caught.value.largest_micro_batch < 64
    assert "give recompute_configs.memory_budget='" in str(caught.value)
    assert "merge micro-batches of at most so many, with gradient_merge_configs.k_steps=" in str(caught.value)
    assert "one_forward" not in str(caught.value)
    model, optimizer = prepared(strategy({"memory_budget": "1300KiB"}, k_steps=2))
    with pytest.raises(DoesNotFit, match="of 32 samples need .* with gradient_merge_configs.k_steps=\\d+ or more"):
        by_step(model, optimizer, batches(1, size=64))
    model, optimizer = prepared(strategy({"memory_budget": "1300KiB"}, k_steps=2))
    # There a batch is a micro-batch, whatever k_steps is.
    with pytest.raises(DoesNotFit, match="in batches of so many, with gradient_merge_configs.k_steps=\\d+"):
        by_minimize(model, optimizer, batches(1, size=64))


def test_the_notes_of_a_plan_are_told_once_and_in_the_words_of_a_strategy(caplog):
    _told.clear()
    for _ in range(2):
        model, optimizer = prepared(strategy({}))
        by_step(model, optimizer, batches(1))
    (said,) = [record.message for record in caplog.records if "a note of the plan: batch norms" in record.message]
    assert said.endswith("without gradient_merge it is whole.")


@pytest.mark.middle
@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1.6, False), (0.5, False)])
def test_a_time_far_off_is_noted_and_its_profile_is_forgotten(factor, is_kept, monkeypatch, tmp_path, caplog):
    _told.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(plan.peak, plan.seconds * factor))
    model, optimizer = prepared(strategy({}))
    by_step(model, optimizer, batches(1))
    assert len(list(cache.folder().iterdir())) == is_kept
    assert any("times as long as predicted" in note for note in optimizer.plan.notes) != is_kept
    assert ("a note of the plan: a real step took" in caplog.text) != is_kept


def test_a_doubt_about_times_stays_with_plans_that_are_made_later(monkeypatch):
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(plan.peak, plan.seconds * 2))
    monkeypatch.setattr(planning_module, "allowed", lambda plan: 0)
    model, optimizer = prepared(strategy({"memory_budget": "20MiB"}))
    by_step(model, optimizer, batches(2))
    assert optimizer.planning.replanned > 0
    assert sum("2.00 times as long as predicted" in note for note in optimizer.plan.notes) == 1


def test_plans_of_a_strategy_refuse_other_models(monkeypatch, tmp_path):
    """The first one, those that are made anew, and those that are made when memory runs out."""
    monkeypatch.setattr(planning_module, "allowed", lambda plan: 0)
    model, optimizer = prepared(strategy({"oom_retry": True}))
    plans = []
    put_on = planning_module.Planning._put_on
    monkeypatch.setattr(
        planning_module.Planning, "_put_on", lambda self, plan: (plans.append(plan), put_on(self, plan))[1]
    )
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    first, second = batches(2)
    step(first)
    model.greed = RunsOut(at=1)
    step(second)
    assert len(plans) > 2
    assert {plan.fingerprint for plan in plans} == {fingerprint_of(model)} != {""}
    optimizer.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="a plan is put on the model that it was made for, got another one"):
        loaded.apply(Net(width=16))
    loaded.apply(Net()).remove()


def test_the_curve_of_a_plan_is_asked_once_however_many_plans_are_tried(monkeypatch):
    asked, made = [], agreement.plan_for
    monkeypatch.setattr(agreement, "plan_for", lambda *a, **k: asked.append(k.get("curve", True)) or made(*a, **k))
    monkeypatch.setattr(Tryout, "run", lambda _, plan: plan.with_measurement(int(plan.peak * 1.1), plan.seconds))
    model, optimizer = prepared(strategy({"memory_budget": "4MiB"}))
    by_step(model, optimizer, batches(1))
    assert optimizer.plan.curve
    assert optimizer.plan.planning_seconds > 0
    assert asked.count(True) == 1
    assert asked.count(False) > 1


def test_batches_that_are_larger_than_planned_are_told_of_once(caplog):
    _told.clear()
    model, optimizer = prepared(strategy({}))
    small, large = batches(2), batches(2, size=32)
    by_step(model, optimizer, [*small, (small[0][0][:8], small[0][1][:8])])
    assert "the plan is for" not in caplog.text
    by_step(model, optimizer, large)
    assert caplog.text.count("a batch has 32 samples, and the plan is for 16") == 1


def test_inputs_that_are_longer_than_planned_are_told_of_once(caplog):
    _told.clear()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    chosen = fleet.DistributedStrategy(recompute=True)
    chosen.recompute_configs = {"checkpoints": "auto", "memory_budget": "1MiB"}
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, chosen)
    for length in (4, 4, 2, 40, 40):
        step((torch.randn(4, length, 8), torch.randn(4, length, 8)))
        assert caplog.text.count("numbers per sample, and the plan was made with 64") == int(length > 4)


def test_a_first_batch_of_another_size_than_the_global_batch_is_refused():
    model, optimizer = prepared(strategy({"global_batch": 64}, k_steps=1))
    with pytest.raises(ValueError, match="global_batch is 64, but the first batch has 16 samples. Give"):
        by_step(model, optimizer, batches(1))


@pytest.mark.parametrize(("setting", "value"), [("global_batch", 16), ("oom_retry", True)])
def test_what_needs_whole_batches_is_refused_where_nobody_sees_them(setting, value):
    model, optimizer = prepared(strategy({setting: value}, k_steps=1))
    with pytest.raises(ValueError, match=f"recompute_configs.{setting} .* Train with fleetx.Step, or leave {setting}"):
        by_minimize(model, optimizer, batches(1), k_steps=1)


def test_inputs_that_cannot_be_cut_say_what_to_do():
    model, _optimizer = prepared(strategy({}))
    model.forward = lambda x, words: x
    with pytest.raises(TypeError, match="cannot be cut into micro-batches") as caught:
        model(torch.ones(2, 16, 32), "words")
    assert "Train with fleetx.Step, or name the checkpoints" in "".join(caught.value.__notes__)


def test_low_precision_and_masters_are_part_of_the_plan():
    made = strategy({}, amp=True, amp_configs={"use_pure_bf16": True})
    plain = strategy(None, amp=True, amp_configs={"use_pure_bf16": True})
    ours, optimizer, model = trained(made, "Step")
    same(ours, trained(plain, "Step")[0])
    low = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.bfloat16)
    assert optimizer.plan.peak_by_kind["master weights"] == 4 * low > 0


def test_any_way_to_compute_a_loss_is_planned():
    made = strategy({})
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = X.Step(model, optimizer, strategy=made, compute=lambda m, b: {"a": m(b["x"]).square().mean()})
    assert step({"x": torch.randn(16, 8, 32)}).updated
    assert step.plan.names == ("0", "1", "2", "3")


# When the prediction is wrong -----------------------------------------------------------------------------------


def short_sighted(measure):
    """A measurement that overlooks two fifths of what is kept."""

    def seen(option):
        return replace(option, kept=Line(0.6 * option.kept.fixed, 0.6 * option.kept.per_sample))

    def measured(*args, **kwargs):
        profile = measure(*args, **kwargs)
        segments = [replace(one, options=tuple(seen(option) for option in one.options)) for one in profile.segments]
        return replace(profile, segments=tuple(segments))

    return measured


def trusting(profile, made):
    """No trial before the first update."""
    plan = made.plan_from(profile)
    return Verified(plan, profile, plan.peak)


def test_a_first_update_that_takes_more_makes_a_new_plan_and_no_step_is_lost_or_doubled(monkeypatch):
    plain, _, _ = trained(strategy(None), "Step")
    monkeypatch.setattr(driver, "measure", short_sighted(driver.measure))
    monkeypatch.setattr(driver, "until_verified", trusting)
    plans = []
    put_on = planning_module.Planning._put_on
    monkeypatch.setattr(
        planning_module.Planning, "_put_on", lambda self, plan: (plans.append(plan), put_on(self, plan))[1]
    )
    ours, optimizer, _ = trained(strategy({}), "Step")
    same(ours, plain)
    assert 1 <= optimizer.planning.replanned <= 3
    assert len(plans) == 1 + optimizer.planning.replanned
    assert plans[0].states != optimizer.plan.states
    assert optimizer.plan.measured.peak <= 1.03 * parse_bytes(BUDGET)
    assert optimizer.plan.peak_by_kind["unexplained"] > 0


def test_plans_are_made_anew_three_times_at_most_and_that_is_said(monkeypatch, caplog):
    _told.discard("planning.peak")
    monkeypatch.setattr(planning_module, "allowed", lambda plan: 0)
    model, optimizer = prepared(strategy({"memory_budget": "20MiB"}))
    by_step(model, optimizer, batches(8))
    assert optimizer.planning.replanned == 3
    assert sum("after 3 new plans" in record.message for record in caplog.records) == 1


def test_if_no_new_plan_fits_the_old_one_stays_and_that_is_said(monkeypatch, caplog):
    _told.discard("planning.fit")
    plain, _, _ = trained(strategy(None), "Step")
    monkeypatch.setattr(planning_module.Consumption, "taken", lambda self: Taken(10**9, 1.0))
    ours, optimizer, _ = trained(strategy({}), "Step")
    same(ours, plain)
    assert any("more memory than planned, and micro-batches of 8 samples need" in r.message for r in caplog.records)
    assert optimizer.plan is not None


# When memory runs out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_ran_out_of_memory_is_done_again_with_a_smaller_plan(where):
    """The third of eight micro-batches, after the model was measured and tried: the update is the same."""
    plain, _, _ = trained(strategy(None), "Step")
    model, optimizer = prepared(strategy({"oom_retry": True}))
    torch.manual_seed(3)
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    data = batches()
    losses = [step(data[0]).loss.item()]
    before = step.plan
    model.greed = RunsOut(at=2, where=where)
    losses += [step(batch).loss.item() for batch in data[1:]]
    assert model.greed.times == 0
    same(state(model, losses), plain)
    assert step.plan.peak < before.peak
    assert step.plan.k_steps == 2


def test_a_step_is_done_again_even_if_no_new_plan_fitted_before(monkeypatch):
    monkeypatch.setattr(planning_module.Consumption, "taken", lambda self: Taken(10**9, 1.0))
    model, optimizer = prepared(strategy({"oom_retry": True}))
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    first, second = batches(2)
    step(first)
    before = step.plan
    model.greed = RunsOut(at=1)
    assert step(second).updated
    assert step.plan.peak < before.peak
    assert any("took the place of a plan for" in note for note in step.plan.notes)


def test_what_was_given_up_is_not_counted_with_what_came_after():
    consumption = Consumption(torch.device("cpu"))
    with consumption.counting([]):
        torch.zeros(1000)  # a step that ran out of memory
        consumption.begin()
        torch.zeros(10)
        assert consumption.taken().peak == 40


@pytest.mark.middle
def test_memory_that_runs_out_again_and_again_ends_the_run_with_the_reason():
    model, optimizer = prepared(strategy({"oom_retry": True}))
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    (data,) = batches(1)
    step(data)
    model.greed = RunsOut(at=1, times=100)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(data)
    notes = "".join(caught.value.__notes__)
    assert "no smaller plan is possible: micro-batches of 8 samples need at least" in notes
    assert "memory ran out" in notes
    model.greed = None
    assert step(data).updated


def test_with_a_global_batch_a_smaller_plan_may_cut_finer():
    made = strategy({"oom_retry": True, "global_batch": 64, "memory_budget": "3MiB"}, k_steps=1)
    model, optimizer = prepared(made)
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    first, second = batches(2, size=64)
    step(first)
    peak = step.plan.peak
    model.greed = RunsOut(at=1)
    assert step(second).updated
    assert step.plan.peak <= 0.9 * peak
    assert optimizer.engine.k_steps == step.plan.k_steps


def test_without_a_retry_memory_that_runs_out_is_an_error():
    model, optimizer = prepared(strategy({}))
    step = X.Step(model, optimizer, nn.functional.mse_loss)
    (data,) = batches(1)
    step(data)
    model.greed = RunsOut(at=1)
    with pytest.raises(torch.OutOfMemoryError):
        step(data)


# A program -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_program_is_planned_with_its_first_feed(compiled):
    from fleetx import static

    def run(configs):
        made = strategy(configs)
        torch.manual_seed(0)
        program = static.Program(
            static.build(_net, 0.0 if compiled else 0.1),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            made,
            compute=lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"]),
            compile=compiled,
        )
        exe = static.Executor(static.CPUPlace())
        exe.run(static.StartupProgram(program))
        torch.manual_seed(3)
        feeds = [{"x": x.numpy(), "y": y.numpy()} for x, y in batches(6, size=8)]
        losses = [float(exe.run(program, feed=feed, fetch_list=["loss"])[0]) for feed in feeds]
        return losses, program.model, exe.optimizer(program).plan

    plain, ours = run(None), run({"memory_budget": "1200KiB"})
    if compiled:
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    else:
        assert ours[0] == plain[0]
    assert ours[2].compile == compiled
    assert (ours[2].micro_batch, ours[2].k_steps) == (8, 2)
    assert memory.applied_to(ours[1]) is not None
    with pytest.raises(ValueError, match="recompute_configs.oom_retry"):
        run({"oom_retry": True})


def _net(dropout):
    """Without dropout where segments are compiled: they draw other numbers than a model that is compiled whole."""
    net = Net()
    for block in net.blocks:
        block.drop.p = dropout
    return net


def test_minimize_does_not_advise_what_it_does_not_take(caplog):
    """It is given a loss: nobody could give its function to the planner there."""
    _told.clear()
    model, optimizer = prepared(strategy({}))
    by_minimize(model, optimizer, batches(2))
    assert "minimize() sees no loss function" in caplog.text
    assert "give loss_fn" not in caplog.text
