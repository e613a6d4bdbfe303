import gc
import logging
import os
import pickle
import random
import re
import socket
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fleetx as X
from fleetx import buffers, fleet
from fleetx.checkpoint import CheckpointError, inspect, survey
from fleetx.checkpoint.manifest import read_manifest
from fleetx.checkpoint.snapshot import HostCopies
from fleetx.data import Loader, ShardedBatches
from tests.checkpoint.making import BATCH, SAMPLES, Parts, same


def test_nothing_to_resume_is_none(tmp_path):
    assert Parts(tmp_path / "new").checkpoints.resume() is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("at", [0, 4, 6, 11])
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(tmp_path, at, asynchronous):
    whole = Parts().train(19)
    before = Parts(tmp_path).train(at)
    before.saved(at, asynchronous=asynchronous)
    if asynchronous:
        before.train(3)  # what happens after the call is not in the checkpoint
        before.checkpoints.wait()
    after = Parts(tmp_path, seed=5)
    start = after.checkpoints.resume()
    after.train(19 - start.step)
    assert start.step == at
    assert same(after.weights(), whole.weights())
    assert after.optimizer.micro_batches_held == whole.optimizer.micro_batches_held == 1
    assert after.loader.state_dict() == whole.loader.state_dict()
    after.optimizer.flush()
    whole.optimizer.flush()
    assert same(after.weights(), whole.weights())


def test_saving_leaves_the_run_alone(tmp_path):
    whole = Parts().train(11)
    drawn = torch.rand(2)
    saved = Parts(tmp_path)
    saved.checkpoints.resume()
    for number in range(11):
        saved.train(1).saved(number, asynchronous=bool(number % 2))
    saved.checkpoints.wait()
    assert same(saved.weights(), whole.weights())
    assert torch.equal(torch.rand(2), drawn)


def test_all_random_states_come_back(tmp_path):
    parts = Parts(tmp_path)
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    np.random.standard_normal()  # leaves a second number in store
    random.gauss(0, 1)
    parts.saved(1)

    def draw():
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            torch.rand(2).tolist(),
        )

    drawn = draw()
    after = Parts(tmp_path, seed=9)
    after.checkpoints.resume()
    assert draw() == drawn


def test_a_step_gives_its_model_and_optimizer(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 2)
        strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = X.Step(model, optimizer, torch.nn.functional.cross_entropy, strategy)
        return step, X.Checkpoints(tmp_path, step=step)

    batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)] + [
        (torch.randn(1, 4), torch.tensor([1]))
    ]
    step, checkpoints = build(0)
    checkpoints.resume()
    for number, batch in enumerate(batches):
        if number == 3:
            checkpoints.save(number)
        step(batch)
    again, checkpoints = build(1)
    assert checkpoints.resume().step == 3
    again(batches[3])  # shorter than k_steps, which only a first batch may not be
    assert same(again.model.state_dict(), step.model.state_dict())


def test_extra_values_and_further_objects_come_back(tmp_path):
    def build():
        things = {
            "average": torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2)),
            "generator": torch.Generator(),
            "numpy": np.random.default_rng(0),
        }
        return things, X.Checkpoints(tmp_path, model=torch.nn.Linear(2, 2), also=things)

    things, checkpoints = build()
    things["average"].update_parameters(torch.nn.Linear(2, 2))
    things["generator"].manual_seed(4)
    things["numpy"].random(5)
    checkpoints.save(1, extra={"best": 0.5, "seen": Counter(a=1), "curve": [(1, torch.tensor([0.1]))]})
    expected = torch.rand(1, generator=things["generator"]), things["numpy"].random()
    fresh, checkpoints = build()
    start = checkpoints.resume()
    assert start.extra == {"best": 0.5, "seen": Counter(a=1), "curve": [(1, torch.tensor([0.1]))]}
    assert same(fresh["average"].state_dict(), things["average"].state_dict())
    assert (torch.rand(1, generator=fresh["generator"]), fresh["numpy"].random()) == expected


