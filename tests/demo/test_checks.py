"""Each check finds what it is there to find."""

import pytest
import torch
from torch import nn

from fleetx import Step, memory
from fleetx.applications.digits import default_strategy
from fleetx.data import load_digits
from fleetx.demo import checks
from fleetx.demo.checks import Given


@pytest.fixture
def given(tmp_path):
    digits = load_digits()
    batch = digits.train_images[:32], digits.train_labels[:32]
    return Given(batch, nn.Linear(2, 2), default_strategy(), tmp_path, seed=0)


def test_the_bytes_that_wait_for_the_backward_are_counted():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(100, 8), torch.randint(0, 4, (100,))
    relu, log_softmax, loss_and_weight = 100 * 16 * 4, 100 * 4 * 4, 2 * 4
    assert checks.kept_for_backward(net, [batch]) == relu + log_softmax + loss_and_weight
    parts = checks.kept_for_backward(net, checks.micro_batches(batch))
    assert parts == (relu + log_softmax) // 4 + loss_and_weight


def test_activations_of_micro_batches_that_are_not_smaller_fail(given, monkeypatch):
    assert checks.activations(given).held
    monkeypatch.setattr(checks, "micro_batches", lambda batch: [batch] * checks.MICRO_BATCHES)
    check = checks.activations(given)
    assert check.held is False
    assert check.figures["merged"] == check.figures["whole"]


def test_recompute_that_saves_nothing_fails(given, monkeypatch):
    monkeypatch.setattr(memory, "apply", lambda model, cuts: torch.enable_grad())
    assert checks.activations(given).held is False


def test_one_bit_of_a_gradient_is_found(given, monkeypatch):
    assert checks.recompute(given).held
    apply = memory.apply

    def wrong(model, cuts):
        def other_bit(gradient):
            return torch.where(torch.arange(len(gradient)) == 0, gradient.nextafter(torch.tensor(9.0)), gradient)

        model.head.bias.register_hook(other_bit)
        return apply(model, cuts)

    monkeypatch.setattr(memory, "apply", wrong)
    check = checks.recompute(given)
    assert check.held is False
    assert check.figures["differing"] == ["gradient of head.bias"]
    assert "1 of 57 tensors differ, gradient of head.bias for one" in check.found


def test_what_is_there_on_one_side_only_differs():
    one = torch.ones(2)
    assert checks.different({"a": one, "b": one}, {"a": one.clone(), "c": one}) == ["b", "c"]


def test_an_update_of_other_samples_fails(given, monkeypatch):
    check = checks.merge(given)
    assert check.held
    assert check.figures["difference"] > 0  # the sums have another order: what is compared was computed twice

    class Forgetful(Step):
        def __call__(self, batch):
            return super().__call__((batch[0][1:], batch[1][1:]))

    monkeypatch.setattr(checks, "Step", Forgetful)
    assert checks.merge(given).held is False


def test_batch_norm_is_said_to_change_the_update(given):
    check = checks.batch_norm(given)
    assert check.held is None
    assert check.figures["samples"] == 8
    assert check.figures["difference"] > 1e-3


def test_one_worker_has_nothing_to_compare_with(given):
    assert checks.workers(given).held is None


@pytest.mark.middle
def test_a_resume_that_forgets_something_fails(given, monkeypatch):
    check = checks.resume(given)
    assert check.held, check.found
    assert list(given.folder.iterdir()) == []

    resume = checks.Checkpoints.resume

    def forgets_where_digits_move(self):
        resume(self)
        self._run.also["moves"].manual_seed(99)

    monkeypatch.setattr(checks.Checkpoints, "resume", forgets_where_digits_move)
    check = checks.resume(given)
    assert check.held is False
    assert check.figures["differing"]


@pytest.mark.middle
def test_a_checkpoint_that_cannot_be_saved_fails(given):
    (given.folder / ".resume-check").write_text("in the way")
    check = checks.resume(given)
    assert check.held is False
    assert "must be a folder" in check.found
