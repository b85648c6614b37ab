"""The folder of a device's results, seeded with the committed ones, so that a run begins with what they lack.

    python tests/smoke/results.py OUT      prints the folder, in OUT, of this device

The folder has the device's name, so that the results of two devices never meet in one file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.rows import device_of, write_whole  # noqa: E402

COMMITTED = ROOT / "docs" / "benchmarks"
SEEDS = "smoke.jsonl", "gpu-tests.jsonl", "kernels.json"  # what a run adds to; the other files are written anew


def name_of(device: str) -> str:
    """A short name for a device: "h200" for NVIDIA H200, "h100" for NVIDIA H100 80GB HBM3."""
    words = re.sub(r"\b\d+ ?gb\b.*", "", device.lower().removeprefix("nvidia")).split()
    return "-".join(re.findall(r"[a-z0-9]+", " ".join(words))) or "unknown"


def seeded(out: Path, device: str, committed: Path = COMMITTED) -> Path:
    """The device's folder in `out`. It gets the committed results of the device, unless it has its own from an earlier run."""
    folder = out / name_of(device)
    folder.mkdir(parents=True, exist_ok=True)
    of_device = [file.parent for file in sorted(committed.rglob("kernels.json")) if device_of(file) == device]
    for given in (place / name for place in of_device for name in SEEDS):
        if given.exists() and not (folder / given.name).exists():
            write_whole(folder / given.name, given.read_text())
    return folder


if __name__ == "__main__":
    import torch

    print(seeded(Path(sys.argv[1]), torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"))
