"""What the compiler cannot do as it is asked: gradients stay exact, and what is done in its place is told."""

import gc
import threading

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.memory import Segment, compiling, sizes
from fleetx.memory.buffers import Watch
from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.recompute import frames_alive
from fleetx.memory.running import Run
from fleetx.memory.sizes import Copies, sizes_of
from fleetx.memory.underway import active_run
from tests.memory.comparing import Example, assert_exact
from tests.memory.zoo import normal

pytestmark = pytest.mark.filterwarnings("ignore:::torch")
DEAR = [Segment("0", "dear"), Segment("1", "dear")]
QUICK = {"compile": True, "backend": "aot_eager"}  # the compiler's front, without its code generator


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Breaks(nn.Module):
    """Cannot be compiled as a whole."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(y)


class Counts(nn.Module):
    """Reads a buffer, and writes to it afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = self.linear((x + self.scale).tanh())
        self.scale.mul_(1.25)
        return y.tanh()


class WritesToItsInput(nn.Module):
    """As torch allows it in compiled code: what it computes from what it wrote."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.relu_()).tanh()


class CountsInHalf(Counts):
    """Reads a part of a buffer, and writes to all of it."""

    def forward(self, x):
        y = self.linear(torch.cat([x[:, :2], x[:, 2:] + self.scale[2:]], dim=1).tanh())
        self.scale.mul_(1.25)
        return y.tanh()


class WritesToASecondInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, state):
        y = self.linear((x + state).sin())
        state.mul_(1.25)
        return y


class WritesToAnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), torch.ones(4)

    def forward(self, x):
        y = self.linear((x + self.scale).tanh())
        self.scale.mul_(1.25)
        return y.tanh()


class WritesLater(Counts):
    writes = False

    def forward(self, x):
        if self.writes:
            return super().forward(x)
        return self.linear((x + self.scale).tanh()).tanh()


def chain(*modules):
    return Example(nn.Sequential(*modules, nn.Linear(4, 4)), lambda step: (normal(step, 6, 4),))


@pytest.mark.middle
def test_dear_outputs_of_what_does_not_compile_as_a_whole_give_way_to_inputs_and_that_is_told():
    with pytest.warns(UserWarning, match=r"ends at 0 only the inputs are saved.*a Breaks does not compile as a whole"):
        applied = assert_exact(chain(Breaks(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())), DEAR, **QUICK)
    assert applied.experience.undivided == {"0"}


@pytest.mark.middle
@pytest.mark.parametrize("module", [Counts, CountsInHalf, WritesToItsInput, WritesToAnAttribute])
def test_dear_outputs_of_what_writes_to_what_it_reads_give_way_to_inputs(module):
    with pytest.warns(UserWarning, match=rf"ends at 1 only .*and a {module.__name__} writes to its inputs, or to what"):
        assert_exact(chain(nn.Linear(4, 4), module()), DEAR, **QUICK)


@pytest.mark.middle
def test_an_input_without_gradient_may_be_written_to():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), WritesToASecondInput()

        def forward(self, x):
            return self.second(self.first(x), torch.full((6, 4), 0.5))

    example = Example(Given(), lambda step: (normal(step, 6, 4),))
    with pytest.warns(UserWarning, match="a WritesToASecondInput writes to its inputs"):
        assert_exact(example, [Segment("second", "dear")], **QUICK)


@pytest.mark.middle
def test_batch_norms_may_count():
    example = chain(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 4))
    applied = assert_exact(example, DEAR, **QUICK)
    assert [learned.is_divided for learned in applied.experience.segments] == [True, True]


@pytest.mark.middle
def test_a_batch_norm_between_cuts_may_count():
    example = chain(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    applied = assert_exact(example, [Segment("0", "dear"), Segment("2", "dear")], **QUICK)
    assert [learned.is_divided for learned in applied.experience.segments] == [True, True]


def test_a_module_that_begins_to_write_is_refused_once():
    module = WritesLater()
    model = nn.Sequential(nn.Linear(4, 4), module)
    memory.apply(model, DEAR, **QUICK)
    for _ in range(2):
        model(torch.randn(6, 4)).sum().backward()
    module.writes = True
    with pytest.raises(RuntimeError, match=r"a WritesLater .* wrote to its inputs, or to what it holds.*save='inputs'"):
        model(torch.randn(6, 4))
    with pytest.warns(UserWarning, match="a WritesLater writes to its inputs"):
        model(torch.randn(6, 4)).sum().backward()


def kept(model, **options):
    """The tensors that are kept for the backward of a segment until "1"."""
    applied = memory.apply(model, [Segment("1", "dear")], **options)
    for _ in range(2):
        loss = model(torch.randn(6, 4)).sum()
        loss.backward()
    loss = model(torch.randn(6, 4)).sum()
    held = sum(saved() is not None and saved().tensor is not None for f in frames_alive() for saved in f.references)
    loss.backward()
    applied.remove()
    return held


class Between(nn.ModuleDict):
    def __init__(self):
        super().__init__({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})

    def forward(self, x):
        x = self["0"](x)
        for _ in range(10):
            x = x.sin()
        return self["1"](x)


def test_what_is_computed_between_modules_is_not_kept_in_silence():
    with pytest.warns(UserWarning, match="ends at 1 only .* what is computed between modules is not compiled"):
        assert kept(Between(), **QUICK) == 0


def test_a_module_with_a_forward_of_its_own_is_not_kept_in_silence():
    model = nn.Sequential(block(), block())
    model[1].forward = model[1].forward
    with pytest.warns(UserWarning, match="ends at 1 only .* a Sequential has a forward of its own"):
        assert kept(model, **QUICK) == 0


OTHER_NAMES = ["preserve_rng_state", "module", "self_", "use_reentrant", "debug"]


@pytest.mark.parametrize("name", ["early_stop", *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_NAMES)])
def test_keywords_of_any_name_reach_the_module(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, **given):
            return self.linear(x).tanh() * (3.0 if given[name] else 1.0)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Named()

        def forward(self, x):
            return self.inner(x, **{name: True})

    assert_exact(Example(Outer(), lambda step: (normal(step, 6, 4),)), [Segment("inner", "dear")], **QUICK)


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[0] == 3:
            raise ValueError("three are too few")
        return self.linear(x).tanh()


def test_an_error_of_the_model_is_raised_as_it_is_and_changes_nothing():
    model = nn.Sequential(Picky(), Picky())
    applied = memory.apply(model, DEAR, **QUICK)
    for _ in range(2):
        model(torch.randn(6, 4)).sum().backward()
    with pytest.raises(ValueError, match="three are too few") as raised:
        model(torch.randn(3, 4))
    assert raised.traceback[-1].path.name == "test_compilations.py"
    model(torch.randn(6, 4)).sum().backward()
    assert not applied.experience.undivided


@pytest.mark.filterwarnings("ignore:of the segment that ends at")
def test_an_error_that_is_being_handled_keeps_its_traceback():
    model = nn.Sequential(Breaks(), Breaks())
    memory.apply(model, DEAR, **QUICK)
    with pytest.raises(KeyError) as raised:  # noqa: PT012 - what is tested happens while it is handled
        try:
            raise KeyError
        except KeyError:
            for _ in range(2):
                model(torch.randn(6, 4)).sum().backward()
            raise
    assert len(raised.traceback) == 1


def test_threads_may_share_a_compiled_model():
    model = nn.Sequential(block(), block())
    compilations = SharedCompilations(backend="eager")
    compilations.install(model)
    compilations.install(model)
    compilations.uninstall(model)
    assert all(compilations.is_installed(one) for one in model)
    compilations.uninstall(model)
    assert not any("forward" in vars(one) for one in model)


@pytest.mark.middle
@pytest.mark.filterwarnings("ignore:of the segment that ends at")
@pytest.mark.parametrize("save", ["inputs", "dear"])
def test_hooks_are_not_compiled(save):
    example = chain(Breaks(), Breaks())
    assert_exact(example, [Segment("0", save), Segment("1", save)], **QUICK)
    compiled = {str(metrics.co_filename) for metrics in torch._dynamo.utils.get_compilation_metrics()}
    ours = {name for name in compiled if "fleetx/memory" in name}
    assert ours
    assert all(name.endswith("compiling.py") for name in ours)


class TwoTowers(nn.Module):
    """Equal blocks that are given inputs of different lengths."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.ModuleList(block() for _ in range(2)) for _ in range(2))

    def forward(self, x, y):
        for one, other in zip(self.left, self.right, strict=True):
            x, y = one(x), other(y)
        return x.mean() * y.mean()


