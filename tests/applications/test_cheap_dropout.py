"""Zeros by products of random words: as many as asked for, and nothing to be learned from one about another."""

import pytest
import torch

from fleetx.applications.cheap_dropout import CheapDropout, draw_words, thinned


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_the_expectation_stays(dropout):
    torch.manual_seed(0)
    ones = torch.ones(2000, 500, dtype=torch.float64)
    result = thinned(ones, draw_words(ones), dropout)
    assert (result == 0).double().mean().item() == pytest.approx(dropout, abs=3e-3)
    assert result.mean().item() == pytest.approx(1.0, abs=6e-3 / (1 - dropout))
    assert sorted(result.unique().tolist()) == pytest.approx([0.0, 1 / (1 - dropout)])


def test_rows_columns_and_rectangles_are_as_if_drawn_one_by_one():
    torch.manual_seed(0)
    ones = torch.ones(4000, 1000)
    kept = (thinned(ones, draw_words(ones), 0.5) != 0).double() - 0.5
    for one in (kept, kept.T):
        spread = one.mean(1).std().item() * one.shape[1] ** 0.5
        assert spread == pytest.approx(0.5, rel=0.1)
    columns = torch.corrcoef(kept.T[:300])
    assert columns.fill_diagonal_(0).abs().max() < 6 / 4000**0.5
    rectangles = kept[0::2, 0::2] * kept[1::2, 0::2] * kept[0::2, 1::2] * kept[1::2, 1::2]
    assert abs(rectangles.mean().item() * 16) < 5 / rectangles.numel() ** 0.5


def test_the_gradient_has_the_same_zeros():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    y = thinned(x, draw_words(x), 0.4)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    torch.testing.assert_close(x.grad * x, y)


def test_eager_code_has_torchs_own():
    x, ours, theirs = torch.randn(50, 40), CheapDropout(0.3), torch.nn.Dropout(0.3)
    for _ in range(2):
        results = []
        for one in (ours, theirs):
            torch.manual_seed(0)
            results.append(one(x))
        assert torch.equal(*results)
        ours.eval(), theirs.eval()


@pytest.mark.middle
@pytest.mark.filterwarnings("ignore:::torch")
def test_compiled_code_repeats_with_the_generator_and_has_the_same_zeros_in_the_gradient():
    layer = CheapDropout(0.3)
    run = torch.compile(lambda x: layer(x.sin()).cos())
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        x = torch.linspace(0.1, 1, 6000).view(60, 100).requires_grad_()
        y = run(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y.detach() != 1)
        outputs.append(y.detach())
    assert torch.equal(*outputs)
    assert (outputs[0] == 1).float().mean().item() == pytest.approx(0.3, abs=0.03)
