import json

from typer.testing import CliRunner

from benchmarks import optim
from benchmarks.__main__ import app


def test_the_benchmark_of_steps_writes_json_table_and_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "TINY_CASES", optim.TINY_CASES[1:])
    done = CliRunner().invoke(app, ["optim", "--tiny", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "optim-tiny.json").read_text())
    (families,) = result["cases"].values()
    assert "of a tiny BERT and a tiny ResNet, biases" in result["what"]
    for family, peer in optim.PEERS.items():
        assert families[family]["times_the_peer"][peer] == 1.0
        assert families[family]["median_ms"][f"FleetX {family}, foreach"] > 0
    assert (tmp_path / "optim-tiny.png").stat().st_size > 1000
    assert not (tmp_path / "optim.json").exists()  # where a real result is
    assert "of the peer" in done.output
    assert "BERT-large" not in done.output


def test_parameters_of_a_case_have_names_gradients_and_the_models_order_of_memory():
    parameters = optim.parameters(optim.TINY_CASES[1], "cpu")
    assert all(parameter.grad.stride() == parameter.stride() for parameter in parameters)
    assert any(parameter.stride() != parameter.contiguous().stride() for parameter in parameters)
    tied = optim.parameters(optim.TINY_CASES[0], "cpu")
    assert len({id(parameter) for parameter in tied}) == len(tied)
    assert not any(parameter.is_meta for parameter in tied)