def block():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.mark.middle
@pytest.mark.parametrize("save", [pytest.param("inputs", marks=pytest.mark.full), "dear"])
def test_equal_blocks_may_be_given_different_sizes_in_one_forward(save):
    lengths = [(5, 7), (5, 9), (6, 8)]
    example = Example(TwoTowers(), lambda step: tuple(normal(step, 3, length, 4) for length in lengths[step]))
    cuts = [Segment(f"{side}.{number}", save) for number in range(2) for side in ("left", "right")]
    assert_exact(example, cuts, **QUICK)


@pytest.mark.middle
def test_two_forwards_of_different_sizes_before_one_backward():
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    batches = (3, 5, 8)

    def gradients():
        model.zero_grad()
        for loss in [model(normal(size, size, 4)).square().mean() for size in batches]:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    applied = memory.apply(model, ["0", "1"], save="everything", **QUICK)
    expected = gradients()
    applied.remove()
    memory.apply(model, ["0", "1"], **QUICK)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


@pytest.mark.middle
@pytest.mark.filterwarnings("ignore:of the segment that ends at 0 only")
def test_dear_outputs_are_compiled_for_a_few_sizes(monkeypatch):
    monkeypatch.setattr(compiling, "_MOST_SIZES", 2)
    example = Example(nn.Sequential(block(), block(), nn.Linear(4, 4)), lambda step: (normal(step, step + 2, 4),))
    with pytest.warns(UserWarning, match=r"ends at 1 only the inputs are saved.*inputs of more than 2 sizes"):
        applied = assert_exact(example, DEAR, steps=4, **QUICK)
    assert applied.experience.undivided == {"0", "1"}


