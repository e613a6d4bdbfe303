"""Questions to the planner that cannot be meant, or are doubtful."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx
from fleetx.comm import world
from fleetx.planner.asked import check
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.meter import CountingMeter
from fleetx.planner.updating import cost_of_update, moved_by

NEEDS_GRADIENT = torch.ones((), requires_grad=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def asked(model=None, **settings):
    sample = (torch.randn(4, 16), torch.randn(4, 16))
    settings = {"loss_fn": functional.mse_loss, "memory": "1MiB", "bandwidth": 0.0} | settings
    return fleetx.plan(model or net(), sample, **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"checkpoints": [0]}, TypeError, "must be a list of names or .* got \\[0\\]: write for example"),
        ({"checkpoints": 5}, TypeError, "must be a list of names or .* got 5: write for example"),
        ({"checkpoints": []}, ValueError, "at least one module, got none"),
        ({"checkpoints": "0"}, ValueError, "got '0': write \\['0'\\]"),
        ({"checkpoints": [""]}, ValueError, "no module '' to cut at: model.named_modules"),
        ({"checkpoints": ["nope"]}, ValueError, "no module 'nope' to cut at: model.named_modules"),
        ({"checkpoints": ["0", "00"]}, ValueError, "no module '00' to cut at: did you mean '0"),
        ({"optimizer": torch.optim.AdamW}, TypeError, "got the class AdamW: make one with the model's parameters"),
        ({"optimizer": "adam"}, TypeError, "must be a torch optimizer or None, got 'adam'"),
        ({"precision": "bf16"}, TypeError, "got 'bf16': write for example precision=torch.bfloat16"),
        ({"precision": torch.int8}, ValueError, "got torch.int8: autocast knows no other"),
        ({"checkpoints": ["q*"]}, ValueError, "no module 'q\\*' to cut at: model.named_modules"),
        ({"checkpoints": ["*", "1"]}, ValueError, "'1' is named twice"),
        ({"loss_fn": lambda out, y: (out - y) ** 2}, ValueError, "loss_fn returned .* shape .* a loss is one number"),
        ({"loss_fn": lambda out, y: (out.mean(), out)}, TypeError, "loss_fn returned .* one number, not a tuple"),
        ({"loss_fn": lambda out, y: out.mean().item()}, TypeError, "loss_fn returned .* one number, not a float"),
        ({"loss_fn": lambda out, y: out.mean().detach()}, ValueError, "loss_fn returned has no gradient, so .* detach"),
        ({"loss_fn": lambda out, y: out.argmax()}, ValueError, "what loss_fn returned has no gradient"),
        (
            {"loss_fn": None},
            TypeError,
            "with all of the sample, for there is no loss_fn: 2 arguments, which .* not take",
        ),
        ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function .* got 'mse': give for example"),
        ({"loss_fn": lambda out: out.mean()}, TypeError, "loss_fn must be .* does not take two arguments"),
        ({"checkpoints": "Auto"}, ValueError, "got 'Auto': write \"auto\""),
        ({"memory": -1}, ValueError, "^memory: an amount of memory must not be negative, got -1"),
        ({"host_memory": "2 KiBs"}, ValueError, "^host_memory: .* got '2 KiBs'"),
        ({"host_memory": True}, TypeError, "^host_memory: .* got True"),
        ({"k_steps": 0}, ValueError, "4 samples have from 1 to 4 micro-batches, got k_steps=0: write .* k_steps=4"),
        ({"k_steps": 9, "global_batch": 8}, ValueError, "from 1 to 8 micro-batches, got k_steps=9: write"),
        (
            {"k_steps": 2, "one_forward": True},
            ValueError,
            "one_forward keeps the batch whole, got k_steps=2 too: leave one",
        ),
        ({"k_steps": 3, "global_batch": 8, "even": True}, ValueError, "got 8 samples in 3: take .* divides 8"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_remedy(settings, error, message):
    with pytest.raises(error, match=message):
        asked(**settings)


def test_a_model_whose_norms_wait_for_other_workers_is_refused(monkeypatch):
    monkeypatch.setattr(world, "size", lambda: 2)
    with pytest.raises(ValueError, match=r"wait for all 2 workers in each forward. Plan with nn.BatchNorm layers"):
        asked(nn.Sequential(nn.Linear(16, 16), nn.SyncBatchNorm(16)))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bandwidth": True}, TypeError, "bandwidth must be a number of bytes per second, .* got True: write"),
        ({"bandwidth": "fast"}, TypeError, "bandwidth must be .* got 'fast': write for example bandwidth=25e9"),
        ({"bandwidth": -1}, ValueError, "bandwidth must be .* 0 or more and finite, or None, got -1: write"),
        ({"bandwidth": float("nan")}, ValueError, "bandwidth must be .* got nan"),
        ({"bandwidth": float("inf")}, ValueError, "bandwidth must be .* got inf"),
        ({"one_forward": 1}, TypeError, "one_forward must be True or False, got 1: write one_forward=True or"),
        ({"even": "yes"}, TypeError, "even must be True or False, got 'yes'"),
        ({"verify": None}, TypeError, "verify must be True or False, got None"),
        ({"global_batch": 10**30}, ValueError, "global_batch must be .* from 1 to 2,147,483,648, got 10+: write"),
        ({"global_batch": 0}, ValueError, "global_batch must be .* got 0: write"),
        ({"global_batch": 4.0}, TypeError, "global_batch must be .* got 4.0: write"),
        ({"k_steps": 2.0}, TypeError, "k_steps must be a number of micro-batches or None, got 2.0: write"),
        ({"k_steps": True}, TypeError, "k_steps must be .* got True: write for example k_steps=4"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_with_a_remedy(settings, error, message):
    sample = torch.randn(4, 16), torch.randn(4, 16)
    with pytest.raises(error, match=message):
        check(net(), sample, functional.mse_loss, None, "auto", None, **settings)


def test_values_that_can_be_meant_are_taken():
    sample = torch.randn(4, 16), torch.randn(4, 16)
    for bandwidth in (None, 0, 0.0, 25e9):
        flags = {"one_forward": True, "even": False, "compile": False, "cached": True, "verify": False}
        check(net(), sample, functional.mse_loss, None, "auto", None, bandwidth=bandwidth, global_batch=64, **flags)


@pytest.mark.middle
def test_what_is_doubtful_is_noted():
    model = net()
    assert asked(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).notes == ()
    (note,) = asked().notes
    assert "no optimizer was given, so that memory for its state was not planned" in note
    (note,) = asked(net().requires_grad_(False), loss_fn=lambda out, y: NEEDS_GRADIENT * out.mean()).notes
    assert "no modules to cut at were found" in note  # none of them keeps anything
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    first, second = asked(net().eval(), optimizer=other).notes
    assert "eval() mode" in first
    assert "none of this model's parameters" in second


@pytest.mark.parametrize("loss_fn", [functional.mse_loss, None])
def test_a_plan_made_in_inference_mode_says_why_there_are_no_gradients(loss_fn):
    sample = torch.randn(4, 16), torch.randn(4, 16)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="fleetx.plan was called while .* outside of that"):
        fleetx.plan(net(), sample if loss_fn else sample[0], loss_fn=loss_fn, memory="1MiB", bandwidth=0.0)


@pytest.mark.parametrize("compiled", [torch.compile, lambda model: model.compile() or model])
def test_a_compiled_model_is_refused_before_anything_runs(compiled, monkeypatch):
    model = net()
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="before torch.compile, got one that is compiled: .* compile=True"):
        asked(compiled(model))


def test_what_fails_without_a_loss_function_because_the_target_was_an_input_is_explained():
    class Two(nn.Sequential):
        def forward(self, x, scale):
            return super().forward(x) * scale["never"]

    with pytest.raises(IndexError) as caught:
        asked(Two(net()), loss_fn=None)
    assert "the model is called with all of the sample, a target included" in "".join(caught.value.__notes__)


def test_losses_in_a_dict_are_planned_as_step_trains_them():
    both = asked(loss_fn=lambda out, y: {"near": functional.mse_loss(out, y), "far": functional.l1_loss(out, y)})
    assert both.global_batch == 4


def test_what_has_no_memory_cannot_be_measured():
    with pytest.raises(ValueError, match="got '0.0.weight' and 7 more on the meta device.* materialise the model"):
        asked(net().to("meta"))
    half = net()
    half[1].register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="got '1.table' on the meta device"):
        asked(half)
    sample = torch.empty(4, 16, device="meta"), torch.randn(4, 16)
    with pytest.raises(ValueError, match="a sample must have values"):
        fleetx.plan(net(), sample, loss_fn=functional.mse_loss, memory="1MiB")


def test_checkpoints_may_be_globs():
    assert asked(checkpoints=["*"]).names == ("0", "1", "2", "3")
    assert asked(checkpoints=["2", "?.0"]).names == ("0.0", "1.0", "2.0", "2", "3.0")


@pytest.mark.middle
def test_parameters_that_the_optimizer_does_not_have_take_no_state_and_are_noted():
    model = net()
    whole = asked(model, optimizer=torch.optim.AdamW(model.parameters()))
    part = asked(model, optimizer=torch.optim.AdamW(model[0].parameters()))  # not what was kept on disk for the first
    assert part.peak_by_kind["optimizer"] == whole.peak_by_kind["optimizer"] / 4
    assert whole.notes == ()
    assert "does not update 6 of 8 trainable parameters" in part.notes[0]
    model[1:].requires_grad_(False)
    assert asked(model, optimizer=torch.optim.AdamW(model[0].parameters())).notes == ()


def test_masters_of_an_optimizer_stand_for_the_parameters_of_low_precision():
    model = net().bfloat16()
    model[3].float()
    parameters = list(model.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters[:6]]
    assert len(moved_by(torch.optim.AdamW([*masters, *parameters[6:]]), parameters)) == 8
    assert len(moved_by(torch.optim.AdamW(parameters[6:]), parameters)) == 2
    assert moved_by(None, parameters) == []


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, fleetx.optim.Lars, fleetx.optim.Lamb])
def test_no_optimizer_has_something_to_say_of_how_it_is_tried(make, capsys, caplog):
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False))
    cost = cost_of_update(model, make(model.parameters(), lr=1e-3))
    assert cost.notes == ()
    assert "length zero" not in capsys.readouterr().err + caplog.text


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_what_an_update_takes_meanwhile_is_what_a_real_one_takes(make, foreach):
    model = nn.Sequential(*(nn.Linear(64, size) for size in (256, 128, 32)))
    optimizer = make(model.parameters(), lr=1e-3, foreach=foreach)
    predicted = cost_of_update(model, optimizer).working_bytes
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with CountingMeter() as meter:
        optimizer.step()
        real = meter.take_peak()
    assert real <= predicted * 1.05 + 4096
    assert predicted <= 1.3 * real + 4096


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoints": "atuo"}, 'did you mean "auto"?'),
        ({"sample": torch.utils.data.DataLoader(torch.randn(4, 16))}, r"give next\(iter\(loader\)\)"),
        ({"sample": {}}, "no keywords, which its forward does not take"),
    ],
)
def test_what_people_mistype_is_understood(given, message):
    asked = {"sample": torch.randn(4, 16), "memory": "1GiB"} | given
    with pytest.raises((TypeError, ValueError), match=message):
        fleetx.plan(nn.Linear(16, 16), asked.pop("sample"), **asked)


def test_so_many_micro_batches_as_were_asked_for():
    plan = asked(global_batch=14, k_steps=4)
    assert (plan.micro_batch, plan.k_steps, plan.shorter) == (4, 4, 2)
    assert plan.reason.startswith("4 micro-batches were asked for")
    assert asked(k_steps=1).reason.startswith("one forward of 4 was asked for")
    assert asked(k_steps=1, one_forward=True).k_steps == 1


class Normed(nn.Module):
    """Refuses a single sample."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


