"""Run the fast tests with another torch or Python, on the CPU, in an environment made for it.

    python3.12 scripts/try_torch.py 2.12.1

The environment has the interpreter that runs this script. Where an index offers only a build for CUDA, its libraries of
several GB are not installed: they are empty stand-ins, since the CPU's code is in torch itself. The last line printed
is the row for docs/versions.md. Needs `nm`, `ldd` and a C compiler for the stand-ins, about 2.5 GB in --folder, and
several minutes.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Loaded on first use only; were it there, torch would ask it for devices.
DRIVER = "libcuda.so.1"
LIBRARY_OF_CUDA = re.compile(r"(nvidia|cuda)-")


def main() -> None:
    """Make the environment, run the tests, print the row; exit as the tests do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the torch to try, such as 2.12.1")
    parser.add_argument("--folder", type=Path, help="keep the environment here, to use it again; default: a new one")
    parser.add_argument("tests", nargs="*", help="arguments for pytest; default: the fast tests")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="fleetx-torch-") as temporary:
        environment = given.folder or Path(temporary) / "env"
        if not (environment / "ready").exists():
            make_environment(environment, given.version)
            (environment / "ready").touch()
        build = output(environment / "bin" / "python", "-c", "import torch; print(torch.__version__)").strip()
        command = [environment / "bin" / "pytest", "-p", "no:cacheprovider", *given.tests]
        line = ""
        with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as tests:
            for line in tests.stdout or ():
                print(line, end="", flush=True)
    print(row(build, line))
    sys.exit(tests.returncode)


def row(build: str, summary: str) -> str:
    """The line of docs/versions.md."""
    counts = re.sub(r" in [\d.]+s.*", "", summary.strip("=\n "))
    day = datetime.datetime.now(tz=datetime.UTC).date()
    return f"| {build} | {platform.python_version()} | CPU | {day} | {counts} |"


def make_environment(environment: Path, version: str) -> None:
    """Torch, what it needs but the large libraries, the pinned tools, and this checkout."""
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    output(*pip, "--no-deps", f"torch=={version}")
    ask = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"
    needed = without_libraries(json.loads(output(environment / "bin" / "python", "-c", ask)))
    names = {re.split(r"[^\w-]", one)[0] for one in needed} | {"torch"}
    pinned = [
        line.split("#")[0].strip()
        for file in ("run.txt", "dev.txt")
        for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
        if "==" in line and line.split("==")[0] not in names
    ]
    output(*pip, *needed, *pinned)
    output(*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    (packages,) = environment.glob("lib/python*/site-packages")
    stand_in(packages)


def without_libraries(requirements: list[str]) -> list[str]:
    """What torch requires; of CUDA only the runtime and the profiler: both are small, and torch calls them."""
    kept = []
    for requirement in (one.split(";")[0].strip() for one in requirements if "extra ==" not in one):
        if requirement.startswith("cuda-toolkit["):
            kept.append(re.sub(r"\[.*\]", "[cudart,cupti]", requirement))
        elif not LIBRARY_OF_CUDA.match(requirement):
            kept.append(requirement)
    return kept


def stand_in(packages: Path) -> None:
    """Put one empty library in the place of all that torch is linked with and that are not installed.

    It has every symbol that torch asks for, under its version: a function that returns an error.
    """
    libraries = sorted((packages / "torch" / "lib").glob("*.so*"))
    missing = {name for one in libraries for name in re.findall(r"^\t(\S+) => not found", output("ldd", one), re.M)}
    missing -= {DRIVER}
    if not missing:
        return
    symbols = missing_symbols(libraries, missing)
    (runtime,) = packages.glob("nvidia/*/lib/libcudart.so.*")
    library = runtime.with_name("stand_in.so")
    source, versions = library.with_suffix(".c"), library.with_suffix(".map")
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(set().union(*symbols.values()))))
    versions.write_text(
        "".join(f"{node} {{ global: {'; '.join(sorted(names))}; }};\n" for node, names in symbols.items() if node)
    )
    output("cc", "-shared", "-fPIC", "-w", "-o", library, source, f"-Wl,--version-script={versions}")
    for name in missing:
        library.with_name(name).symlink_to(library.name)


def missing_symbols(libraries: list[Path], missing: set[str]) -> dict[str, set[str]]:
    """By version: what torch's libraries use of CUDA's, and neither they nor an installed one define."""
    defined = {
        line.split()[-1].split("@")[0]
        for one in libraries
        for line in output("nm", "-D", "--defined-only", one).splitlines()
    }
    symbols = defaultdict(set)
    for one in libraries:
        used = output("nm", "-D", "--undefined-only", "--with-symbol-versions", one)
        for name, version in re.findall(r"^ +[Uw] ((?:cu|nccl|nv)\w+)(?:@(\S+))?$", used, re.M):
            from_installed = version.startswith("lib") and version not in missing
            if name not in defined and not from_installed:
                symbols[version].add(name)
    return symbols


def output(*command: str | Path) -> str:
    """What a command prints; its errors are shown, and end this script."""
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
