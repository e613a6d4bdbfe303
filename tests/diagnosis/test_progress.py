import time

import torch.distributed as dist

from fleetx.comm.beats import Beat, Wait
from fleetx.diagnosis.progress import Progress, Stall, culprits, misses_the_start, stuck_ending
from fleetx.diagnosis.stacks import Stack, main_thread, read_stack
from tests.waiting import GUARD

SENDING = Stack(['File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce'], in_message=True)
READING = Stack(['File "/x/data.py", line 7 in read'])


def test_workers_that_have_not_begun_or_go_on_are_left_alone():
    progress = Progress(limit=10, start_limit=10)
    progress.note({0: Beat(0), 1: Beat(1)}, now=0)
    progress.note({0: Beat(0), 1: Beat(2)}, now=9)
    assert progress.stalled([0, 1], now=18) == {}
    assert progress.stalled([0, 1], now=20) == {1: Stall(11, 10)}
    assert progress.stalled([0], now=20) == {}  # the other one has ended
    never = Progress(limit=0)
    never.note({0: Beat(5), 1: Beat(0, due=True)}, now=0)
    assert never.stalled([0, 1], now=1e9) == {}


def test_a_first_step_that_is_due_has_a_limit_of_its_own():
    progress = Progress(limit=10, start_limit=100)
    progress.note({0: Beat(0, due=True)}, now=0)  # joins the others
    progress.note({0: Beat(0)}, now=90)  # and has joined: now it may take its time
    assert progress.stalled([0], now=1e9) == {}
    progress.note({0: Beat(0, due=True)}, now=1000)  # it has a model
    assert progress.stalled([0], now=1099) == {}
    (stall,) = progress.stalled([0], now=1101).values()
    assert str(stall) == "no first step for 101 s, the limit is 100 s (--start_timeout)"
    progress.note({0: Beat(1, due=True)}, now=1102)  # from its first step on the other limit counts
    assert progress.stalled([0], now=1113) == {0: Stall(11, 10)}


def test_the_one_that_does_not_wait_for_others_keeps_them_waiting():
    anywhere = dict.fromkeys(range(3), READING)
    assert culprits(beats(5, 5, 5, waiting=(0, 2)), anywhere) == [1]
    assert culprits(beats(6, 5, 6, waiting=(0, 1, 2)), anywhere) == [1]
    assert culprits(beats(0, 6, 6, waiting=(1, 2)), anywhere) == [0]
    assert culprits(beats(5, 5, 5, waiting=(0, 1, 2)), anywhere) == [0, 1, 2]
    assert culprits(beats(5, 5, 5, waiting=(0,)), anywhere | {2: SENDING}) == [1]
    assert culprits(beats(5, 4, waiting=(0,)), {0: Stack(stopped=True), 1: READING}) == [0]


def test_to_begin_or_to_end_waiting_is_no_step():
    progress = Progress(limit=10)
    progress.note({0: Beat(1)}, now=0)
    progress.note({0: Beat(1, wait=Wait.FOR_OTHERS)}, now=9)
    assert progress.stalled([0], now=11) == {0: Stall(11, 10)}


def test_a_worker_that_others_wait_for_in_init_has_not_joined_them():
    joining = {0: Beat(wait=Wait.TO_JOIN), 1: Beat()}
    assert misses_the_start(1, joining)
    assert not misses_the_start(0, joining)
    assert not misses_the_start(1, beats(0, 0, waiting=(0,)))
    assert str(Stall(31, 30, is_start=True, is_missed=True)) == (
        "it has not joined the others, who have waited for 31 s in fleet.init(), the limit is 30 s (--start_timeout)"
    )


def beats(*counts, waiting=()):
    return {
        rank: Beat(count, wait=Wait.FOR_OTHERS if rank in waiting else Wait.NONE) for rank, count in enumerate(counts)
    }


def test_a_message_that_a_script_sends_by_itself_is_known_by_where_torch_is(tmp_path):
    dump = tmp_path / "stack"
    for file, known in ((dist.distributed_c10d.__file__, True), ("/x/torch/distributed/mine.py", False)):
        dump.write_text(f'Current thread 0x8f (most recent call first):\n  File "{file}", line 2 in all_reduce\n')
        assert read_stack(dump, None, stopped=False, end=time.monotonic() + GUARD).in_message == known


def test_it_is_described_with_limit_state_and_place():
    ending = stuck_ending(1, "here", Stall(12.3, 10), READING, 0.0)
    assert ending.stuck == (
        "no step for 12 s, the limit is 10 s (--progress_timeout); its process is unknown, "
        'in File "/x/data.py", line 7 in read'
    )
    assert ending.lines[1:] == READING.lines
    assert (
        "it is stopped (SIGSTOP or a debugger), and it gave no stack"
        in stuck_ending(1, "here", Stall(12.3, 10), Stack(stopped=True), 0.0).stuck
    )


def test_the_main_thread_is_found_among_others():
    dump = (
        "Thread 0x00007f (most recent call first):\n"
        '  File "other.py", line 1 in wait\n\n'
        "Current thread 0x00008f (most recent call first):\n"
        '  File "mine.py", line 2 in step\n'
        '  File "/x/fleetx/launch/worker.py", line 3 in run\n'
        '  File "<frozen runpy>", line 4 in _run_code\n'
    )
    assert main_thread(dump) == ['File "mine.py", line 2 in step']
    assert main_thread("") == []
