"""Checks of all that only a device can tell, in a minute, before anything longer is run.

    python tests/smoke/run.py [--json FILE] [--only GLOB] [--opt-in] [--jobs N] [--seconds S]

Each check of the modules of `CHECKED` runs in a process of its own, so that one that breaks CUDA breaks nothing else, and gives a
line of JSON as it ends: `passed`, `failed`, `out of time`, or `no device`. Those that have not passed in FILE in their present form
come first. Checks of kernels that only a request takes run with `--opt-in` alone. Exits with 1 where one failed, with 2 where a
package is missing.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
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
sys.path[:0] = [folder for folder in (str(ROOT), str(HERE)) if folder not in sys.path]

from lines import NO_DEVICE, OUT_OF_TIME, Lines  # noqa: E402
from needs import missing, refuse  # noqa: E402


def entered() -> dict[str, Any]:
    """All checks, by name."""
    from checks import CHECKED, CHECKS

    for module in CHECKED:
        importlib.import_module(module)
    return CHECKS


def unpassed_first(names: list[str], lines: Lines) -> list[str]:
    """The checks in order, after those that have not passed in their present form."""
    from benchmarks.unconfirmed import sources_of_checks

    now, passed = sources_of_checks(), {name for name, line in lines.earlier.items() if line["status"] == "passed"}
    return sorted(names, key=lambda name: name in passed and lines.earlier[name].get("source") == now.get(name))


def one(name: str) -> dict[str, Any]:
    """Run a check in this process."""
    import torch
    import triton
    from checks import SmokeDevice

    from benchmarks.launches import fingerprints
    from benchmarks.unconfirmed import sources_of_checks

    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    where["source"] = sources_of_checks().get(name, "")
    try:
        with fingerprints() as launches:
            measured = entered()[name](SmokeDevice("cuda"))
            torch.cuda.synchronize()
    except Exception as error:
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"[:2000], **where}
    return {"status": "passed", "measured": measured, **where, "launches": " ".join(sorted(launches))}


def apart(name: str, until: float) -> dict[str, Any]:
    """Run a check in another process, which is ended at the time limit."""
    began = time.monotonic()
    if began >= until:
        return {"check": name, "status": OUT_OF_TIME, "seconds": 0.0}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, str(HERE / "run.py"), "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=until - began)
    except subprocess.TimeoutExpired:
        return {"check": name, "status": OUT_OF_TIME, "seconds": round(time.monotonic() - began, 1)}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # it was killed, or ended before it could say anything
        found = {"status": "failed", "why": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    return {"check": name, **found, "seconds": round(time.monotonic() - began, 1)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the lines to this file")
    parser.add_argument("--only", default="*", metavar="GLOB", help="checks of these names (default: all)")
    parser.add_argument("--opt-in", action="store_true", help="the checks of kernels that only a request takes, and no others")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of them (default: %(default)s)")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if lacking := missing():
        return refuse("smoke", lacking)
    if args.here is not None:
        print(json.dumps(one(args.here), default=str))
        return 0
    checks = entered()
    from checks import OPT_IN

    names = [name for name in checks if fnmatch.fnmatch(name, args.only) and (name in OPT_IN) == args.opt_in]
    if not names:
        parser.error(f"--only: expected a glob that finds one of {', '.join(checks)}, got {args.only!r}")
    import torch

    lines = Lines(args.json)
    if not torch.cuda.is_available():
        return report(({"check": name, "status": NO_DEVICE, "torch": torch.__version__} for name in names), lines)
    until = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(apart, name, until) for name in unpassed_first(names, lines)]
        return report((done.result() for done in as_completed(running)), lines)


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
