from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.data import Epoch, ShardedBatches, TokenBatches
from fleetx.data.token_batches import grow

shapes = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 7), st.booleans())


def deal(plans, epoch=0):
    return [[batch.tolist() for batch in plan.epoch(epoch)] for plan in plans]


def sharded(size, workers, per_worker, **options):
    return [
        ShardedBatches(size, workers * per_worker, rank=rank, workers=workers, **options) for rank in range(workers)
    ]


def all_of(dealt):
    return Counter(index for rank in dealt for batch in rank for index in batch)


def check_rounds(dealt, plans, epoch=0):
    assert {len(rank) for rank in dealt} == {plans[0].count(epoch)}
    assert all(batch for rank in dealt for batch in rank[:-1])


def updates(workers, last, size=33, global_batch=8):
    plans = [ShardedBatches(size, global_batch, rank=rank, workers=workers, last=last) for rank in range(workers)]
    return [sorted(index for part in turn for index in part) for turn in zip(*deal(plans), strict=True)]


@settings(max_examples=150)
@given(shapes)
def test_keep_gives_every_sample_once(shape):
    size, workers, per_worker, shuffle = shape
    plans = sharded(size, workers, per_worker, shuffle=shuffle)
    dealt = deal(plans)
    check_rounds(dealt, plans)
    assert all_of(dealt) == Counter(range(size))
    assert all(len(batch) <= per_worker for rank in dealt for batch in rank)


@settings(max_examples=100)
@given(shapes)
def test_wrap_gives_all_workers_equally_many(shape):
    size, workers, per_worker, shuffle = shape
    plans = sharded(size, workers, per_worker, shuffle=shuffle, last="wrap")
    dealt = deal(plans)
    check_rounds(dealt, plans)
    seen = all_of(dealt)
    assert set(seen) == set(range(size))
    assert 0 <= seen.total() - size < workers * per_worker
    assert {len(batch) for rank in dealt for batch in rank} == {per_worker}


@pytest.mark.parametrize("last", ["keep", "wrap", "drop"])
def test_the_samples_of_every_update_are_the_same_for_any_number_of_workers(last):
    alone = updates(1, last)
    assert [len(update) for update in alone] == [8, 8, 8, 8, *{"keep": [1], "wrap": [8], "drop": []}[last]]
    assert updates(2, last) == updates(4, last) == updates(8, last) == alone


def test_wrap_refuses_a_batch_that_cannot_be_shared_equally():
    with pytest.raises(
        ValueError, match=r"equally many samples, and a global batch of 5 .* by 2 workers: make it a mu"
    ):
        ShardedBatches(10, 5, rank=0, workers=2, last="wrap")


@settings(max_examples=100)
@given(shapes)
def test_drop_gives_full_batches_only(shape):
    size, workers, per_worker, shuffle = shape
    if size < workers * per_worker:
        with pytest.raises(ValueError, match=r"last='drop' gives only full batches.*use last='keep'"):
            sharded(size, workers, per_worker, last="drop")
        return
    dealt = deal(sharded(size, workers, per_worker, shuffle=shuffle, last="drop"))
    assert {len(batch) for rank in dealt for batch in rank} == {per_worker}
    assert set(all_of(dealt).values()) == {1}


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 5), st.integers(30, 90), st.integers(0, 9))
def test_token_batches_give_every_sample_once(lengths, workers, tokens, seed):
    lengths = np.array(lengths)
    plans = [TokenBatches(lambda _: lengths, tokens, rank=r, workers=workers, seed=seed) for r in range(workers)]
    dealt = deal(plans, 3)
    check_rounds(dealt, plans, 3)
    assert all_of(dealt) == Counter(range(len(lengths)))
    for rank in dealt:
        for batch in filter(None, rank):
            assert len(batch) * lengths[batch].max() <= tokens


def test_a_token_batch_grows_while_one_more_fits():
    assert grow(np.array([4, 4, 4, 4]), 12) == [3, 1]
    assert grow(np.array([2, 2, 2, 6, 1]), 12) == [3, 2]
    assert grow(np.array([12, 1, 1]), 12) == [1, 2]


def test_epochs_differ_and_the_same_epoch_does_not():
    plan = ShardedBatches(100, 10, seed=3)
    assert deal([plan], 1) == deal([ShardedBatches(100, 10, seed=3)], 1)
    assert deal([plan], 1) != deal([plan], 2)
    assert deal([plan], 1) != deal([ShardedBatches(100, 10, seed=4)], 1)
    assert deal([ShardedBatches(5, 5, shuffle=False)], 9) == [[[0, 1, 2, 3, 4]]]


def test_the_global_batch_does_not_depend_on_the_number_of_workers():
    alone = [batch.tolist() for batch in ShardedBatches(51, 12).epoch(2)]
    for turn, batch in zip(zip(*deal(sharded(51, 3, 4), 2), strict=True), alone, strict=True):
        assert sorted(index for part in turn for index in part) == sorted(batch)


def test_random_streams_depend_on_each_of_seed_epoch_sample_and_purpose():
    draws = [
        Epoch(seed, number).rng(index, stream).random()
        for seed in (0, 1)
        for number in (0, 1)
        for index in (0, 1)
        for stream in (0, 1)
    ]
    assert len(set(draws)) == 16
    assert Epoch(1, 2).rng(3).random() == Epoch(1, 2).rng(3).random()
    assert torch.equal(Epoch(0, 5).order(9), torch.randperm(9, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, r"at least one sample, this one has 0"),
        ({"global_batch": 1, "workers": 2, "rank": 0}, r"must give each worker a sample: 1 samples for 2 workers"),
        ({"last": "half"}, r"last must be one of 'keep', 'wrap', 'drop', got 'half'"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*40 - 1, got -1"),
        ({"rank": 2, "workers": 2}, r"from 0 to workers - 1: got rank 2 of 2"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShardedBatches(**({"size": 10, "global_batch": 4} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 3.5), r"global_batch must be a whole number, got 3.5 \(float\): give the samples of one batch"),
        (("10", 4), r"size must be a whole number, got '10' \(str\): give the number of samples, len\(dataset\)"),
    ],
)
def test_sizes_of_a_wrong_type_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        ShardedBatches(*arguments)
    assert ShardedBatches(np.int64(10), np.int32(4)).count(0) == 3


@pytest.mark.parametrize(
    "make",
    [lambda **place: ShardedBatches(8, 4, **place), lambda **place: TokenBatches(lambda _: np.ones(8), 4, **place)],
)
def test_batches_that_the_driver_made_are_refused_on_workers(make, monkeypatch):
    """Ray Train copies what a train function refers to: each worker would read everything."""
    asked, given = make(), make(rank=0, workers=1)
    assert len(list(asked.epoch(0))) == 2
    for name, value in {"is_joined": True, "rank": 1, "size": 2}.items():
        monkeypatch.setattr(f"fleetx.data.sampling.world.{name}", lambda value=value: value)
    with pytest.raises(RuntimeError, match="dealt out to 1, and the job has 2 workers. Make plan and loader"):
        list(asked.epoch(0))
    assert len(list(given.epoch(0))) == 2
