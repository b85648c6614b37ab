"""`python -m funcops.bench NAME [--json FILE]`: one row a measurement."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import platform
from pathlib import Path

import torch

BENCHES = ("launch", "memory", "overhead", "residuals", "step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m funcops.bench")
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    rows = importlib.import_module(f"funcops.bench.{args.name}").run()
    width = max(len(row.case) for row in rows)
    for row in rows:
        print(f"{row.bench}  {row.case.ljust(width)}  {row.provider.ljust(18)}  {row.metric.ljust(34)}  {row.value:12.3f} {row.unit}")
    if args.json:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
        data = {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
