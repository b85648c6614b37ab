"""Makes an environment with another torch than `constraints.txt` names, and the Triton that this torch asks for.

    python tests/newest.py .newest                          the newest torch that pip installs
    python tests/newest.py .newest --torch 2.11.0           that one
    python tests/newest.py .newest --beside .venv           all but torch and Triton is read from that environment, not installed

Every other package has the version of `constraints.txt`. Where the index does not answer, or the disk has too little room,
one line says why, and the exit status is 75: another attempt may succeed. What is already there is kept.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GIGABYTES = 8  # torch's CUDA build takes 5.3, the other packages 0.7, and pip unpacks a wheel of 1 beside them
SECONDS = 540  # a fetch that takes longer has stalled
TRY_LATER = 75


class TryLaterError(Exception):
    pass


def constraints(torch):
    """The lines of `constraints.txt` without torch's and Triton's, and this torch's."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not re.match(r"(torch|triton)\b", line)]
    return "\n".join([*lines, f"torch=={torch}", ""])


def room(folder):
    """Raise if the disk of a folder has too little room."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < GIGABYTES:
        raise TryLaterError(
            f"disk: {folder} must have {GIGABYTES} GB of room, got {free:.1f} GB: free some, or name another folder"
        )


def pip(python, *args, seconds=SECONDS):
    """pip's output. An index that does not answer raises an error of its own class."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "--timeout",
        "20",
        "--retries",
        "1",
    ]
    try:
        ran = subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise TryLaterError(f"index: pip {args[0]} must end within {seconds} s, and did not: try again") from late
    if ran.returncode == 0:
        return ran.stdout
    if re.search(r"No space left|Errno 28", ran.stderr):
        raise TryLaterError(f"disk: pip {args[0]} ran out of room: free some, or name another folder")
    if re.search(r"[Cc]onnection|[Tt]imed out|Temporary failure|Max retries|No matching distribution", ran.stderr):
        raise TryLaterError(f"index: pip {args[0]} must reach the packages' index, got {ran.stderr.strip().splitlines()[-1]}")
    raise SystemExit(f"pip {' '.join(args)}:\n{ran.stderr}")


def newest(python):
    """The version of torch that pip installs for this Python: the newest, under the constraints of pip's own configuration."""
    said = pip(python, "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", "torch")
    try:
        return json.loads(said)["install"][0]["metadata"]["version"].partition("+")[0]
    except (ValueError, LookupError) as error:
        raise TryLaterError(f"index: pip's report on torch must name a version, got {said[:80]!r}") from error


def make(folder, torch, beside):
    """Make an environment at `folder`; print the versions, the size and the seconds."""
    python = folder / "bin" / "python"
    if not python.exists():
        room(folder.parent)
        without = ["--without-pip"] if beside else []  # a test of the wheel installs it
        subprocess.run([sys.executable, "-m", "venv", *without, str(folder)], check=True)
    torch = torch or newest(python)
    made = folder / ".made"
    wanted = (
        f"torch {torch}, {f'beside {beside}' if beside else 'whole'}\n" + (ROOT / "pyproject.toml").read_text() + constraints(torch)
    )
    began = time.monotonic()
    if not made.exists() or made.read_text() != wanted:
        room(folder.parent)
        made.unlink(missing_ok=True)
        pins = folder / "constraints.txt"
        pins.write_text(constraints(torch))
        print(f"installing torch {torch} and what it asks for into {folder}: 6 GB where pip takes the build for CUDA", flush=True)
        pip(python, "install", "--no-compile", "-c", str(pins), *(["torch"] if beside else ["-e", ".[test]"]))
        site = next(folder.glob("lib/python*/site-packages"))
        if beside:  # a .pth file adds to the end of the path: this environment's torch is found first
            (site / "beside.pth").write_text(f"{ROOT}\n{next(beside.resolve().glob('lib/python*/site-packages'))}\n")
        made.write_text(wanted)
    say = "import torch, triton; print(f'torch {torch.__version__}, Triton {triton.__version__}')"
    said = subprocess.run(
        [python, "-W", "ignore", "-c", say], capture_output=True, text=True, check=True, cwd=folder
    ).stdout.strip()
    print(f"{folder}: {said}; {time.monotonic() - began:.0f} s", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="", help="a version in place of the newest")
    parser.add_argument("--beside", type=Path, help="an environment of the same Python, whose other packages are read")
    args = parser.parse_args(argv)
    try:
        make(args.folder.absolute(), args.torch, args.beside)
    except TryLaterError as error:
        print(f"newest: not run: {error}", flush=True)
        raise SystemExit(TRY_LATER) from error


if __name__ == "__main__":
    main()
