import signal

import pytest

from fleetx.diagnosis.ending import LOST, STUCK, Ending, root_cause

GLOO = "[../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:29500"


def ending(rank, code=1, time=0.0, **facts):
    return Ending(rank, "here", code, time, **facts)


@pytest.mark.parametrize(
    ("one", "sentence", "code"),
    [
        (ending(3, 37), "worker 3 failed with exit code 37 (host here)", 37),
        (ending(0, -11), "worker 0 was ended by SIGSEGV (host here)", 128 + signal.SIGSEGV),
        (ending(0, -60), "worker 0 was ended by signal 60 (host here)", 188),
        (
            ending(2, error_type="KeyError", error="'a'\nand more"),
            "worker 2 failed with exit code 1 (host here): KeyError: 'a'",
            1,
        ),
        (
            ending(1, -9, out_of_memory=True),
            "worker 1 was ended by SIGKILL: the machine or its memory limit ran out of memory (host here)",
            137,
        ),
        (ending(1, STUCK, stuck="no step for 9 s"), "worker 1 made no progress: no step for 9 s (host here)", 124),
        (
            ending(2, error_type="RuntimeError", error="the workers differ:\n  worker 1 has 3\n  more"),
            "worker 2 failed with exit code 1 (host here): RuntimeError: the workers differ: worker 1 has 3",
            1,
        ),
        (
            ending(1, 0, left_early=3),
            "worker 1 left with exit code 0 while others were still at work (host here): all workers must do the same "
            "steps",
            3,
        ),
        (
            ending(1, 0, asked=15),
            "worker 1 was asked to stop (SIGTERM) by somebody other than fleetrun, and left (host here)",
            143,
        ),
        (ending(1, LOST, lost_host="it is silent"), "host here with worker 1 is lost: it is silent", 1),
    ],
)
def test_what_happened_in_one_line(one, sentence, code):
    assert (one.sentence(), one.exit_code) == (sentence, code)


def test_the_first_that_failed_by_itself_is_the_cause():
    lost = ending(0, time=1.0, error_type="RuntimeError", error=GLOO)
    raised = ending(2, time=2.0, error_type="ValueError", error="bad sample")
    later = ending(1, time=3.0, error_type="ValueError", error="another")
    assert root_cause([lost, raised, later]) is raised
    assert root_cause([lost]) is lost  # better than nothing
    killed = ending(3, -9, time=4.0)
    assert root_cause([lost, killed]) is killed


def test_a_worker_that_left_without_an_error_is_the_cause_where_others_only_lost_it():
    lost = ending(0, time=2.0, error_type="RuntimeError", error=GLOO)
    for moment in (1.0, 2.2):  # processes take a moment to end, and clocks differ
        assert root_cause([lost, ending(1, 0, moment)]) == ending(1, 0, moment, left_early=1)
    assert root_cause([lost, ending(1, 0, 2.0), ending(2, 0, 1.0)]).rank == 2
    for other in (ending(1, 0, 9.0), ending(1, 0, 1.0, by_us=True), ending(1, -15, 1.0, by_us=True)):
        assert root_cause([lost, other]) is lost
    raised = ending(0, time=2.0, error_type="ValueError", error="bad sample")
    assert root_cause([raised, ending(1, 0, 1.0)]) is raised
    asked = root_cause([lost, ending(1, 0, 1.0, asked=15)])
    assert (asked.rank, asked.exit_code) == (1, 128 + 15)


def test_what_was_ended_by_the_launcher_is_no_cause():
    assert root_cause([ending(0, -15, by_us=True), ending(1, 0)]) is None
    mine = ending(2, 5, time=9.0)
    assert root_cause([ending(0, -15, by_us=True), mine]) is mine


def test_a_lost_host_and_a_worker_that_stood_still_explain_everything_else():
    failed = ending(0, time=1.0, error_type="ValueError", error="x")
    for cause in (ending(1, STUCK, 5.0, stuck="no step"), ending(1, LOST, 5.0, lost_host="silent")):
        assert root_cause([failed, cause]) is cause


def test_errors_that_only_sound_like_lost_connections_are_causes():
    mine = ending(0, time=1.0, error_type="ValueError", error="connection closed by the script's own database")
    assert not mine.is_consequence
    assert not ending(0, error_type="RuntimeError", error="cannot restore the weights").is_consequence
    assert ending(0, error_type="RuntimeError", error="TCPStore: key not found").is_consequence


def test_a_job_whose_worker_was_asked_to_leave_by_somebody_else_is_not_done():
    left, asked = ending(0, 0, time=1.0), ending(1, 0, time=2.0, asked=15)
    assert root_cause([left]) is None
    assert root_cause([left, asked]) is asked
    failed = ending(2, 3, time=3.0)
    assert root_cause([left, asked, failed]) is failed


def test_it_travels_as_plain_values():
    one = ending(0, -9, 1.5, lines=["a"], out_of_memory=True)
    assert Ending(**one.as_message()) == one
