"""How machines find each other and are let in, within this process; whole jobs: tests/launch/host_scenarios.py."""

import os
import socket
import threading

import pytest

from fleetx.launch import gathering as module
from fleetx.launch import joining, remote
from fleetx.launch.channel import Channel, ChannelClosedError
from fleetx.launch.crew import CrewSettings
from fleetx.launch.gathering import Gathering, versions
from fleetx.launch.job import Job, JobSettings
from fleetx.launch.joining import Membership, join
from fleetx.launch.network import LOOPBACK, interface_of, is_here, require_reachable, resolved
from fleetx.launch.roster import Roster
from fleetx.launch.say import LaunchError
from fleetx.launch.secret import VARIABLE, read_secret
from fleetx.launch.stopping import Stopping
from tests.waiting import GUARD, wait_for

SECRET = b"a secret of this very test"


class Own:
    """Stands for the leading machine's workers."""

    address = LOOPBACK
    settings = CrewSettings(["x.py"], 1, "leader")

    def poll(self, _wait):
        return []

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
    def joined():
        channel.receive(0.01)
        return gathering.newcomers(0.01)

    return wait_for(joined, "machine that joins")[0]


def test_a_machine_that_knows_the_secret_is_let_in(gathering, capsys):
    crew = until_joined(gathering, connect(gathering))
    assert (crew.settings.host, crew.settings.workers, crew.address, crew.node) == ("other", 2, "10.0.0.2", 1)
    assert "host other (10.0.0.2) has joined with 2 workers." in capsys.readouterr().err
    until_joined(gathering, connect(gathering, workers=1))
    assert "has joined with 1 worker." in capsys.readouterr().err


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
    with pytest.raises(
        LaunchError, match=rf"port {gathering.port} of 127.0.0.1 is in use .* need --rank 1, 2, .* another port with"
    ):
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
    said = []

    def are_refused():
        assert gathering.newcomers(0.02) == []
        said.append(capsys.readouterr().err)
        return "said nothing" in "".join(said) and "no launcher of FleetX" in "".join(said)

    wait_for(are_refused, "refusal of both")
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


def test_a_name_that_only_this_machine_knows_is_refused():
    require_reachable("10.0.0.1", "10.0.0.1")
    require_reachable("localhost", LOOPBACK)
    with pytest.raises(LaunchError, match=r"all machines can reach, and 'node1' is 127.0.1.1 on this one"):
        require_reachable("node1", "127.0.1.1")
    with pytest.raises(LaunchError, match=r"--ips: the host 'no such host' is not known"):
        resolved("--ips", "no such host")


def test_a_machine_that_hangs_up_while_it_is_let_in_does_no_harm(gathering, monkeypatch):
    channel = connect(gathering)
    send, broke = Channel.send, []

    def broken(self, message):
        if "welcome" in message:
            broke.append(message)
            raise ChannelClosedError("the connection broke")
        send(self, message)

    def is_refused():
        _try(channel)
        assert gathering.newcomers(0.01) == []
        return broke

    monkeypatch.setattr(Channel, "send", broken)
    wait_for(is_refused, "welcome")
    assert gathering._strangers == []
    assert gathering.newcomers(0.01) == []


def test_one_that_is_refused_takes_nobody_with_it(gathering):
    good = [connect(gathering, host=name) for name in "ab"]
    bad = connect(gathering, job_id="yesterday")
    found, refusals = [], []

    def all_have_their_answer():
        for channel in (*good, bad):
            _try(channel)
        try:
            found.extend(gathering.newcomers(0.01))
        except LaunchError as error:
            refusals.append(error)
        return len(found) + len(refusals) == 3

    wait_for(all_have_their_answer, "answer to all")
    assert {crew.settings.host for crew in found} == {"a", "b"}


def test_one_that_does_not_fit_does_not_end_a_job_that_runs(gathering, capsys):
    roster = Roster(Own(), gathering, least=1, most=2)
    bad = connect(gathering, job_id="yesterday")

    def is_refused():
        _try(bad)
        roster.keep_in_touch(0.01)
        return "cannot take part" in capsys.readouterr().err

    wait_for(is_refused, "refusal")


def test_ctrl_c_on_a_machine_that_waits_stops_the_start(gathering):
    channel = connect(gathering)
    roster = Roster(Own(), gathering, least=3, most=3, wait=600)
    stopping = Stopping()
    helper = threading.Thread(target=roster.assemble, args=(stopping,))
    helper.start()
    while not any("welcome" in message for message in channel.receive(0.05)):
        pass
    channel.send({"stop": 2})
    helper.join(GUARD)
    assert stopping.numbers == [2]


def test_ctrl_c_on_a_machine_without_a_part_sends_it_home(gathering):
    roster = Roster(Own(), gathering, least=1, most=1)
    channel = connect(gathering)
    channel.send({"stop": 2})

    def last_words():
        roster.keep_in_touch(0.01)
        return [message for message in _try(channel) if "end" in message]

    assert wait_for(last_words, "end")[0]["end"] == 130
    assert not roster.has_newcomers()
    assert roster.stop_signals() == []


class NoWorkers:
    """Stands for a crew that has nothing to do."""

    ranks = ()
    is_closed = False

    def poll(self, _wait):
        return []

    def beats(self):
        return {}

    def has_failing(self):
        return False

    def close(self):
        self.is_closed = True


def membership():
    ours, theirs = socket.socketpair()
    leader = Channel(ours, SECRET, leads=True)
    member = Membership(Channel(theirs, SECRET, leads=False), NoWorkers(), "leader:1", "job")
    member._channel.receive(0.1)
    leader.receive(0.1)
    return leader, member


def test_a_second_ctrl_c_ends_a_member_whose_leader_does_not_answer(monkeypatch):
    monkeypatch.setattr(joining, "_PATIENCE", 0.2)
    _leader, member = membership()
    assert member.serve(Stopping([2, 2])) == 130  # one that waited for the leader would take it for lost


def test_how_the_job_ended_is_heard_though_the_leader_has_hung_up(monkeypatch):
    leader, member = membership()
    leader.send({"end": 7, "sentence": "worker 0 failed"})
    leader.close()

    def broken():
        raise ChannelClosedError("the connection broke")

    monkeypatch.setattr(member, "_listen", broken)  # as when a message of ours could not be sent
    assert member.serve(Stopping()) == 7
    assert member._crew.is_closed


def test_a_machine_that_is_not_let_in_leaves_nothing_behind(monkeypatch):
    def made(*_args):
        raise AssertionError("workers were prepared for a job that did not let us in")

    monkeypatch.setattr(joining, "Crew", made)
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=lambda: listener.accept()[0].close()).start()
        with pytest.raises(LaunchError, match="did not let this machine in"):
            join((LOOPBACK, port), SECRET, Own.settings, rank=1, job_id=None, wait=GUARD, stopping=Stopping())


def test_machines_that_wait_hear_from_the_leader(gathering, monkeypatch):
    """While the workers of a job take their time to save and leave, say."""
    monkeypatch.setattr(remote, "WORD_EVERY", 0.0)
    roster = Roster(Own(), gathering, least=1, most=1)
    channel = connect(gathering)
    job = Job(JobSettings("job"), roster, Stopping())

    def is_heard():
        job._poll(0.0)
        return any("ping" in message for message in _try(channel))

    wait_for(is_heard, "word from the leader")
