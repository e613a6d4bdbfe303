"""The scripts around a release."""

import ctypes
import shutil
import subprocess

import pytest

import fleetx
from scripts.release_check import ReleaseError, check_changelog, torch_pin
from scripts.try_torch import row, stand_in, without_libraries
from tests.jobs.starting import ROOT


def changelog(folder, heading):
    (folder / "src" / "fleetx").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "fleetx" / "version.py", folder / "src" / "fleetx")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\nText.\n")


def test_a_release_has_a_section_with_its_day(tmp_path):
    changelog(tmp_path / "good", f"{fleetx.__version__} (2026-11-19)")
    check_changelog(tmp_path / "good")


@pytest.mark.parametrize("heading", [f"{fleetx.__version__} (unreleased)", "0.0.9 (2026-11-19)", "Unreleased"])
def test_a_release_without_a_section_of_its_own_is_refused(heading, tmp_path):
    changelog(tmp_path, heading)
    with pytest.raises(ReleaseError, match=r"CHANGELOG.md must begin with \S+ and a day, got '"):
        check_changelog(tmp_path)


def test_the_pin_of_torch_is_exact():
    assert torch_pin(ROOT).startswith("torch==2.")


def test_of_cuda_the_two_small_libraries_are_installed():
    requirements = [
        "sympy>=1.13.3",
        'cuda-toolkit[cublas,cudart,nvtx]==13.0.2; platform_system == "Linux"',
        'cuda-bindings<14,>=13.0.3; platform_system == "Linux"',
        'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"',
        'triton==3.7.1; platform_system == "Linux"',
        'optree>=0.13.0; extra == "optree"',
    ]
    assert without_libraries(requirements) == ["sympy>=1.13.3", "cuda-toolkit[cudart,cupti]==13.0.2", "triton==3.7.1"]


def test_the_row_has_the_counts_without_the_time():
    cells = row("2.12.1+cu130", "===== 12 passed, 2 skipped in 3.45s (0:00:03) =====\n").split(" | ")
    assert cells[0] == "| 2.12.1+cu130"
    assert cells[-1] == "12 passed, 2 skipped |"


@pytest.mark.middle
def test_the_stand_in_loads_and_answers_with_an_error(tmp_path):
    """A library that uses another one under a version, as torch uses cuBLAS, and one that has no version."""
    if not all(map(shutil.which, ("cc", "nm", "ldd"))):
        pytest.skip("needs a C compiler and binutils")
    ours, theirs = tmp_path / "torch" / "lib", tmp_path / "nvidia" / "cu13" / "lib"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)

    def compile(library, source, *options):
        (tmp_path / "source.c").write_text(source)
        options = [*options, f"-Wl,-soname,{library.name}"]
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "source.c", *options], check=True)

    (tmp_path / "versions").write_text("libcublas.so.13 { global: cublasCreate; };\n")
    compile(theirs / "libcudart.so.13", "int cudaGetDeviceCount(void) { return 100; }\n")
    compile(
        theirs / "libcublas.so.13",
        "int cublasCreate(void) { return 0; }\n",
        f"-Wl,--version-script={tmp_path / 'versions'}",
    )
    compile(theirs / "libnccl.so.2", "int ncclInit(void) { return 0; }\n")
    compile(
        ours / "libtorch_cuda.so",
        "int cublasCreate(void); int ncclInit(void); int cudaGetDeviceCount(void);\n"
        "int blas(void) { return cublasCreate(); } int nccl(void) { return ncclInit(); }\n"
        "int devices(void) { return cudaGetDeviceCount(); }\n",
        *(theirs / name for name in ("libcudart.so.13", "libcublas.so.13", "libnccl.so.2")),
        "-Wl,-z,now,-rpath,$ORIGIN/../../nvidia/cu13/lib",
    )
    (theirs / "libcublas.so.13").unlink()
    (theirs / "libnccl.so.2").unlink()
    with pytest.raises(OSError, match="cannot open shared object file"):
        ctypes.CDLL(str(ours / "libtorch_cuda.so"))
    stand_in(tmp_path)
    library = ctypes.CDLL(str(ours / "libtorch_cuda.so"))
    assert (library.blas(), library.nccl(), library.devices()) == (1, 1, 100)


def test_the_scripts_for_a_shell_are_well_formed():
    folders, kinds = ("scripts", "examples"), ("*.sh", "*.sbatch")
    scripts = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    assert {"install_engines.sh", "train.sbatch"} <= {path.name for path in scripts}
    for path in scripts:
        subprocess.run(["sh", "-n", path], check=True)
