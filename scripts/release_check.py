"""Build a release from a clean clone of the last commit, and try it as its users will.

    python scripts/release_check.py

The wheel is installed into an empty environment and used there; the tests that read the project's files run from the
unpacked source distribution. What passed lies in dist/. Needs git, `make` and an index to install from; about five
minutes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS_OF_FILES = ("tests/benchmarks", "tests/test_docs.py", "tests/test_package.py")
# What the README's six lines take for granted.
NAMES_OF_THE_README = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)]
loss_fn = torch.nn.functional.cross_entropy
"""


class ReleaseError(SystemExit):
    """The release must not be published; the message says why."""


def main() -> None:
    """Build, check, and leave the two files in dist/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the two files go; default: dist/")
    parser.add_argument("--trial", action="store_true", help="without the day in CHANGELOG.md and the sdist's tests")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleetx-release-") as temporary:
        folder = Path(temporary)
        clone = folder / "clone"
        run("git", "clone", "--quiet", ROOT, clone)
        if not given.trial:
            check_changelog(clone)
        wheel, sdist = build(clone, folder / "built")
        source = unpack(sdist, folder / "source")
        check_same_wheel(wheel, build(source, folder / "rebuilt")[0])
        check_wheel(wheel, clone, folder / "installed")
        if not given.trial:
            run("make", ".venv/.ready", cwd=source)
            run(source / ".venv" / "bin" / "pytest", "-q", "-m", "not full and not gpu", *TESTS_OF_FILES, cwd=source)
        given.out.mkdir(parents=True, exist_ok=True)
        for path in (wheel, sdist):
            print(f"passed: {shutil.copy(path, given.out)}")


def check_changelog(clone: Path) -> None:
    """The first section must be that of this version, with a day."""
    stated = (clone / "src" / "fleetx" / "version.py").read_text(encoding="utf-8")
    version = stated.split('__version__ = "')[1].split('"')[0]
    heading = re.search(r"^## (.+)$", (clone / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    said = heading[1] if heading else ""
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", said):
        raise ReleaseError(f"the sections of CHANGELOG.md must begin with {version} and a day, got {said!r}: date it.")


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def unpack(sdist: Path, into: Path) -> Path:
    """The folder of the project in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (folder,) = into.iterdir()
    return folder


def check_same_wheel(wheel: Path, rebuilt: Path) -> None:
    """From the source distribution must come the same wheel, with nothing in it but the package."""
    if wheel.read_bytes() != rebuilt.read_bytes():
        raise ReleaseError("the source distribution builds another wheel than the clone: compare the two files.")
    foreign = [
        name for name in zipfile.ZipFile(wheel).namelist() if not re.match(r"fleetx(-[\d.]+\.dist-info)?/", name)
    ]
    if foreign:
        raise ReleaseError(f"the wheel must hold the package alone, and holds {', '.join(foreign)}.")


def check_wheel(wheel: Path, clone: Path, folder: Path) -> None:
    """Install it without extras, then with all, into an environment of its own, and use it in an empty folder."""
    environment, empty = folder / "env", folder / "empty"
    venv.create(environment, with_pip=True)
    empty.mkdir()
    binaries = environment / "bin"
    pip = (binaries / "python", "-m", "pip", "install", "--quiet")
    # The exact pin keeps the CPU build where one is offered.
    run(*pip, torch_pin(clone))
    run(*pip, wheel)
    said = subprocess.run([binaries / "fleetx", "--help"], capture_output=True, text=True, cwd=empty)
    if said.returncode != 2 or "pip install 'fleetx[cli]'" not in said.stderr or said.stderr.count("\n") != 1:
        raise ReleaseError(f"without extras, fleetx must name the extra in one line, and says {said.stderr!r}.")
    blocks = re.findall(r"```python\n(.*?)```", (clone / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (six,) = (block for block in blocks if "fleet.init()" in block)
    (folder / "six.py").write_text(NAMES_OF_THE_README + six, encoding="utf-8")
    run(binaries / "python", folder / "six.py", cwd=empty)
    run(binaries / "fleetrun", "--nproc_per_node", "2", folder / "six.py", cwd=empty)
    run(*pip, f"fleetx[all] @ {wheel.as_uri()}")
    for arguments in (["--version"], ["--help"], ["doctor"], ["train", "--epochs", "1"]):
        run(binaries / "fleetx", *arguments, cwd=empty)
    (run_folder,) = (empty / "runs").iterdir()
    missing = {"run.png", "weights.safetensors", "metrics.jsonl"} - {path.name for path in run_folder.iterdir()}
    if missing:
        raise ReleaseError(f"fleetx train must leave its files in {run_folder}, and did not make {', '.join(missing)}.")


def torch_pin(clone: Path) -> str:
    """The torch that `make run` installs."""
    lines = (clone / "requirements" / "run.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a step with nothing of this checkout on its path; the release ends where one fails."""
    words = [str(part) for part in command]
    print("$", *words, flush=True)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if subprocess.run(words, cwd=cwd, env=env).returncode:
        raise ReleaseError(f"failed: {' '.join(words)}")


if __name__ == "__main__":
    main()
