"""The applications on a CUDA device, against torchvision, timm and transformers, and without waiting for the device."""

import copy
import dataclasses
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import fleetx as X
from fleetx import fleet
from fleetx.applications import Bert_base, Resnet50, bias_gradients, own_kernels, residual_norm
from fleetx.applications import packed_attention as kernels
from fleetx.applications.bert_config import to_hugging_face
from fleetx.applications.bert_unpad import pack
from fleetx.applications.cheap_dropout import CheapDropout, draw_words, thinned
from fleetx.applications.stream_norm import StreamLayerNorm
from tests.applications import bert_plain as plain
from tests.gpu.test_step import NoWaiting

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _true_fp32():
    """TF32, torch's default for convolutions, has ten bits: 1e-4 needs all of fp32's."""
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision  # torch wants both alike
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    yield
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before


def imported(name):
    """Other projects may warn on import; that is not ours to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def with_statistics(model):
    """Running statistics and norms away from 0 and 1, so that a swapped one would show."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.data.uniform_(0.5, 1.0)
            module.bias.data.normal_(0, 0.1)
    return model


def assert_near(ours, theirs):
    """To 1e-4 of the largest: logits of an untrained network may have any size."""
    assert (ours - theirs).abs().max() <= 1e-4 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_resnet50_has_the_weights_and_the_logits_of_others(library):
    torch.manual_seed(0)
    if library == "torchvision":
        theirs = imported("torchvision").models.resnet50()
    else:
        theirs = imported("timm").create_model("resnet50", pretrained=False)
    theirs = with_statistics(theirs).cuda().eval()
    ours = Resnet50().cuda().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(4, 3, 224, 224, device="cuda")
    with torch.no_grad():
        assert_near(ours(images), theirs(images))


