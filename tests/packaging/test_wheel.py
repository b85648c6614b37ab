"""`python -m build` makes a wheel that installs and imports with torch and optree alone, without Triton, extras
or a GPU."""

import importlib.metadata
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import checkout
import pytest
import release

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

PROGRAM = """
import importlib, importlib.util, pkgutil, sys
sys.path[:0] = sys.argv[1:]
import torch, funcops
assert "torch._dynamo" not in sys.modules, "the compiler is imported by who compiles: it is most of the time of an import"
for absent in ("triton", "numpy", "matplotlib", "safetensors", "transformers", "tqdm"):
    assert importlib.util.find_spec(absent) is None, absent
without = []
for module in pkgutil.walk_packages(funcops.__path__, "funcops."):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name == "triton", (module.name, error)
        without.append(module.name)
print(funcops.__version__, funcops.__file__, *without, sep="\\n")

from funcops import (ActivationConfig, ChainConfig, LinearConfig, RMSNormConfig, Step, activation, backend, chain, donate, linear,
                     linear_bwd, linear_fwd, random, report, rms_norm)
from funcops import nn as fnn

cfg = LinearConfig(4, 2)
params, x, dy = linear.init(cfg, key=random.key(0)), torch.randn(3, 4), torch.randn(3, 2)
y, kept = linear_fwd(params, x, cfg)
assert torch.equal(y, torch.nn.functional.linear(x, params.weight, params.bias)) and "weight" in str(report(kept, params, x))
dparams, dx = linear_bwd(donate(kept), dy, cfg)
assert torch.equal(dx, dy @ params.weight)
steps = Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, cfg), Step("act", activation, ActivationConfig(kind="relu"))
block = ChainConfig(steps=steps)
weights = chain.init(block, key=random.key(0))
y, kept = chain.fwd(weights, x, block)
assert chain.bwd(kept, dy, block)[1].shape == x.shape
fnn.Linear(4, 2)(x).sum().backward()
try:
    with backend("triton"):
        rms_norm.fwd(weights["norm"], x, steps[0].cfg)
except ValueError as error:
    assert str(error) == "rms_norm_fwd: backend must be 'torch' (Triton is not installed), got 'triton'", error
else:
    raise AssertionError("ran on Triton")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    release.archives(folder)
    return folder


def test_contents_of_the_archives(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "funcops").rglob("*.py")}
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = [file.read(name).decode() for name in names if name.endswith("dist-info/METADATA")]
    info = {name.split("/", 1)[1] for name in names if ".dist-info/" in name}
    assert {name for name in names if ".dist-info/" not in name} == sources | {"funcops/py.typed"}
    assert {"licenses/LICENSE", "METADATA", "WHEEL", "RECORD"} <= info
    assert "License-Expression: Apache-2.0" in metadata and "# funcops" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.M)
    assert sorted(needed) == ["optree", "torch", "triton", "typing_extensions"]
    with tarfile.open(source) as file:
        unpacked = {name.partition("/")[2] for name in file.getnames()}
    tested = {name for name in checkout.files() if not name.startswith(".ci/")}  # the tests read pages, hooks and patterns, too
    assert sources <= tested <= unpacked, sorted(tested - unpacked)


def test_it_imports_with_torch_alone(built, tmp_path):
    """`only` holds the wheel's dependencies without Triton."""
    (wheel,) = built.glob("*.whl")
    pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"
    release.run(*pip, "--target", tmp_path / "target", wheel, cwd=tmp_path)
    only = tmp_path / "only"
    only.mkdir()
    wanted, seen = ["torch", "optree"], {"triton"}
    while wanted:
        name = wanted.pop()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        seen.add(name)
        listed = [re.match(r"[\w.-]+", one)[0] for one in found.requires or () if "extra ==" not in one]
        wanted += [one for one in listed if one not in seen]
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (only / top).exists():
                (only / top).symlink_to(found.locate_file(top).resolve())
    warnings = "-W", "error", "-W", "ignore:Failed to initialize NumPy"  # torch's own, which does without
    said = release.run(sys.executable, "-I", "-S", *warnings, "-c", PROGRAM, tmp_path / "target", only, cwd=tmp_path)
    version, file, *without = said.splitlines()
    assert file == str(tmp_path / "target/funcops/__init__.py") and wheel.name.startswith(f"funcops-{version}-")
    rooms = ("funcops.library.kernels.triton.", "funcops.engine.backend.", "funcops.testing.aot", "funcops.testing.fingerprint")
    assert len(without) > 10 and all(name.startswith(rooms) for name in without)
