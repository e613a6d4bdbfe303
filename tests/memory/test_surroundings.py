"""Settings of torch, and models on several devices."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor

from fleetx import memory
from fleetx.memory import randomness
from fleetx.memory.surroundings import Surroundings
from fleetx.memory.tape import pointer_of
from tests.memory.comparing import assert_nothing_left, cycled, some_states
from tests.memory.test_structures import example, in_each_state, linear
from tests.memory.zoo import normal

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        query = self.linear(x).view(1, 1, -1, 4)
        return F.scaled_dot_product_attention(query, query, query).view(-1, 4)


def test_the_kernels_of_attention_are_those_of_the_forward():
    def forward(model, x):
        hidden = model.a(x)
        query = hidden.view(1, 1, -1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            hidden = F.scaled_dot_product_attention(query, query, query).view(-1, 4)
            hidden = model.attends(hidden)
        return model.c(model.attends(model.b(hidden)).tanh())

    for cuts in (["attends", "b"], ["b", "c"]):
        in_each_state(lambda: example(forward, attends=Attends()), cuts)


def test_the_default_dtype_is_that_of_the_forward():
    def forward(model, x):
        torch.set_default_dtype(torch.float64)
        try:
            hidden = model.makes(model.a(x)) * torch.arange(0, 1, 0.25)
        finally:
            torch.set_default_dtype(torch.float32)
        return model.c(model.b(hidden.float()).tanh())

    class Makes(nn.Module):
        def forward(self, x):
            return x.sin() * torch.linspace(0, 1, 4)

    for cuts in (["makes", "b"], ["b"]):
        in_each_state(lambda: example(forward, makes=Makes()), cuts)


@pytest.fixture
def _settings_as_they_were():
    before = Surroundings.now(("cpu",))
    yield
    before.restore()


@pytest.mark.usefixtures("_settings_as_they_were")
def test_settings_are_put_back_where_they_differ():
    noted = Surroundings.now(("cpu",))
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.set_default_dtype(torch.float64)
    changed = Surroundings.now(("cpu",))
    noted.restore()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert Surroundings.now(("cpu",)) == noted
    changed.restore()
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert Surroundings.now(("cpu",)) == changed


def test_a_model_lies_where_any_of_its_tensors_lies():
    class On:
        def __init__(self, device):
            self.device = device

    def devices(*names):
        return randomness.devices_of([On(device) for device in names])

    assert devices() == (CPU,)
    assert devices(CPU, torch.device("meta")) == (CPU,)
    assert devices(CPU, FIRST, SECOND, FIRST) == (FIRST, SECOND, CPU)


def test_the_generators_of_all_devices_are_put_back(monkeypatch):
    states = {FIRST: torch.tensor(1), SECOND: torch.tensor(2)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    noted = randomness.state((FIRST, SECOND, CPU))
    host = torch.get_rng_state()
    torch.rand(1)
    states[FIRST], states[SECOND] = torch.tensor(3), torch.tensor(4)
    with randomness.replaying(noted, (FIRST, SECOND, CPU)):
        assert [int(state) for state in states.values()] == [1, 2]
        assert torch.equal(torch.get_rng_state(), host)
    assert [int(state) for state in states.values()] == [3, 4]
    assert not torch.equal(torch.get_rng_state(), host)
    randomness.restore(noted, FIRST)  # where only one is asked for
    assert [int(state) for state in states.values()] == [1, 4]


def test_moving_to_the_host_needs_one_accelerator(monkeypatch):
    def forward(model, x):
        return model.c(model.b(model.a(x)))

    monkeypatch.setattr(randomness, "devices_of", lambda _tensors: (FIRST, SECOND, CPU))
    made = example(forward)
    applied = memory.apply(made.model, ["a", "b"], home="host")
    with pytest.raises(
        ValueError, match=r"one accelerator .* lies on cuda:0, cuda:1; .* until a, b. Use home='device'"
    ):
        made.model(*made.batch(0))
    assert_nothing_left(applied)


def test_tensors_that_consist_of_others():
    """As sharded parameters do: they have no memory of their own."""

    def sharded(model):
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                module._parameters[name] = nn.Parameter(TwoTensor(parameter.detach(), parameter.detach().clone()))
        return model

    assert pointer_of(TwoTensor(torch.ones(1), torch.ones(1))) is None
    for states in [state for state in some_states() if all(home == "device" for _, home in state)]:
        model = sharded(nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(3))))
        plain = copy.deepcopy(model)
        memory.apply(model, cycled(["0", "1"], states))
        for number in range(2):
            found = []
            for one in (plain, model):
                one.zero_grad()
                x = normal(number, 3, 4)
                one(TwoTensor(x, x)).square().sum().backward()
                found.append([parameter.grad.a for parameter in one.parameters()])
            assert all(map(torch.equal, *found))
