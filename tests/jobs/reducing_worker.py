"""Trains in several ways that must send gradients alike, and saves what came out and what was sent."""

import logging
import logging.handlers
import random
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fleetx import fleet
from fleetx.comm import stragglers
from fleetx.comm.groups import GroupSettings
from fleetx.comm.reducer import Reducer, ReducerSettings
from tests import plain
from tests.hand_clock import HandClock
from tests.waiting import wait_for

WINDOWS, MICRO_BATCHES = 3, 4

# Beside gradient merge; the model has a frozen part and an unused parameter.
SENDING_ALIKE = {
    "merge": {},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["first", "norm"]}},
    "offload": {"recompute": True, "recompute_configs": {"checkpoints": ["first", "norm"], "enable_offload": True}},
}

UNFUSED = {"fuse_all_reduce_ops": False}
IN_TWOS = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
IN_THREES = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 3}
# Ways that must give the same bits, and ways that must give the same sums; each name begins with what it compares to.
SAME_BITS = {
    "merge, 3 groups": {"nccl_comm_num": 3},
    "merge, 20 groups": {"nccl_comm_num": 20},
    "unfused, 3 groups": UNFUSED | {"nccl_comm_num": 3},
    "fp16, 3 groups": UNFUSED | {"fp16_allreduce": True, "nccl_comm_num": 3},
    "in twos, 3 groups": UNFUSED | IN_TWOS | {"nccl_comm_num": 3},
    "merge, one host": {"use_hierarchical_allreduce": True},
}
SAME_SUMS = {
    "merge, in twos": IN_TWOS,
    "unfused, in threes": UNFUSED | IN_THREES,
    "recompute, in twos": SENDING_ALIKE["recompute"] | IN_TWOS,
    "fp16, in twos": UNFUSED | IN_TWOS | {"fp16_allreduce": True},
    "bf16, in threes": UNFUSED | IN_THREES | {"bf16_allreduce": True},
}
COMPARED_TO = {
    "unfused": UNFUSED,
    "fp16": UNFUSED | {"fp16_allreduce": True},
    "bf16": UNFUSED | {"bf16_allreduce": True},
    "in twos": UNFUSED | IN_TWOS,
}
UNEVEN = {"uneven": {}, "uneven, 3 groups": {"nccl_comm_num": 3}, "uneven, in twos": IN_TWOS}
ORDERS = {
    "3 groups": GroupSettings(count=3),
    "in twos": GroupSettings(hierarchical=True, inner_ranks=2),
    "2 groups in threes": GroupSettings(count=2, hierarchical=True, inner_ranks=3),
}
TRIALS = 25


def build(**settings):
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": MICRO_BATCHES}, fuse_grad_size_in_MB=1, **settings
    )
    strategy.last_comm_group_size_MB = 0.0001
    model = fleet.distributed_model(plain.make_net(), strategy)
    return model, fleet.distributed_optimizer(plain.make_optimizer("adam", model), strategy)


def micro_batch(window, number):
    seed = 1000 * window + 100 * number + fleet.worker_index()
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator).double(), torch.randint(0, 3, (5,), generator=generator)


def train(**settings):
    """The weights; the all-reduces that each micro-batch after the first window sent; and what the overview says."""
    model, optimizer = build(**settings)
    counts = []
    for window in range(WINDOWS):
        for number in range(MICRO_BATCHES):
            with counted() as calls:
                optimizer.minimize(plain.mean_loss(model, micro_batch(window, number)))
            counts.append(len(calls))
    return {
        "weights": model.state_dict(),
        "counts": counts[MICRO_BATCHES:],
        "overview": optimizer.overview().splitlines()[-1],
    }


class counted:  # noqa: N801 - used like a function
    """Collects the arguments of all all-reduces."""

    def __enter__(self):
        calls, self._before = [], dist.all_reduce

        def counting(*args, **kwargs):
            calls.append(kwargs)
            return self._before(*args, **kwargs)

        dist.all_reduce = counting
        return calls

    def __exit__(self, *_error):
        dist.all_reduce = self._before


