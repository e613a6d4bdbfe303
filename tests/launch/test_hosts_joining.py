"""How machines find each other and are let in, within this process; whole jobs: tests/launch/host_scenarios.py."""

import os
import resource
import socket
import threading

import pytest

from fleetx.comm.beats import Beat
from fleetx.diagnosis.ending import Ending
from fleetx.diagnosis.stacks import Stack
from fleetx.launch import gathering as module
from fleetx.launch import joining, remote
from fleetx.launch import run as launching
from fleetx.launch.channel import Channel, ChannelClosedError
from fleetx.launch.crew import Attempt, CrewSettings
from fleetx.launch.gathering import Gathering, versions
from fleetx.launch.job import Job, JobSettings
from fleetx.launch.joining import Membership, join
from fleetx.launch.network import LOOPBACK, interface_of, is_here, require_reachable, resolved
from fleetx.launch.options import parse
from fleetx.launch.roster import Roster
from fleetx.launch.say import LaunchError
from fleetx.launch.secret import VARIABLE, read_secret
from fleetx.launch.stopping import Stopping
from tests.waiting import GUARD, wait_for

SECRET = b"a secret of this very test"
FACTS = {"host": "other", "workers": 2, "address": "10.0.0.2", "interface": "eth0", "rank": 1, "job_id": None}
FACTS["versions"] = versions()
ATTEMPT = Attempt(0, 0, 2, 1, 2, LOOPBACK, 1, [], "job", 0)


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
    one = Gathering(LOOPBACK, 0, SECRET, "job", 3)
    one.port = one._listener.getsockname()[1]
    yield one
    one.close()


def connect(gathering, **changes):
    channel = Channel(socket.create_connection((LOOPBACK, gathering.port)), SECRET, leads=False)
    channel.send({"join": FACTS | changes})
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
    until_joined(gathering, connect(gathering, workers=1, rank=None))
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
    assert gathering._strangers == {}
    mute.close()
    rude.close()