def test_plain_torch_objects_are_saved_too(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        checkpoints = X.Checkpoints(tmp_path, model=model, optimizer=optimizer, also={"schedule": schedule})
        return model, optimizer, schedule, checkpoints

    def train(model, optimizer, schedule, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            schedule.step()

    *parts, checkpoints = build(0)
    train(*parts, 3)
    checkpoints.save(3)
    train(*parts, 3)
    *again, checkpoints = build(1)
    assert checkpoints.resume().step == 3
    train(*again, 3)
    assert same(again[0].state_dict(), parts[0].state_dict())


def test_several_models_and_optimizers_are_saved_together(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        models = {name: fleet.distributed_model(torch.nn.Linear(2, 2)) for name in ("generator", "critic")}
        optimizers = {
            name: fleet.distributed_optimizer(torch.optim.Adam(model.parameters())) for name, model in models.items()
        }
        return models, optimizers, X.Checkpoints(tmp_path, model=models, optimizer=optimizers)

    models, optimizers, checkpoints = build(0)
    for name, model in models.items():
        optimizers[name].minimize(model(torch.ones(1, 2)).sum())
    path = checkpoints.save(1)
    assert set(load_file(path / "model.safetensors")) == {
        f"{name}/{leaf}" for name in models for leaf in ("weight", "bias")
    }
    fresh, _, checkpoints = build(1)
    assert checkpoints.resume().step == 1
    assert all(same(fresh[name].state_dict(), models[name].state_dict()) for name in models)


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model, X.Checkpoints(tmp_path, model=model)

    model, checkpoints = build()
    path = checkpoints.save(1)
    assert set(load_file(path / "model.safetensors")) == {"0.weight", "0.bias", "1.bias"}
    fresh, checkpoints = build()
    checkpoints.resume()
    assert fresh[1].weight is fresh[0].weight
    assert same(fresh.state_dict(), model.state_dict())


def test_any_tool_can_read_the_weights(tmp_path):
    parts = Parts(tmp_path).train(4)
    path = parts.saved(4)
    assert same(load_file(path / "model.safetensors"), parts.weights())


def test_the_last_ones_are_kept(tmp_path):
    parts = Parts(tmp_path, keep=2)
    for number in range(5):
        parts.saved(number)
    assert [one.path.name for one in survey(tmp_path)] == ["save-000005-step-4", "save-000004-step-3"]
    assert all(one.problem is None for one in survey(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "save-000004-step-3", "save-000005-step-4"]


def test_all_are_kept_on_request(tmp_path):
    parts = Parts(tmp_path, keep=None)
    for number in range(5):
        parts.saved(number)
    assert len(survey(tmp_path)) == 5


def test_damaged_ones_are_not_counted_and_copies_are_not_removed(tmp_path):
    parts = Parts(tmp_path, keep=2)
    for number in range(3):
        path = parts.saved(number)
    path.rename(tmp_path / "the best one")
    (tmp_path / "save-000002-step-1" / "model.safetensors").write_bytes(b"")
    parts = Parts(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="none can be used"):
        parts.checkpoints.resume()
    assert parts.checkpoints.resume(tmp_path / "the best one").step == 2
    for number in range(3, 5):
        parts.checkpoints.save(number)
    names = {entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")}
    assert names == {"the best one", "save-000003-step-3", "save-000004-step-4"}


def test_one_of_another_model_is_not_called_damaged(tmp_path):
    Parts(tmp_path).saved(7)
    other = X.Checkpoints(tmp_path, model=torch.nn.Linear(3, 5))
    with pytest.raises(
        CheckpointError, match=r"holds one checkpoint, and none(.|\n)*another model(.|\n)*Build what was saved"
    ):
        other.resume()


def test_a_checkpoint_can_be_surveyed_alone(tmp_path):
    path = Parts(tmp_path).saved(7)
    (one,) = survey(path)
    assert (one.path, one.problem) == (path, None)


def test_the_newest_is_the_one_saved_last_whatever_its_step(tmp_path):
    parts = Parts(tmp_path, keep=None)
    parts.saved(100)
    parts.saved(20)
    assert Parts(tmp_path).checkpoints.resume().step == 20


def test_a_run_in_a_used_folder_must_resume_before_it_saves(tmp_path):
    Parts(tmp_path).saved(7)
    parts = Parts(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds checkpoints of an earlier run \(save-000001-step-7 is the newest\)"
    ):
        parts.checkpoints.save(8)
    parts.checkpoints.resume()
    parts.checkpoints.save(8)


def test_what_another_run_saved_after_this_one_found_nothing_is_not_removed(tmp_path):
    first, second = (Parts(tmp_path / "new", keep=1) for _ in range(2))
    assert first.checkpoints.resume() is second.checkpoints.resume() is None
    path = first.checkpoints.save(7)
    del first
    gc.collect()
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        second.checkpoints.save(8)
    assert path.exists()


def test_the_folder_is_the_same_wherever_the_program_goes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    parts = Parts("saves")
    parts.checkpoints.resume()
    monkeypatch.chdir("elsewhere")
    assert parts.checkpoints.save(1).parent == tmp_path / "saves"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"loader": {"train": None}}, "loader= names 'train', and the checkpoint has 'loader': give what was saved"),
        ({"also": {"ema": None}}, "also= names 'ema', and the checkpoint has none: give what was saved"),
    ],
)
def test_what_was_not_saved_is_named_before_anything_is_put_back(tmp_path, names, message):
    Parts(tmp_path).train(4).saved(4)
    parts = Parts(tmp_path, seed=5)
    given = {"loader": parts.loader} | {
        kind: {name: parts.loader if kind == "loader" else torch.Generator() for name in named}
        for kind, named in names.items()
    }
    checkpoints = X.Checkpoints(tmp_path, model=parts.model, optimizer=parts.optimizer, **given)
    before = parts.weights()
    with pytest.raises(CheckpointError, match=message):
        checkpoints.resume()
    assert same(parts.weights(), before)


class Refusing:
    """Somebody else's object, which can refuse its state only when it is loaded."""

    def state_dict(self):
        return {"value": 1}

    def load_state_dict(self, state):
        raise ValueError("this state is refused")


def other_batch(parts):
    return {"loader": Loader(parts.loader.dataset, ShardedBatches(SAMPLES, BATCH + 1, seed=3))}


def without_schedule(parts):
    inner = torch.optim.Adam(parts.model.parameters(), lr=0.05)
    return {"optimizer": fleet.distributed_optimizer(inner, parts.optimizer.strategy)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (other_batch, r"same plan of batches: global_batch was 4 and is 5"),
        (without_schedule, r"this optimizer has not a scheduler and the state dict has"),
        (lambda _: {"also": {"other": Refusing()}}, r"this state is refused"),
    ],
)
def test_a_resume_that_is_refused_changes_nothing(tmp_path, changed, message):
    Parts(tmp_path, also={"other": Refusing()}).train(4).saved(4)
    parts = Parts(seed=5).train(1)
    given = {"loader": parts.loader, "optimizer": parts.optimizer, "also": {"other": torch.Generator()}}
    given |= changed(parts)
    checkpoints = X.Checkpoints(tmp_path, model=parts.model, **given)

    def state():
        optimizer = {name: value for name, value in given["optimizer"].state_dict().items() if name != "fleetx"}
        return [parts.weights(), optimizer, torch.get_rng_state()]

    before, position = deepcopy(state()), given["loader"].state_dict()
    with pytest.raises(ValueError, match=message):
        checkpoints.resume()
    torch.testing.assert_close(state(), before, rtol=0, atol=0)
    assert given["loader"].state_dict() == position


