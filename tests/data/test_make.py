import pytest

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
    assert list(contents(tmp_path)) == [(tmp_path / "mine.txt").relative_to(tmp_path)]
    make(tmp_path, **SMALL[make], overwrite=True)
    assert len(contents(tmp_path)) > 1
    with pytest.raises(FileExistsError, match=r"mine.txt is a file"):
        make(tmp_path / "mine.txt")


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"images must be at least 1, got 0"):
        make_imagenet(tmp_path, images=0)
    with pytest.raises(ValueError, match=r"Fashion-MNIST has 10 classes, got 11"):
        make_idx(tmp_path, classes=11)
    with pytest.raises(ValueError, match=r"got vocab=6 and seq_len=32"):
        make_digital(tmp_path, vocab=6)