def test_any_number_of_strangers_keeps_nobody_out(gathering, capsys):
    """`select.select` ends with an error at the 1,024th open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    strangers = []
    try:
        for _ in range(1030):
            strangers.append(socket.create_connection((LOOPBACK, gathering.port)))
            if len(strangers) % 10 == 0:
                assert gathering.newcomers(0) == []
        assert until_joined(gathering, connect(gathering)).settings.host == "other"
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(gathering._strangers) <= module._MOST_STRANGERS
    said = capsys.readouterr().err
    assert said.count("a connection was refused: 127.0.0.1:") == module._MOST_LINES
    assert "is one of too many that say nothing" in said
    assert "Nothing more is said about connections from 127.0.0.1." in said


def test_strangers_that_use_up_all_open_files_keep_nobody_out(gathering, monkeypatch, capsys):
    accept, errors = socket.socket.accept, [OSError(24, "Too many open files")]
    strangers = [socket.create_connection((LOOPBACK, gathering.port)) for _ in range(3)]
    wait_for(lambda: gathering.newcomers(0.01) or len(gathering._strangers) == 3, "strangers")
    monkeypatch.setattr(socket.socket, "accept", lambda one: accept(one) if not errors else _raise(errors.pop()))
    until_joined(gathering, connect(gathering))
    assert len(gathering._strangers) == 2
    assert f"127.0.0.1:{strangers[0].getsockname()[1]} is one of too many" in capsys.readouterr().err


def _raise(error):
    raise error


ODD_MACHINES = [
    ({"hello": 1}, "knows the secret, and did not say that it joins"),
    ({"join": None}, "sent what is no message of FleetX (Joined expected, got None)"),
    ({"join": {"host": "other"}}, "(Joined expected, got {'host': 'other'})"),
    ({"join": FACTS | {"workers": "2"}}, "(int expected, got '2')"),
    ({"join": FACTS | {"workers": 10**9}}, "(workers must be from 1 to 4096, not 1000000000)"),
    ({"join": FACTS | {"rank": -1}}, "(rank must be at least 0, not -1)"),
    ({"join": FACTS | {"versions": ["1.0"]}}, "expected, got ['1.0'])"),
    (["join"], "sent what is no message of FleetX."),
]


@pytest.mark.parametrize(("message", "why"), ODD_MACHINES)
def test_a_machine_that_knows_the_secret_and_says_odd_things_is_refused(gathering, capsys, message, why):
    channel = Channel(socket.create_connection((LOOPBACK, gathering.port)), SECRET, leads=False)
    channel.send(message)

    def is_refused():
        _try(channel)
        assert gathering.newcomers(0.01) == []
        return capsys.readouterr().err

    said = wait_for(is_refused, "refusal")
    assert said.startswith("fleetrun: a connection was refused: 127.0.0.1:")
    assert why in said
    until_joined(gathering, connect(gathering))


ODD_WORDS = [
    {"stop": "now"},
    {"stop": 9},
    {"ended": {"rank": 0}},
    {"ended": []},
    {"beats": {"zero": [1, False, 0, 0]}},
    {"beats": {"0": [1, False, 0]}},
    {"beats": {"0": [None, False, 0, 0]}},
    {"failing": 1},
    {"stacks": {"0": {"lines": [1]}}},
    {"ago": float("nan")},
    ["beats"],
]


@pytest.mark.parametrize("message", ODD_WORDS, ids=str)
def test_a_machine_of_the_job_that_says_odd_things_is_lost_alone(gathering, message):
    channel = connect(gathering)
    crew = until_joined(gathering, channel)
    crew.start(ATTEMPT)
    channel.send(message)
    endings = wait_for(lambda: crew.poll(0.01), "end of its workers")
    assert [ending.rank for ending in endings] == [0, 1]
    assert "no message of FleetX" in crew.lost or "asked to stop with signal 9" in crew.lost


def test_what_a_member_says_arrives_as_it_was_meant(gathering):
    channel = connect(gathering)
    crew = until_joined(gathering, channel)
    crew.start(ATTEMPT)
    beat, stack = Beat(3, True, 15, 2), Stack(["a line"], True, "sleeping")
    channel.send({"beats": {1: beat}, "failing": True, "new": "of a later version"})
    channel.send({"ended": Ending(0, "other", 1, 2.0, lines=["x"], error="E").as_message(), "ago": 0})
    (ending,) = wait_for(lambda: crew.poll(0.01), "ending")
    assert (ending.rank, ending.lines, ending.error) == (0, ["x"], "E")
    assert (crew.beats(), crew.has_failing()) == ({1: beat}, True)
    crew.ask_for_stacks()
    channel.send({"stacks": {1: stack.as_message()}})
    assert crew.stacks() == {1: stack}


def test_the_second_machine_with_a_rank_is_refused_and_the_first_one_stays(gathering, capsys):
    roster = Roster(Own(), gathering, least=3, most=3)
    first = connect(gathering, host="first")
    wait_for(lambda: (_try(first), roster._look(0.01), roster._newcomers)[-1], "first machine")
    for changes, why in (
        ({"host": "second"}, "its --rank 1 is that of host first (10.0.0.2), which has joined: give each machine a"),
        ({"rank": 0}, "its --rank is 0, the number of the machine that leads"),
        ({"rank": 3}, "its --rank is 3, and this job has 3 machines (--nnodes)"),
    ):
        channel = connect(gathering, **changes)
        refusal = wait_for(lambda one=channel: (roster._look(0.01), _try(one))[-1], "refusal")
        assert why in refusal[0]["refused"]
        assert f"cannot take part: {why}" in capsys.readouterr().err
    assert [crew.settings.host for crew in roster._newcomers] == ["first"]


def test_a_machine_that_comes_back_takes_the_place_of_its_silent_self(gathering, monkeypatch):
    roster = Roster(Own(), gathering, least=3, most=3)
    for host in ("hangs up", "falls silent", "comes back"):
        channel = connect(gathering, host=host)
        wait_for(
            lambda one=channel, name=host: (
                _try(one),
                roster._look(0.01),
                [crew for crew in roster._newcomers if crew.settings.host == name],
            )[-1],
            "machine",
        )
        if host == "hangs up":
            channel.close()
        else:
            monkeypatch.setattr(remote, "WORD_EVERY", 0.0)
    assert [crew.settings.host for crew in roster._newcomers] == ["comes back"]


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
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_text("another that is long enough\n")
    assert read_secret(tmp_path / "secret") == b"another that is long enough"


def odd_secrets(folder):
    file = folder / "secret"
    yield file, "cannot be read: No such file or directory. Name a file that holds the secret"
    yield folder, "must name a file with the secret in it, and .* is a folder"
    os.mkfifo(folder / "pipe", 0o600)
    yield folder / "pipe", "is no ordinary file"
    for mode in (0o644, 0o640, 0o604, 0o620):
        file.write_text("long enough to be a secret")
        file.chmod(mode)
        yield file, rf"can be read or changed by other users \(mode {mode:o}\), .* `chmod 600 {file}`"
    file.chmod(0o600)
    for content, message in (
        (b" \n", "must have at least 16 characters, and it has 0; `head"),
        (b"\x00\xff" * 20, "must be one line of text in UTF-8"),
        (b"one line of the secret\nand another", "must be one line of text in UTF-8"),
        (b"x" * 5000, "must have at most 4096 characters"),
    ):
        file.write_bytes(content)
        yield file, message


def test_odd_secret_files_are_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    for file, message in odd_secrets(tmp_path):
        with pytest.raises(ValueError, match=message):
            read_secret(file)
    monkeypatch.setenv(VARIABLE, "not UTF-8, but long enough \udcff")
    with pytest.raises(ValueError, match=rf"the secret in {VARIABLE} must be one line of text in UTF-8"):
        read_secret(None)


def test_a_machine_that_may_train_alone_needs_no_secret(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    ran = []
    monkeypatch.setattr(launching, "_run_here", lambda *given: ran.append(given) or 0)
    elastic = ["--nnodes", "1:4", "--master", LOOPBACK, "--log_dir", str(tmp_path / "log"), __file__]
    assert launching.run(parse(elastic)) == 0
    assert len(ran) == 1
    assert "without a secret no other machine can join, and this one goes on alone." in capsys.readouterr().err
    for wrong in (["--rank", "1", *elastic], [*elastic[:1], "2:4", *elastic[2:]]):
        assert launching.run(parse(wrong)) == 1
        assert "a job on several machines needs a secret that all of them know" in capsys.readouterr().err
    assert len(ran) == 1


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


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("0.0.0.0", "means all interfaces of a machine"),
        ("0", "means all interfaces of a machine"),
        ("224.0.0.1", "a multicast address"),
        ("255.255.255.255", "a broadcast address"),
        ("127.255.255.255", "a broadcast address"),
        ("240.0.0.1", "a reserved address"),
    ],
)
def test_an_address_that_is_not_one_machines_is_refused(host, kind):
    with pytest.raises(LaunchError, match=rf"--master must be the address of one machine, and '{host}' is .*{kind}"):
        resolved("--master", host)
    assert not is_here(host)


@pytest.mark.parametrize("host", ["::1", "a..b", "x" * 70])
def test_what_is_no_address_at_all_is_refused(host):
    with pytest.raises(LaunchError, match="--master: the host .* is not known"):
        resolved("--master", host)


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
    assert gathering._strangers == {}
    assert gathering.newcomers(0.01) == []


def test_one_that_is_refused_takes_nobody_with_it(gathering):
    good = [connect(gathering, host=name, rank=None) for name in "ab"]
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
