import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import fleetx as X
from fleetx import data, fleet
from fleetx.applications import Resnet50


def tiny(**settings):
    torch.manual_seed(0)
    return Resnet50(**{"classes": 5, "depths": (1, 2, 1, 1), "width": 4, "image_size": 32, **settings})


def photos(n=4, size=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 5, (n,), generator=generator)


def names_of_torchvision():
    """The keys of torchvision's resnet50, spelled out from its paper-shaped table: 3, 4, 6, 3 bottlenecks."""

    def norm(name):
        return [f"{name}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]

    names = ["conv1.weight", *norm("bn1")]
    for stage, depth in zip((1, 2, 3, 4), (3, 4, 6, 3), strict=True):
        for block in range(depth):
            at = f"layer{stage}.{block}"
            for index in (1, 2, 3):
                names += [f"{at}.conv{index}.weight", *norm(f"{at}.bn{index}")]
            if block == 0:
                names += [f"{at}.downsample.0.weight", *norm(f"{at}.downsample.1")]
    return [*names, "fc.weight", "fc.bias"]


def test_names_and_sizes_are_torchvisions():
    with torch.device("meta"):
        model = Resnet50()
    state = model.state_dict()
    assert list(state) == names_of_torchvision()
    assert len(state) == 320
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer3.5.conv3.weight": (1024, 256, 1, 1),
        "layer4.0.downsample.0.weight": (2048, 1024, 1, 1),
        "fc.weight": (1000, 2048),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_the_block_halves_the_image_in_its_3x3_convolution():
    with torch.device("meta"):
        model = Resnet50()
    for stage, stride in ((1, 1), (2, 2), (3, 2), (4, 2)):
        block = model.get_submodule(f"layer{stage}.0")
        assert block.conv1.stride == (1, 1)
        assert block.conv2.stride == block.downsample[0].stride == (stride, stride)


def plain_forward(state, images, depths):
    """The network once more, from the names alone."""

    def convolved(name, x, stride=1, padding=0):
        return functional.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)

    def normed(name, x):
        values = [state[f"{name}.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias")]
        mean, variance, weight, bias = (value[None, :, None, None] for value in values)
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    x = normed("bn1", convolved("conv1", images, 2, 3)).relu()
    x = functional.max_pool2d(x, 3, 2, 1)
    for stage, block in ((s, b) for s, depth in enumerate(depths, 1) for b in range(depth)):
        at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
        y = normed(f"{at}.bn1", convolved(f"{at}.conv1", x)).relu()
        y = normed(f"{at}.bn2", convolved(f"{at}.conv2", y, stride, 1)).relu()
        y = normed(f"{at}.bn3", convolved(f"{at}.conv3", y))
        if block == 0:
            x = normed(f"{at}.downsample.1", convolved(f"{at}.downsample.0", x, stride))
        x = (x + y).relu()
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


def test_logits_equal_a_plain_forward_in_fp64():
    model = tiny().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                tensor.data.uniform_(0.5, 1.5)
    images = torch.randn(3, 3, 40, 32, dtype=torch.float64)
    expected = plain_forward(model.state_dict(), images, model.depths)
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_are_normalised_in_the_model_and_floats_are_not(dtype):
    model, (images, _) = tiny().to(dtype).eval(), photos()
    mean = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64).view(3, 1, 1)
    normalised = ((images.double() / 255 - mean) / std).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(model(images), model(normalised), rtol=tolerance, atol=tolerance)


def test_the_loss_is_the_mean_cross_entropy_with_smoothing():
    images, labels = photos()
    model = tiny(label_smoothing=0.1).eval()
    expected = functional.cross_entropy(model(images), labels, label_smoothing=0.1)
    assert torch.equal(model(images=images, labels=labels)["loss"], expected)
    assert model.items((images, labels)) == model.items({"images": images, "labels": labels}) == {"loss": 4}


@pytest.mark.parametrize("label", [-100, -1, 5])
def test_no_label_is_left_out_of_the_mean(label):
    """torch ignores -100 by default; the count of items would then be wrong."""
    images, labels = photos()
    labels[1] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        tiny()(images, labels)


def test_shorter_whole_numbers_are_labels_too():
    images, labels = photos()
    assert torch.equal(tiny()(images, labels.int())["loss"], tiny()(images, labels)["loss"])


def test_the_loss_is_fp32_under_autocast():
    images, labels = photos()
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiny()(images, labels)["loss"]
    assert loss.dtype == torch.float32


