import errno
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.checkpoint import CheckpointError, inspect
from fleetx.checkpoint.manifest import FORMAT, FileFacts, Manifest, read_manifest
from tests.checkpoint.damaging import KINDS, change_anything, damage, rewrite, rewrite_text
from tests.checkpoint.making import Parts, same


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two checkpoints in mid-window, and the weights of the older."""
    folder = tmp_path_factory.mktemp("checkpoints")
    parts = Parts(folder).train(4)
    parts.saved(4)
    weights = parts.weights()
    parts.train(4).saved(8)
    return folder, weights


@pytest.fixture
def copied(original, tmp_path):
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(original, copied, kind):
    newest = copied / "save-000002-step-8"
    what = damage(newest, kind, seed=1)
    assert inspect(newest).problem, what
    parts = Parts(copied, seed=3)
    start = parts.checkpoints.resume()
    assert (start.step, start.path.name) == (4, "save-000001-step-4")
    assert start.passed_over[0].path == newest
    assert same(parts.weights(), original[1])
    parts.train(4)
    assert parts.checkpoints.save(8).name == "save-000003-step-8"


def check_many(original, folder, count, seed):
    rng = random.Random(seed)
    newest = folder / "save-000002-step-8"
    pristine = original[0] / newest.name
    parts = Parts(folder, seed=3)
    caught = dict.fromkeys(KINDS, 0)
    for _ in range(count):
        kind = rng.choice(list(KINDS))
        what = damage(newest, kind, seed=rng.random())
        start = parts.checkpoints.resume()
        assert start.step == 4, (kind, what)
        assert start.passed_over[0].path == newest
        assert same(parts.weights(), original[1])
        caught[kind] += 1
        shutil.rmtree(newest)
        shutil.copytree(pristine, newest)
    return caught


def test_damage_of_every_kind_at_random_places_is_caught(original, copied, caplog):
    caplog.set_level(logging.ERROR)
    assert sum(check_many(original, copied, 120, seed=0).values()) == 120


@pytest.mark.full
def test_sixteen_hundred_damaged_checkpoints_are_caught(original, copied, caplog):
    caplog.set_level(logging.ERROR)
    caught = check_many(original, copied, 1600, seed=1)
    assert all(count > 50 for count in caught.values()), caught


@settings(max_examples=120)
@given(which=st.integers(0, 100), place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
def test_any_other_byte_anywhere_is_caught(original, which, place, value):
    path = original[0] / "save-000002-step-8"
    files = sorted(path.iterdir())
    file = files[which % len(files)]
    contents = file.read_bytes()
    changed = bytearray(contents)
    changed[int(place * len(contents))] ^= value
    try:
        file.write_bytes(changed)
        assert inspect(path).problem is not None
    finally:
        file.write_bytes(contents)
    assert inspect(path).problem is None


def test_a_checkpoint_whose_folder_cannot_be_listed_is_passed_over(copied, monkeypatch):
    newest = max(copied.glob("save-*"))
    listed = Path.iterdir

    def iterdir(path):
        if path == newest:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    start = Parts(copied).checkpoints.resume()
    assert [one.path for one in start.passed_over] == [newest]
    assert "the folder cannot be read (Stale file handle)" in start.passed_over[0].reason


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_manifest_that_may_have_no_end_is_not_read(copied, make):
    newest = copied / "save-000002-step-8"
    (newest / "manifest.json").unlink()
    make(newest / "manifest.json")
    assert inspect(newest).problem == "manifest.json is not a file"


def state_of(tree, *keys):
    for key in keys:
        tree = tree["dict"][key]
    return tree.get("dict", tree) if isinstance(tree, dict) else tree


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("shared.json", lambda tree: tree["dict"].pop("models")),
        ("shared.json", lambda tree: state_of(tree, "optimizers", "optimizer", "fleetx").pop("watch")),
        ("shared.json", lambda tree: state_of(tree, "optimizers", "optimizer", "fleetx").update(watch=None)),
        (
            "shared.json",
            lambda tree: state_of(tree, "optimizers", "optimizer", "param_groups")[0]["dict"].update(lr=[]),
        ),
        ("shared.json", lambda tree: state_of(tree, "models", "model", "weights", "0.weight")["tensor"].pop("name")),
        ("rank-00000.json", lambda tree: state_of(tree, "random").update(python={"tuple": []})),
        ("rank-00000.json", lambda tree: state_of(tree, "loaders", "loader").update(batches=-1)),
        ("rank-00000.json", lambda tree: state_of(tree, "windows", "optimizer").update(grads=[1])),
        ("rank-00000.json", lambda tree: state_of(tree, "start").pop("buffers")),
        ("manifest.json", lambda tree: tree.update(workers=2**70)),
        ("manifest.json", lambda tree: tree["job"]["optimizers"]["optimizer"][2][0].append([])),
        ("manifest.json", lambda tree: tree["job"]["optimizers"].update(optimizer={})),
        ("manifest.json", lambda tree: tree["files"]["model.safetensors"]["tensors"].update({"0.bias": "F32 [-6]"})),
    ],
)
def test_impossible_contents_under_valid_hashes_are_passed_over(original, copied, file, change):
    newest = copied / "save-000002-step-8"
    rewrite(newest, file, change)
    parts = Parts(copied, seed=3)
    start = parts.checkpoints.resume()
    assert start.step == 4
    assert start.passed_over[0].path == newest
    assert file in start.passed_over[0].reason
    assert same(parts.weights(), original[1])


@pytest.mark.middle
def test_no_impossible_contents_raise_what_is_not_ours(original, copied, caplog):
    caplog.set_level(logging.ERROR)
    rng, newest, steps = random.Random(2), copied / "save-000002-step-8", []
    for _ in range(150):
        what = []
        file = rng.choice(["shared.json", "rank-00000.json", "manifest.json"])
        rewrite(newest, file, lambda tree: what.append(change_anything(tree, rng)))  # noqa: B023
        parts = Parts(copied, seed=3)
        before = parts.weights()
        try:
            steps.append(parts.checkpoints.resume().step)
        except (CheckpointError, ValueError):  # whole, but of something that was not given here
            assert same(parts.weights(), before), what
            steps.append(None)
        except Exception as error:
            raise AssertionError(f"{file}: {what}") from error
        shutil.rmtree(newest)
        shutil.copytree(original[0] / newest.name, newest)
    # What was changed need not matter: a count in the manifest, say.
    assert steps.count(4) > 110


OPTIMIZER = "dict optimizers dict optimizer dict"
IMPOSSIBLE = [
    ("manifest.json", "job optimizers optimizer 2", -1),
    ("rank-00000.json", "dict start dict loaders dict unknown", ["x"]),
    ("rank-00000.json", "dict windows dict optimizer dict buffers", [{"bytes": ""}]),
    ("rank-00000.json", "dict buffers dict model dict 1.num_batches_tracked", -1),
    ("shared.json", f"{OPTIMIZER} fleetx dict watch", None),
    ("shared.json", f"{OPTIMIZER} fleetx dict watch dict total", None),
    ("shared.json", f"{OPTIMIZER} fleetx dict names", None),
    ("shared.json", f"{OPTIMIZER} param_groups 0 dict params", [[1]] * 6),
]


@pytest.mark.parametrize(("file", "path", "value"), IMPOSSIBLE)
def test_a_value_that_no_save_writes_is_passed_over(copied, file, path, value):
    def change(tree):
        *parents, last = [int(key) if key.isdigit() else key for key in path.split()]
        for key in parents:
            tree = tree[key]
        tree[last] = value

    newest = copied / "save-000002-step-8"
    rewrite(newest, file, change)
    assert Parts(copied, seed=3).checkpoints.resume().step == 4


def test_deep_json_under_valid_hashes_is_passed_over(copied):
    newest = copied / "save-000002-step-8"
    rewrite(newest, "shared.json", lambda tree: tree["dict"].update(optimizers="DEEP"))
    rewrite_text(newest, "shared.json", lambda text: text.replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000))
    assert Parts(copied, seed=3).checkpoints.resume().step == 4


def test_when_all_are_damaged_each_is_named_and_nothing_begins_anew(copied):
    for path in copied.glob("save-*"):
        damage(path, "flipped bit", seed=2)
    parts = Parts(copied)
    with pytest.raises(CheckpointError) as error:
        parts.checkpoints.resume()
    message = str(error.value)
    assert "holds 2 checkpoints, and none can be used" in message
    assert "save-000001-step-4: " in message
    assert "save-000002-step-8: " in message
    assert "give another folder to begin anew" in message
    with pytest.raises(CheckpointError, match="checkpoints of an earlier run"):
        parts.checkpoints.save(1)


def test_a_manifest_that_points_elsewhere_is_refused(copied):
    """Even one with a right checksum: no file outside of the checkpoint is read."""
    newest = copied / "save-000002-step-8"
    manifest = read_manifest(newest)
    for name in ("../save-000001-step-4/model.safetensors", "/etc/passwd", "..", ""):
        files = manifest.files | {name: FileFacts(1, "0")}
        (newest / "manifest.json").write_bytes(Manifest(**(vars(manifest) | {"files": files})).to_bytes())
        assert "not the name of a file beside it" in inspect(newest).problem


def test_a_manifest_of_a_newer_format_says_so(copied):
    newest = copied / "save-000002-step-8"
    text = (newest / "manifest.json").read_text(encoding="utf-8")
    (newest / "manifest.json").write_text(text.replace(FORMAT, "fleetx checkpoint 9"), encoding="utf-8")
    assert "written as 'fleetx checkpoint 9'" in inspect(newest).problem