class Numbered(nn.Module):
    """A layer that reads its own number, as many do."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.layer_idx = nn.Linear(4, 4), number

    def forward(self, x):
        return self.linear(x).tanh() * (self.layer_idx + 1)


@pytest.mark.middle
@pytest.mark.parametrize("save", [pytest.param("inputs", marks=pytest.mark.full), "dear"])
def test_many_layers_that_know_their_number_are_all_compiled(save, caplog):
    example = Example(nn.Sequential(*map(Numbered, range(10))), lambda step: (normal(step, 6, 4),))
    applied = assert_exact(example, [Segment(str(number), save) for number in range(10)], steps=2, **QUICK)
    assert not applied.experience.undivided
    assert "recompile_limit" not in caplog.text


class User:
    """Something that may be repeated."""


@pytest.mark.middle
def test_other_sizes_have_a_copy_of_their_own_while_the_first_may_be_repeated():
    copies, first, second = Copies(), User(), User()
    assert copies.which("short", first) == 0
    assert copies.which("short", second) == 0
    assert copies.which("long", second) == 1
    del first, second
    gc.collect()
    third = User()
    assert copies.which("longer", third) == 0  # the compiler makes it one for all sizes
    assert copies.which("short", third) == 0
    assert copies.which("long", third) == 1


def test_sizes_are_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr(sizes, "_MANY", 3)
    copies = Copies()
    for number in range(10):
        copies.which(number, User())
    assert len(copies._copy) <= 3


def test_what_is_never_repeated_needs_one_copy():
    copies = Copies()
    assert [copies.which(size, None) for size in ("short", "long", "short")] == [0, 0, 0]


def test_sizes_are_those_of_tensors_and_whole_numbers():
    x = torch.zeros(2, 3)
    assert sizes_of(((x, "text", None, 1.5), {"n": 4})) == ((x.shape, (3, 1)), 4)
    assert sizes_of(((x.to_sparse(),), {})) == ((x.shape, None),)


def test_errors_of_the_model_itself_are_raised():
    class Wrong(nn.Module):
        def forward(self, x):
            raise ValueError("of the model")

    compilations = SharedCompilations(backend="eager")
    module = Wrong()
    compilations.install([module])
    with compilations.saving(("matmul",)) as saving, pytest.raises(ValueError, match="of the model"):
        module(torch.zeros(2))
    assert saving.refused is None  # that says nothing of the compiler


@pytest.mark.middle
@pytest.mark.parametrize("save", ["everything", "dear"])
def test_nobody_is_asked_about_what_the_compiler_sees_to(save, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    memory.apply(model, [Segment("0", save), Segment("1", save)], **QUICK)
    for _ in range(3):
        model(torch.randn(6, 4)).sum().backward()
    asked = []
    monkeypatch.setattr(Run, "pack", lambda _run, tensor: asked.append(tensor))
    model(torch.randn(6, 4)).sum().backward()
    assert not asked


@pytest.mark.middle
@pytest.mark.parametrize("save", ["everything", "dear"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_compiled_module_leaves_nothing_behind(save, error):
    class Fails(nn.Linear):
        def __call__(self, x):
            if self.fails:
                raise error
            return super().__call__(x)

    failing = Fails(4, 4)
    failing.fails = False
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(failing), nn.Linear(4, 4))
    applied = memory.apply(model, [Segment("0", save), Segment("1", save)], **QUICK)
    for _ in range(3):
        model(torch.randn(6, 4)).sum().backward()
    failing.fails = True
    with pytest.raises(error):
        model(torch.randn(6, 4))
    failing.fails = False
    model(torch.randn(6, 4)).sum().backward()
    assert active_run() is None
    assert applied.experience.compilations._saving.frame is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    applied.remove()
    assert not any("forward" in vars(module) for module in model.modules())


class Either(nn.Module):
    """A module that is shared by two ways."""

    def __init__(self):
        super().__init__()
        self.shared, self.kept, self.dear = Counts(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.other = False

    def forward(self, x):
        x = self.shared(x)
        return self.dear(x) if self.other else self.kept(x)


@pytest.mark.filterwarnings("ignore:of the segment")
@pytest.mark.filterwarnings("ignore:the forward did not come to")
def test_a_segment_that_ran_freely_is_not_divided_unseen():
    found = []
    for cut in (True, False):
        torch.manual_seed(0)
        model = Either()
        if cut:
            memory.apply(model, [Segment("kept", "everything"), Segment("dear", "dear")], **QUICK)
        for number in range(7):
            model.other = number >= 3
            model(normal(number, 6, 4)).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(ours, plain) for ours, plain in zip(*found, strict=True))


def subtracted(hidden, norm):
    return torch.tanh(hidden - norm.running_mean)


class ReadsStatistics(nn.Module):
    """Reads what its batch norm counts, before it counts."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        hidden = self.linear(x)
        centred = subtracted(hidden, self.norm)
        return self.linear(centred * torch.tanh(self.norm(hidden)))


