import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from fleetx.data import Loader, SampleError, ShardedBatches
from fleetx.data.loader import Loading
from tests.waiting import GUARD


class Noise:
    """Samples with a random part."""

    def __init__(self, size=23, bad=()):
        self.size = size
        self.bad = bad

    def __len__(self):
        return self.size

    def sample(self, index, epoch):
        if index in self.bad:
            raise SampleError("bad", f"list.txt:{index + 1}: sample {index} is bad.")
        return {"index": index, "noise": torch.from_numpy(epoch.rng(index).random(3))}


def build(num_workers=0, size=23, batch=4, bad=(), on_error="raise", **plan):
    options: Loading = {"num_workers": num_workers, "timeout": 60.0}
    return Loader(Noise(size, bad), ShardedBatches(size, batch, **plan), on_error=on_error, **options)


def same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def two_epochs(loader):
    return [*loader, *loader]


def test_epochs_follow_each_other():
    loader = build()
    batches = two_epochs(loader)
    assert loader.epoch == 2
    assert len(batches) == 2 * len(loader) == 12
    for half in (batches[:6], batches[6:]):
        assert sorted(torch.cat([batch["index"] for batch in half]).tolist()) == list(range(23))
    assert batches[0]["index"].tolist() != batches[6]["index"].tolist()


def test_calling_is_iterating():
    same(list(build()()), list(build()))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_processes_change_nothing(num_workers):
    same(two_epochs(build(num_workers)), two_epochs(build()))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (1, 0), (2, 1)])
def test_resumes_at_every_batch(before, after):
    expected = two_epochs(build())
    first = build(before)
    states = [first.state_dict()] + [first.state_dict() for _ in range(2) for _ in first]
    assert len(states) == 13
    first.close()
    resumed = build(after)
    for given, state in enumerate(states[:12]):
        resumed.load_state_dict(state)
        rest = list(resumed) + (list(resumed) if given < 6 else [])
        same(rest, expected[given:])
    assert states[6] == build().state_dict() | {"epoch": 1}


def test_leaving_a_loop_goes_on_with_the_next_batch():
    expected, loader = list(build(1)), build(1)
    got = [next(iter(loader)), next(iter(loader))]
    same([*got, *loader], expected)


def test_set_epoch_starts_an_epoch():
    batches, loader = two_epochs(build()), build()
    next(iter(loader))
    loader.set_epoch(1)
    same(list(loader), batches[6:])
    loader.set_epoch(0)
    same(list(loader), batches[:6])
    with pytest.raises(ValueError, match=r"counted from 0, got -1"):
        loader.set_epoch(-1)


def test_an_old_iteration_is_refused():
    loader = build()
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(RuntimeError, match=r"a loader has one position, and a newer iteration"):
        next(old)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_global_generator_alone(num_workers):
    torch.manual_seed(5)
    list(build(num_workers))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_a_state_of_another_plan_is_refused():
    state = build().state_dict()
    with pytest.raises(ValueError, match=r"same plan of batches: global_batch was 4 and is 5; seed was 0 and is 2"):
        build(batch=5, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"no batch 6 in epoch 0: it has 6"):
        build().load_state_dict(state | {"batches": 6, "samples": 23})


