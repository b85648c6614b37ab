"""`python -m funcops.testing` prints what a report of a mistake needs: versions, the device, the backend, and set variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

import funcops
from funcops.engine.backend import wants_triton

PACKAGES = ("torch", "triton", "optree", "transformers", "peft", "accelerate", "lightning")
PREFIXES = ("FUNCOPS_", "TRITON_", "CUDA_VISIBLE", "PYTORCH_", "TORCH_")


def environment() -> dict[str, str]:
    """Names and values, in the order in which they are printed. A value holds no path: variables that are set are only named."""
    found = {"funcops": funcops.__version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["device"] = _device()
    found["backend"] = "triton" if wants_triton(torch.empty(1, device="cuda" if torch.cuda.is_available() else "cpu")) else "torch"
    found["variables"] = ", ".join(sorted(name for name in os.environ if name.startswith(PREFIXES))) or "none"
    return found


def _device() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, {major}.{minor}, CUDA {torch.version.cuda or torch.version.hip}"


if __name__ == "__main__":
    for name, value in environment().items():
        print(f"{name:<13}{value}")
