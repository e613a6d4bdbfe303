"""Programs: cloned, run for test, two on one model, and what may not be changed once they have run."""

import copy
import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet, static
from fleetx.static.bound import lock_of
from tests.static.making import Classifier, feeds, merging, program, sgd, tensors


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def settings():
    return {
        "optimizer": sgd,
        "strategy": merging(2),
        "compute": lambda model, batch: model(**batch),
        "scheduler": schedule,
        "clip_norm": 0.01,
        "compile": False,
        "mode": "max-autotune",
        "seed": 7,
        "items": lambda batch: len(batch["labels"]),
    }


def test_a_clone_has_all_settings():
    main = static.Program(Classifier(), **settings())
    names = [field.name for field in dataclasses.fields(main) if field.init]
    assert {"model", *settings()} == set(names)
    for name in names:
        assert getattr(main.clone(), name) is getattr(main, name), name
    test = main.clone(for_test=True)
    for name in names:
        dropped = name in ("optimizer", "scheduler", "clip_norm", "items")
        assert getattr(test, name) is (None if dropped else getattr(main, name)), name


def test_a_clone_trains_as_the_program_would():
    def trained(clone):
        main = static.Program(Classifier(), **settings() | {"mode": None})
        main = main.clone() if clone else main
        for feed in feeds(6):
            static.Executor().run(main, feed)
        return list(main.model.parameters())

    for one, other in zip(trained(clone=True), trained(clone=False), strict=True):
        assert torch.equal(one, other)


def test_an_empty_program_cannot_be_cloned():
    with pytest.raises(ValueError, match="the program is empty.*before the executor runs or the program is cloned"):
        static.Program().clone(for_test=True)


def test_a_program_that_has_run_cannot_be_changed_but_its_clone_can():
    main = program()
    main.clip_norm = 1.0
    static.Executor().run(main, feeds(1)[0])
    with pytest.raises(RuntimeError, match=r"setting its clip_norm now would change nothing.*program.clone\(\)"):
        main.clip_norm = 2.0
    clone = main.clone()
    clone.clip_norm = 2.0
    assert (main.clip_norm, clone.clip_norm) == (1.0, 2.0)


