"""The code blocks of all pages, as a reader's editor sees them: mypy and pyright (in basic mode) must find nothing.
And what functions of ops return, as mypy knows it, has no Any in it. Run by `make check`."""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import funcops

CALLS = """
import torch
from typing_extensions import assert_type
from funcops import LinearConfig, LinearParams, LinearResiduals, Needs, donate, random
from funcops import linear, linear_bwd, linear_dgrad, linear_fwd, linear_init, linear_wgrad
from funcops import ChainConfig, Step, chain, differentiable, nn, value_and_grad, vjp

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
assert_type(dx, torch.Tensor)
dx, pending = linear_dgrad(residuals, None, cfg)
assert_type(linear_wgrad(pending, cfg), LinearParams)
linear_bwd(maybe, y, cfg)
linear_bwd(donate(residuals), y, cfg, into=dparams)
assert_type(residuals.dtype, torch.dtype)
linear.fwd(params=params, x=y, cfg=cfg, needs=Needs.ALL)
linear.bwd(residuals=residuals, dy=y, cfg=cfg, into=None)
linear.dgrad(residuals=residuals, dy=y, cfg=cfg)
linear.wgrad(pending=None, cfg=cfg)
assert_type(linear.fwd(params, y, cfg)[0], torch.Tensor)
assert_type(value_and_grad(linear)(params, y, cfg), tuple[torch.Tensor, LinearParams])
assert_type(value_and_grad(linear, x=True)(params, y, cfg), tuple[torch.Tensor, tuple[LinearParams, torch.Tensor]])
assert_type(vjp(linear, params, y, cfg)[1](y), tuple[LinearParams, torch.Tensor])
assert_type(differentiable(linear)(params, y, cfg), torch.Tensor)
blocks = ChainConfig(steps=(Step("up", linear, cfg),))
value_and_grad(chain, losses=("aux",))(chain.init(blocks), y, blocks)
assert_type(nn.Linear(4, 3)(y), torch.Tensor)
assert_type(nn.RMSNorm(4)(input=y), torch.Tensor)
assert_type(nn.CrossEntropyLoss()(y, target=y), torch.Tensor)
"""  # what overloads and the functions of an op are for
WRONG = """
import torch
from funcops import LinearConfig, LinearParams, RMSNormConfig, linear, linear_fwd, rms_norm, softcap
from funcops import ChainConfig, RepeatConfig, Step, chain, differentiable, nn, repeat, value_and_grad, vjp
cfg, params, x = LinearConfig(4, 3), LinearParams(torch.ones(3, 4), None), torch.ones(2, 4)
steps, layers = ChainConfig(steps=(Step("up", linear, cfg),)), RepeatConfig(linear, cfg, 2)
tree = chain.init(steps)
linear.fwd(x, params, cfg)
linear_fwd(x, params, cfg)
linear.fwd(params, x, RMSNormConfig(4))
rms_norm.fwd(params, x, RMSNormConfig(4))
softcap.fwd(params, x, cfg)
linear.fwd(params, x)
value_and_grad(linear)(x, params, cfg)
value_and_grad(linear)(params, x)
vjp(linear, x, params, cfg)
differentiable(linear)(x, params, cfg)
chain.fwd(x, tree, steps)
chain.fwd(tree, x, layers)
repeat.fwd(tree, x, steps)
value_and_grad(chain)(x, tree, steps)
nn.Linear(4, 3)()
nn.Linear(4, 3)(None)
nn.Linear(4, 3)(x, x)
nn.Sequential(nn.Linear(4, 3))()
nn.CrossEntropyLoss()(x)
"""  # each call after the seventh line must be an error for an editor
ROOT = Path(__file__).resolve().parents[1]
OF_ANY_FORM = {  # whose results have the form of what they are given, and why
    **dict.fromkeys(("chain", "repeat", "skip", "parallel", "interleave"), "trees of their parts"),
    **dict.fromkeys(("route_dgrad", "route_bwd"), "x has a key beside its logits, as the config says"),
    "gated_delta_rule": "x and y have a state beside their main value, as the config says",
    **dict.fromkeys(("glu_dgrad", "glu_bwd", "qkv_split_dgrad", "qkv_split_bwd"), "x is one tensor or two, as the config says"),
}
FOR_MYPY = ("wrong", "results")  # modules in which it finds errors and notes: that is what they are for
ARGUMENTS = {"init": 1, "fwd": 3, "bwd": 3, "dgrad": 3, "wgrad": 2}


