import json
import re
import sys
from dataclasses import replace

import pytest
import torch
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fleetx.planner.chain import State
from fleetx.planner.command import plan_command
from fleetx.planner.costs import NOTHING
from fleetx.planner.fitting import DoesNotFit
from fleetx.planner.making import plan_for
from fleetx.planner.picture import draw_plan
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.samples import application
from fleetx.planner.table import in_words
from tests.planner.profiles import transformer

GIB = 2**30
runner = CliRunner()

MAKER = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
    return nn.Sequential(*blocks, nn.Linear(16, 3)), (torch.randn(4, 16), torch.randint(3, (4,))), nn.CrossEntropyLoss()

def normed():
    model, sample, loss_fn = make()
    return nn.Sequential(nn.BatchNorm1d(16), model), sample, loss_fn

def needs(width):
    return make()

def wrong():
    return make()[0]

def turned():
    return make()[1::-1]

def no_loss():
    return *make()[:2], "mse"

def many_losses():
    return *make()[:2], nn.CrossEntropyLoss(reduction="none")

def broken():
    return 1 / 0

def ends():
    exit(0)

def lazy():
    return nn.LazyLinear(3), torch.randn(4, 16)

def empty():
    return nn.ReLU(), torch.randn(4, 16)

def no_optimizer():
    return *make(), "adam"

def breaks():
    def forward(*_):
        raise ValueError("it is the model's")
    model, *others = make()
    model[2].forward = forward
    return model, *others
