"""Folders with a space in their path, and torch's compiler."""

import os

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils
from torch.utils import cpp_extension

from fleetx import compiler_paths, notices
from fleetx.apart import compiled_apart
from fleetx.compiler_paths import check_compiler_paths
from fleetx.memory.compiling import SharedCompilations


@pytest.fixture(autouse=True)
def _paths(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    # A checkout may lie in a folder with a space itself.
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: "/tmp/torchinductor")
    monkeypatch.setattr(compiler_paths.sysconfig, "get_config_var", lambda _: "/usr/lib")


def test_torch_in_such_a_folder_is_given_another_path(tmp_path, monkeypatch):
    folder = tmp_path / "a b" / "torch" / "lib"
    folder.mkdir(parents=True)
    for _ in range(2):
        monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
        check_compiler_paths()
        assert " " not in cpp_extension.TORCH_LIB_PATH
        assert os.path.realpath(cpp_extension.TORCH_LIB_PATH) == str(folder)


def test_others_keep_theirs(tmp_path):
    check_compiler_paths()
    assert str(tmp_path) == cpp_extension.TORCH_LIB_PATH


@pytest.mark.parametrize("wrong", ["/tmp/a b", "/tmp/it's", '/tmp/"x"', "/tmp/a\\b"])
def test_a_cache_in_such_a_folder_is_refused_where_something_is_compiled(monkeypatch, wrong):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", wrong)
    for compile in (check_compiler_paths, SharedCompilations, lambda: compiled_apart(abs)):
        with pytest.raises(RuntimeError, match="have no space in their path") as refused:
            compile()
        assert f"{wrong!r}, where its cache is (TORCHINDUCTOR_CACHE_DIR): use other" in str(refused.value)
    SharedCompilations(backend="aot_eager")


def test_so_are_temporary_files_and_pythons_libraries(monkeypatch):
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: "/tmp/a b/x")
    monkeypatch.setattr(compiler_paths.sysconfig, "get_config_var", lambda _: "/opt/a b/lib")
    with pytest.raises(RuntimeError, match=r"'/tmp/a b/x', where .*\(TMPDIR\) and in '/opt/a b/lib', where Python's"):
        check_compiler_paths()


def test_where_there_is_a_gpu_it_is_a_warning(monkeypatch, caplog):
    """What is compiled for it alone does not use these commands."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(notices, "_told", set())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/a b")
    for _ in range(2):
        check_compiler_paths()
    assert [record.message[:30] for record in caplog.records] == ["torch.compile builds code for "]