class Noisy(nn.Module):
    """Batch statistics, dropout, and a part that is meant to stay in evaluation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.settled = nn.BatchNorm1d(4).eval()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.drop(self.settled(self.norm(x)))).square().mean()


@pytest.mark.middle
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_test_program_evaluates(compile):
    main, exe = static.Program(Noisy(), sgd, compile=compile), static.Executor()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    exe.run(main, {"x": x})
    model, test = main.model, main.clone(for_test=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = [exe.run(test, {"x": x}, ["loss"])[0] for _ in range(2)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model.settled.training
    with torch.no_grad():
        np.testing.assert_allclose(losses, [model.eval()(x).item()] * 2, rtol=1e-6)


def test_two_windows_on_one_model_do_not_mix_silently():
    exe, main = static.Executor(), program()
    other = main.clone()
    exe.run(main, feeds(1)[0])
    exe.run(other, feeds(1)[0])
    with pytest.raises(RuntimeError, match="changed outside of the optimizer while its window held 1"):
        exe.run(main, feeds(1)[0])


def test_two_programs_may_take_turns_after_whole_windows():
    exe, main = static.Executor(), program()
    other = main.clone()
    for turn in (main, other, main):
        before = main.model.scale.item()
        for feed in feeds(4):
            exe.run(turn, feed)
        assert main.model.scale.item() != before


def test_programs_of_one_model_have_one_strategy():
    exe, main = static.Executor(), program()
    exe.run(main, feeds(1)[0])
    for optimizer in (sgd, None):
        other = static.Program(main.model, optimizer, merging(2), compile=False)
        with pytest.raises(ValueError, match="prepared with another strategy.*build a second model"):
            exe.run(other, feeds(1)[0])
    exe.run(static.Program(main.model, compile=False), feeds(1)[0], ["loss"])


class Elsewhere(static.CPUPlace):
    """To torch `cpu:0` is another device than `cpu`, so that one host can stand for two."""

    @property
    def device(self):
        return torch.device("cpu", 0)


def test_a_model_lives_on_one_device():
    main = program()
    static.Executor().run(main, feeds(1)[0])
    for other in (main, main.clone(for_test=True)):
        with pytest.raises(RuntimeError, match=r"this model run on cpu, .* build a second model for cpu:0"):
            static.Executor(Elsewhere()).run(other, feeds(1)[0])


def test_a_model_that_was_moved_away_is_noticed():
    main = program()
    static.Executor().run(main, feeds(1)[0])
    main.model.to("meta")
    with pytest.raises(RuntimeError, match=r"moved to meta after .* bound to cpu. Move it back with model.to\('cpu'\)"):
        static.Executor().run(main, feeds(1)[0])


@pytest.mark.middle
def test_a_forward_of_the_objects_own_stays_its_own():
    model = Classifier()
    original = model.forward
    model.forward = lambda images, labels: {"loss": 2 * original(images, labels)["loss"]}
    own, feed = model.forward, feeds(1)[0]
    (loss,) = static.Executor().run(static.Program(model), feed, ["loss"])
    assert loss == pytest.approx(2 * original(**tensors(feed))["loss"].item(), rel=1e-12)
    assert model.forward is own


@pytest.mark.parametrize("by", ["torch.compile", "model.compile"])
def test_a_model_that_is_compiled_already_is_refused(by):
    model = Classifier()
    if by == "torch.compile":
        model = torch.compile(model)
    else:
        model.compile()
    with pytest.raises(ValueError, match="compiled already.*give it the model as it was before"):
        static.Executor().run(static.Program(model, sgd), feeds(1)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1)}, TypeError, "a function as optimizer, not a SGD: .*"),
        ({"scheduler": "cosine"}, TypeError, "a function as scheduler, not a str: for example scheduler=lambda"),
        ({"compute": 3}, TypeError, "a function as compute, not a int"),
        ({"items": 3}, TypeError, "a function as items, not a int"),
        ({"optimizer": None, "clip_norm": 1.0}, ValueError, "has clip_norm but no optimizer"),
        ({"optimizer": None, "scheduler": schedule}, ValueError, "has scheduler but no optimizer"),
        ({"model": "resnet"}, TypeError, "Program takes an nn.Module, not a str"),
        ({"model": Classifier}, TypeError, "not a type: give an object of it, or static.build"),
        ({"clip_norm": "1"}, ValueError, "clip_norm must be a number above 0, or None for no limit, not '1'"),
        ({"seed": "a"}, TypeError, r"seed must be a whole number from 0 to 2\*\*63 - 1, got 'a'"),
        ({"seed": -1}, ValueError, r"seed must be a whole number from 0 to 2\*\*63 - 1, got -1"),
        ({"compile": "no"}, TypeError, "compile must be True or False, got 'no': False runs eagerly"),
        ({"mode": 3}, TypeError, "mode must be one of torch.compile's names, got 3"),
        ({"strategy": {}}, TypeError, "strategy must be a fleet.DistributedStrategy"),
    ],
)
def test_wrong_settings_say_what_is_right(options, error, message):
    with pytest.raises(error, match=message):
        static.Program(**{"model": Classifier(), "optimizer": sgd, "compile": False} | options)


def test_settings_are_checked_when_they_are_set_too():
    clone = program().clone()
    with pytest.raises(AttributeError, match="a program has no setting 'clipnorm'; did you mean 'clip_norm'"):
        clone.clipnorm = 3
    with pytest.raises(ValueError, match="clip_norm must be a number above 0, or None"):
        clone.clip_norm = -3
    clone.optimizer, clone.clip_norm = None, 1.0  # in any order; seen together when it runs
    with pytest.raises(ValueError, match="has clip_norm but no optimizer"):
        static.Executor().run(clone, feeds(1)[0])


def test_build_takes_what_makes_a_model():
    with pytest.raises(TypeError, match=r"a Classifier: give the class, static.build\(Classifier, ...\)"):
        static.build(Classifier())
    with pytest.raises(TypeError, match="a class or function that makes a model, got 'resnet'"):
        static.build("resnet")
    with pytest.raises(TypeError, match="this made a dict: give the class"):
        static.build(dict)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)], ids=["eager", "compiled"])
def test_a_skipped_window_is_told_once(compile, caplog, monkeypatch):
    monkeypatch.setattr("fleetx.notices._told", set())
    exe, main = static.Executor(), program(compile=compile)
    good, bad = feeds(1)[0], feeds(1)[0]
    bad["images"][0] = np.nan
    for feed in [good] * 4 + [bad] * 8 + [good] * 4:
        exe.run(main, feed)
    told = [record.message for record in caplog.records if "a window was skipped" in record.message]
    assert len(told) == 1
    assert "exe.optimizer(program).nonfinite_windows" in told[0]
    assert exe.optimizer(main).nonfinite_windows == 2


def test_items_weigh_the_feeds_of_a_window():
    """Feeds of 6, 2, 4 and 1 samples give the update of their 13 samples together."""
    uneven = [feed for size in (6, 2, 4, 1) for feed in feeds(1, size)]
    main = program(items=lambda batch: len(batch["labels"]))
    for feed in uneven:
        static.Executor().run(main, feed)
    reference = Classifier()
    whole = {name: torch.cat([torch.as_tensor(feed[name]) for feed in uneven]) for name in uneven[0]}
    reference(**whole)["loss"].backward()
    sgd(reference.parameters()).step()
    for ours, theirs in zip(main.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_items_of_one_loss_may_come_by_name_and_of_several_not_at_all():
    exe = static.Executor()
    exe.run(program(items=lambda batch: {"loss": len(batch["labels"])}), feeds(1)[0])
    several = program(items=lambda batch: {"mlm": 3, "nsp": 2})
    with pytest.raises(ValueError, match=r"counts for mlm, nsp: .* Use fleetx.Step"):
        exe.run(several, feeds(1)[0])
    summing = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2, "avg": False})
    with pytest.raises(ValueError, match="only one of the two is possible"):
        exe.run(static.Program(Classifier(), sgd, summing, items=len, compile=False), feeds(1)[0])


def test_the_optimizer_can_be_reached_to_flush_save_and_resume():
    exe, main = static.Executor(), program(scheduler=schedule)
    for feed in feeds(6):
        exe.run(main, feed)
    saved = copy.deepcopy((exe.optimizer(main).state_dict(), main.model.state_dict()))
    assert exe.optimizer(main).flush().updated

    resumed = program(scheduler=schedule)
    resumed.model.load_state_dict(saved[1])
    exe.optimizer(resumed).load_state_dict(saved[0])
    assert exe.optimizer(resumed).flush().updated
    for ours, theirs in zip(resumed.model.parameters(), main.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="has no optimizer: it was made without one, or cloned for_test"):
        exe.optimizer(main.clone(for_test=True))


def test_starting_twice_keeps_the_weights(caplog, monkeypatch):
    monkeypatch.setattr("fleetx.notices._told", set())
    main = static.Program(static.build(nn.Linear, 2, 1), seed=3, compile=False)
    exe = static.Executor()
    exe.run(static.StartupProgram(main))
    weight = main.model.weight.detach().clone()
    main.model.weight.data.add_(1)
    exe.run(static.StartupProgram(main))
    assert torch.equal(main.model.weight, weight + 1)
    assert [record.message for record in caplog.records] == [
        "the startup program ran before: the model keeps the weights that it has."
    ]


def test_a_model_on_meta_that_nobody_can_fill_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"build it with fleetx.static.build\(YourModel, ...\)"):
        static.Executor().run(static.StartupProgram(static.Program(model)))


def test_runs_of_one_model_wait_for_each_other():
    """Seen from inside of each run: another thread cannot begin one."""
    free = []

    def ask_from_a_thread(model):
        lock = lock_of(model)
        thread = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()

    def compute(model, batch):
        ask_from_a_thread(model)
        return model(**batch)

    def optimizer(parameters):
        ask_from_a_thread(main.model)  # while it is bound: two threads would make two optimizers
        return sgd(parameters)

    main = static.Program(Classifier(), optimizer, compute=compute, compile=False)
    exe, (feed,) = static.Executor(), feeds(1)
    exe.run(main, feed)
    exe.run(main.clone(for_test=True), feed, ["loss"])
    assert free == [False, False, False]
    assert lock_of(main.model).acquire(blocking=False)
    assert lock_of(Classifier()) is not lock_of(main.model)


@pytest.mark.middle
def test_threads_train_as_one_thread_would_also_beside_an_evaluation():
    (feed,) = feeds(1)

    def trained(threads, evaluations):
        main = static.Program(Classifier(), sgd, merging(2), compile=False)
        test, exe = main.clone(for_test=True), static.Executor()
        modes = []
        main.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
        runs = [lambda: exe.run(main, feed, ["loss"])] * threads + [lambda: exe.run(test, feed, ["loss"])] * evaluations
        errors = []

        def repeat(run):
            try:
                for _ in range(48 // threads):
                    run()
            except Exception as error:  # else the thread would keep it to itself
                errors.append(error)

        workers = [threading.Thread(target=repeat, args=(run,)) for run in runs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not errors
        assert modes.count(True) == 48
        return list(main.model.parameters())

    alone = trained(1, 0)
    for threads, evaluations in ((3, 0), (1, 2), (2, 1)):
        for one, other in zip(trained(threads, evaluations), alone, strict=True):
            assert torch.equal(one, other)
