"""`make gpu-smoke`: what only a device can tell, in a minute, before anything longer is run.

    python tests/smoke/run.py [--json FILE] [--only GLOB] [--jobs N] [--seconds S]

Each check of `checks.py`, `graph_checks.py` and `model_checks.py` runs in a process of its own, so that one that breaks CUDA breaks
nothing else, and gives a line of JSON as it ends: `passed`, `failed`, `out of time`, or `no device`. Exits with 1 where one failed,
with 2 where a package is missing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)] if str(HERE) not in sys.path else []

from lines import NO_DEVICE, Lines  # noqa: E402
from needs import missing, refuse  # noqa: E402


def one(name: str) -> dict[str, Any]:
    """Run a check in this process."""
    import graph_checks  # noqa: F401
    import model_checks  # noqa: F401  enters its checks
    import torch
    import triton
    from checks import CHECKS, SmokeDevice

    from benchmarks.launches import fingerprints
    from benchmarks.unconfirmed import sources_of_checks

    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    where["source"] = sources_of_checks().get(name, "")
    try:
        with fingerprints() as launches:
            measured = CHECKS[name](SmokeDevice("cuda"))
            torch.cuda.synchronize()
    except Exception as error:
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"[:2000], **where}
    return {"status": "passed", "measured": measured, **where, "launches": " ".join(sorted(launches))}


def apart(name: str, until: float) -> dict[str, Any]:
    """Run a check in another process, which is ended at the time limit."""
    began = time.monotonic()
    if began >= until:
        return {"check": name, "status": "out of time", "seconds": 0.0}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, str(HERE / "run.py"), "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=until - began)
    except subprocess.TimeoutExpired:
        return {"check": name, "status": "out of time", "seconds": round(time.monotonic() - began, 1)}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # it was killed, or ended before it could say anything
        found = {"status": "failed", "why": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    return {"check": name, **found, "seconds": round(time.monotonic() - began, 1)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the lines to this file")
    parser.add_argument("--only", default="*", metavar="GLOB", help="checks of these names (default: all)")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of them (default: %(default)s)")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if lacking := missing():
        return refuse("gpu-smoke", lacking)
    sys.path[:0] = [str(ROOT), str(HERE)]
    if args.here is not None:
        print(json.dumps(one(args.here), default=str))
        return 0
    import graph_checks  # noqa: F401
    import model_checks  # noqa: F401
    from checks import CHECKS

    names = [name for name in CHECKS if fnmatch.fnmatch(name, args.only)]
    if not names:
        parser.error(f"--only: expected a glob that finds one of {', '.join(CHECKS)}, got {args.only!r}")
    import torch

    if not torch.cuda.is_available():
        lines = Lines(args.json, device=False)
        return report(({"check": name, "status": NO_DEVICE, "torch": torch.__version__} for name in names), lines)
    until = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(apart, name, until) for name in names]
        return report((done.result() for done in as_completed(running)), Lines(args.json))


def report(results: Iterable[dict[str, Any]], lines: Lines) -> int:
    """Print each check's result as it comes, and write it to the file; return 1 if one failed."""
    found = []
    for one in results:
        found.append(one)
        print(lines.add(one), flush=True)
    bad = [one["check"] for one in found if one["status"] not in ("passed", NO_DEVICE)]
    print(f"{len(found) - len(bad)} of {len(found)} well" + (f"; not: {', '.join(sorted(bad))}" if bad else ""), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