@pytest.mark.parametrize("sizes", [plain.SIZES, {}], ids=["small", "base"])
def test_bert_has_the_weights_and_the_logits_of_transformers(sizes):
    transformers = imported("transformers")
    torch.manual_seed(0)
    ours = Bert_base(**sizes).cuda().eval()
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**to_hugging_face(ours.config))).cuda().eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    inputs = on_device(plain.batch())
    inputs = {name: inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    with torch.no_grad():
        predictions, relationship = ours(**inputs)
        expected = theirs(**inputs)
    assert_near(predictions, expected.prediction_logits)
    assert_near(relationship, expected.seq_relationship_logits)


def on_device(batch):
    return {name: tensor.cuda() for name, tensor in batch.items()}


def test_the_forward_on_the_device_equals_the_cpu_in_fp64():
    model, inputs = plain.tiny(loss_chunk=4).double(), plain.batch()
    there = copy.deepcopy(model).cuda()
    here_losses, there_losses = model(**inputs), there(**on_device(inputs))
    sum(here_losses.values()).backward()
    sum(there_losses.values()).backward()
    for name, loss in here_losses.items():
        torch.testing.assert_close(there_losses[name].cpu(), loss, rtol=1e-12, atol=1e-12)
    for one, other in zip(there.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_residual_stream_stays_low_under_autocast(dtype):
    model, inputs = plain.tiny(dropout=0.1).cuda(), on_device(plain.batch())
    seen = []
    for module in (model.bert.embeddings, *model.bert.encoder.layer):
        module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cuda", dtype):
        losses = model(**inputs)
    assert seen == [dtype] * 3
    assert {loss.dtype for loss in losses.values()} == {torch.float32}


@pytest.mark.parametrize("amp", [{"dtype": "bfloat16"}, {"use_pure_bf16": True}], ids=["autocast", "pure"])
@pytest.mark.parametrize("application", ["bert", "resnet"])
def test_a_step_does_not_wait_for_the_device(application, amp):
    if application == "bert":
        model, batch = Bert_base(**plain.SIZES).cuda(), on_device(plain.batch(n=8))
    else:
        model = Resnet50(classes=5, depths=(1, 1, 1, 1), width=16).cuda().to(memory_format=torch.channels_last)
        images = torch.randint(0, 256, (8, 3, 64, 64), dtype=torch.uint8, device="cuda")
        batch = {"images": images, "labels": torch.randint(0, 5, (8,), device="cuda")}
    strategy = fleet.DistributedStrategy(
        amp=True, amp_configs=amp, gradient_merge=True, gradient_merge_configs={"k_steps": 2}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = X.Step(model, optimizer, strategy=strategy, items=model.items)
    for _ in range(3):
        step(batch)
    with NoWaiting():
        for _ in range(3):
            out = step(batch)
    assert out.loss.isfinite()


def test_the_logits_never_dominate_device_memory():
    torch.manual_seed(0)
    model = Bert_base(**{**plain.SIZES, "vocab_size": 30522, "width": 64, "max_positions": 128}).cuda()
    n, masked = 256, 20
    positions = torch.arange(masked, device="cuda").expand(n, masked)
    batch = {
        "input_ids": torch.randint(0, 30522, (n, 128), device="cuda"),
        "masked_positions": positions,
        "masked_labels": torch.randint(0, 30522, (n, masked), device="cuda"),
    }

    def peak(chunk):
        model.cls.predictions.loss_chunk = chunk
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**batch)["mlm"].backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    logits = 4 * n * masked * 30522
    peak(256)  # the first run allocates workspaces
    assert peak(256) < 0.6 * logits < logits < peak(n * masked)


def packed(lengths, width, dtype):
    """Sequences of random queries, keys and values, and where they begin."""
    torch.manual_seed(0)
    lengths = torch.tensor(lengths)
    packing = pack(torch.arange(512) < lengths[:, None], torch.device("cuda"))
    return torch.randn(int(lengths.sum()), 3, 4, width, device="cuda", dtype=dtype), packing


def with_gradient(function, qkv):
    qkv = qkv.detach().requires_grad_()
    output = function(qkv)
    # Made in fp32, since fp16 cannot count so far; then rounded, so that all types get the same numbers.
    weights = torch.linspace(-1, 1, output.numel(), device="cuda").bfloat16().to(output.dtype).view_as(output)
    return output.detach(), torch.autograd.grad(output, qkv, weights)[0]


def exactly(qkv, packing, mask=None, keep=1.0):
    """The formula in fp64, one sequence after the other."""
    outputs = []
    for number, (begin, end) in enumerate(pairwise(packing.starts.tolist())):
        query, key, value = (part.transpose(0, 1) for part in qkv[begin:end].unbind(1))
        weights = (query @ key.mT / qkv.shape[-1] ** 0.5).softmax(-1)
        if mask is not None:
            weights = weights * mask[number, :, : end - begin, : end - begin] / keep
        outputs.append((weights @ value).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 16, 32, 64, 80, 128])
def test_attention_of_packed_sequences_is_exact_to_its_dtype(width, dtype):
    qkv, packing = packed([512, 1, 333, 64, 100], width, dtype)
    assert kernels.has_kernels_for(qkv) == (width in kernels.WIDTHS)
    ours = with_gradient(lambda qkv: kernels.attend(qkv, packing, 0.0), qkv)
    exact = with_gradient(lambda qkv: exactly(qkv, packing), qkv.double())
    for got, expected in zip(ours, exact, strict=True):
        assert (got.double() - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("width", [16, 64, 128])
def test_dropped_scores_are_dropped_in_the_gradient_too(width):
    qkv, packing = packed([512, 7, 333], width, torch.bfloat16)
    words = kernels.draw_words(3, 4, 512, 0.3, qkv.device)
    ours = with_gradient(lambda qkv: kernels.packed_attention_op(qkv, packing.starts, words, 512, 0.3)[0], qkv)
    mask, keep = kernels.survivors(words, 0.3), kernels.keep_probability(0.3)
    assert mask.double().mean().item() == pytest.approx(keep, abs=2e-3)
    exact = with_gradient(lambda qkv: exactly(qkv, packing, mask, keep), qkv.double())
    for got, expected in zip(ours, exact, strict=True):
        assert (got.double() - expected).norm() < 2 * torch.finfo(qkv.dtype).eps * expected.norm()


def test_packed_attention_repeats_bit_by_bit():
    qkv, packing = packed([512, 7, 333], 64, torch.bfloat16)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(with_gradient(lambda qkv: kernels.attend(qkv, packing, 0.1), qkv))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def trained_losses_and_gradients(model, batch, compiled):
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    if compiled:
        model.compile()
    with torch.autocast("cuda", torch.bfloat16):
        losses = model(**batch)
    sum(losses.values()).backward()
    return {name: loss.item() for name, loss in losses.items()}, {n: p.grad for n, p in parameters.items()}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("mask_at", ["host", "device"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_without_padding_gives_what_it_gives_with_padding(compiled, mask_at):
    """Both in bf16; fp32 says how near is near."""
    torch.manual_seed(0)
    sizes = {**plain.SIZES, "width": 128, "heads": 2, "intermediate": 256, "max_positions": 64}
    model = Bert_base(**sizes, dropout=0.0, attention_dropout=0.0).cuda()
    batch = on_device(plain.batch(n=16, length=64))
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    positions = batch["masked_positions"]
    batch["masked_positions"] = torch.where(positions < 0, positions, positions % lengths)  # of real words
    exact = model(**batch)
    sum(exact.values()).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses, gradients = trained_losses_and_gradients(model, batch, compiled=False)
    model.config = dataclasses.replace(model.config, unpad=True)
    mask = batch["attention_mask"]
    batch["attention_mask"] = mask.cpu() if mask_at == "host" else mask
    ours, ours_gradients = trained_losses_and_gradients(model, batch, compiled)
    for name, loss in exact.items():
        assert abs(ours[name] - loss.item()) < 2 * abs(losses[name] - loss.item()) + 2e-3
    for name, gradient in expected.items():
        ours_off, padded_off = ((g[name] - gradient).norm() for g in (ours_gradients, gradients))
        assert ours_off < 2 * padded_off + 0.01 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("shape", [(8, 512, 1024), (1029, 1500), (1024, 3, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_keeps_words_and_no_mask(shape, dtype):
    torch.manual_seed(0)
    layer, kept = CheapDropout(0.25), []
    input = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        output = layer(input)
    (words,) = kept
    assert words.numel() == input.numel() // shape[-1] + shape[-1]
    torch.testing.assert_close(output, thinned(input.double(), words, 0.25).to(dtype))
    gradient = torch.randn_like(output)
    output.backward(gradient)
    torch.testing.assert_close(input.grad, thinned(gradient.double(), words, 0.25).to(dtype))
    assert (input.grad == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


def near(ours, exact, dtype):
    """Each to the rounding of its own dtype, as a whole; parameters, which are fp32, to that of what was summed up."""
    for one, other in zip(ours, exact, strict=True):
        assert (one.double() - other.double()).norm() < 4 * torch.finfo(dtype).eps * other.double().norm()


@pytest.mark.parametrize(("shape", "dropout"), [((64, 512, 1024), 0.1), ((1029, 768), 0.0), ((3, 700, 2000), 0.5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_end_of_a_half_layer_is_one_pass_and_repeats_bit_by_bit(shape, dropout, dtype):
    torch.manual_seed(0)
    norm = StreamLayerNorm(shape[-1]).cuda()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    projected, shortcut, gradient = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    bias = torch.randn(shape[-1], device="cuda", requires_grad=True)
    inputs = projected.requires_grad_(), bias, shortcut.requires_grad_(), norm.weight, norm.bias
    assert residual_norm.can_take(shortcut)
    seen, kept = [], []
    for _ in range(2):
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
            output = residual_norm.residual_norm(projected, bias, shortcut, norm, dropout)
        seen.append([output, *torch.autograd.grad(output, inputs, gradient)])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    assert sum(one.numel() * one.element_size() for one in kept) < 2.1 * (
        shortcut.numel() * 2 + norm.weight.numel() * 8
    )
    torch.manual_seed(1)
    value = projected.double() + bias.double()
    value = thinned(value, draw_words(shortcut), dropout) if dropout else value
    parameters = norm.weight.double(), norm.bias.double()
    exact = nn.functional.layer_norm(value + shortcut.double(), shape[-1:], *parameters, norm.eps)
    near(seen[0], [exact, *torch.autograd.grad(exact, inputs, gradient.double())], dtype)


@pytest.mark.parametrize("shape", [(64, 512, 1024), (1029, 768), (3, 700, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_biases_come_along_and_repeat_bit_by_bit(shape, dtype):
    torch.manual_seed(0)
    projected, gradient = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    inputs = projected.requires_grad_(), torch.randn(shape[-1], device="cuda", requires_grad=True)
    seen = []
    for _ in range(2):
        output = bias_gradients.biased_gelu(*inputs)
        seen.append([output, *torch.autograd.grad(output, inputs, gradient)])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    exact = nn.functional.gelu(inputs[0].double() + inputs[1].double())
    near(seen[0], [exact, *torch.autograd.grad(exact, inputs, gradient.double())], dtype)
    wide, bias = torch.cat([projected] * 3, -1), torch.zeros(3 * shape[-1], device="cuda", requires_grad=True)
    parts = bias_gradients.parts_with_bias(wide, bias)
    gradients = gradient, 2 * gradient, torch.zeros_like(gradient)
    ours = torch.autograd.grad(parts, (wide, bias), gradients)
    joined = torch.cat(gradients, -1)
    assert torch.equal(ours[0], joined)
    near(ours[1:], [joined.double().flatten(0, -2).sum(0)], dtype)


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_a_large_batch_trains_as_by_torchs_operations(amp, monkeypatch):
    """Both in low precision; fp32 says how near is near."""
    torch.manual_seed(0)
    sizes = {**plain.SIZES, "width": 128, "heads": 2, "intermediate": 512, "max_positions": 128}
    model = Bert_base(**sizes, dropout=0.0, attention_dropout=0.0).cuda()
    batch = on_device(plain.batch(n=128, length=128))
    exact, expected = trained(model, batch, None)
    ours = trained(model, batch, amp)
    kernels_of_ours = {"_ResidualNormBackward", "_BiasedGeluBackward", "_PartsBackward"}
    assert kernels_of_ours <= names_of_nodes(model, batch, amp)
    monkeypatch.setattr(own_kernels, "can_take", lambda _: False)
    assert not kernels_of_ours & names_of_nodes(model, batch, amp)
    theirs = trained(model, batch, amp)
    assert abs(ours[0] - exact) < 2 * abs(theirs[0] - exact) + 2e-3
    for name, gradient in expected.items():
        ours_off, torchs_off = ((g[name] - gradient).norm() for _, g in (ours, theirs))
        assert ours_off < 1.5 * torchs_off + 1e-3 * gradient.norm() + 1e-7, name


def trained(model, batch, amp):
    model.zero_grad()
    with torch.autocast("cuda", amp or torch.bfloat16, enabled=amp is not None):
        loss = sum(model(**batch).values())
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def names_of_nodes(model, batch, amp):
    with torch.autocast("cuda", amp):
        waiting = [sum(model(**batch).values()).grad_fn]
    found = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [one for one, _ in node.next_functions]
    return {type(node).__name__ for node in found}
