"""Saving and resuming, on both optimizers."""

import copy
import pickle

import pytest
import torch

from fleetx.optim import Lamb, Lars, Muon

from .training import assert_bit_equal, network, through_a_file, train, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_last", [True, False])
def test_resumed_is_bit_equal(make, dtype, weights_last):
    model = network(dtype)
    optimizer = make(model.parameters(), exclude_from_weight_decay=["bias", "norm"])
    train(model, optimizer, range(3))
    saved, weights = through_a_file(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 6))

    again = network(dtype)
    resumed = make(again.parameters(), exclude_from_weight_decay=["bias", "norm"])
    if not weights_last:
        again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    if weights_last:
        again.load_state_dict(weights)
    train(again, resumed, range(3, 6))

    assert_bit_equal(values(again), values(model))
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert resumed.state[a].keys() == optimizer.state[b].keys()
        assert_bit_equal(resumed.state[a].values(), optimizer.state[b].values())


def test_what_was_loaded_is_not_written_to(make):
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other = network()
    resumed = make(other.parameters())
    resumed.load_state_dict(saved)
    train(other, resumed, range(2))
    for key, entries in before["state"].items():
        assert_bit_equal(entries.values(), saved["state"][key].values())


def test_copies_and_pickles_step_on(make):
    model = network(torch.bfloat16)
    optimizer = make(model.parameters(), exclude_from_weight_decay=["bias"])
    train(model, optimizer, range(2))
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        again, resumed = copied((model, optimizer))
        assert resumed.param_groups[0]["decays"] == optimizer.param_groups[0]["decays"]
        train(again, resumed, range(2, 4))
        twin, theirs = copy.deepcopy((model, optimizer))
        train(twin, theirs, range(2, 4))
        assert_bit_equal(values(again), values(twin))


def test_hyperparameters_are_loaded_and_exclusions_kept(make):
    model = network()
    optimizer = make(model.parameters(), exclude_from_weight_decay=["*.bias"])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.007
    other = make(model.parameters(), exclude_from_weight_decay=["bias"])
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.007
    assert other.param_groups[0]["exclude_from_weight_decay"] == ["bias"]
    assert [row.pattern for row in other.exclusion_rows()] == ["bias"]


def test_other_exclusions_are_refused(make):
    model = network()
    saved = make(model.parameters(), exclude_from_weight_decay=["bias"]).state_dict()
    other = make(model.parameters())
    with pytest.raises(ValueError, match=r"treat 3 parameters of group 0 differently, '0\.bias' first: .*\['bias'\]"):
        other.load_state_dict(saved)
    for mask in other._masks:
        saved["param_groups"][0][mask] = other.param_groups[0][mask]
    other.load_state_dict(saved)  # as the message says
    assert all(other.param_groups[0]["decays"])


def test_state_of_another_optimizer_is_refused(make):
    model = network()
    saved = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"has no 'decays', so no La.* saved it: load a state that a La"):
        make(model.parameters()).load_state_dict(saved)


OURS = {
    "Lars": lambda p, **more: Lars(p, lr=0.3, **more),
    "Lamb": lambda p, **more: Lamb(p, lr=0.02, **more),
    "Muon": lambda p, **more: Muon(p, lr=0.02, **more),
}


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("loader", OURS)
def test_state_of_another_of_ours_is_refused(saver, loader):
    """The rate would be the other's, and all buffers would begin anew without a word."""
    model = network()
    optimizer = OURS[saver](model.parameters())
    train(model, optimizer, range(1))
    other = OURS[loader](model.parameters())
    if saver == loader:
        other.load_state_dict(optimizer.state_dict())
        return
    lr = other.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=f"so no {loader} saved it, but a {saver}: load a state that a {loader} saved"):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("kind", OURS)
