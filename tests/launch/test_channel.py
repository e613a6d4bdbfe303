import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.launch import channel as module
from fleetx.launch.channel import Channel, ChannelClosedError, StrangerError

SECRET = b"a secret of sixteen or more"


def pair(secret=SECRET, other=None):
    ours, theirs = socket.socketpair()
    leader, member = Channel(ours, secret, leads=True), Channel(theirs, other or secret, leads=False)
    return leader, member


def meet(leader, member):
    assert member.receive(1) == []
    assert leader.receive(1) == []


def test_messages_arrive_in_both_directions():
    leader, member = pair()
    member.send({"join": 1})  # kept until the leader's number is here
    assert member.receive(1) == []
    assert receive_all(leader) == [{"join": 1}]
    leader.send({"welcome": "ü"})
    assert member.receive(1) == [{"welcome": "ü"}]
    assert leader.is_trusted


def receive_all(channel):
    """What is there by now, which may have come in pieces."""
    return channel.receive(1) + channel.receive(0.05)


def test_nobody_waits_for_ever_for_one_who_does_not_listen(monkeypatch):
    monkeypatch.setattr(module, "_SEND_TIMEOUT", 0.1)
    leader, member = pair()
    meet(leader, member)
    with pytest.raises(ChannelClosedError, match="broke"):
        leader.send({"text": "x" * 3_000_000})


def test_another_secret_is_refused_before_anything_is_parsed(monkeypatch):
    leader, member = pair(other=b"not the secret of this job")
    meet(leader, member)
    member.send({"join": 1})

    def parse(_text):
        raise AssertionError("parsed before its proof was checked")

    monkeypatch.setattr(module.json, "loads", parse)
    with pytest.raises(StrangerError, match="does not know the secret of this job"):
        leader.receive(1)


def test_somebody_who_speaks_another_language_is_refused():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(StrangerError, match="no launcher of FleetX"):
        Channel(ours, SECRET, leads=True).receive(1)


def test_a_stranger_cannot_make_us_keep_much():
    ours, theirs = socket.socketpair()
    leader = Channel(ours, SECRET, leads=True)
    theirs.sendall(module._MAGIC + bytes(32) + (1 << 30).to_bytes(4, "big") + bytes(32))
    with pytest.raises(StrangerError, match="announced a message of 1073741824 bytes"):
        leader.receive(1)


class Recorder:
    """A socket that keeps what is sent through it."""

    def __init__(self, real):
        self.real, self.sent = real, []

    def sendall(self, data):
        self.sent.append(data)
        self.real.sendall(data)

    def __getattr__(self, name):
        return getattr(self.real, name)


def recorded():
    """Two sides that have met, and the bytes of two messages of the member, not yet delivered."""
    ours, theirs = socket.socketpair()
    leader = Channel(ours, SECRET, leads=True)
    recorder = Recorder(theirs)
    member = Channel(recorder, SECRET, leads=False)
    meet(leader, member)
    recorder.real = Recorder(socket.socketpair()[0])
    recorder.sent.clear()
    member.send({"number": 1})
    member.send({"number": 2})
    return leader, theirs, recorder.sent


def test_messages_cannot_be_repeated_reordered_or_left_out():
    for order in ([0, 0], [1], [1, 0]):
        leader, wire, sent = recorded()
        wire.sendall(b"".join(sent[index] for index in order))
        with pytest.raises(StrangerError):
            receive_all(leader)


def test_a_conversation_cannot_be_played_again_or_sent_back():
    _, _, sent = recorded()
    leader, wire, _ = recorded()
    wire.sendall(sent[0])  # of another conversation
    with pytest.raises(StrangerError):
        leader.receive(1)


@settings(max_examples=40)
@given(st.data())
def test_any_changed_byte_is_noticed(data):
    leader, wire, sent = recorded()
    message = bytearray(sent[0])
    place = data.draw(st.integers(4, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    wire.sendall(message)
    with pytest.raises(StrangerError):
        leader.receive(1)


def test_the_end_of_a_connection_is_noticed():
    leader, member = pair()
    meet(leader, member)
    member.close()
    with pytest.raises(ChannelClosedError, match="closed the connection|broke"):
        receive_all(leader)


def test_messages_are_plain_json():
    leader, wire, sent = recorded()
    assert json.loads(sent[0][36:]) == {"number": 1}
    wire.sendall(sent[0])
    assert leader.receive(1) == [{"number": 1}]