class Renorm(nn.BatchNorm1d):
    """Reads its own statistics."""

    def forward(self, input):
        return super().forward(input) * (input - self.running_mean).tanh()


@pytest.mark.middle
@pytest.mark.parametrize("module", [ReadsStatistics, lambda: nn.Sequential(Renorm(4), nn.Linear(4, 4))])
def test_dear_outputs_where_statistics_are_read_give_way_to_inputs(module):
    with pytest.warns(UserWarning, match="writes to its inputs, or to what it holds"):
        assert_exact(chain(nn.Linear(4, 4), module()), DEAR, steps=4, **QUICK)


@pytest.mark.filterwarnings("ignore:of the segment that ends at 0 only the inputs are saved")
def test_what_the_compiler_refused_is_not_tried_again():
    model = nn.Sequential(Breaks(), nn.Linear(4, 4), nn.Linear(4, 4))
    applied = memory.apply(model, DEAR, **QUICK)
    divided = []
    for _ in range(6):
        model(torch.randn(6, 4)).sum().backward()
        divided.append(applied.experience.segments[0].is_divided)
    assert divided[1:] == [False] * 5


def test_a_compiled_forward_that_another_thread_removes_during_a_replay_stays_removed():
    module, compilations = nn.Linear(4, 4), SharedCompilations(backend="eager")
    compilations.install([module])
    with Watch().before(module).restored():
        compilations.uninstall([module])
    assert "forward" not in vars(module)


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11", "2.12")),
    reason="torch.compile by itself fails or crashes there in several threads",
)
def test_threads_share_a_model_whose_segments_are_repeated():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)], nn.Linear(4, 1)).double()
    sample = torch.randn(5, 4, dtype=torch.double)

    def gradients():
        return torch.autograd.grad(model(sample).square().sum(), list(model.parameters()))

    expected = gradients()
    applied = memory.apply(model, ["0", "1", "2"], **QUICK)
    gradients()
    failed = []

    def work():
        try:
            for _ in range(30):
                assert all(torch.allclose(a, b) for a, b in zip(gradients(), expected, strict=True))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    applied.remove()
    assert not failed
    assert not any("forward" in vars(module) for module in model.modules())
