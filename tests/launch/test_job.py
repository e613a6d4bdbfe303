import pytest

from fleetx.comm.beats import Beat, BeatReader, Manner, Wait, _Beats
from fleetx.diagnosis.ending import Ending, root_cause
from fleetx.launch.job import _may_ask_yet, ended_by_force, explain


@pytest.mark.parametrize(
    ("manners", "held"),
    [
        ("UNKNOWN UNKNOWN", False),  # nothing would be lost
        ("UNKNOWN UNDECIDED", True),
        ("UNKNOWN ASKS", True),
        ("UNDECIDED ASKS", True),
        ("ASKS ASKS", False),
        ("UNDECIDED NEVER_ASKS", False),  # they run the same script
        ("ASKS NEVER_ASKS", True),  # which was said too early
        ("", False),
    ],
)
def test_a_signal_is_held_back_while_a_worker_that_trains_may_ask_yet(manners, held):
    beats = {rank: Beat(manner=Manner[name]) for rank, name in enumerate(manners.split())}
    assert _may_ask_yet(beats) == held


def test_workers_that_did_not_leave_are_named_with_the_reason():
    assert ended_by_force([1, 0], "after 3 s (--stop_timeout)") == (
        "workers 0, 1 had not left after 3 s (--stop_timeout) and were ended; what they had not saved is lost."
    )
    assert ended_by_force([2], "at the second signal (SIGINT)") == (
        "worker 2 had not left at the second signal (SIGINT) and was ended; what it had not saved is lost."
    )


def lost(rank, **facts):
    error = "Connection closed by peer"
    return Ending(rank, "here", 1, 2.0, error_type="RuntimeError", error=error, log=f"log/workerlog.{rank}", **facts)


def test_who_left_early_is_named_last_and_those_that_lost_it_show_their_error(capsys):
    endings = [lost(2, lines=["Traceback"]), Ending(1, "here", 0, 1.0, log="log/workerlog.1", lines=["done"])]
    explain(root_cause(endings), endings)
    assert capsys.readouterr().err.splitlines() == [
        "fleetrun: the end of log/workerlog.2:",
        "    Traceback",
        "fleetrun: worker 2 failed because it lost worker 1.",
        "fleetrun: worker 1 left with exit code 0 while others were still at work (host here): all workers must do the "
        "same steps. Its log: log/workerlog.1.",
    ]


@pytest.mark.parametrize("error", ["it cannot go on", "it cannot go on.", "it cannot go on:"])
def test_each_sentence_ends_with_one_full_stop(error, capsys):
    cause = Ending(0, "here", 1, 1.0, error_type="ValueError", error=error, log="log/workerlog.0")
    explain(cause, [cause, lost(1), lost(2)], "restart 1 of 2")
    assert capsys.readouterr().err.splitlines() == [
        "fleetrun: workers 1, 2 failed because they lost worker 0.",
        "fleetrun: worker 0 failed with exit code 1 (host here): ValueError: it cannot go on. "
        "Its log: log/workerlog.0. This is restart 1 of 2.",
    ]


def test_what_a_worker_notes_reaches_the_launcher(tmp_path):
    reader = BeatReader(tmp_path / "beats", 3)
    worker = _Beats()
    worker.note_manner(Manner.ASKS)  # without a launcher: nothing to note it in
    worker.open(reader.place(1))
    worker.beat()
    worker.beat()
    assert reader.read(1) == Beat(2)
    worker.expect(True)
    worker.note_signal(15)
    worker.note_manner(Manner.NEVER_ASKS)
    with worker.waiting():
        assert reader.read(1) == Beat(2, True, 15, Manner.NEVER_ASKS, Wait.FOR_OTHERS)
    assert reader.read(1) == Beat(2, True, 15, Manner.NEVER_ASKS)
    assert reader.read(0) == reader.read(2) == Beat()
    reader.reset()
    assert reader.read(1) == Beat()
