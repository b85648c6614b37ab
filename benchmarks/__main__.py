"""`python -m benchmarks NAME [--json FILE] [--csv FILE]`: prints a table, a row for each measurement."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from benchmarks.measure import BenchError, NoDevice, machine, print_table, write_csv, write_json

BENCHES = {
    "aot": "every Triton kernel compiled ahead of time, without a GPU",
    "cards": "which card runs what: the table of all builds, and the choices of the code",
    "compiled": "what torch.compile gets of a training step: nodes, loops and lines, against torch.nn's",
    "decode": "tokens one at a time, against Hugging Face's generate with its static cache",
    "figures": "every measured comparison that is committed, with its best and its worst case",
    "first_page": "the bytes of README's table: what blocks of named models keep, and peaks, by what runs them",
    "graph": "a training step of a small model on this GPU: eager, graphed, and torch.compile",
    "kernels": "every kernel on this GPU, against torch and Liger-Kernel",
    "invariant": "the same bits whatever else is in the batch, against the same decoder without it",
    "launch": "host time of a Triton launch, the driver stubbed",
    "memory": "peak live bytes of four blocks, forward and backward",
    "overhead": "host time of forward and backward on small tensors",
    "recording": "a digest, and a step that is recorded over one that is not",
    "recipes": "low-precision recipes on this GPU: a linear layer and a Llama block, against bfloat16",
    "residuals": "bytes that a block keeps for its backward",
    "schedule": "matrix products and live bytes of a split backward, against the split of torch.distributed.pipelining",
    "step": "a training step of the example's model",
    "modules": "unmodified modules as ops: bytes kept, products and time, against autograd's and torch_remat's",
    "swapped": "Hugging Face's models after from_torch: bytes kept, and time, against torch's",
    "traffic": "bytes that kernels move over the minimum, and the quality of their code, without a GPU",
    "unconfirmed": "what no GPU has run in its present form",
    "window": "attention with a window, with rows of one length and of twice that length",
    "wgrads": "many weight gradients at once, against one after another",
    "wide_layers": "which layers to leave wide: the choice of quantization_report, against the first and last",
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    chosen = next((arg for arg in argv if arg in BENCHES), None)
    module: Any = importlib.import_module(f"benchmarks.{chosen}") if chosen else None  # do not import the others
    for name, what in BENCHES.items():
        one = names.add_parser(name, help=what, description=what)
        one.add_argument("--json", metavar="FILE", help="also write the rows here, with the machine's versions")
        one.add_argument("--csv", metavar="FILE", help="also write the rows here")
        one.add_argument("--if-device", action="store_true", help="if a GPU is needed but missing, say so and exit with 0")
        if name == chosen and hasattr(module, "add_arguments"):
            module.add_arguments(one)
    options = vars(parser.parse_args(argv))
    name, json_path, csv_path, if_device = (options.pop(key) for key in ("name", "json", "csv", "if_device"))
    rows: list[Any] = []
    try:
        found, about = module.run(**options), machine()
        for given in [found] if isinstance(found, list) else found:  # rows that come one by one, or several, are written at once
            rows += given if isinstance(given, list) else [given]
            if json_path:
                write_json(json_path, rows, about)
            if csv_path:
                write_csv(csv_path, rows)
    except BenchError as e:
        if not (if_device and isinstance(e, NoDevice)):
            parser.error(str(e))
        print(json.dumps({"bench": name, "status": "no device"}))
    finally:
        print_table(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
