"""How machines find each other and are let in, within this process; whole jobs: tests/jobs/test_machines.py."""

import os
import socket
import time

import pytest

from fleetx.launch import gathering as module
from fleetx.launch.channel import Channel
from fleetx.launch.crew import CrewSettings
from fleetx.launch.gathering import Gathering, versions
from fleetx.launch.joining import join
from fleetx.launch.network import LOOPBACK, interface_of, is_here
from fleetx.launch.roster import Roster
from fleetx.launch.say import LaunchError
from fleetx.launch.secret import VARIABLE, read_secret
from fleetx.launch.stopping import Stopping

SECRET = b"a secret of this very test"


class Own:
    """Stands for the leading machine's workers."""

    address = LOOPBACK
    settings = CrewSettings(["x.py"], 1, "leader")

    def close(self):
        pass


@pytest.fixture
def gathering():
    one = Gathering(LOOPBACK, 0, SECRET, "job")
    one.port = one._listener.getsockname()[1]
    yield one
    one.close()


def connect(gathering, **changes):
    channel = Channel(socket.create_connection((LOOPBACK, gathering.port)), SECRET, leads=False)
    facts = {"host": "other", "workers": 2, "address": "10.0.0.2", "interface": "eth0", "rank": 1, "job_id": None}
    channel.send({"join": facts | {"versions": versions()} | changes})
    return channel


def until_joined(gathering, channel):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        channel.receive(0.01)
        if crews := gathering.newcomers(0.01):
            return crews[0]
    raise AssertionError("nobody joined")


def test_a_machine_that_knows_the_secret_is_let_in(gathering, capsys):
    crew = until_joined(gathering, connect(gathering))
    assert (crew.settings.host, crew.settings.workers, crew.address, crew.node) == ("other", 2, "10.0.0.2", 1)
    assert "host other (10.0.0.2) has joined with 2 workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": versions() | {"torch": "1.0"}}, r"host other .* versions differ, torch 1.0 there and .* here"),
        ({"job_id": "yesterday"}, "its --job_id is yesterday, and this job is job"),
    ],
)
def test_a_machine_that_does_not_fit_ends_the_start_and_is_named(gathering, changes, message):
    channel = connect(gathering, **changes)
    with pytest.raises(LaunchError, match=message):
        until_joined(gathering, channel)
    refused = [m for _ in range(20) for m in _try(channel)]
    assert "Use the same on all machines" in refused[0]["refused"]


def _try(channel):
    try:
        return channel.receive(0.05)
    except Exception:
        return []


def test_a_port_in_use_is_named_with_its_remedy(gathering):
    with pytest.raises(LaunchError, match=rf"port {gathering.port} of 127.0.0.1 is in use .* give another port with"):
        Gathering(LOOPBACK, gathering.port, SECRET, "job")
    with pytest.raises(LaunchError, match="cannot listen on 203.0.113.1:.*Is it an address of this machine"):
        Gathering("203.0.113.1", 0, SECRET, "job")


def test_it_listens_on_the_given_address_alone(gathering):
    assert gathering._listener.getsockname()[0] == LOOPBACK


def test_machines_that_never_join_are_named(gathering):
    roster = Roster(Own(), gathering, least=2, most=2, wait=0.1, expected=[LOOPBACK, "10.0.0.2"])
    with pytest.raises(LaunchError, match=r"1 of 2 machines have joined within 0.1 s \(127.0.0.1\); missing: 10.0.0.2"):
        roster.assemble(Stopping())
    unnamed = Roster(Own(), gathering, least=3, most=3, wait=0.1)
    with pytest.raises(LaunchError, match=r"missing: the one with --rank 1, the one with --rank 2\."):
        unnamed.assemble(Stopping())


def test_a_leader_that_is_not_there_is_named():
    with socket.socket() as unused:
        unused.bind((LOOPBACK, 0))
        port = unused.getsockname()[1]
        settings = CrewSettings(["x.py"], 1, "me")
        with pytest.raises(LaunchError, match=rf"machine at 127.0.0.1:{port} was not there within 0.1 s"):
            join((LOOPBACK, port), SECRET, settings, rank=1, job_id=None, wait=0.1, stopping=Stopping())


def test_strangers_are_refused_and_forgotten(gathering, capsys, monkeypatch):
    monkeypatch.setattr(module, "_HANDSHAKE", 0.2)
    mute = socket.create_connection((LOOPBACK, gathering.port))
    rude = socket.create_connection((LOOPBACK, gathering.port))
    rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
    end = time.monotonic() + 10
    while gathering.newcomers(0.02) == [] and ("said nothing" not in (text := capsys.readouterr().err) or not text):
        assert time.monotonic() < end
    assert gathering._strangers == []
    mute.close()
    rude.close()


def test_secrets(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=rf"needs a secret that all of them know.*{VARIABLE}"):
        read_secret(None)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ValueError, match=rf"the secret in {VARIABLE} must have at least 16 characters"):
        read_secret(None)
    monkeypatch.setenv(VARIABLE, "long enough to be a secret")
    assert read_secret(None) == b"long enough to be a secret"
    assert VARIABLE not in os.environ  # workers do not get it
    (tmp_path / "secret").write_text("another that is long enough\n")
    assert read_secret(tmp_path / "secret") == b"another that is long enough"
    with pytest.raises(ValueError, match="--secret_file .*nowhere cannot be read"):
        read_secret(tmp_path / "nowhere")


def test_addresses_of_this_machine():
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("203.0.113.1") is None
    assert is_here(LOOPBACK)
    assert not is_here("203.0.113.1")
