"""The loading benchmark: its rivals do the same work, and its figures add up."""

import math

import pytest
import torch

from benchmarks import loading
from benchmarks.loading import FULL_PEER, OURS, PEER, Images, Text, measure, summarise
from benchmarks.plain_loading import PlainImages, PlainText
from fleetx.data import load_digital_dataset_from_file, load_imagenet_from_file, make_digital, make_imagenet


def test_the_plain_loader_gives_images_of_the_same_kind(tmp_path):
    path = make_imagenet(tmp_path, classes=4, images=8, size=300)
    ours = next(iter(load_imagenet_from_file(path, 8, classes=4, num_workers=0)))
    theirs = torch.utils.data.default_collate([PlainImages(path, draft=True)[index] for index in range(8)])
    assert ours["images"].shape == theirs[0].shape == (8, 3, 224, 224)
    assert ours["images"].dtype == theirs[0].dtype
    assert sorted(ours["labels"].tolist()) == sorted(theirs[1].tolist())


def test_the_plain_loader_gives_text_of_the_same_kind(tmp_path):
    data, vocab = make_digital(tmp_path, samples=512, vocab=64, seq_len=32)
    ours = next(iter(load_digital_dataset_from_file(data, vocab, 512, 32)))
    plain = PlainText(data, vocab, 32)
    theirs = plain.collate([plain[index] for index in range(len(plain))])
    for name, tensor in ours.items():
        assert (tensor.shape, tensor.dtype) == (theirs[name].shape, theirs[name].dtype), name
    for batch in (ours, theirs):
        masked = (batch["masked_labels"] != -100).sum().item()
        assert (batch["masked_positions"] >= 0).sum().item() == masked
        tokens = batch["attention_mask"].sum().item() - 3 * 512
        assert masked / tokens == pytest.approx(0.15, abs=0.01)
        assert batch["next_sentence_labels"].float().mean().item() == pytest.approx(0.5, abs=0.1)
        assert (batch["input_ids"] == 3).sum().item() / masked == pytest.approx(0.8, abs=0.05)


@pytest.mark.middle
def test_every_rival_is_measured_in_every_round():
    cases = (
        Images("images", 64, files=8, rounds=2, batches=1, batch=4),
        Text("reading", 16, reads=True, samples=64, rounds=2),
        Text("text", 16, reads=False, samples=256, rounds=3, batches=2, batch=8),
    )
    summary = summarise([measure(1, cases), measure(1, cases)])
    rivals = {name: set(case["samples_per_s"]) for name, case in summary["cases"].items()}
    assert rivals == {"images": {OURS, PEER, FULL_PEER}, "reading": {OURS, PEER}, "text": {OURS, PEER}}
    for name, case in summary["cases"].items():
        assert all(math.isfinite(speed) and speed > 0 for speed in case["samples_per_s"].values())
        assert set(case["speed_of_ours"]) == rivals[name] - {OURS}
    assert len(summary["runs"][0]["cases"]["text"][OURS]) == 3


def test_a_speed_is_the_median_of_rounds_so_that_a_slow_moment_does_not_count():
    assert loading.paired([1.0, 1.0, 9.0], [2.0, 2.0, 2.0]) == 2.0
