import pytest

from fleetx.comm.beats import Beat, BeatReader, Manner, _Beats
from fleetx.launch.job import _may_ask_yet


@pytest.mark.parametrize(
    ("manners", "held"),
    [
        ("UNKNOWN UNKNOWN", False),  # nothing would be lost
        ("UNKNOWN UNDECIDED", True),
        ("UNKNOWN ASKS", True),
        ("UNDECIDED ASKS", True),
        ("ASKS ASKS", False),
        ("UNDECIDED NEVER_ASKS", False),  # they run the same script
        ("", False),
    ],
)
def test_a_signal_is_held_back_while_a_worker_that_trains_may_ask_yet(manners, held):
    beats = {rank: Beat(manner=Manner[name]) for rank, name in enumerate(manners.split())}
    assert _may_ask_yet(beats) == held


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
    assert reader.read(1) == Beat(2, True, 15, Manner.NEVER_ASKS)
    assert reader.read(0) == reader.read(2) == Beat()
    reader.reset()
    assert reader.read(1) == Beat()
