from fleetx.launch.progress import Progress, culprits, stuck_ending
from fleetx.launch.stacks import Stack, main_thread

WAITING = Stack(['File "/x/site-packages/torch/distributed/distributed_c10d.py", line 1 in all_reduce'])
OURS = Stack(['File "/x/src/fleetx/comm/reducer.py", line 170 in _receive', 'File "a.py", line 1 in <module>'])
READING = Stack(['File "/x/data.py", line 7 in read'])


def test_workers_that_have_not_begun_or_go_on_are_left_alone():
    progress = Progress(limit=10)
    progress.note({0: 0, 1: 1}, now=0)
    progress.note({0: 0, 1: 2}, now=9)
    assert progress.stalled({0: 0, 1: 2}, now=18) == {}
    assert progress.stalled({0: 0, 1: 2}, now=20) == {1: 11}
    assert Progress(limit=0).stalled({0: 5}, now=1e9) == {}


def test_the_one_that_does_not_wait_for_others_keeps_them_waiting():
    assert culprits({0: 5, 1: 5, 2: 5}, {0: WAITING, 1: READING, 2: OURS}) == [1]
    assert culprits({0: 6, 1: 5, 2: 6}, {0: WAITING, 1: OURS, 2: OURS}) == [1]
    assert culprits({0: 6, 1: 0}, {0: WAITING, 1: READING}) == [1]
    assert culprits({0: 5, 1: 5}, {0: WAITING, 1: OURS}) == [0, 1]
    assert culprits({0: 5, 1: 4}, {0: Stack(WAITING.lines, stopped=True), 1: READING}) == [0]


def test_it_is_described_with_limit_state_and_place():
    ending = stuck_ending(1, "here", 12.3, 10, READING, 0.0)
    assert 'no step for 12 s, the limit is 10 s; its process is unknown, in File "/x/data.py", line 7' in ending.stuck
    assert ending.lines[1:] == READING.lines
    assert (
        "it is stopped (SIGSTOP or a debugger), and it gave no stack"
        in stuck_ending(1, "here", 12.3, 10, Stack(stopped=True), 0.0).stuck
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
