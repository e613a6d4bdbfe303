"""Things that models in the wild do in their forwards."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from fleetx import memory
from tests.memory.comparing import STATES, Example, assert_exact, cycled, some_states
from tests.memory.test_backward import both
from tests.memory.test_structures import Layered, example, in_each_state, linear
from tests.memory.zoo import integers, normal


class MoCo(nn.Module):
    """A teacher that follows the student, and a queue of its answers, both written to in the forward."""

    def __init__(self, width=4, size=8):
        super().__init__()
        self.student = nn.Sequential(linear(), nn.BatchNorm1d(width), nn.ReLU(inplace=True), linear())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(width, size), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, queries, keys):
        queries = F.normalize(self.student(queries), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                ours.data = ours.data * 0.9 + theirs.data * 0.1
            order = torch.randperm(len(keys))
            keys = F.normalize(self.teacher(keys[order]), dim=1)[order.argsort()]
        positive = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        logits = torch.cat([positive, negative], 1) / 0.07
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.t()
        self.place[0] = (place + len(keys)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def test_a_teacher_and_a_queue():
    def make():
        torch.manual_seed(0)
        return Example(MoCo(), lambda step: (normal(step, 4, 4), normal(step + 9, 4, 4)), loss=lambda loss: loss)

    for cuts in (["student"], ["student.1", "teacher"], ["teacher.2", "student.2"], [":normalize", ":cat"]):
        in_each_state(make, cuts)


@pytest.mark.middle
@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_transformers(training):
    class Translates(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 8)
            self.both = nn.Transformer(8, 2, 2, 2, 16, dropout=0.1, batch_first=True)
            self.head = nn.Linear(8, 20)

        def forward(self, source, target):
            mask = self.both.generate_square_subsequent_mask(target.shape[1])
            padding = source == 0
            hidden = self.both(
                self.words(source), self.words(target), tgt_mask=mask, src_key_padding_mask=padding.float() * -1e4
            )
            return self.head(hidden)

    def make():
        torch.manual_seed(0)
        model = Translates().train(training)
        return Example(model, lambda step: (integers(step, 20, 3, 7), integers(step + 1, 20, 3, 5)))

    layers = [f"both.{part}.layers.{index}" for part in ("encoder", "decoder") for index in range(2)]
    inside = ["both.encoder.layers.0.self_attn", "both.decoder.layers.1.linear1", "both.decoder.layers.0:add"]
    for cuts in (layers, inside, ["both.encoder", "both.decoder.layers.0.multihead_attn"]):
        if training or not any(":" in cut or "self_attn" in cut for cut in cuts):
            in_each_state(make, cuts, steps=2)


def test_a_container_whose_own_weights_are_parametrized():
    class Own(Layered):
        def __init__(self):
            super().__init__(None)
            self.weight = nn.Parameter(torch.randn(4, 4))
            nn.utils.parametrizations.spectral_norm(self, "weight")
            nn.utils.parametrizations.weight_norm(self.c)

        def forward(self, x):
            hidden = F.linear(self.a(x).tanh(), self.weight)
            return self.c(self.b(hidden).sin() @ self.weight)

    def make():
        torch.manual_seed(0)
        return Example(Own(), lambda step: (normal(step, 3, 4),))

    for cuts in (["a"], ["a", "b"], ["c"], ["parametrizations.weight.0"], [":linear", ":matmul"]):
        in_each_state(make, cuts)


def test_pruned_weights():
    def make():
        made = example(lambda model, x: model.c(model.b(model.a(x).tanh()).tanh()))
        for module in (made.model.a, made.model.b):
            prune.l1_unstructured(module, "weight", amount=0.4)
        return made

    def copied(made):
        plain = Layered(made.model.run)
        for module in (plain.a, plain.b):
            prune.identity(module, "weight")
        plain.load_state_dict(made.model.state_dict())
        return plain

    for states in some_states():
        made = make()
        plain = copied(made)
        memory.apply(made.model, cycled(["a", "b"], states))

        def use(model, step):
            loss = model(normal(step, 3, 4)).square().sum()
            loss.backward()
            return [loss.detach()]

        both((plain, made.model), use)


def test_modules_that_are_no_children():
    """A list hides them from the model; their operations are noted one by one."""

    class Hides(Layered):
        def __init__(self):
            super().__init__(None)
            self.hidden = [nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.2)), linear()]

        def forward(self, x):
            return self.b(self.hidden[1](self.hidden[0](self.a(x)).tanh()))

    for cuts in (["a", "b"], ["b"], [":tanh"]):
        for states in some_states():
            torch.manual_seed(0)
            made = Example(Hides(), lambda step: (normal(step, 3, 4),))

            def step(model, batch, loss_of, precision):
                from tests.memory.comparing import step as one

                outcome = one(model, batch, loss_of, precision)
                for index, module in enumerate(model.hidden):
                    outcome.gradients |= {f"{index}.{n}": p.grad.clone() for n, p in module.named_parameters()}
                    outcome.buffers |= {f"{index}.{n}": b.clone() for n, b in module.named_buffers()}
                return outcome

            assert_exact(made, cycled(cuts, states), step=step)


def test_a_module_whose_forward_is_called_by_name():
    def forward(model, x):
        hidden = model.norm.forward(model.a.forward(x))
        return model.c(F.relu(model.b.forward(hidden)))

    for cuts in (["c"], [":relu"], [":linear", ":relu"]):
        in_each_state(lambda: example(forward, norm=nn.BatchNorm1d(4)), cuts)


def test_gradients_of_what_is_inside():
    """`retain_grad` and hooks on tensors in the middle."""
    seen = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.kept = None

        def forward(self, x):
            self.kept = self.linear(x)
            self.kept.retain_grad()
            self.kept.register_hook(lambda grad: seen.append(grad.clone()))
            return self.kept.tanh()

    def forward(model, x):
        hidden = model.keeps(model.a(x))
        hidden.retain_grad()
        hidden.register_hook(lambda grad: grad * 2)
        model.middle = hidden
        return model.b(hidden.sigmoid())

    for cuts in (["a"], ["keeps"], ["a", "keeps", "b"]):
        for states in some_states():
            made = example(forward, keeps=Keeps())
            plain = copy.deepcopy(made.model)
            memory.apply(made.model, cycled(cuts, states))

            def use(model, step):
                seen.clear()
                model(normal(step, 3, 4)).square().sum().backward()
                return [model.keeps.kept.grad, model.middle.grad, *seen]

            both((plain, made.model), use)


def test_anomaly_detection():
    made = example(lambda model, x: model.c(model.b(model.a(x).tanh()).sigmoid()))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert_exact(made, cycled(["a", "b"], STATES["mixed"]))


def test_gradients_that_add_up_over_several_batches():
    def accumulated(model, batch, loss_of, precision):
        from tests.memory.comparing import step

        for part in batch[0].chunk(3):
            loss_of(model(part)).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        outcome = step(model, batch, loss_of, precision)
        outcome.gradients |= {f"before: {name}": grad for name, grad in gradients.items()}
        return outcome

    def forward(model, x):
        return model.d(model.norm(model.c(model.b(model.a(x).tanh()).sigmoid())))

    for states in some_states():
        made = example(forward, 6, 4, norm=nn.BatchNorm1d(4))
        assert_exact(made, cycled(["a", "b", "c"], states), step=accumulated)


def test_weights_in_bfloat16():
    def make():
        made = example(lambda model, x: model.c(model.norm(model.b(model.a(x.bfloat16()).tanh())).sigmoid()))
        made.model.add_module("norm", nn.LayerNorm(4))
        made.model.bfloat16()
        return made

    in_each_state(make, ["a", "b", "norm"])


def test_arrays_and_numbers_on_the_way():
    """What leaves torch and comes back is kept, not repeated."""

    def forward(model, x):
        hidden = model.a(x)
        order = torch.from_numpy(hidden.detach().numpy().argsort(0)[:, 0].copy())
        scale = torch.tensor(float(hidden.detach().abs().max()))
        weights = torch.as_tensor([hidden.detach().mean().item(), 0.5, 1.0, 2.0])
        hidden = model.b(hidden[order] / scale) * weights
        return model.c(hidden.masked_fill(hidden > hidden.detach().mean().item(), 0.0).tanh())

    for cuts in (["a"], ["b"], ["a", "b"], ["c"]):
        in_each_state(lambda: example(forward), cuts)


def test_inputs_made_without_a_version():
    with torch.inference_mode():
        images = normal(0, 3, 4)
        mask = images > 0
    made = example(lambda model, x, mask: model.b(model.a(x.float()).masked_fill(mask.clone(), 0.0).tanh()))
    made.batch = lambda step: (images.clone(), mask)
    for states in some_states():
        made.model = copy.deepcopy(made.model)
        applied = assert_exact(made, cycled(["a", "b"], states))
        applied.remove()
