"""The packages that runs on a device need in this Python's environment, and which of them are missing.

python tests/smoke/needs.py      one line: Python, the device, and each package; exits with 2 where the library cannot be imported
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEAST = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)[^"]*",$', (ROOT / "pyproject.toml").read_text(), re.M))
PYTHON = (3, 10)
NEEDED = tuple(LEAST)  # by the library
TESTS = ("pytest", "hypothesis", "numpy")  # by the gpu tests besides
BESIDES = ("pytest-xdist", "tqdm", "matplotlib", "safetensors", "liger-kernel")  # many processes; the example; pictures; a rival


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def had(name: str) -> str | None:
    """The version of a package, "" where that is not known; None where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "" if importlib.util.find_spec(name.replace("-", "_")) else None


def missing(names: Iterable[str] = NEEDED) -> list[str]:
    """The packages that are missing or too old, in words."""
    found = [] if sys.version_info[:2] >= PYTHON else [f"python>=3.10 (got {sys.version.split()[0]})"]
    for name in names:
        got, least = had(name), LEAST.get(name)
        wanted = name if least is None else f"{name}>={least}"
        if got is None:
            found.append(f"{wanted} (not installed)")
        elif got and least is not None and _numbers(got) < _numbers(least):
            found.append(f"{wanted} (got {got})")
    return found


def refuse(where: str, lacking: list[str]) -> int:
    print(f"{where}: {sys.executable} lacks {', '.join(lacking)}", file=sys.stderr)
    return 2


def main() -> int:
    lacking = missing()
    packages = {name: had(name) for name in (*NEEDED, *TESTS, *BESIDES)}
    found: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable, "device": "not asked", **packages}
    if not lacking:
        import torch

        found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    print(json.dumps({**found, "missing": [*lacking, *missing(TESTS)]}), flush=True)
    return refuse("gpu", lacking) if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
