"""What a feed may hold, and what is said where it may not."""

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import static
from tests.static.making import Classifier, feeds, program, sgd, tensors

FEED = feeds(1)[0]


def loss_of(feed, main=None):
    (loss,) = static.Executor().run(main or program(), feed, ["loss"])
    return loss


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda feed: {}, ValueError, "needs images, labels, but the feed has nothing: add images, labels"),
        (lambda feed: None, ValueError, "needs images, labels, but the feed has nothing"),
        (lambda feed: {"images": feed["images"]}, ValueError, "the feed has images: add labels"),
        (lambda feed: feed | {"labels": None}, ValueError, "the feed has images: add labels"),
        (lambda feed: feed | {"image": 1}, ValueError, "no input 'image', do you mean 'images'.*images, labels"),
        (lambda feed: feed | {3: 1}, ValueError, "no input 3. It takes images, labels"),
        (lambda feed: [feed], TypeError, "a dict from names to arrays, not a list: feed={'images': ..., 'labels'"),
        (lambda feed: feed | {"images": "abc"}, TypeError, "'images' must be a tensor, an array .* got 'abc'"),
        (lambda feed: feed | {"images": [[1.0], [1.0, 2.0]]}, TypeError, "'images' must be .* all rows equally long"),
        (lambda feed: feed | {"images": np.array([None])}, TypeError, "'images' must be a tensor"),
        (lambda feed: {name: value[:0] for name, value in feed.items()}, ValueError, r"empty: images float64 \(0, 6\)"),
    ],
)
def test_a_wrong_feed_says_what_is_right(change, error, message):
    with pytest.raises(error, match=message):
        static.Executor().run(program(), change(FEED), ["loss"])


def test_a_model_that_works_in_place_on_its_input_does_not_overwrite_the_array():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 1).double()

        def forward(self, images):
            return {"loss": self.net(images.mul_(0.5)).square().mean()}

    images = FEED["images"].copy()
    loss_of({"images": images}, static.Program(InPlace(), sgd, compile=False))
    assert np.array_equal(images, FEED["images"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", FEED["images"].astype(np.float32)),
        ("images", FEED["images"][:, :4]),
        ("labels", FEED["labels"].astype(np.float64)),
        ("labels", FEED["labels"][:4]),
    ],
)
def test_where_the_model_fails_the_feed_is_shown(name, value):
    main = program()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        loss_of(FEED | {name: value}, main)
    kind = str(torch.as_tensor(value).dtype).removeprefix("torch.")
    assert f"{name} {kind} {value.shape}" in caught.value.__notes__[0]
    assert "the model's weights are float64" in caught.value.__notes__[0]
    # Nothing was merged: the window of four begins with the next feed.
    for feed in feeds(3):
        loss_of(feed, main)
    assert static.Executor().optimizer(main).micro_batches_held == 3


def test_arrays_may_lie_in_memory_as_they_like():
    expected = loss_of(FEED)
    read_only = FEED["images"].copy()
    read_only.setflags(write=False)
    mirrored = FEED["images"][::-1].copy()[::-1]
    for images in (read_only, mirrored, np.asfortranarray(FEED["images"]), FEED["images"].astype(">f8")):
        assert loss_of(FEED | {"images": images}) == expected
    assert loss_of(FEED | {"images": list(FEED["images"])}) == expected
    assert loss_of(tensors(FEED)) == expected
    assert loss_of(FEED | {"labels": FEED["labels"].tolist()}) == expected


class Flexible(nn.Module):
    """Takes anything by name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, *, scale=None, **others):
        loss = self.linear(x).mean() * (1.0 if scale is None else scale)
        return sum([other.mean() for other in others.values()], start=loss)


def test_a_model_that_takes_any_name_is_fed_any_name():
    model, x = Flexible(), torch.ones(2, 4)
    main = static.Program(model, compile=False)
    assert loss_of({"x": x, "scale": 2.0, "shift": x}, main) == pytest.approx(2 * model(x).item() + 1)
    assert loss_of({"x": x, "scale": None}, main) == pytest.approx(model(x).item())


def test_where_the_user_computes_the_loss_the_feed_is_the_users():
    def compute(model, batch):
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    main = static.Program(nn.Linear(4, 1), sgd, compute=compute, compile=False)
    x = torch.ones(2, 4)
    assert np.isfinite(loss_of({"x": x, "y": x[:, :1]}, main))
    assert np.isfinite(loss_of({"x": x, "y": x[:, :1]}, main.clone(for_test=True)))
    with pytest.raises(KeyError) as caught:
        loss_of({"x": x}, main)
    assert "the feed was x float32 (2, 4)" in caught.value.__notes__[0]


def test_what_is_no_program_or_no_place_is_refused_and_a_startup_program_takes_no_feed():
    with pytest.raises(TypeError, match=r"runs programs, not a Classifier: wrap a model in Program\(model\)"):
        static.Executor().run(Classifier(), FEED)
    with pytest.raises(TypeError, match=r"takes CPUPlace\(\) or CUDAPlace\(0\), not 'cpu'"):
        static.Executor("cpu")
    with pytest.raises(ValueError, match="takes no feed and gives nothing to fetch"):
        static.Executor().run(static.StartupProgram(program()), FEED)
