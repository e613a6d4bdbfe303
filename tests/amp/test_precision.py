import copy
import pickle

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.amp import apply_precision
from fleetx.strategy import AmpConfigs


class Probe(nn.Module):
    """Notes the dtypes that arrive at it and leave it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.seen = []

    def forward(self, x):
        y = self.inner(x)
        self.seen.append((x.dtype, y.dtype))
        return y


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        Probe(nn.Linear(4, 4)), Probe(nn.LayerNorm(4)), Probe(nn.Linear(4, 4)), Probe(nn.BatchNorm1d(4))
    )


def run(model, **configs):
    apply_precision(model, AmpConfigs(**configs))
    output = model(torch.randn(3, 4))
    return output, [module.seen[-1] for module in model]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_inside_and_fp32_outside(dtype):
    output, seen = run(make(), dtype=str(dtype).removeprefix("torch."))
    assert output.dtype == torch.float32
    assert seen[0] == (torch.float32, dtype)
    assert not torch.is_autocast_enabled("cpu")


def test_the_black_list_keeps_modules_out_of_low_precision():
    _, seen = run(make(), dtype="bfloat16", custom_black_list=["2.inner"])
    assert seen[0][1] == torch.bfloat16
    assert seen[2][1] == torch.float32


def test_the_white_list_forces_modules_into_low_precision_and_trains_their_fp32_weights():
    model = make()
    output, seen = run(model, dtype="bfloat16", custom_white_list=["1"])
    assert seen[1] == (torch.bfloat16, torch.bfloat16)
    output.square().sum().backward()
    norm = model[1].inner
    assert isinstance(norm.weight, nn.Parameter)
    assert norm.weight.dtype == norm.weight.grad.dtype == torch.float32
    assert norm.weight.grad.abs().sum() > 0


LISTED = [
    # black, white, and what 1, 2.0, 2.1.0, 2.1.1, 2.2 and 3 compute in
    (["2"], ["2.1"], "low fp32 low low fp32 low"),
    (["2.1"], ["2"], "low low fp32 fp32 low low"),
    (["2", "2.1.0"], ["2.1"], "low fp32 fp32 low fp32 low"),
    (["2.1"], ["2", "2.1.0"], "low low low fp32 low low"),
    (["2", "2.1"], [], "low fp32 fp32 fp32 fp32 low"),
    ([], ["2", "2.1"], "low low low low low low"),
]


@pytest.mark.parametrize("mode", [{"dtype": "bfloat16"}, {"use_pure_bf16": True}])
@pytest.mark.parametrize(("black", "white", "expected"), LISTED)
def test_of_nested_listed_modules_the_innermost_decides(black, white, expected, mode):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4), inner, nn.Linear(4, 2))
    computed = []
    for module in model.modules():  # before any cast at the border of a region
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, output: computed.append(output.dtype))
    apply_precision(model, AmpConfigs(**mode, custom_black_list=black, custom_white_list=white))
    model(torch.randn(3, 4)).square().sum().backward()
    assert computed == [torch.bfloat16 if kind == "low" else torch.float32 for kind in expected.split()]
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_module_on_both_lists_is_refused():
    with pytest.raises(ValueError, match=r"must not name the same module, got '1' in both: take it out of one"):
        run(make(), dtype="bfloat16", custom_white_list=["1"], custom_black_list=["1*"])


@pytest.mark.parametrize(("mode", "dtype"), [("use_pure_fp16", torch.float16), ("use_pure_bf16", torch.bfloat16)])
def test_pure_modes_cast_the_weights_except_batch_norm(mode, dtype):
    model = make()
    weights = list(model.parameters())
    output, seen = run(model, **{mode: True}, custom_black_list=["2"])
    assert output.dtype == torch.float32
    assert [seen[0], seen[1], seen[2]] == [(dtype, dtype), (dtype, dtype), (torch.float32, torch.float32)]
    assert model[3].inner.running_mean.dtype == torch.float32
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def train(model, cuts=(), **configs):
    strategy = fleet.DistributedStrategy(amp=True, amp_configs=configs, recompute=bool(cuts))
    if cuts:
        strategy.recompute_configs = {"checkpoints": list(cuts)}
    model = fleet.distributed_model(model, strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    for inputs in torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(1)):
        optimizer.minimize(model(inputs).square().mean())
    return model


@pytest.mark.parametrize("black", ["head", "body"])
def test_a_pure_mode_keeps_a_weight_wide_that_a_listed_module_shares(black):
    model, weight, low = (
        train(Tied(), use_pure_bf16=True, custom_black_list=[black]),
        Tied().body.weight,
        torch.bfloat16,
    )
    body, head = (torch.float32 if name == black else low for name in ("body", "head"))
    for inputs in torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(1)):
        hidden = torch.tanh((inputs.to(low).to(body) @ weight.to(body).T).to(low))
        output = (hidden.to(head) @ weight.to(head).T).to(low).float()
        (gradient,) = torch.autograd.grad(output.square().mean(), weight)
        with torch.no_grad():
            weight -= 0.5 * gradient
    assert torch.equal(model.body.weight, weight)
    assert model.body.weight is model.head.weight


@pytest.mark.parametrize("configs", [{"use_pure_bf16": True}, {"dtype": "bfloat16", "custom_white_list": ["0.0"]}])
def test_a_shared_module_is_not_meant_to_run_in_two_precisions(configs):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Tanh(), shared))
    with pytest.raises(
        ValueError, match=r"'0\.0' and '1\.1' are one module.*in another\. Name the modules around it alike"
    ):
        apply_precision(model, AmpConfigs(**configs, custom_black_list=["1"]))
    apply_precision(model, AmpConfigs(**configs, custom_black_list=["0", "1"]))
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "configs",
    [
        {"dtype": "bfloat16", "custom_white_list": ["body"]},
        {"dtype": "bfloat16", "custom_black_list": ["body"]},
        {"use_pure_bf16": True, "custom_black_list": ["head"]},
    ],
)
def test_listed_modules_that_are_recomputed_train_as_they_do_otherwise(configs):
    plain, ours = train(Tied(), **configs), train(Tied(), cuts=["body"], **configs)
    assert torch.equal(ours.body.weight, plain.body.weight)
    assert isinstance(ours.body.weight, nn.Parameter)


@pytest.mark.parametrize("name", ["softmax", "matmul", "layer_norm", "no.such.module"])
@pytest.mark.parametrize("setting", ["custom_white_list", "custom_black_list"])
def test_operators_and_unknown_modules_are_refused(setting, name):
    with pytest.raises(ValueError, match=rf"{setting} names modules.*{name}.*no public lists of operators"):
        apply_precision(make(), AmpConfigs(**{setting: [name]}))


def test_an_exception_inside_leaves_no_autocast_behind():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(Broken())
    apply_precision(model, AmpConfigs(dtype="bfloat16", custom_white_list=["0"]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            model(torch.ones(1))
        assert not torch.is_autocast_enabled("cpu")
        assert isinstance(model[0].weight, nn.Parameter)


def test_a_prepared_model_can_be_copied_and_pickled():
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16", "custom_white_list": ["1"]})
    model = fleet.distributed_model(make(), strategy)
    x = torch.randn(3, 4)
    model.eval()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)


def test_outputs_keep_their_classes():
    from collections import OrderedDict

    class Answer(OrderedDict):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return Answer(scores=self.linear(x), count=3)

    model = Model()
    apply_precision(model, AmpConfigs(dtype="bfloat16"))
    answer = model(torch.ones(1, 2))
    assert isinstance(answer, Answer)
    assert (answer["scores"].dtype, answer["count"]) == (torch.float32, 3)


# torch's compiler looks at .grad of whatever it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# That of torch 2.11 looks at our switches of autocast as well, and warns that it leaves them as they are.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin `torch\\..*autocast")
@pytest.mark.parametrize("order", ["compiled around", "compiled in place"])
def test_a_prepared_model_can_be_compiled(order):
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model = fleet.distributed_model(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), strategy)
    x = torch.randn(3, 4)
    expected = model(x)
    if order == "compiled around":
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        compiled = model
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
        assert not torch.is_autocast_enabled("cpu")


def test_a_copy_of_a_prepared_model_is_cast_once():
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    model = fleet.distributed_model(make(), strategy)
    twin = fleet.distributed_model(copy.deepcopy(model), strategy)
    assert len(twin._forward_pre_hooks) == len(model._forward_pre_hooks) == 1


def test_batch_norm_may_be_forced_low():
    output, seen = run(make(), dtype="bfloat16", custom_white_list=["3"])
    assert seen[3] == (torch.bfloat16, torch.bfloat16)
    assert output.dtype == torch.float32