def test_what_is_left_out_is_told(tmp_path, caplog):
    Parts(tmp_path, also={"noise": torch.Generator()}).train(3).saved(3)
    parts = Parts(seed=5)
    X.Checkpoints(tmp_path, model=parts.model, optimizer=parts.optimizer).resume()
    told = " ".join(caplog.messages)
    assert "the state of 'loader', which is not put back: give it with loader=" in told
    assert "the state of 'noise', which is not put back: give it with also=" in told


@pytest.mark.parametrize(("saved", "asked"), [(None, "b"), ("a", "b")])
def test_a_job_with_a_name_resumes_only_what_has_it(tmp_path, saved, asked):
    Parts(tmp_path, job=saved).saved(3)
    with pytest.raises(CheckpointError, match="and this one is 'b'"):
        Parts(tmp_path, job=asked).checkpoints.resume()
    assert Parts(tmp_path, job=saved).checkpoints.resume().step == 3


def test_an_interrupted_save_is_named_passed_over_and_swept_away(tmp_path):
    parts = Parts(tmp_path)
    path = parts.saved(3)
    draft = tmp_path / ".saving-000002-step-4-abcdef01"
    draft.mkdir()
    for file in path.iterdir():  # all of it is there, only the renaming did not happen
        (draft / file.name).write_bytes(file.read_bytes())
    parts = Parts(tmp_path)
    start = parts.checkpoints.resume()
    assert (start.step, start.path) == (3, path)
    assert "passed over" in str(start)
    assert [(one.path, one.reason) for one in start.passed_over] == [(draft, "its save was interrupted")]
    assert parts.checkpoints.save(4).name == "save-000002-step-4"
    assert not draft.exists()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda lock, precious: lock.symlink_to(precious), "a link, a folder or a socket"),
        (lambda lock, precious: lock.symlink_to(precious.parent / "not there"), "a link, a folder or a socket"),
        (lambda lock, precious: lock.hardlink_to(precious), "a file that has other names too"),
        (lambda lock, _: lock.write_text("another program's"), "a file that something else wrote"),
        (lambda lock, _: os.mkfifo(lock), "not a plain file"),
        (lambda lock, _: lock.mkdir(), "a link, a folder or a socket"),
    ],
)
def test_a_lock_that_is_not_ours_is_refused_and_left_alone(tmp_path, make, what):
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("results of years")
    folder.mkdir()
    make(folder / ".lock", precious)
    files = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=rf"\.lock keeps other jobs from saving .* and it is {what}\. Remove it"):
        Parts(folder).checkpoints.resume()
    assert precious.read_text() == "results of years"
    assert {path.name for path in tmp_path.iterdir()} == files


