"""The process groups of all-reduces: the order of what enters them. In whole jobs: tests/jobs/test_reducing.py."""

import gc
import logging

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fleetx import notices
from fleetx.comm import groups
from fleetx.comm.groups import GroupSettings, Pipeline, groups_for

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Work:
    """Completes whenever the test likes, or when it is waited for."""

    def __init__(self, likes):
        self._likes, self.waited = likes, False

    def is_completed(self):
        return self.waited or self._likes()

    def wait(self):
        self.waited = True


@given(st.data())
def test_messages_enter_each_stage_in_the_order_in_which_they_were_sent(data):
    parts = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), "whether this worker has part in each stage")
    count = data.draw(st.integers(1, 6), "messages")
    entered = [[], [], []]

    def stage(number):
        def start(tensor):
            entered[number].append(int(tensor))
            return Work(lambda: data.draw(st.booleans(), "is complete")) if parts[number] else None

        return start

    pipeline, stages = Pipeline(), tuple(map(stage, range(3)))
    messages = []
    for number in range(count):
        messages.append(pipeline.send(torch.tensor(number), stages))
        for _ in range(data.draw(st.integers(0, 2), "gradients that arrive")):
            pipeline.advance()
            assert sorted(map(len, entered), reverse=True) == list(map(len, entered))
    for message in messages:
        pipeline.receive(message)
    assert entered == [list(range(count))] * 3


def test_nccl_is_left_to_choose(group, monkeypatch, caplog):
    monkeypatch.setattr(notices, "_told", set())
    monkeypatch.setattr(groups, "backend_of", lambda _device: "nccl")
    caplog.set_level(logging.INFO, logger="fleetx")
    for _ in range(2):
        assert groups_for(GroupSettings(hierarchical=True, inner_ranks=2), CPU).members is None
    (said,) = caplog.messages
    assert said.startswith("use_hierarchical_allreduce changes nothing here: on GPUs NCCL itself chooses")


def test_the_backend_is_that_of_the_device(group):
    assert groups.backend_of(CPU) == "gloo"


def test_groups_are_made_once_and_go_with_the_default_group(group):
    settings = GroupSettings(count=3)
    made = groups_for(settings, CPU)
    assert made.described(3) == ", over 3 process groups"
    assert made.described(2) == ", over 3 process groups of which 2 are used"
    assert groups_for(GroupSettings(count=3), CPU) is made
    assert groups_for(GroupSettings(), CPU).described(1) == ""
    del made
    dist.destroy_process_group()
    gc.collect()
    assert len(groups._made) == 0
