from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetx.cli import app
from fleetx.data import make_digital, make_idx, make_imagenet

SMALL = {make_imagenet: {"images": 6, "size": 24}, make_digital: {"samples": 12}, make_idx: {"images": 12}}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("make", [make_imagenet, make_digital, make_idx])
def test_the_seed_decides_all(tmp_path, make):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        make(tmp_path / name, **SMALL[make], seed=seed)
    one, same, other = (contents(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert one.keys() == other.keys()
    assert one != other


@pytest.mark.parametrize("make", [make_imagenet, make_digital, make_idx])
def test_a_folder_in_use_is_left_alone(tmp_path, make):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is not empty: name another folder, or pass overwrite=True"):
        make(tmp_path)
    with pytest.raises(FileExistsError, match=r"was not made here, and would not be replaced: mine.txt\. Move"):
        make(tmp_path, **SMALL[make], overwrite=True)
    assert list(contents(tmp_path)) == [(tmp_path / "mine.txt").relative_to(tmp_path)]
    with pytest.raises(FileExistsError, match=r"mine.txt is a file"):
        make(tmp_path / "mine.txt")


@pytest.mark.parametrize("make", [make_imagenet, make_digital, make_idx])
def test_overwriting_leaves_nothing_of_what_was_made_before(tmp_path, make):
    larger = {name: 3 * count for name, count in SMALL[make].items()} | ({"files": 5} if make is make_digital else {})
    make(tmp_path / "twice", **larger)
    for name in ("twice", "once"):
        make(tmp_path / name, **SMALL[make], overwrite=True)
    assert contents(tmp_path / "twice") == contents(tmp_path / "once")


def test_overwriting_does_not_reach_through_links_or_into_foreign_folders(tmp_path):
    data, _ = make_digital(tmp_path / "text", samples=4)
    (data / "old.txt").write_text("1 9 2;0 0 0;0 1 2;1")
    with pytest.raises(FileExistsError, match=r"not be replaced: data/old.txt\."):
        make_digital(tmp_path / "text", samples=4, overwrite=True)
    (data / "old.txt").rename(tmp_path / "part-007.txt")
    (data / "part-007.txt").symlink_to(tmp_path / "part-007.txt")
    with pytest.raises(FileExistsError, match=r"not be replaced: data/part-007.txt\."):
        make_digital(tmp_path / "text", samples=4, overwrite=True)
    assert (tmp_path / "part-007.txt").exists()


def run(*arguments):
    return CliRunner().invoke(app, ["data", "make", *map(str, arguments)], env={"COLUMNS": "400"})


def test_the_command_takes_the_makers_sizes(tmp_path):
    done = run("imagenet", tmp_path / "i", "--images", 6, "--classes", 3, "--size", 24, "--val-images", 3, "--seed", 1)
    assert done.exit_code == 0, done.output
    make_imagenet(tmp_path / "same", images=6, classes=3, size=24, val_images=3, seed=1)
    assert contents(tmp_path / "i") == contents(tmp_path / "same")
    done = run("digital", tmp_path / "d", "--samples", 8, "--vocab", 32, "--seq-len", 16, "--files", 1)
    assert done.exit_code == 0, done.output
    make_digital(tmp_path / "text", samples=8, vocab=32, seq_len=16, files=1)
    assert contents(tmp_path / "d") == contents(tmp_path / "text")
    again = run("digital", tmp_path / "d", "--samples", 8)
    assert again.exit_code == 2
    assert "is not empty: name another folder, or add --overwrite to replace" in again.output
    assert run("digital", tmp_path / "d", "--samples", 8, "--overwrite").exit_code == 0


def test_the_command_refuses_sizes_of_another_format(tmp_path):
    done = run("idx", tmp_path / "x", "--seq-len", 16)
    assert done.exit_code == 2
    assert "idx has no --seq-len: its sizes are --images, --classes, --size." in done.output
    assert run("idx", tmp_path / "x", "--images", "many").exit_code == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_folder_that_cannot_be_written_is_named_in_one_sentence(tmp_path, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(Path, "mkdir", fails)
    done = run("idx", tmp_path / "x")
    assert done.exit_code == 2
    said = f"x cannot be written ({error.strerror}): name a folder where you may write."
    assert said in " ".join(done.output.replace("│", " ").split())


def test_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match=r"images must be a whole number, got 1.5 \(float\): give a count"):
        make_imagenet(tmp_path, images=1.5)
    with pytest.raises(TypeError, match=r"vocab must be a whole number, got '64'"):
        make_digital(tmp_path, vocab="64")
    with pytest.raises(ValueError, match=r"images must be at least 1, got 0"):
        make_imagenet(tmp_path, images=0)
    with pytest.raises(ValueError, match=r"Fashion-MNIST has 10 classes, got 11"):
        make_idx(tmp_path, classes=11)
    with pytest.raises(ValueError, match=r"got vocab=6 and seq_len=32"):
        make_digital(tmp_path, vocab=6)


def test_no_file_is_left_empty(tmp_path):
    with pytest.raises(ValueError, match="each file needs a sample, got files=100 and samples=3: make fewer files"):
        make_digital(tmp_path / "few", samples=3, files=100)
