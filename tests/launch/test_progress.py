from fleetx.comm.beats import Beat
from fleetx.launch.progress import Progress, Stall, culprits, misses_the_start, stuck_ending
from fleetx.launch.stacks import Stack, main_thread

WAITING = Stack(['File "/x/site-packages/torch/distributed/distributed_c10d.py", line 1 in all_reduce'])
OURS = Stack(['File "/x/src/fleetx/comm/reducer.py", line 170 in _receive', 'File "a.py", line 1 in <module>'])
JOINING = Stack([*WAITING.lines, 'File "/x/src/fleetx/fleet/job.py", line 41 in init', 'File "a.py", line 3'])
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
    assert culprits(beats(5, 5, 5), {0: WAITING, 1: READING, 2: OURS}) == [1]
    assert culprits(beats(6, 5, 6), {0: WAITING, 1: OURS, 2: OURS}) == [1]
    assert culprits(beats(6, 0), {0: WAITING, 1: READING}) == [1]
    assert culprits(beats(5, 5), {0: WAITING, 1: OURS}) == [0, 1]
    assert culprits(beats(5, 4), {0: Stack(WAITING.lines, stopped=True), 1: READING}) == [0]


def test_a_worker_that_others_wait_for_in_init_has_not_joined_them():
    stacks = {0: JOINING, 1: READING}
    assert misses_the_start(1, beats(0, 0), stacks)
    assert not misses_the_start(0, beats(0, 0), stacks)
    assert not misses_the_start(1, beats(0, 0), {0: WAITING, 1: READING})
    assert str(Stall(31, 30, is_start=True, is_missed=True)) == (
        "it has not joined the others, who have waited for 31 s in fleet.init(), the limit is 30 s (--start_timeout)"
    )


def beats(*counts):
    return {rank: Beat(count) for rank, count in enumerate(counts)}


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
