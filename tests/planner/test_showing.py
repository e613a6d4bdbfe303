import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from fleetx.planner.command import plan_command
from fleetx.planner.picture import draw_plan
from fleetx.planner.plan import Moment, Plan
from fleetx.planner.samples import application
from fleetx.planner.search import plan_for
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

def wrong():
    return make()[0]
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


def test_a_model_of_the_users_own_is_planned_from_the_command_line(app, maker, tmp_path):
    options = ["--memory", "64KiB", "--global-batch", "64", "--no-bf16", "--verify"]
    done = runner.invoke(app, [maker, *options, "--out", "plan.json", "--picture", "plan.png"])
    assert done.exit_code == 0, done.output
    assert "global batch 64" in done.output
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.verified
    assert max(moment.peak for moment in plan.moments) == plan.measured.peak
    assert (tmp_path / "plan.png").exists()
    done = runner.invoke(app, [maker, *options, "--json"])
    assert json.loads(done.stdout)["global_batch"] == 64


def test_what_does_not_fit_is_said_and_not_thrown(app, maker):
    done = runner.invoke(app, [maker, "--memory", "1KiB", "--no-bf16"])
    assert done.exit_code == 1
    assert "needs at least" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of them"),
        (["users_model"], "module:function"),
        (["users_model:nothing"], "cannot be imported"),
        (["users_model:wrong"], "must return"),
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