def write_pages(folder):
    """Each page as one module, with its blocks at their own line numbers."""
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        lines, inside = [], False
        for line in page.read_text().splitlines():
            opens = line == "```python"
            inside = (inside or opens) and not (inside and line == "```")
            lines.append(line if inside and not opens else "")
        if any(lines):
            (folder / (re.sub(r"\W", "_", page.stem) + ".py")).write_text("\n".join(lines) + "\n")


def checkers(folder):
    """The type checkers' commands, by name. mypy reads the modules beside the pages, too, at once: most of its time is torch."""
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)], "reportMissingModuleSource": False}
    (folder / "pyrightconfig.json").write_text(json.dumps({**settings, "exclude": [f"{name}.py" for name in FOR_MYPY]}))
    (folder / "calls.py").write_text(CALLS)
    (folder / "wrong.py").write_text(WRONG)
    (folder / "results.py").write_text(results())
    pages = sorted(map(str, folder.glob("*.py")))
    return {
        "mypy": ["-m", "mypy", "--no-error-summary", *pages],
        "pyright": ["-m", "pyright", "--project", str(folder), "--pythonpath", sys.executable],
    }


def functions():
    """The names of every op's functions."""
    names = {name for name, value in vars(funcops).items() if isinstance(value, funcops.Op)}
    return sorted(f"{name}_{part}" for name in names for part in ARGUMENTS if hasattr(funcops, f"{name}_{part}"))


def results():
    """A module that reveals the types of their results, a line for each."""
    lines = ["import typing", "import funcops", "a: typing.Any"]
    for name in functions():
        given = ", ".join(["a"] * ARGUMENTS[name.rpartition("_")[2]])
        lines.append(f"reveal_type(funcops.{name}({given}))")
    return "\n".join(lines) + "\n"


def untyped(said):
    """Functions whose results are not fully typed for mypy."""
    found = re.findall(r'results.py:(\d+): note: Revealed type is "(.*)"', said)
    known = {functions()[int(line) - 4]: revealed for line, revealed in found}
    return {name: known.get(name, "nothing") for name in functions() if "Any" in known.get(name, "Any")}


def unmarked(said):
    """The wrong calls in which mypy sees nothing."""
    found = {int(line) for line in re.findall(r"wrong.py:(\d+): error", said)}
    return [text for line, text in enumerate(WRONG.splitlines(), 1) if line > 7 and line not in found]


def wrong_results(said):
    """The functions that `OF_ANY_FORM` does not name and mypy does not know, and those that it names and mypy knows."""
    left = untyped(said)
    wrong = {name for name in left if name not in OF_ANY_FORM and name.rpartition("_")[0] not in OF_ANY_FORM}
    wrong |= {name for name in OF_ANY_FORM if not any(one.startswith(name) for one in left)}
    return [f"{name}: {left.get(name, 'known')}" for name in sorted(wrong)]


def main():
    failed = False
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as threads:
        folder = Path(name)
        write_pages(folder)
        commands = checkers(folder)
        missing = [checker for checker in commands if importlib.util.find_spec(checker) is None]
        if missing:
            print(*(f"{checker} is not installed: pip install -e '.[dev]'" for checker in missing), sep="\n")
            return 1

        def run(command):  # there mypy has its memory of torch
            return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)

        of_mypy, of_pyright = threads.map(run, commands.values())
    of_pages = [line for line in of_mypy.stdout.splitlines() if not any(f"{name}.py:" in line for name in FOR_MYPY)]
    for checker, found in (
        ("mypy", "\n".join([*of_pages, of_mypy.stderr]).strip()),
        ("pyright", (of_pyright.stdout + of_pyright.stderr) * bool(of_pyright.returncode)),
    ):
        if found:
            print(f"{checker}, of the blocks of the pages (line numbers are the page's):\n{found}")
            failed = True
    if seen := unmarked(of_mypy.stdout):
        print("mypy must find an error in each of:", *seen, sep="\n")
        failed = True
    if wrong := wrong_results(of_mypy.stdout):
        print("results of these functions are (or, by OF_ANY_FORM, are not) known to mypy:", *wrong, sep="\n")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
