"""Which versions are installed."""

import importlib.metadata
import platform
from typing import Any

import torch

from fleetx.version import __version__

NEEDED = ("torch", "numpy", "rich", "safetensors")
OPTIONAL = ("typer", "matplotlib", "pillow", "triton", "tokenizers", "transformers", "timm", "accelerate", "lightning")


def versions() -> dict[str, Any]:
    """FleetX, Python, the system, and the packages that FleetX uses or works with."""
    found: dict[str, Any] = {"fleetx": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in (*NEEDED, *OPTIONAL):
        found[name] = _version(name)
    return found | {"cuda": torch.version.cuda, "cudnn": _cudnn(), "nccl": _nccl()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn() -> int | None:
    return torch.backends.cudnn.version() if torch.cuda.is_available() else None


def _nccl() -> str | None:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())
