import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

from fleetx.data import Epoch, load_imagenet_from_file, make_imagenet
from fleetx.data.cropping import FORMATS, centre_box, random_box, read_train, read_val, resample
from fleetx.data.imagenet import read_list


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_imagenet(tmp_path_factory.mktemp("images") / "set", classes=3, images=20, size=40)


def load(path, **options):
    return load_imagenet_from_file(path, **({"batch_size": 4, "image_size": 16, "num_workers": 0} | options))


def write_list(folder, lines, images=("a.JPEG", "b.JPEG")):
    for name in images:
        Image.new("RGB", (20, 20), (200, 10, 10)).save(folder / name, "JPEG")
    path = folder / "list.txt"
    path.write_text(lines)
    return path


def test_batches(made):
    batches = list(load(made))
    assert len(batches) == 5
    for batch in batches:
        assert list(batch) == ["images", "labels"]
        assert batch["images"].dtype == torch.uint8
        assert batch["images"].shape == (4, 3, 16, 16)
        assert batch["images"].is_contiguous(memory_format=torch.channels_last)
        assert batch["labels"].dtype == torch.int64
    assert torch.cat([batch["labels"] for batch in batches]).bincount().tolist() == [7, 7, 6]


def test_validation_is_in_order_whole_and_the_same_in_every_epoch(made):
    loader = load(made.parent / "val.txt", phase="val", batch_size=2)
    first, second = list(loader), list(loader)
    assert torch.cat([batch["labels"] for batch in first]).tolist() == [0, 1, 2, 0, 1]
    assert all(torch.equal(one["images"], two["images"]) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
def test_resumes_to_the_exact_next_batch(made, before, after):
    expected = list(load(made, seed=3))
    for given in range(len(expected)):
        loader = load(made, seed=3, num_workers=before)
        batches = iter(loader)
        for _ in range(given):
            next(batches)
        resumed = load(made, seed=3, num_workers=after)
        resumed.load_state_dict(loader.state_dict())
        for got, want in zip(resumed, expected[given:], strict=True):
            assert torch.equal(got["images"], want["images"])
            assert torch.equal(got["labels"], want["labels"])


def test_two_workers_share_an_epoch_and_wrap_its_end(made):
    made.with_name("odd.txt").write_text("".join(f"train/{line}\n" for line in made.read_text().splitlines()[:7]))
    counts = [
        [len(batch["labels"]) for batch in load(made.with_name("odd.txt"), batch_size=2, rank=r, workers=2)]
        for r in (0, 1)
    ]
    assert counts == [[2, 2], [2, 2]]


def test_validation_on_two_workers_sees_every_image_once(made):
    parts = [list(load(made.parent / "val.txt", phase="val", batch_size=1, rank=r, workers=2)) for r in (0, 1)]
    assert [[len(batch["labels"]) for batch in part] for part in parts] == [[1, 1, 1], [1, 1, 0]]
    empty = parts[1][2]["images"]
    assert (empty.shape, empty.dtype) == ((0, 3, 16, 16), torch.uint8)


def test_epochs_augment_anew_and_validation_does_not(made):
    samples = load(made).dataset
    assert torch.equal(samples.sample(3, Epoch(0, 1))[0], samples.sample(3, Epoch(0, 1))[0])
    assert not torch.equal(samples.sample(3, Epoch(0, 1))[0], samples.sample(3, Epoch(0, 2))[0])


def test_the_classes_can_be_seen(made):
    means = torch.zeros(3, 3)
    for batch in load(made):
        for image, label in zip(batch["images"].float(), batch["labels"], strict=True):
            means[label] += image.mean(dim=(1, 2))
    assert means.argmax(dim=1).tolist() == [0, 2, 1]


def test_random_boxes_have_the_stated_areas_and_ratios():
    boxes = np.array([random_box(500, 375, Epoch(0, 0).rng(index)) for index in range(2000)])
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, ratio = wide * high / (500 * 375), wide / high
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 500
    assert boxes[:, 3].max() <= 375
    assert 0.075 < share.min() < 0.1
    assert 0.9 < share.max() <= 1
    assert 0.74 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.35
    assert 0.4 < share.mean() < 0.5  # below the middle, 0.54: large boxes of an unlike ratio do not fit


def test_an_image_too_narrow_for_any_crop_is_cut_to_a_permitted_ratio():
    left, top, right, bottom = random_box(1000, 10, Epoch(0, 0).rng(0))
    assert math.isclose((right - left) / (bottom - top), 4 / 3)
    assert (top, bottom) == (0, 10)


def test_the_centre_is_224_of_256():
    assert centre_box(512, 256) == (144, 16, 368, 240)


def test_half_of_the_images_are_mirrored(tmp_path):
    picture = np.zeros((20, 20, 3), np.uint8)
    picture[:, 10:] = 255
    Image.fromarray(picture).save(tmp_path / "half.png")
    mirrored = 0
    for index in range(200):
        image = read_train(tmp_path / "half.png", 8, Epoch(0, 0).rng(index)).float().mean(dim=(0, 2))
        mirrored += int(image[0] > image[-1])
    assert 60 < mirrored < 140


def test_decoding_large_jpegs_at_a_fraction_hardly_changes_them(tmp_path):
    down, across = np.mgrid[0:900, 0:1200]
    waves = 127 + 100 * np.sin(across / 40) * np.cos(down / 55)
    Image.fromarray(np.stack([waves, waves.T[:900, :1].repeat(1200, 1), 255 - waves], 2).astype(np.uint8)).save(
        tmp_path / "large.jpg", quality=95
    )
    fast = read_val(tmp_path / "large.jpg", 64).float()
    with Image.open(tmp_path / "large.jpg") as image:
        image.load()
        slow = torch.from_numpy(np.array(resample(image.copy(), centre_box(*image.size), 64))).float()
    assert (fast - slow).abs().mean() < 1.5


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_kind_of_image_becomes_three_colours(tmp_path, mode):
    name = "image.jpg" if mode == "CMYK" else "image.png"
    image = Image.new("RGB", (30, 20), (250, 250, 250)).convert(mode)
    image.save(tmp_path / name, **({"transparency": b"\0\1"} if mode == "P" else {}))
    assert read_val(tmp_path / name, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("name", ["image.png", "image.tiff"])
def test_grey_of_16_bits_keeps_its_brightness(tmp_path, name):
    ramp = np.linspace(0, 65535, 30).astype(np.uint16)[None].repeat(20, axis=0)
    Image.fromarray(ramp).save(tmp_path / name)
    Image.fromarray((ramp >> 8).astype(np.uint8)).save(tmp_path / f"8.{name}")
    assert torch.equal(read_val(tmp_path / name, 8), read_val(tmp_path / f"8.{name}", 8))


@pytest.mark.parametrize(("kind", "tags"), [(np.int32, {}), (np.float32, {}), (np.uint16, {262: 0})])
def test_values_without_a_known_white_are_refused(tmp_path, kind, tags):
    path = write_list(tmp_path, "a.JPEG 0\n")
    Image.fromarray(np.full((20, 20), 200, kind)).save(tmp_path / "a.JPEG", "TIFF", tiffinfo=tags)
    with pytest.raises(ValueError, match=r"list.txt:1: .*a.JPEG cannot be decoded \(its values \(mode .*convert it\)"):
        next(iter(load(path)))


def test_a_format_that_runs_other_programs_is_refused(tmp_path, monkeypatch):
    path = write_list(tmp_path, "a.JPEG 0\n")
    Image.new("RGB", (20, 20)).save(tmp_path / "a.JPEG", "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was run"))
    with pytest.raises(ValueError, match=r"a.JPEG cannot be decoded \(it is no image in one of the formats JPEG, PNG"):
        next(iter(load(path)))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_an_image_that_may_have_no_end_is_refused(tmp_path, make):
    path = write_list(tmp_path, "a.JPEG 0\npipe.JPEG 1\n")
    make(tmp_path / "pipe.JPEG")
    with pytest.raises(
        ValueError, match=r"list.txt:2: .* cannot be decoded \(.*pipe.JPEG must be a plain file, and is"
    ):
        next(iter(load(path, batch_size=2)))


@pytest.mark.middle
@pytest.mark.parametrize("form", FORMATS)
def test_the_formats_that_are_read(tmp_path, form):
    Image.new("RGB", (20, 20), (200, 10, 10)).save(tmp_path / "image", form)
    assert (read_val(tmp_path / "image", 8)[0, 0] - torch.tensor([200, 10, 10])).abs().max() < 8


def test_images_lie_in_the_lists_folder_or_in_one_named_like_it(tmp_path):
    path = write_list(tmp_path, "a.JPEG 0\nb.JPEG 1\n")
    assert len(list(load(path))) == 1
    (tmp_path / "list").mkdir()
    assert len(list(load(path))) == 1
    (tmp_path / "a.JPEG").rename(tmp_path / "list" / "a.JPEG")
    (tmp_path / "b.JPEG").rename(tmp_path / "list" / "b.JPEG")
    assert len(list(load(path))) == 1


@pytest.mark.parametrize(
    ("lines", "message", "reason"),
    [
        ("a.JPEG 0\nb.JPEG\n", r"list.txt:2: expected `relative/path.JPEG label`, got b'b.JPEG\\n'", "malformed line"),
        ("a.JPEG 0\n\n", r"list.txt:2: expected `relative", "malformed line"),
        ("a.JPEG 0\nb.JPEG one\n", r"list.txt:2: expected `relative", "malformed line"),
        ("a.JPEG 0\nb.JPEG 7\n", r"list.txt:2: a label is from 0 to 6 for classes=7, got 7", "label out of range"),
        ("a.JPEG 0\nb.JPEG -1\n", r"list.txt:2: a label is from 0 to 6", "label out of range"),
    ],
)
def test_bad_lines(tmp_path, lines, message, reason):
    path = write_list(tmp_path, lines)
    with pytest.raises(ValueError, match=message):
        load(path, classes=7)
    loader = load(path, classes=7, on_error="skip", last="keep")
    assert [batch["labels"].tolist() for batch in loader] == [[0]]
    assert loader.skipped == {reason: 1}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_images(tmp_path, num_workers):
    path = write_list(tmp_path, "a.JPEG 0\ngone.JPEG 1\ncut.JPEG 2\nb.JPEG 3\ntext.JPEG 4\n")
    (tmp_path / "cut.JPEG").write_bytes((tmp_path / "a.JPEG").read_bytes()[:500])
    (tmp_path / "text.JPEG").write_text("no image")
    options = {"batch_size": 1, "shuffle": False, "num_workers": num_workers}
    loader = load(path, **options)
    next(iter(loader))
    with pytest.raises(FileNotFoundError, match=r"list.txt:2: there is no image .*gone.JPEG"):
        next(iter(loader))
    for position, message in (
        (2, r"list.txt:3: .*cut.JPEG cannot be decoded \(.*[Tt]runc"),
        (4, r"list.txt:5: .*text"),
    ):
        loader.load_state_dict(loader.state_dict() | {"batches": position, "samples": position})
        with pytest.raises(ValueError, match=message):
            next(iter(loader))
    loader = load(path, on_error="skip", **options)
    assert [batch["labels"].item() for batch in loader] == [0, 3, 3, 3, 0]
    assert loader.skipped == {"missing image": 1, "broken image": 2}


def test_bad_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.txt: there is no such list"):
        load(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"list.txt: the list holds no image"):
        load(write_list(tmp_path, ""))
    path = write_list(tmp_path, "a.JPEG 0\n")
    with pytest.raises(ValueError, match=r"phase must be 'train' or 'val', got 'test'"):
        load(path, phase="test")
    with pytest.raises(ValueError, match=r"at least 1, got 0, 16 and 1000"):
        load(path, batch_size=0)
    for name, value in (("batch_size", 2.5), ("batch_size", "8"), ("classes", None), ("image_size", True)):
        with pytest.raises(TypeError, match=rf"{name} must be a whole number, got {value!r} \("):
            load(path, **{name: value})
    with pytest.raises(TypeError, match=r"no argument 'batchsize'; did you mean 'batch_size'"):
        load(path, batchsize=3)
    with pytest.raises(TypeError, match=r"the epoch must be a whole number, got 'x'"):
        load(path).set_epoch("x")
    with pytest.raises(ValueError, match=r"on_error must be"):
        load(path, on_error="ignore")


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    listed = read_list(write_list(tmp_path, "\ufeffa.JPEG 0\nb.JPEG 1\n"), 2, "raise")
    assert [listed.name(0), listed.name(1)] == ["a.JPEG", "b.JPEG"]