def test_a_state_resumes_on_another_number_of_workers():
    alone = build()
    expected = list(alone)[2:]
    alone.set_epoch(0)
    next(alone()), next(alone())
    state = alone.state_dict()
    ranks = [build(rank=rank, workers=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    for both, batch in zip(zip(*ranks, strict=True), expected, strict=True):
        assert sorted(torch.cat([part["index"] for part in both]).tolist()) == sorted(batch["index"].tolist())


def test_a_state_before_a_batch_with_too_few_samples_resumes_on_more_workers():
    loader = build(size=21)
    for _ in range(5):
        next(loader())
    state, (last,) = loader.state_dict(), list(loader)
    ranks = [build(size=21, rank=rank, workers=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    full, empty = (list(rank) for rank in ranks)
    same(full, [last])
    assert [{name: (*value.shape, value.dtype) for name, value in batch.items()} for batch in empty] == [
        {"index": (0, torch.int64), "noise": (0, 3, torch.float64)}
    ]
    assert ranks[0].state_dict() == ranks[1].state_dict() == loader.state_dict()


@pytest.mark.parametrize(
    ("collate", "empty"), [(list, []), (lambda samples: tuple(zip(*samples, strict=True)), ()), (len, 0)]
)
def test_other_empty_batches_are_collated_from_no_samples(collate, empty):
    loader = Loader([torch.ones(2)] * 3, ShardedBatches(3, 2, rank=1, workers=2), collate=collate)
    assert list(loader)[1] == empty


def test_a_collate_that_needs_samples_is_named():
    loader = Loader(["one", "two", "three"], ShardedBatches(3, 2, rank=1, workers=2))
    with pytest.raises(ValueError, match=r"could not be collated \(IndexError.*let collate= take an empty list, or"):
        list(loader)


def test_a_changed_plan_shows_in_the_number_of_samples():
    state = build(size=21).state_dict()
    with pytest.raises(ValueError, match=r"3 samples had been given, but 1 batches of epoch 0 now hold 4"):
        build(size=21).load_state_dict(state | {"batches": 1, "samples": 3})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_raises_with_its_place_and_the_position_stays(num_workers):
    loader = build(num_workers, bad=(9,), shuffle=False)
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ValueError, match=r"^list.txt:10: sample 9 is bad\.$"):
        next(batches)
    assert loader.state_dict()["batches"] == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_skipped_sample_is_replaced_by_the_next_good_one(num_workers):
    loader = build(num_workers, bad=(9, 10, 22), on_error="skip", shuffle=False)
    batches = list(loader)
    assert batches[2]["index"].tolist() == [8, 11, 11, 11]
    assert batches[5]["index"].tolist() == [20, 21, 0]
    same(batches[:2] + batches[3:5], list(build(shuffle=False))[:2] + list(build(shuffle=False))[3:5])
    assert loader.skipped == {"bad": 3}


def test_all_samples_bad():
    with pytest.raises(ValueError, match=r"every one of the 3 samples is bad: \{'bad': 3\}"):
        list(build(size=3, bad=(0, 1, 2), on_error="skip"))


class Wrong(Noise):
    def sample(self, index, epoch):
        raise KeyError(f"sample {index}")


def test_any_other_error_in_a_process_keeps_its_kind_and_traceback():
    loader = Loader(Wrong(), ShardedBatches(23, 4), num_workers=1)
    with pytest.raises(KeyError, match=r"test_loader.py"):
        list(loader)


class Suicidal(Noise):
    def sample(self, index, epoch):
        if index == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index, epoch)


@pytest.mark.middle
def test_a_killed_process_raises():
    loader = Loader(Suicidal(), ShardedBatches(23, 4, shuffle=False), num_workers=2)
    with pytest.raises(
        RuntimeError,
        match=r"a loading process was lost while batch \d of epoch 0.*(Killed|exited unexpectedly).*num_workers",
    ):
        list(loader)


class Stuck(Noise):
    def sample(self, index, epoch):
        time.sleep(600)


@pytest.mark.middle
def test_a_stuck_process_raises():
    loader = Loader(Stuck(), ShardedBatches(23, 4), num_workers=1, timeout=1)
    with pytest.raises(RuntimeError, match=r"a loading process was lost.*raise timeout \(now 1 s\)"):
        list(loader)


def test_signals_to_all_processes_of_a_job_do_not_end_loading_processes():
    """SLURM sends SIGTERM to them too, and the training process needs batches until it has saved."""
    loader, expected, before = build(1), two_epochs(build()), multiprocessing.active_children()
    batches = [next(iter(loader))]
    (process,) = set(multiprocessing.active_children()).difference(before)
    for number in ("-TERM", "-INT"):
        subprocess.run(["kill", number, str(process.pid)], check=True)
    same(batches + two_epochs(loader), expected)
    process.terminate()  # torch does so with one that hangs
    process.join(GUARD)
    assert process.exitcode == 0


@pytest.mark.middle
def test_a_script_that_ends_midway_does_not_hang():
    script = (
        "from fleetx.data import Loader, ShardedBatches\n"
        "loader = Loader(list(range(100)), ShardedBatches(100, 5), num_workers=2)\n"
        "print(len(next(iter(loader))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_plain_sequences_can_be_loaded():
    loader = Loader([{"x": number} for number in range(5)], ShardedBatches(5, 2, shuffle=False))
    assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, r"num_workers must be at least 0, got -1"),
        ({"prefetch": 0}, r"prefetch must be at least 1, got 0"),
        ({"timeout": -1}, r"timeout must be at least 0, got -1"),
        ({"on_error": "ignore"}, r"on_error must be 'raise' or 'skip', got 'ignore'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Loader([1], ShardedBatches(1, 1), **options)


@pytest.mark.parametrize("size", [5, 20])
def test_a_plan_for_another_number_of_samples_is_refused(size):
    with pytest.raises(ValueError, match=rf"it is for {size}, and the data set has 10. Give ShardedBatches\(10, "):
        Loader(list(range(10)), ShardedBatches(size, 2))


def test_what_is_no_plan_is_refused():
    with pytest.raises(TypeError, match=r"takes a plan of batches, got \[\[0, 1\]\] \(list\), .*give ShardedBatches"):
        Loader([1, 2], [[0, 1]])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"it has no epoch, batches, samples, plan\. Give what a loader's state_dict\(\) returned"),
        (None, r"it is None \(NoneType\)"),
        ({"epoch": 0, "samples": 0, "plan": {}}, r"it has no batches\."),
        ({"epoch": "0", "batches": 0, "samples": 0, "plan": {}}, r"its epoch is '0' and not a whole number"),
        ({"epoch": 0, "batches": 0, "samples": 0, "plan": 3}, r"its plan is 3 and not a dict"),
    ],
)
def test_what_is_no_state_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        build().load_state_dict(state)


