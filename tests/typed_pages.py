"""The code blocks of all pages, as a reader's editor sees them: mypy and pyright (in basic mode) must find nothing.
Run by `make check`."""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS = """
import torch
from typing_extensions import assert_type
from funcops import LinearConfig, LinearParams, LinearResiduals, Needs, linear, linear_bwd, linear_fwd, linear_init, random

cfg = LinearConfig(4, 3, bias=False)
params = linear_init(cfg, key=random.key(0))
assert_type(params, LinearParams)
y, residuals = linear_fwd(params, torch.ones(2, 4), cfg)
assert_type(y, torch.Tensor)
assert_type(residuals, LinearResiduals)
_, maybe = linear_fwd(params=params, x=torch.ones(2, 4), cfg=cfg, needs=Needs.NONE)
assert_type(maybe, LinearResiduals | None)
dparams, dx = linear_bwd(residuals, y, cfg)
assert_type(dparams, LinearParams)
linear.fwd(params=params, x=y, cfg=cfg, needs=Needs.ALL)
linear.bwd(residuals=residuals, dy=y, cfg=cfg, into=None)
linear.dgrad(residuals=residuals, dy=y, cfg=cfg)
linear.wgrad(pending=None, cfg=cfg)
"""  # what overloads and the functions of an op are for
ROOT = Path(__file__).resolve().parents[1]


def write_pages(folder):
    """Each page as one module, its blocks at the lines where they stand."""
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        lines, inside = [], False
        for line in page.read_text().splitlines():
            opens = line == "```python"
            inside = (inside or opens) and not (inside and line == "```")
            lines.append(line if inside and not opens else "")
        if any(lines):
            (folder / (re.sub(r"\W", "_", page.stem) + ".py")).write_text("\n".join(lines) + "\n")


def checkers(folder):
    """What checks them, by name, as commands."""
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)], "reportMissingModuleSource": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    (folder / "calls.py").write_text(CALLS)
    pages = sorted(map(str, folder.glob("*.py")))
    return {
        "mypy": ["-m", "mypy", "--no-error-summary", *pages],
        "pyright": ["-m", "pyright", "--project", str(folder), "--pythonpath", sys.executable],
    }


def main():
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pages(folder)
        for checker, command in checkers(folder).items():
            if importlib.util.find_spec(checker) is None:
                print(f"{checker} is not installed: pip install -e '.[dev]'")
                failed = True
                continue
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, capture_output=True, text=True
            )  # where mypy's memory of torch is
            if done.returncode:
                print(f"{checker}, of the blocks of the pages (line numbers are the page's):\n{done.stdout}{done.stderr}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
