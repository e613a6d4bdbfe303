"""Tries what is installed: a step on each device, two workers on this machine, and the packages behind features."""

import importlib
import importlib.util
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fleetx.doctor.finding import Check, tried


def step_on(device: torch.device) -> Check:
    """A few updates through merge, recompute and LARS: the loss must fall."""
    return tried(
        f"a step on {device}",
        lambda: _trained(device),
        "run python -c 'import torch; torch.ones(1, device=...)' on that device: if that fails too, it is torch's "
        "installation or the driver; else report this",
    )


def _trained(device: torch.device) -> str:
    from fleetx import Step, fleet

    strategy = fleet.DistributedStrategy(
        gradient_merge=True,
        gradient_merge_configs={"k_steps": 2},
        recompute=True,
        recompute_configs={"checkpoints": ["0"]},
        lars=True,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 2)).to(device)
        inputs = torch.randn(64, 8).to(device)
        step = Step(
            model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), nn.functional.cross_entropy, strategy
        )
        losses = [step((inputs, (inputs.sum(dim=1) > 0).long())).loss.item() for _ in range(20)]
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


def two_workers() -> Check:
    """A job of two workers that sum their ranks over gloo on the loopback."""
    return tried(
        "two workers over gloo",
        _job,
        "allow connections to 127.0.0.1, and unset GLOO_SOCKET_IFNAME, MASTER_ADDR and MASTER_PORT",
    )


def _job(seconds: int = 120) -> str:
    script = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory(prefix="fleetx-doctor-") as logs:  # nobody asked for these where they are
        command = [sys.executable, "-m", "fleetx.launch", "--devices", "cpu,cpu", "--log_dir", logs, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode or "sum 3" not in done.stdout:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}")
    return "they found each other and agree"


def packages() -> list[Check]:
    """That what reads and writes files works; and Triton, where there is a GPU for its kernels."""
    checks = [
        tried("safetensors", _safetensors, _reinstall("safetensors")),
        _of_extra("Pillow", "PIL", "images", _pillow),
        _of_extra("matplotlib", "matplotlib", "plots", _matplotlib),
    ]
    if torch.cuda.is_available():
        checks.append(tried("Triton", _triton, "install the torch build for your CUDA version, which brings Triton"))
    return checks


def _of_extra(package: str, module: str, extra: str, attempt: Callable[[], str]) -> Check:
    """Without the extra nothing is wrong; a package that is there must work."""
    if importlib.util.find_spec(module) is None:
        return Check(package, True, f"not installed; its features need: pip install 'fleetx[{extra}]'")
    return tried(package, attempt, _reinstall(package))


def _reinstall(package: str) -> str:
    return f"reinstall it: pip install --force-reinstall {package.lower()}"


def _safetensors() -> str:
    from safetensors.torch import load, save

    loaded = load(save({"x": torch.arange(3)}))["x"]
    if loaded.tolist() != [0, 1, 2]:
        raise RuntimeError(f"read back {loaded.tolist()}")
    return "writes and reads"


def _pillow() -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 4), (255, 0, 0)).save(file, "JPEG")
    image = Image.open(io.BytesIO(file.getvalue()))
    if image.size != (4, 4):
        raise RuntimeError(f"read back an image of {image.size}")
    return "writes and reads JPEG"


def _matplotlib() -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    FigureCanvasAgg(Figure(figsize=(1, 1))).draw()
    return "draws"


def _triton() -> str:
    return f"version {importlib.import_module('triton').__version__}"