"""


@pytest.fixture
def app():
    made = typer.Typer()
    made.command()(plan_command)
    return made


@pytest.fixture
def maker(tmp_path, monkeypatch):
    (tmp_path / "users_model.py").write_text(MAKER)
    monkeypatch.chdir(tmp_path)
    yield "users_model:make"
    sys.modules.pop("users_model", None)


def test_the_picture_is_drawn_with_and_without_measurements(tmp_path):
    plan = plan_for(transformer(4), memory=10 * GIB, global_batch=64, one_forward=True)
    path = draw_plan(plan, tmp_path / "plan.png")
    without = path.stat().st_size
    assert without > 10_000
    moments = [Moment(name, "forward", 5 * GIB, 6 * GIB) for name in (*plan.names, "tail")]
    moments += [Moment(name, "backward", 5 * GIB, 6 * GIB) for name in reversed(plan.names)]
    moments.append(Moment("end", "backward", GIB, 6 * GIB))
    draw_plan(plan.with_measurement(6 * GIB, plan.seconds, tuple(moments)), path)
    assert path.stat().st_size != without


def test_the_legend_of_the_picture_hides_nothing_and_measurements_begin_with_the_step(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plan = plan_for(transformer(4), memory=10 * GIB, global_batch=64, one_forward=True)
    moments = tuple(Moment(name, "forward", 5 * GIB, 6 * GIB) for name in (*plan.names, "tail"))
    draw_plan(plan.with_measurement(6 * GIB, plan.seconds, moments), tmp_path / "plan.png")
    step = figures[0].axes[0]
    assert step.get_legend() is None
    assert len(figures[0].legends) == 1
    (measured,) = [line for line in step.lines if line.get_label() == "measured"]
    assert measured.get_xdata()[0] == 0


def test_the_table_explains_its_words():
    plan = plan_for(transformer(4).corrected(64, GIB), memory=10 * GIB, global_batch=64, one_forward=True)
    rows = [" ".join(line.split()) for line in str(plan).splitlines()]
    assert any(re.match(r"encoder\.layer\.\d–\d \d segments \w", row) for row in rows)
    assert any(row.startswith("working ") and "what the segment that runs at the peak takes" in row for row in rows)
    assert any(row.startswith("unexplained ") and "differed from the prediction" in row for row in rows)
    assert "narrow matmul outputs" in in_words(State("dear", dear=("narrow_matmul",)))


def test_a_peak_in_the_update_is_called_so():
    plan = plan_for(transformer(4, update_bytes=8 * GIB), memory=32 * GIB, global_batch=4, curve=False)
    assert any(re.match(r" +update +8 GiB +.*its update", line) for line in str(plan).splitlines())
    assert "working" not in str(plan)


def test_speeds_beside_a_measured_one_are_said_to_be_predicted():
    plan = plan_for(transformer(4), memory=10 * GIB, global_batch=64)
    lines = [line.strip() for line in str(plan).splitlines()]
    assert {"runners-up", "with more or less memory"} <= set(lines)
    lines = [line.strip() for line in str(plan.with_measurement(plan.peak, plan.seconds / 2)).splitlines()]
    assert {"runners-up, as predicted", "with more or less memory, as predicted"} <= set(lines)


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        (("inputs", "inputs"), "all segments are computed again."),
        (("inputs", "dear"), "all segments are computed again, 1 of them in part."),
        (("dear", "dear"), "all segments are computed again in part."),
        (("everything", "dear"), "1 of 2 segments is computed again in part."),
    ],
)
def test_what_keeps_dear_outputs_is_computed_again_in_part(saves, said):
    segments = [
        replace(segment, options=tuple(option for option in segment.options if option.state == State(save)))
        for segment, save in zip(transformer(2).segments, saves, strict=True)
    ]
    plan = plan_for(
        replace(transformer(2), segments=tuple(segments)), memory=100 * GIB, global_batch=8, one_forward=True
    )
    assert plan.reason == f"one forward of 8 was asked for; {said}"


def test_what_is_as_fast_is_not_called_faster():
    profile = transformer(2, overhead=0)
    flat = replace(profile, tail_forward_seconds=NOTHING, tail_backward_seconds=NOTHING)
    plan = plan_for(flat, memory=1000 * GIB, global_batch=8, curve=False)
    assert "as fast as" in plan.reason
    assert "0.0%" not in plan.reason


def test_a_model_of_the_users_own_is_planned_from_the_command_line(app, maker, tmp_path):
    options = ["--memory", "64KiB", "--global-batch", "64", "--no-bf16", "--verify"]
    done = runner.invoke(app, [maker, *options, "--out", "plan.json", "--picture", "plan.png"])
    assert done.exit_code == 0, done.output
    assert "global batch 64" in done.output
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.verified
    assert max(moment.peak for moment in plan.moments) == plan.measured.peak
    assert re.search(r"The planner took [\d,.]+ m?s: measuring, planning and verifying\.\n$", done.stdout)
    assert (tmp_path / "plan.png").exists()
    done = runner.invoke(app, [maker, *options, "--json"])
    assert json.loads(done.stdout)["global_batch"] == 64
    assert json.loads(done.stdout)["planning_seconds"] > 0


@pytest.mark.middle
def test_what_the_planner_took_is_said_without_the_making_of_the_model(app, maker, tmp_path):
    slow = "from fleetx import clock; clock.time.sleep(1000)"
    (tmp_path / "users_model.py").write_text(MAKER.replace("torch.manual_seed(0)", slow))
    done = runner.invoke(app, [maker, "--memory", "64KiB", "--no-bf16", "--json"])
    assert 0 < json.loads(done.stdout)["planning_seconds"] < 1000


def test_a_plan_says_how_long_it_took_only_if_that_is_known():
    plan = plan_for(transformer(4), memory=10 * GIB, global_batch=64, one_forward=True)
    assert "The planner took" not in str(plan)
    timed = replace(plan, planning_seconds=12.345)
    assert str(timed).splitlines()[-1] == "  The planner took 12.35 s: measuring and planning."
    assert timed == plan  # plans are the same however long they took


def test_amounts_on_the_command_line_may_be_plain_bytes(app, maker):
    done = runner.invoke(app, [maker, "--memory", "262144", "--host-memory", "1000", "--no-bf16", "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert (values["memory"], values["host_memory"]) == (262144, 1000)


def test_what_does_not_fit_is_said_and_not_thrown(app, maker):
    done = runner.invoke(app, [maker, "--memory", "1KiB", "--no-bf16"])
    assert done.exit_code == 1
    assert "needs at least" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "must be a number and one of the units"),
        (["--memory", "1GiB", "--host-memory", "some"], "--host-memory: an amount of memory must be a number and one"),
        (["--memory", "1GiB", "--seq-len", "64"], "--seq-len and --image-size are for --app"),
        pytest.param(
            [],
            "has no budget of its own: give one, as --memory",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason=""),
        ),
    ],
)
def test_wrong_amounts_are_explained(app, maker, arguments, message):
    done = runner.invoke(app, [maker, *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "none/p.json"], "--out must be in a folder that exists"),
        (["--out", "."], "--out must be a file"),
        (["--picture", "none/p.png"], "--picture must be in a folder that exists"),
        (["--picture", "p.xyz"], "--picture must end in one of"),
        (["--picture", "p"], "for example plan.png"),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_planning(app, maker, arguments, message, monkeypatch):
    monkeypatch.setattr("fleetx.planner.plan", lambda *_, **__: pytest.fail("planned first"))
    done = runner.invoke(app, [maker, "--memory", "1GiB", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_weights_that_do_not_fit_are_not_measured_first(app, maker, monkeypatch):
    monkeypatch.setattr("fleetx.planner.plan", lambda *_, **__: pytest.fail("measured first"))
    done = runner.invoke(app, [maker, "--memory", "17KiB"])
    assert done.exit_code == 1
    assert "needs at least 20.95 KiB for weights, gradients and AdamW alone, and the budget is 17 KiB" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_without_a_gpu_the_command_says_at_once_that_it_measures_on_the_cpu(app, maker, monkeypatch):
    def ended(*_, **__):
        raise DoesNotFit("nothing fits", 1, 1)

    monkeypatch.setattr("fleetx.planner.plan", ended)
    done = runner.invoke(app, [maker, "--memory", "1GiB"])
    assert done.output.index("measuring on the CPU") < done.output.index("nothing fits")


@pytest.mark.middle
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "20.97KiB"], r"give --memory '21.02 KiB' or more, or take an optimizer that needs less"),
        (
            ["--memory", "40KiB", "--global-batch", "512", "--one-forward"],
            r"in one forward, with --global-batch \d+, or leave out --one-forward, so that",
        ),
    ],
)
def test_what_the_command_advises_are_its_own_options(app, maker, arguments, message):
    done = runner.invoke(app, [maker, "--no-bf16", *arguments])
    assert done.exit_code == 1
    assert re.search(message, " ".join(done.stderr.split()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--k-steps", "9", "--global-batch", "8"],
            "from 1 to 8 micro-batches, got --k-steps 9: write for example --k-steps 4",
        ),
        (["--k-steps", "2", "--one-forward"], "--one-forward keeps the batch whole, got --k-steps 2 too"),
    ],
)
def test_micro_batches_that_a_batch_does_not_have_are_refused(app, maker, arguments, message):
    done = runner.invoke(app, [maker, "--memory", "1MiB", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_the_command_takes_a_number_of_micro_batches(app, maker):
    done = runner.invoke(
        app, [maker, "--no-bf16", "--memory", "1MiB", "--global-batch", "12", "--k-steps", "3", "--json"]
    )
    assert Plan.from_json(done.stdout).k_steps == 3


def test_what_cannot_be_written_is_told_after_the_plan(app, maker, tmp_path, monkeypatch):
    monkeypatch.setattr(Plan, "save", full)
    done = runner.invoke(app, [maker, "--no-bf16", "--memory", "1MiB", "--out", str(tmp_path / "plan.json")])
    assert done.exit_code == 2
    assert "Plan for" in done.stdout
    assert "plan.json could not be written: no space left on the device." in done.stderr


@pytest.mark.middle
def test_a_plan_is_saved_though_it_cannot_be_printed(app, maker, tmp_path, monkeypatch):
    monkeypatch.setattr(Plan, "__str__", full)
    done = runner.invoke(app, [maker, "--no-bf16", "--memory", "1MiB", "--out", str(tmp_path / "plan.json")])
    assert isinstance(done.exception, OSError)
    assert Plan.load(tmp_path / "plan.json").k_steps


def full(*_):
    raise OSError("no space left on the device")


def test_what_the_command_notes_are_its_own_options(app, maker):
    done = runner.invoke(app, ["users_model:normed", "--no-bf16", "--memory", "28KiB", "--global-batch", "512"])
    assert "not the whole batch; --one-forward keeps it whole." in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of them"),
        (["users_model"], "module:function"),
        (["users_model:nothing"], "cannot be imported"),
        (["users_model:needs"], "a function without arguments, got 'users_model:needs' (missing a required argument"),
        (["users_model:nn"], "a function without arguments, got 'users_model:nn', which is a module"),
        (["--app", "resnet50", "--seq-len", "64"], "resnet50 sees images: give --image-size"),
        (["--app", "bert_base", "--image-size", "64"], "bert_base reads texts: give --seq-len"),
        (["users_model:wrong"], "must return"),
        (["users_model:turned"], "got a tuple in the place of the model, which comes first"),
        (["users_model:no_loss", "--no-bf16"], "loss_fn must be a function"),
        (
            ["users_model:many_losses", "--no-bf16"],
            "loss_fn returned for 2 samples is not a loss: 'loss' has shape (2,)",
        ),
        (["users_model:broken"], "ZeroDivisionError"),
        (["users_model:ends"], "SystemExit: 0"),
        (["users_model:lazy"], "uninitialized parameter"),
        (["users_model:empty"], "optimizer got an empty parameter list"),
        (["users_model:no_optimizer"], "got a str in the place of the optimizer, which comes last"),
        (["users_model:breaks", "--no-bf16"], "ValueError: it is the model's"),
        (["users_model:breaks", "--no-bf16"], "FleetX: the planner tried the model with 2 samples"),
        (["--app", "vgg"], "--app must be one of"),
    ],
)
def test_wrong_arguments_are_explained(app, maker, arguments, message):
    done = runner.invoke(app, [*arguments, "--memory", "1GiB"])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_the_applications_samples_can_be_fed_to_them():
    model, sample = application("resnet50", 512, 32)
    assert torch.isfinite(model(**sample)["loss"])


WITH_OPTIMIZER = """
import torch
from torch import nn

