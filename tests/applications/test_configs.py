import sys

import pytest

from fleetx.applications import parse_train_configs


def test_the_defaults_are_the_guides():
    assert vars(parse_train_configs([])) == {
        "lr": 0.1,
        "momentum": 0.9,
        "beta1": 0.9,
        "beta2": 0.997,
        "epsilon": 1e-9,
        "batch_size": 32,
    }


def test_flags_come_from_the_command_line_unless_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "2e-4", "--batch_size", "8"])
    assert (parse_train_configs().lr, parse_train_configs().batch_size) == (2e-4, 8)
    assert parse_train_configs(["--beta1", "0.8"]).beta1 == 0.8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "1"], "unrecognized arguments: --learning_rate"),
        (["--batch", "8"], "unrecognized arguments: --batch"),
        (["--lr", "-1"], "argument --lr: must be a number above 0, got '-1'"),
        (["--lr", "nan"], "argument --lr: must be a number above 0, got 'nan'"),
        (["--lr", "fast"], "argument --lr: must be a number, got 'fast'"),
        (["--momentum", "1.0"], "argument --momentum: must be at least 0 and below 1, got '1.0'"),
        (["--batch_size", "0"], "argument --batch_size: must be a whole number of at least 1, got '0'"),
        (["--batch_size", "3.5"], "argument --batch_size: must be a whole number of at least 1, got '3.5'"),
    ],
)
def test_wrong_flags_end_the_script_with_a_reason(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse_train_configs(flags)
    assert message in capsys.readouterr().err