def test_channels_last_goes_through_to_the_last_block():
    model = tiny().to(memory_format=torch.channels_last)
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(photos(size=64)[0].contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_flops_are_what_torch_counts():
    """torch leaves out the gradient of the images, which nobody needs; the formula's rule of three does not."""
    model = tiny(image_size=50)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 50, 50))
    assert model.flops_per_sample() == 3 * counter.get_total_flops()
    with torch.device("meta"):
        full = Resnet50()
    assert full.flops_per_sample() == 3 * 2 * 4_089_184_256


def test_checkpoints_are_the_sixteen_blocks():
    with torch.device("meta"):
        model = Resnet50()
    assert len(model.checkpoints) == 16
    assert (model.checkpoints[0], model.checkpoints[-1]) == ("layer1.0", "layer4.2")
    assert all(model.get_submodule(name) for name in model.checkpoints)


def test_initial_values_are_torchvisions():
    model = tiny(width=16)
    weight = model.layer3[0].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert all(block.bn3.weight.eq(1).all() for block in model.layer2)
    assert model.fc.weight.abs().max() <= 1 / model.fc.in_features**0.5
    assert all(block.bn3.weight.eq(0).all() for block in tiny(zero_init_residual=True).layer2)


def test_a_model_built_on_meta_comes_to_life():
    with torch.device("meta"):
        model = Resnet50(classes=5, depths=(1, 1, 1, 1), width=4)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    twin = Resnet50(classes=5, depths=(1, 1, 1, 1), width=4)
    torch.manual_seed(3)
    twin.reset_parameters()
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_micro_batches_equal_the_big_batch_when_statistics_are_frozen():
    images, labels = photos(n=9)
    model = tiny().double()
    model.eval()  # batch statistics cannot be equal; all the rest must be
    plain = copy.deepcopy(model)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4})
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, items=model.items)
    out = step({"images": images, "labels": labels})
    loss = functional.cross_entropy(plain(images), labels)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_small_one_learns():
    images, labels = photos(n=8)
    model = tiny()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    step = X.Step(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), strategy=strategy)
    losses = [step((images, labels)).loss.item() for _ in range(15)]
    assert losses[-1] < 0.3 * losses[0]


def test_its_loader_gives_batches_it_can_train_on(tmp_path):
    path = data.make_imagenet(tmp_path / "images", classes=5, images=10, size=40)
    model = tiny()
    batch = next(iter(model.load_imagenet_from_file(path, 6, num_workers=0)))
    assert tuple(batch) == model.inputs
    assert batch["images"].shape == (6, 3, 32, 32)
    assert model(**batch)["loss"].isfinite()
    with pytest.raises(ValueError, match="2"):  # labels of the list that the model does not have
        tiny(classes=2).load_imagenet_from_file(path, num_workers=0)
    with pytest.raises(ValueError, match="classes must be at most the model's 2, got 5"):
        tiny(classes=2).load_imagenet_from_file(path, classes=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": 0}, "classes must be a whole number of at least 1, got 0"),
        ({"depths": (3, 4)}, r"depths gives the blocks of four stages, got \(3, 4\)"),
        ({"depths": (3, 4, 0, 3)}, "each of depths must be a whole number of at least 1, got 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be a number at least 0 and below 1, got 1.0"),
    ],
)
def test_wrong_settings_say_what_is_right(settings, message):
    with pytest.raises(ValueError, match=message):
        Resnet50(**settings)


@pytest.mark.parametrize(
    ("images", "kind", "message"),
    [
        (torch.zeros(2, 32, 32, 3), ValueError, r"shape \(n, 3, height, width\), not \(2, 32, 32, 3\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.int64), TypeError, "uint8 .* or normalised floats, not torch.int64"),
    ],
)
def test_wrong_images_say_what_is_right(images, kind, message):
    with pytest.raises(kind, match=message):
        tiny()(images)


def test_wrong_batches_say_what_is_right():
    model = tiny()
    with pytest.raises(ValueError, match="has the entries images, labels, not pictures"):
        model.items({"pictures": torch.zeros(1)})
    with pytest.raises(ValueError, match="a batch of Resnet50 needs images, this one has labels"):
        model.items({"labels": torch.zeros(1)})
    for batch in ([1, 2, 3], torch.zeros(2)):
        with pytest.raises(TypeError, match="is a dict, or a tuple in the order images, labels"):
            model.items(batch)