def make():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    return model, (torch.randn(4, 16), torch.randn(4, 16)), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1)

def too_many():
    return make() + (1,)
"""


def test_the_command_takes_cuts_and_an_optimizer(app, tmp_path, monkeypatch):
    (tmp_path / "with_optimizer.py").write_text(WITH_OPTIMIZER)
    monkeypatch.chdir(tmp_path)
    cut = ["--checkpoint", "1", "--checkpoint", "2", "--checkpoint", "3", "--no-cached", "--no-bf16", "--json"]
    done = runner.invoke(app, ["with_optimizer:make", "--memory", "1MiB", *cut])
    assert done.exit_code == 0
    plan = Plan.from_json(done.stdout)
    assert plan.names == ("1", "2", "3")
    assert plan.peak_by_kind.get("optimizer", 0) == 0  # SGD has no state
    done = runner.invoke(app, ["with_optimizer:make", "--memory", "1MiB", "--checkpoint", "blocks"])
    assert done.exit_code == 2
    assert "the model has no module 'blocks' to cut at" in " ".join(done.output.split())
    done = runner.invoke(app, ["with_optimizer:too_many", "--memory", "1MiB"])
    assert done.exit_code == 2
    assert "got 5 values" in done.output
    sys.modules.pop("with_optimizer", None)