@pytest.mark.middle
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"global_batch": 8, "k_steps": 8},
            "of 2 samples or more, got 8 samples with k_steps=8: take k_steps=4 or less",
        ),
        (
            {"global_batch": 9, "k_steps": 5},
            "of 2 samples or more, got 9 samples with k_steps=5: take k_steps=4 or less",
        ),
        ({"global_batch": 1}, "takes 2 samples or more at a time, got global_batch=1: take global_batch=2 or more"),
    ],
)
def test_micro_batches_that_a_model_refuses_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        asked(Normed(), **settings)


@pytest.mark.middle
def test_how_to_keep_a_batch_whole_depends_on_what_was_asked():
    def said(model=None, **settings):
        return " ".join(asked(model or Normed(), global_batch=8, **settings).notes)

    assert "the whole batch; one_forward=True in place of k_steps keeps it whole" in said(k_steps=2)
    assert "batch norms see" not in said(Normed().eval(), k_steps=2)  # they do not look at the others


def test_that_nothing_can_be_cut_is_noted_and_told_if_it_does_not_fit():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert any("no modules to cut at were found, each of which must run once" in note for note in asked(model).notes)
    with pytest.raises(DoesNotFit, match="or name modules to cut at with checkpoints=.* no blocks were found"):
        asked(model, memory="8KiB", one_forward=True, global_batch=512)
