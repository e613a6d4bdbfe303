"""The chunked loss: the numbers of the plain formula, and never more than a chunk of logits in memory."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fleetx.applications.bert_losses import mean_cross_entropy, projected_cross_entropy
from tests.applications import bert_plain as plain


def problem(positions=13, width=6, words=17, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in ((positions, width), (words, width), (words,))
    )
    labels = torch.randint(0, words, (positions,), generator=generator)
    labels[::4] = -100
    return (hidden, weight, bias), labels


@pytest.mark.parametrize("chunk", [1, 5, 13, 1000])
def test_loss_and_gradients_equal_the_formula_in_fp64(chunk):
    tensors, labels = problem()
    hidden, weight, bias = tensors
    expected = functional.cross_entropy(hidden @ weight.T + bias, labels)
    ours = projected_cross_entropy(*tensors, labels, chunk)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    theirs = torch.autograd.grad(3 * expected, tensors)
    for one, other in zip(torch.autograd.grad(3 * ours, tensors), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_two_backwards_of_one_forward():
    tensors, labels = problem()
    loss = projected_cross_entropy(*tensors, labels, 4)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_second_derivatives_are_refused():
    tensors, labels = problem()
    loss = tensors[2].sum() * projected_cross_entropy(*tensors, labels, 4)
    (gradient, *_) = torch.autograd.grad(loss, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_small_gradients_survive_fp16_when_the_loss_is_scaled():
    tensors, labels = problem(positions=4096, words=64, dtype=torch.float32)
    hidden, weight, bias = (tensor.detach() for tensor in tensors)
    scale = 32768.0
    low = hidden.half().requires_grad_()
    (scale * projected_cross_entropy(low, weight, bias, labels, 512)).backward()
    exact = hidden.half().double().requires_grad_()
    mean_cross_entropy(exact @ weight.half().double().T + bias, labels).backward()
    error = low.grad.double() / scale - exact.grad
    assert error.norm() < 1e-3 * exact.grad.norm()


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given)
        return result

    def _count(self, storage, given):
        key = storage._cdata
        if key in given or key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self._seen.discard(key)
        self.now -= size


def peak_of(function):
    gc.collect()
    with LiveBytes() as bytes_alive:
        function()
    return bytes_alive.peak


@pytest.mark.middle
def test_the_logits_never_dominate_memory():
    """Twice the positions add twice the hidden states, not twice the logits; the plain formula adds those."""
    width, words, chunk = 8, 4000, 32

    def ours(positions):
        tensors, labels = problem(positions, width, words, torch.float32)
        return lambda: projected_cross_entropy(*tensors, labels, chunk).backward()

    def formula(positions):
        (hidden, weight, bias), labels = problem(positions, width, words, torch.float32)
        return lambda: functional.cross_entropy(hidden @ weight.T + bias, labels).backward()

    logits = 4 * 512 * words
    assert peak_of(formula(512)) >= 2 * logits
    assert peak_of(ours(512)) < 0.3 * logits
    assert peak_of(ours(1024)) - peak_of(ours(512)) < 0.02 * logits


def test_the_logits_of_a_whole_bert_are_not_kept_for_the_backward():
    model = plain.tiny(vocab_size=5000, loss_chunk=8)
    inputs = plain.batch(n=20)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(**inputs)
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    largest = max(size for key, size in sizes.items() if key not in parameters)
    assert largest < 0.1 * 4 * inputs["masked_labels"].numel() * 5000