def uneven(**settings):
    """A window begun and given up by all, one after a change of what is frozen, and an epoch that ends unevenly."""
    model, optimizer = build(**settings)
    optimizer.minimize(plain.mean_loss(model, micro_batch(0, 0)))
    optimizer.engine.window.start_over()  # as after an out-of-memory error
    for window, last in ((0, MICRO_BATCHES), (1, MICRO_BATCHES), (2, fleet.worker_index())):
        model.norm.bias.requires_grad_(window == 0)
        for number in range(last):
            optimizer.minimize(plain.mean_loss(model, micro_batch(window, number)))
    optimizer.flush()
    return {"weights": model.state_dict(), "overview": str(optimizer.engine.window.reducer)}


def by_host():
    """Workers 0 and 1 on one host, the others on another."""
    own_name = socket.gethostname
    socket.gethostname = lambda: f"host{min(fleet.worker_index() // 2, 1)}"
    try:
        # Another number of groups than elsewhere: these are made once.
        return train(use_hierarchical_allreduce=True, nccl_comm_num=2)
    finally:
        socket.gethostname = own_name


WIRES = {"fp16": (torch.float16, 2.0**-11, 2.0**-25), "bf16": (torch.bfloat16, 2.0**-8, 0.0)}
EXTREME = 60000.0  # nearly all that float16 holds


def rounding(wire, groups):
    """The worst error of means over the workers, as a part of the bound that the guide states; inf if one overflows."""
    dtype, unit, smallest = WIRES[wire]
    workers = fleet.worker_num()
    given = torch.stack([_gradients(rank) for rank in range(workers)]).double()
    parameter = torch.nn.Parameter(torch.zeros(given.shape[1]))
    reducer = Reducer([parameter], 0, ReducerSettings(wire_dtype=dtype, groups=groups))
    with reducer.overlapping(()):
        (parameter * _gradients(fleet.worker_index())).sum().backward()
    reducer.finish()
    error = (parameter.grad.double() / workers - given.mean(0)).abs()
    relative = workers * unit / (1 - workers * unit) + 1e-6  # the sums before and after are in float32
    bound = relative * given.abs().mean(0) + workers * smallest
    return (error / bound).nan_to_num(torch.inf).max().item()


def _gradients(rank):
    """Of all sizes and both signs; the last ones extreme on all workers."""
    generator = torch.Generator().manual_seed(rank)
    sizes = 10.0 ** torch.empty(20000).uniform_(-9, 4, generator=generator)
    signs = torch.randint(0, 2, (20000,), generator=generator) * 2 - 1
    return torch.cat([sizes * signs, torch.full((100,), EXTREME), torch.full((100,), -EXTREME)])


def random_orders(groups):
    """Trials in which a sum was wrong: gradients arrive in another order on each worker, late, or not at all."""
    rank, workers = fleet.worker_index(), fleet.worker_num()
    return [trial for trial in range(TRIALS) if not _trial(random.Random(trial), rank, workers, groups)]


def _trial(common, rank, workers, groups):
    sizes = [common.randint(1, 400) for _ in range(common.randint(1, 20))]
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    settings = ReducerSettings(bucket_mib=0.005, last_bucket_mib=0.001, fuse=common.random() < 0.7, groups=groups)
    reducer = Reducer(parameters, 2, settings)
    right = True
    for _ in range(3):
        # What each worker does in this window, known to all of them; 0 stands for an unused parameter.
        table = [[common.choice([0, 1, 2, 3]) for _ in sizes] for _ in range(workers)]
        announcing = [common.random() < 0.1 for _ in range(workers)]
        empty = [common.random() < 0.1 for _ in range(workers)]
        own = random.Random(common.random() + rank)
        idle = [a or e for a, e in zip(announcing, empty, strict=True)]
        sums = [sum(row[i] for row, no in zip(table, idle, strict=True) if not no) for i in range(len(sizes))]
        for parameter in parameters:
            parameter.grad = None
        if announcing[rank]:
            extras = reducer.announce(1)
        else:
            with reducer.overlapping((1.0, 0.0)):
                if not empty[rank] and any(table[rank]):
                    _loss(parameters, table[rank], own).backward()
            extras = reducer.finish()
            for parameter, total in zip(parameters, sums, strict=True):
                given = 0 if parameter.grad is None else parameter.grad.unique().item()
                right = right and given == total
        right = right and [extra.item() for extra in extras] == [workers - sum(announcing), sum(announcing)]
    return right