def test_a_lock_from_before_is_written_over_and_never_cut(tmp_path):
    (tmp_path / ".lock").write_text(f"process 1 on {'long' * 50}\n")
    size = (tmp_path / ".lock").stat().st_size
    Parts(tmp_path).checkpoints.resume()
    assert (tmp_path / ".lock").read_text().split() == ["process", str(os.getpid()), "on", socket.gethostname()]
    assert (tmp_path / ".lock").stat().st_size == size


def test_only_drafts_are_nothing_to_resume(tmp_path):
    (tmp_path / ".saving-000001-step-4-abcdef01").mkdir()
    assert Parts(tmp_path).checkpoints.resume() is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"width": 5}, r"of another model: 0.weight is F32 \[5, 4\] there and F32 \[6, 4\] here"),
        (
            {"optimizer": torch.optim.SGD},
            r"of another optimizer: optimizer is \['SGD', \[6\]\] there and \['Adam', \[6\]\] here",
        ),
        ({"job": "hers"}, "of another job, 'hers', and this one is 'mine'"),
    ],
)
def test_a_checkpoint_of_another_job_is_passed_over_and_never_removed(tmp_path, caplog, other, reason):
    Parts(tmp_path / "a", job="mine").saved(1)
    Parts(tmp_path / "b", **({"job": "mine"} | other)).saved(2).rename(tmp_path / "a" / "save-000001-step-2")
    foreign = tmp_path / "a" / "save-000007-step-2"
    (tmp_path / "a" / "save-000001-step-2").rename(foreign)
    _rename_inside(foreign)
    parts = Parts(tmp_path / "a", job="mine", keep=1)
    start = parts.checkpoints.resume()
    assert start.step == 1
    assert start.passed_over[0].path == foreign
    assert re.search(reason, start.passed_over[0].reason)
    assert re.search(reason, caplog.text)
    parts.checkpoints.save(5)
    assert foreign.exists()


def _equal_layers(folder, order, kind, **options):
    """Two layers of one shape, each a group of its own."""
    strategy = fleet.DistributedStrategy(**options)
    model = fleet.distributed_model(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2))), strategy)
    groups = [{"params": list(model[index].parameters())} for index in order]
    optimizer = fleet.distributed_optimizer(kind(groups, lr=0.1, momentum=0.9), strategy)
    return model, optimizer, X.Checkpoints(folder, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {"amp": True, "amp_configs": {"use_pure_bf16": True}},
        pytest.param({}, marks=pytest.mark.middle),
        pytest.param({"lars": True}, marks=pytest.mark.middle),
    ],
)
def test_momentum_is_not_put_back_for_another_parameter(tmp_path, options):
    model, optimizer, checkpoints = _equal_layers(tmp_path, (0, 1), torch.optim.SGD, **options)
    optimizer.minimize(model(torch.ones(3, 2)).square().mean())
    checkpoints.resume()
    checkpoints.save(1)
    other, swapped, resuming = _equal_layers(tmp_path, (1, 0), torch.optim.SGD, **options)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    message = r"parameter 0 of group 0 is '0\.weight' there and '1\.weight' here.* from lists and not from sets"
    with pytest.raises(CheckpointError, match=message):
        resuming.resume()
    with pytest.raises(ValueError, match=message):
        swapped.load_state_dict(optimizer.state_dict())
    assert same(other.state_dict(), before)
    assert not swapped.state
    again, _, resuming = _equal_layers(tmp_path, (0, 1), torch.optim.SGD, **options)
    assert resuming.resume().step == 1
    assert same(again.state_dict(), model.state_dict())