@pytest.mark.middle
@pytest.mark.parametrize(("options", "name"), [({"num_workers": 1.5}, "num_workers"), ({"timeout": "9"}, "timeout")])
def test_options_of_a_wrong_type_are_refused(options, name):
    with pytest.raises(TypeError, match=rf"{name} must be a .*number"):
        Loader([1], ShardedBatches(1, 1), **options)


def draw():
    """One number from each of the generators that data sets share with everything else."""
    return [torch.rand(()).item(), np.random.random(), random.random()]


class Drawing:
    """Samples with random parts from the global generators, as torchvision's transforms have them."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return [index, *draw()]


class DrawingMany(Drawing):
    """The same, read a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def collate_drawing(samples):
    return {"samples": samples, "collate": draw()}


def drawing(dataset, num_workers=0, **plan):
    plan = ShardedBatches(len(dataset), 4, seed=5, **plan)
    return Loader(dataset, plan, num_workers=num_workers, collate=collate_drawing)


def test_global_draws_depend_on_seed_epoch_and_sample_only():
    loader = drawing(Drawing())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = two_epochs(loader)
    alone = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert draw() == alone  # the caller's generators did not follow the samples
    loader.set_epoch(0)
    assert two_epochs(loader) == first
    samples = {
        (number // 3, sample[0]): sample[1:] for number, batch in enumerate(first) for sample in batch["samples"]
    }
    assert len({number for numbers in samples.values() for number in numbers}) == 2 * 11 * 3
    for rank in range(2):
        for batch in drawing(Drawing(), rank=rank, workers=2):
            assert all(samples[0, sample[0]] == sample[1:] for sample in batch["samples"])
    halves = drawing(Subset(DrawingMany(), range(11))), drawing(Subset(Drawing(), range(11)))
    assert [list(half) == first[:3] for half in halves] == [False, True]


@pytest.mark.middle
@pytest.mark.parametrize("dataset", [Drawing(), DrawingMany()])
def test_global_draws_are_the_same_for_any_number_of_loading_processes(dataset):
    loader = drawing(dataset)
    expected = two_epochs(loader)
    assert len({str(batch["collate"]) for batch in expected}) == 6
    for before, after in ((2, 0), (0, 2), (2, 1)):
        interrupted = drawing(dataset, before)
        got = [next(iter(interrupted)) for _ in range(2)]
        resumed = drawing(dataset, after)
        resumed.load_state_dict(interrupted.state_dict())
        interrupted.close()
        assert [*got, *two_epochs(resumed)] == expected


def test_a_failing_sample_gives_the_callers_generators_back():
    loader = Loader(Wrong(), ShardedBatches(23, 4))
    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(KeyError):
        list(loader)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