def test_state_that_no_step_could_continue_from_is_refused(kind):
    model = network()
    optimizer = OURS[kind](model.parameters())
    train(model, optimizer, range(2))
    buffers = {
        key: [name for name in state if name != "step"] for key, state in optimizer.state_dict()["state"].items()
    }
    for wrong, message in (
        (
            lambda state, name: state.update(other=state.pop(name)),
            r"state of '0\.weight' has no '{name}', and {kind} continues from .*entry",
        ),
        (
            lambda state, name: state.update({name: torch.zeros(7)}),
            r"'{name}' in the saved state of '0\.weight' must be .* \(6, 4\), got one of shape \(7,\): load",
        ),
        (
            lambda state, name: state.update({name: None}),
            "'{name}' in the saved state .* must be a tensor .*, got None",
        ),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        name = buffers[0][-1]
        wrong(saved["state"][0], name)
        with pytest.raises(ValueError, match=message.replace("{name}", name).replace("{kind}", kind)):
            optimizer.load_state_dict(saved)
    del saved["state"][0]
    optimizer.load_state_dict(saved)  # as the message says
    train(model, optimizer, range(1))


def test_a_count_of_steps_must_be_one_number():
    model = network()
    optimizer = OURS["Lamb"](model.parameters())
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = 1
    with pytest.raises(
        ValueError, match=r"'step' in the saved state of '0\.weight' must be a tensor of one number, got 1"
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    ("lr", "message"), [(-1.0, r"got -1\.0"), ("x", "got 'x'"), (torch.tensor(-0.5), r"got -0\.5")], ids=str
)
def test_a_rate_below_zero_is_not_loaded(kind, lr, message):
    optimizer = OURS[kind](network().parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = lr
    with pytest.raises((ValueError, TypeError), match=f"lr must be a number at least 0, {message}"):
        optimizer.load_state_dict(saved)


def test_settings_of_muon_are_checked_too():
    optimizer = OURS["Muon"](network().parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["betas"] = (0.9, 1.5)
    with pytest.raises(ValueError, match=r"betas\[1\] must be a number at least 0 and below 1, got 1\.5"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", ["Lars", "Lamb"])
def test_another_form_is_refused(kind):
    model = network()
    saved = OURS[kind](model.parameters()).state_dict()
    other = OURS[kind](model.parameters(), form="timm")
    with pytest.raises(
        ValueError, match=f"trained with form 'fleet', and this {kind} has form 'timm': build the {kind}"
    ):
        other.load_state_dict(saved)
    assert other.param_groups[0]["form"] == "timm"
    saved["param_groups"][0]["form"] = "timm"
    other.load_state_dict(saved)  # as the message says


def test_settings_that_could_not_be_given_cannot_be_loaded(make):
    """Clipping to 0 would silently stop the training."""
    model = network()
    optimizer = make([{"params": [parameter]} for parameter in model.parameters()])
    for wrong, message in (
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be a number above 0, got 0\.0: 1\.0 is usual, None is no limit"),
        ({"form": "flete"}, "did you mean 'fleet'"),
    ):
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group.update(wrong)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = -1e-19  # where cosines end
    optimizer.load_state_dict(saved)
    saved["param_groups"][1]["max_grad_norm"] = 2.0
    with pytest.raises(ValueError, match=r"max_grad_norm is said once for all groups, got None and 2\.0"):
        optimizer.load_state_dict(saved)
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [None] * 6


def test_masters_of_a_full_precision_model_are_refused(make):
    model = network(torch.bfloat16)
    optimizer = make(model.parameters())
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match=r"fp32 master for '0\.weight', which is torch\.float32 here: convert"):
        make(network().parameters()).load_state_dict(optimizer.state_dict())


def test_torchs_own_checks_still_speak(make):
    model = network()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        make(model.parameters()).load_state_dict(make([{"params": [p]} for p in model.parameters()]).state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        make(model.parameters()).load_state_dict(make(list(model.parameters())[:2]).state_dict())


def test_users_load_hooks_see_what_they_should(make):
    model = network(torch.bfloat16)
    optimizer = make(model.parameters())
    train(model, optimizer, range(1))
    seen = []
    other = make(model.parameters())

    def emptied(_, state_dict):
        return {**state_dict, "state": {0: state_dict["state"][0]}}

    other.register_load_state_dict_pre_hook(emptied)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[model[0].weight]["master"].dtype))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32]
    assert len(other.state) == 1
    other.load_state_dict(optimizer.state_dict())  # our own hooks are gone again
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("kind", [Lars, Lamb, Muon])
def test_state_in_another_order_of_named_parameters_is_refused(kind):
    def build(*order):
        options = {"exclude_from_muon": []} if kind is Muon else {}
        optimizer = kind([(name, torch.nn.Parameter(torch.ones(2, 2))) for name in order], lr=0.1, **options)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(2, 2)
        optimizer.step()
        return optimizer

    saved = build("a", "b").state_dict()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 is 'a' there and 'b' here.*build the groups"):
        build("b", "a").load_state_dict(saved)
    renamed = build("encoder.a", "encoder.b")
    renamed.load_state_dict(saved)
    assert kind is Muon or renamed.param_groups[0]["param_names"] == ["encoder.a", "encoder.b"]