def test_a_checkpoint_without_names_is_still_taken(tmp_path):
    before = Parts(tmp_path)
    path = before.saved(2)
    manifest = read_manifest(path)
    older = replace(manifest.job, optimizers={name: its[:2] for name, its in manifest.job.optimizers.items()})
    (path / "manifest.json").write_bytes(replace(manifest, job=older).to_bytes())
    assert Parts(tmp_path).checkpoints.resume().step == 2


def _rename_inside(path):
    """Make the manifest agree with a folder's new name, as if it had been saved so."""
    manifest = replace(read_manifest(path), name=path.name)
    (path / "manifest.json").write_bytes(manifest.to_bytes())


def test_a_renamed_checkpoint_is_taken_only_when_it_is_named(tmp_path):
    parts = Parts(tmp_path).train(4)
    path = parts.saved(4)
    copy = path.rename(tmp_path / "save-000009-step-4")
    with pytest.raises(CheckpointError, match="its manifest is that of save-000001-step-4: it was renamed"):
        Parts(tmp_path).checkpoints.resume()
    after = Parts(tmp_path, seed=3)
    assert after.checkpoints.resume(copy).path == copy
    assert same(after.weights(), parts.weights())


def test_a_certain_checkpoint_can_be_taken(tmp_path):
    parts = Parts(tmp_path)
    first = parts.saved(1)
    weights = parts.weights()
    parts.train(6).saved(2)
    after = Parts(tmp_path, seed=3)
    assert after.checkpoints.resume(first).step == 1
    assert same(after.weights(), weights)
    after.checkpoints.save(2)
    with pytest.raises(CheckpointError, match="and .*nothing is none"):
        after.checkpoints.resume(tmp_path / "nothing")


def test_a_hidden_file_in_a_checkpoint_is_let_be(tmp_path):
    (Parts(tmp_path).saved(1) / ".nfs0001").write_text("a file system's own")
    assert Parts(tmp_path).checkpoints.resume().passed_over == ()


def test_what_is_passed_over_is_logged_and_listed(tmp_path, caplog):
    parts = Parts(tmp_path)
    parts.saved(1)
    path = parts.saved(2)
    (path / "shared.json").unlink()
    start = Parts(tmp_path).checkpoints.resume()
    assert start.step == 1
    assert str(start.passed_over[0]) == f"{path}: shared.json is missing"
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        f"a checkpoint was passed over, {path}: shared.json is missing."
    ]


def test_a_missing_folder_of_checkpoints_cannot_be_surveyed(tmp_path):
    with pytest.raises(CheckpointError, match="is none"):
        survey(tmp_path / "nothing")
    assert survey(tmp_path) == []
    path = Parts(tmp_path).saved(3)
    assert (inspect(path).manifest.step, inspect(path).problem) == (3, None)
    path = path.rename(tmp_path / "copy")
    assert inspect(path).problem is None
    assert "renamed" in survey(tmp_path)[0].problem


