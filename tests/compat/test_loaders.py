"""The applications' loaders, as the guide calls them."""

import pytest

from fleetx.compat import fleet_lightning
from fleetx.data import make_digital, make_imagenet

SMALL_BERT = {"layers": 1, "width": 8, "heads": 2, "vocab_size": 32, "max_positions": 16}
SMALL_RESNET = {"classes": 4, "depths": (1, 1, 1, 1), "width": 4, "image_size": 32}


@pytest.fixture
def digital(tmp_path):
    return make_digital(tmp_path / "text", samples=8, vocab=32, seq_len=16)


@pytest.fixture
def listed(tmp_path):
    return make_imagenet(tmp_path / "images", images=8, size=32)


def load_text(digital):
    model = fleet_lightning.applications.Bert_large(**SMALL_BERT)
    data_dir, vocab_path = digital
    return model, model.load_digital_dataset_from_file(
        data_dir=str(data_dir), vocab_path=str(vocab_path), max_seq_len=16, batch_size=4
    )


def test_a_loader_is_called_and_gives_what_the_model_is_fed(digital):
    model, data_loader = load_text(digital)
    batches = list(data_loader())
    assert len(batches) == 2
    assert all(set(batch) == set(model.inputs) for batch in batches)
    assert next(data_loader())["input_ids"].shape == (4, 16)  # the next epoch


def test_images_have_the_models_size(listed):
    model = fleet_lightning.applications.Resnet50(**SMALL_RESNET)
    batch = next(model.load_imagenet_from_file(str(listed), batch_size=4, num_workers=0)())
    assert batch["images"].shape == (4, 3, 32, 32)
    assert batch["labels"].shape == (4,)


def test_a_loader_made_before_the_worker_has_joined_reads_its_share_only(digital, listed, monkeypatch):
    """The guide's LARS script makes its loader first, and calls fleet.init later."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, text = load_text(digital)
    images = fleet_lightning.applications.Resnet50(**SMALL_RESNET).load_imagenet_from_file(listed, num_workers=0)
    for loader in (text, images):
        assert (loader.plan.rank, loader.plan.workers) == (1, 2)
