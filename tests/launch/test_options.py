from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from fleetx.cores import Cores
from fleetx.launch import options as options_module
from fleetx.launch.banner import configuration
from fleetx.launch.options import MEANINGLESS, parse

SCRIPT = str(Path(__file__))
TWO = ["--nnodes", "2", "--master", "10.0.0.1:6170"]


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.split("error: ")[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: script"),
        (["no_such_script.py"], "the script 'no_such_script.py' does not exist (looked in "),
        (["--nproc_per_node", "0", SCRIPT], "must be a whole number of at least 1, or auto, gpu or cpu, not '0'"),
        (["--nproc_per_node", "tpu", SCRIPT], "must be a whole number of at least 1, or auto, gpu or cpu, not 'tpu'"),
        (["--nproc_per_node", "gpu", SCRIPT], "--nproc_per_node gpu asks for one worker per GPU, and torch finds none"),
        (["--devices", "cpu", "--nproc_per_node", "gpu", SCRIPT], "--nproc_per_node gpu contradicts --devices cpu:"),
        (["--no_python", "no_such_program"], "the program 'no_such_program' is not there, or is not executable"),
        (["--no_python", SCRIPT], "is not executable"),
        (["--no_python", "-m", "a.module"], "--module is for a module of Python, and --no_python for other programs"),
        (["--local-ranks-filter", "0", SCRIPT], "fleetrun has no --local-ranks-filter: leave it out: --log_dir has"),
        (["--shutdown-timeout=5", SCRIPT], "fleetrun has no --shutdown-timeout: use --stop_timeout."),
        (["--devices", "cpu,0", SCRIPT], "must be GPU numbers such as 0,1, or cpu,cpu; not 'cpu,0'"),
        (
            ["--devices", "cpu,cpu", "--nproc_per_node", "3", SCRIPT],
            "(more workers than devices): leave one of them out",
        ),
        (["--nnodes", "2", SCRIPT], "--nnodes 2 needs --master HOST:PORT"),
        (["--master", "10.0.0.1:6170", SCRIPT], "--master is for several hosts, and --nnodes, which says how many"),
        (["--nnodes", "4:2", SCRIPT], "a range such as 2:4, not '4:2'"),
        (["--master", "10.0.0.1:0", SCRIPT], "must be HOST:PORT such as 10.0.0.1:6170, not '10.0.0.1:0'"),
        ([*TWO, "--rank", "2", SCRIPT], "--rank must be from 0 to 1 with --nnodes 2, not 2"),
        (["--ips", "10.0.0.1,10.0.0.1", SCRIPT], "must be different addresses"),
        (
            ["--ips", "203.0.113.1,203.0.113.2", SCRIPT],
            "none of --ips 203.0.113.1,203.0.113.2 is an address of this machine",
        ),
        (["--ips", "203.0.113.1", "--nnodes", "3", SCRIPT], "--nnodes 3 contradicts --ips, which names 1 host:"),
        (["--ips", "203.0.113.1", SCRIPT], "none of --ips 203.0.113.1 is an address of this machine"),
        (["--max_restart", "-1", SCRIPT], "must be a whole number of at least 0, not '-1'"),
        (["--progress_timeout", "soon", SCRIPT], "must be a number of seconds, at least 0, not 'soon'"),
        (["--job_id", "a b", SCRIPT], "must be letters, digits, dots and dashes"),
        (["--max_restarts", "2", SCRIPT], "fleetrun has no --max_restarts: use --max_restart."),
        (["--node-rank=1", SCRIPT], "fleetrun has no --node-rank: use --rank."),
        (["--standalone", SCRIPT], "fleetrun has no --standalone: leave it out: a job of one machine needs no address"),
        (["--master_port", "29500", SCRIPT], "fleetrun has no --master_port: use --master HOST:PORT"),
        (["--rdzv-endpoint", "a:1", SCRIPT], "fleetrun has no --rdzv-endpoint: use --master HOST:PORT"),
        (["--logdir", "a", SCRIPT], "fleetrun has no --logdir: use --log_dir, or put it after the script"),
        (["--lr", "0.1", SCRIPT], "fleetrun has no --lr: fleetrun --help lists its options. Those of the script go"),
        ([str(Path(SCRIPT).parent)], "is a folder: name a file in it."),
        *((["--" + name, "1", SCRIPT], f"--{name} belongs to parameter servers") for name in MEANINGLESS),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(arguments, message, capsys):
    assert message in refused(arguments, capsys)


def test_all_that_is_wrong_is_named_at_once(capsys):
    options = ["--max_restarts", "2", "--standalone", "--rdzv-id=7", "--servers", "a:1", "--workers", "b:1"]
    said = refused([*options, "--log_dir", "x", "--lr", "0.1", SCRIPT, "--momentum", "0.9"], capsys)
    for name in ("--max_restarts", "--standalone", "--rdzv-id", "--lr"):
        assert said.count(f"fleetrun has no {name}: ") == 1
    for name in ("--servers", "--workers"):
        assert f"{name} belongs to parameter servers" in said
    assert "--momentum" not in said


def test_every_option_of_torchrun_works_or_has_a_remedy(capsys):
    for action in get_args_parser()._actions[1:]:  # after --help
        for option in action.option_strings:
            said = refused(["--no-such-option", option, "1", SCRIPT], capsys)
            assert f"fleetrun has no {option}: fleetrun --help" not in said, option


def test_a_number_of_workers_by_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(options_module, "cores", lambda: Cores(64, 3))
    for word, found in (("cpu", (3, "cpu,cpu,cpu")), ("auto", (3, "None"))):
        options = parse(["--nproc_per_node", word, SCRIPT])
        assert (options.workers, str(options.devices)) == found
    assert parse(["--devices", "cpu,cpu", "--nproc_per_node", "cpu", SCRIPT]).workers == 2
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for word, found in (("cpu", (3, "cpu,cpu,cpu")), ("auto", (2, "None")), ("gpu", (2, "None"))):
        options = parse(["--nproc_per_node", word, SCRIPT])
        assert (options.workers, str(options.devices)) == found
    assert parse(["--gpus", "1", "--nproc_per_node", "gpu", SCRIPT]).workers == 1


def test_more_workers_than_gpus_must_be_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("FLEETX_SHARE_GPUS", raising=False)
    three = ["--nproc_per_node", "3", SCRIPT]
    assert "more workers than this machine has GPUs (2): each worker needs its own. Lower it," in refused(three, capsys)
    monkeypatch.setenv("FLEETX_SHARE_GPUS", "2")
    assert "FLEETX_SHARE_GPUS must be 1, to let workers share GPUs, or 0, got '2'." in refused(three, capsys)
    monkeypatch.setenv("FLEETX_SHARE_GPUS", "1")
    assert parse(three).workers == 3


def test_a_program_that_is_no_python_is_run_as_it_is():
    options = parse(["--no-python", "sh", "-c", "true"])
    assert options.command == ["--no_python", "sh", "-c", "true"]
    assert options.banner()["training_script_args"] == ["-c", "true"]


def test_a_machine_alone_needs_nothing():
    options = parse([SCRIPT, "--lr", "0.1", "--gpus"])
    assert options.command == [SCRIPT, "--lr", "0.1", "--gpus"]
    assert (options.workers, options.alone, options.max_restart, options.log_dir) == (1, True, 0, Path("log"))


def test_dashes_within_options_are_taken_for_underscores(capsys):
    options = parse(["--nproc-per-node", "1", "--log-dir=x", "--max-restart", "2", SCRIPT, "--log-dir"])
    assert (options.workers, options.log_dir, options.max_restart) == (1, Path("x"), 2)
    assert options.command == [SCRIPT, "--log-dir"]
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "--log-dir" not in capsys.readouterr().out


def test_several_machines():
    by_master = parse([*TWO, "--rank", "1", SCRIPT])
    assert (by_master.least_hosts, by_master.most_hosts, by_master.master) == (2, 2, ("10.0.0.1", 6170))
    elastic = parse(["--nnodes", "2:4", "--master", "10.0.0.1", SCRIPT])
    assert (elastic.least_hosts, elastic.most_hosts, elastic.master) == (2, 4, ("10.0.0.1", 6170))
    by_ips = parse(["--ips", "203.0.113.1,127.0.0.1", SCRIPT])
    assert (by_ips.most_hosts, by_ips.rank, by_ips.master) == (2, 1, ("203.0.113.1", 6170))
    both = parse(["--ips", "203.0.113.1,127.0.0.1", "--nnodes", "1:2", SCRIPT])
    assert (both.least_hosts, both.most_hosts) == (1, 2)
    assert parse(["--ips", "127.0.0.1", SCRIPT]).alone


def test_devices_are_those_that_the_job_was_given(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert parse(["--gpus", "6", SCRIPT]).devices.environment() == {"CUDA_VISIBLE_DEVICES": "6"}
    assert "names GPU 0, and CUDA_VISIBLE_DEVICES leaves 4,6 to this job" in refused(["--gpus", "0", SCRIPT], capsys)
    assert parse([SCRIPT]).workers == 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert parse(["--gpus", "0,1", SCRIPT]).workers == 2
    assert "names GPU 2, and this machine has 2" in refused(["--gpus", "2", SCRIPT], capsys)


def test_the_block_has_the_guides_rows():
    lines = configuration(parse(["--gpus", "cpu,cpu", SCRIPT, "--lr", "1"]).banner()).splitlines()
    assert lines[0] == "-----------  Configuration Arguments -----------"
    assert lines[1:7] == [
        "gpus: cpu,cpu",
        "heter_worker_num: None",
        "heter_workers: None",
        "http_port: None",
        "ips: 127.0.0.1",
        "job_id: None",
    ]
    assert "log_dir: log" in lines
    assert {"join_timeout: 300", "stop_timeout: 30"} <= set(lines)
    assert lines[-1] == "-" * 48


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for flag in ("--gpus", "--devices", "--nproc_per_node", "--ips", "--nnodes", "--master", "--rank", "--log_dir"):
        assert flag in text
    assert "--max_restart" in text
    assert "--job_id" in text
    assert "--start_timeout" in text
    assert "heter" not in text
    assert "fleetrun --nproc_per_node 2 train.py --lr 0.1" in text