def test_no_pickle_is_loaded(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("unpickled")

    Parts(tmp_path).train(4).saved(4)
    after = Parts(tmp_path)
    for module, names in ((pickle, ("load", "loads", "Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    assert after.checkpoints.resume().step == 4


def test_the_package_never_mentions_pickle_or_torch_load():
    for file in (Path(X.__file__).parent / "checkpoint").glob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert "import pickle" not in source
        assert "torch.load" not in source
        assert "all_gather_object" not in source


def test_another_k_steps_takes_the_window_again(tmp_path):
    """Five batches with windows of 3 leave 2 in progress; windows of 2 begin again after the first three."""
    Parts(tmp_path).train(5).saved(5)
    after = Parts(tmp_path, k_steps=2)
    start = after.checkpoints.resume()
    assert start.replayed == 2
    assert "2 micro-batches are taken again" in str(start)
    assert after.loader.state_dict()["batches"] == 3
    assert after.optimizer.micro_batches_held == 0
    assert same(after.weights(), Parts().train(3).weights())


def test_a_window_that_began_in_the_epoch_before_is_taken_again_from_there(tmp_path):
    per_epoch = -(-SAMPLES // BATCH)
    assert per_epoch == 6
    Parts(tmp_path, k_steps=4).train(7).saved(7)
    after = Parts(tmp_path, k_steps=2)
    assert after.checkpoints.resume().replayed == 3
    assert after.loader.last_batch == (0, 4)
    assert (after.loader.epoch, after.loader.state_dict()["batches"]) == (0, 4)


def test_a_window_after_an_epoch_that_was_left_early_is_taken_again_from_its_own_start(tmp_path):
    parts = Parts(tmp_path).train(3)
    parts.loader.set_epoch(2)
    parts.train(2).saved(5)
    after = Parts(tmp_path, k_steps=2)
    assert after.checkpoints.resume().replayed == 2
    assert (after.loader.epoch, after.loader.state_dict()["batches"]) == (2, 0)


def test_a_window_that_was_resumed_still_knows_where_it_began(tmp_path):
    Parts(tmp_path).train(4).saved(4)
    again = Parts(tmp_path, seed=2)
    again.checkpoints.resume()
    again.train(1).saved(5)
    after = Parts(tmp_path, k_steps=2)
    assert after.checkpoints.resume().replayed == 2
    assert after.loader.state_dict()["batches"] == 3
    assert same(after.weights(), Parts().train(3).weights())


def test_a_window_that_is_taken_again_begins_with_what_was_loaded_before_it(tmp_path):
    parts = Parts(tmp_path)
    parts.checkpoints.resume()
    parts.train(3)
    parts.model[1].load_state_dict({**parts.model[1].state_dict(), "running_mean": torch.full((6,), 5.0)})
    parts.train(2).checkpoints.save(5)
    after = Parts(tmp_path, k_steps=2, seed=5)
    assert after.checkpoints.resume().replayed == 2
    assert after.model[1].running_mean.equal(torch.full((6,), 5.0))


def test_a_window_that_is_taken_again_begins_with_what_was_written_before_its_batch_was_given(tmp_path):
    """What a loop writes once it has the batch, it writes again."""

    def train(parts, batches):
        for number in range(batches):
            if parts.optimizer.micro_batches_held == 0 and number:
                parts.model[1].running_mean.fill_(5.0)  # estimated anew after each update, say
            inputs, labels = next(iter(parts.loader))
            parts.model[1].running_var.add_(1.0)  # as part of each batch
            parts.optimizer.minimize(torch.nn.functional.cross_entropy(parts.model(inputs), labels))

    parts = Parts(tmp_path, k_steps=2)
    parts.checkpoints.resume()
    train(parts, 5)
    parts.checkpoints.save(5)
    after = Parts(tmp_path, k_steps=1, seed=5)
    assert after.checkpoints.resume().replayed == 1
    assert after.model[1].running_mean.equal(torch.full((6,), 5.0))
    inputs, _ = next(iter(after.loader))
    after.model[1].running_var.add_(1.0)
    with torch.no_grad():
        after.model(inputs)
    for name in ("running_mean", "running_var"):
        assert getattr(after.model[1], name).equal(getattr(parts.model[1], name)), name


def test_a_window_that_began_in_the_middle_of_a_batch_cannot_be_taken_again(tmp_path):
    """Its batch served the window before, too, which would count twice."""

    def train(parts, batches):
        for _ in range(batches):
            inputs, labels = next(iter(parts.loader))
            for half in (slice(0, 1), slice(1, 2), slice(2, 4)):
                parts.optimizer.minimize(
                    torch.nn.functional.cross_entropy(parts.model[3](parts.model[0](inputs[half])), labels[half])
                )

    parts = Parts(tmp_path, k_steps=2)
    parts.checkpoints.resume()
    train(parts, 1)
    parts.checkpoints.save(1)
    with pytest.raises(ValueError, match="a window of 1 micro-batches was in progress.*loaders that can go back"):
        Parts(tmp_path, k_steps=3).checkpoints.resume()
    again = Parts(tmp_path, k_steps=2, seed=5)
    again.checkpoints.resume()
    train(again, 1)
    whole = Parts(k_steps=2)
    train(whole, 2)
    assert same(again.weights(), whole.weights())
    again.checkpoints.save(2)
    assert Parts(tmp_path, k_steps=3).checkpoints.resume().replayed == 0


def test_a_window_with_a_large_buffer_that_was_seen_to_change_goes_on(tmp_path, monkeypatch):
    def count(module, _inputs, _output):
        module.queue += 1

    def with_queue(**options):
        parts = Parts(**options)
        parts.model[0].register_buffer("queue", torch.zeros(64))
        parts.model[0].register_forward_hook(count)
        parts.optimizer.engine.buffers.keep()
        return parts

    monkeypatch.setattr(buffers, "LARGE", 100)
    with_queue(folder=tmp_path).train(4).saved(4)
    parts = with_queue(folder=tmp_path, seed=5)
    assert parts.checkpoints.resume().step == 4
    assert same(parts.train(3).weights(), with_queue().train(7).weights())


def test_a_window_without_a_loader_cannot_be_taken_again(tmp_path):
    def build(k_steps):
        parts = Parts(k_steps=k_steps)
        return parts, X.Checkpoints(tmp_path, model=parts.model, optimizer=parts.optimizer)

    parts, checkpoints = build(3)
    parts.train(4)
    checkpoints.save(4)
    parts, checkpoints = build(3)
    assert checkpoints.resume().step == 4
    assert parts.optimizer.micro_batches_held == 1
    parts, checkpoints = build(2)
    with pytest.raises(ValueError, match="a window of 1 micro-batches was in progress"):
        checkpoints.resume()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a checkpoint of nothing"),
        ({"model": 3}, "model= takes nn.Modules, and 'model' is a int"),
        (
            {"loader": [1, 2]},
            "loader= takes what has a state to save, and 'loader', a list, has none. Use fleetx.data.Loader",
        ),
        ({"also": {"a": 3}}, "also= takes what has a state to save, and 'a', a int, has none"),
        ({"step": 3}, "step= takes a fleetx.Step, not a int. The number of a step belongs to save"),
        ({"model": torch.nn.Linear(1, 1), "keep": 0}, "keep must be a whole number of at least 1"),
        ({"model": torch.nn.Linear(1, 1), "keep": True}, "keep must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        X.Checkpoints(tmp_path, **given)


def test_the_inner_optimizer_is_not_enough(tmp_path):
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="a plain SGD on a model that went through"):
        X.Checkpoints(tmp_path, model=model, optimizer=inner)


def test_a_step_and_a_model_contradict_each_other(tmp_path):
    parts = Parts()
    step = X.Step(parts.model, parts.optimizer, torch.nn.functional.cross_entropy)
    with pytest.raises(ValueError, match="not both"):
        X.Checkpoints(tmp_path, step=step, model=parts.model)


@pytest.mark.parametrize("step", [-1, True, 1.5, "3"])
def test_the_number_of_a_step_is_checked(tmp_path, step):
    with pytest.raises(ValueError, match="step must be a whole number"):
        Parts(tmp_path).saved(step)


def test_an_extra_value_that_cannot_be_saved_is_named_and_changes_nothing(tmp_path):
    parts = Parts(tmp_path)
    parts.saved(1)
    for asynchronous in (False, True):
        with pytest.raises(TypeError, match="'extra/where' is a pathlib"):
            parts.checkpoints.save(2, extra={"where": Path()}, asynchronous=asynchronous)
    assert Parts(tmp_path).checkpoints.resume().step == 1
    parts.checkpoints.save(3)


def test_asynchronous_saves_use_the_same_memory_again():
    copies = HostCopies()
    tensors = {"a": torch.randn(4, 3).t(), "b": torch.tensor(2)}
    first = copies.take(tensors)
    addresses = {name: copy.data_ptr() for name, copy in first.items()}
    assert same(first, tensors)
    tensors["a"].add_(1)
    assert not torch.equal(first["a"], tensors["a"])
    second = copies.take(tensors)
    assert same(second, tensors)
    assert {name: copy.data_ptr() for name, copy in second.items()} == addresses
    assert copies.take({"a": torch.randn(2)})["a"].shape == (2,)