def _loss(parameters, factors, own):
    """Its backward meets the parameters in a random order, with pauses."""
    used = [(p, factor) for p, factor in zip(parameters, factors, strict=True) if factor]
    own.shuffle(used)
    terms = []
    for parameter, factor in used:
        term = parameter.sum() * factor
        pause = own.random() / 200
        if own.random() < 0.3:
            term.register_hook(lambda _grad, pause=pause: time.sleep(pause))
        terms.append(term)
    return sum(terms)


OVERLAPS = {"flat": {}, "3 groups": {"nccl_comm_num": 3}, "in twos": IN_TWOS, "bf16": {"bf16_allreduce": True}}


def hidden(**settings):
    """What each micro-batch of a second window says of its communication, whose backward lets some of it arrive."""
    model, optimizer = build(**UNFUSED, **settings)
    found = []
    for window in range(2):
        for number in range(MICRO_BATCHES):
            inputs, labels = micro_batch(window, number)
            output = model.first(model.frozen(inputs))
            if window and number == MICRO_BATCHES - 1:
                output.register_hook(lambda _grad: _wait_for_first(optimizer.engine.window.reducer))
            scores = model.head(torch.tanh(model.norm(output)))
            loss = torch.nn.functional.cross_entropy(scores, labels) + model.unused.sum()  # whose bucket is the first
            found.append(optimizer.minimize(loss).comm_hidden)
    return found[MICRO_BATCHES:]


def _wait_for_first(reducer):
    def is_summed():
        reducer._pipeline.advance()  # as when a gradient arrives
        return reducer._buckets[0].message.is_complete

    wait_for(is_summed, "first message")


# By windows: what a window takes each worker, in seconds of a clock set by hand, and how many items it has.
WORKERS = {
    "even": lambda rank, window: (1.0, 8),
    "more to do": lambda rank, window: (2.0, 16) if rank == 1 else (1.0, 8),
    "slow at first": lambda rank, window: (9.0 if rank == 1 and window < stragglers.WINDOWS else 1.0, 8),
    "slow": lambda rank, window: (1.5 if rank == 1 else 1.0, 8),
    "uneven ends": lambda rank, window: (2.0 if rank == fleet.worker_num() - 1 else 1.0, 0 if rank == 0 else 8),
}


def slow_workers(clock, taking):
    """What is logged in so many windows that one slow in all of them, the first left out, is named."""
    model = fleet.distributed_model(plain.make_net())
    optimizer = fleet.distributed_optimizer(plain.make_optimizer("sgd", model))
    logged, rank = logging.handlers.BufferingHandler(1000), fleet.worker_index()
    logging.getLogger("fleetx").addHandler(logged)
    for window in range(stragglers.WINDOWS + 2):
        seconds, items = taking(rank, window)
        clock.now += seconds
        if items:
            optimizer.minimize(plain.mean_loss(model, micro_batch(window, 0)), items=items)
    optimizer.flush()
    logging.getLogger("fleetx").removeHandler(logged)
    return [record.getMessage() for record in logged.buffer if "slow" in record.getMessage()]


def main():
    fleet.init()
    ways = SENDING_ALIKE | COMPARED_TO | SAME_BITS | SAME_SUMS
    results = {name: train(**settings) for name, settings in ways.items()}
    results |= {name: uneven(**UNFUSED, **settings) for name, settings in UNEVEN.items()}
    results["by host"] = by_host()
    results["rounding"] = {
        f"{wire}, {name}": rounding(wire, groups)
        for wire in WIRES
        for name, groups in {"flat": GroupSettings()}.items() | ORDERS.items()
    }
    results["hidden"] = {name: hidden(**settings) for name, settings in OVERLAPS.items()}
    with pytest.MonkeyPatch.context() as patch:
        clock = HandClock().install(patch)
        results["slow workers"] = {name: slow_workers(clock, taking) for name, taking in WORKERS.items()}
    results["orders"] = {name: random_orders(groups) for name, groups in ORDERS.items()}
    torch.save(results, Path(sys.argv[1]) / f"{fleet.worker_index()}.pt")


if __name__ == "__main__":
    main()
