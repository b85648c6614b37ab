"""The hash of a kernel's source and launch, by which `make aot` finds the kernels that changed."""

import importlib
import itertools
import sys

import pytest

pytest.importorskip("triton")

NUMBERS = itertools.count()
HELPERS = """
import triton, triton.language as tl

LIMIT = tl.constexpr(4)

@triton.jit
def deep(x):
    return x + 1

@triton.jit
def helper(x):
    return deep(x) * 2
"""
KERNEL = """
import triton, triton.language as tl
import {helpers} as helpers
from {helpers} import LIMIT

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, helpers.helper(tl.load(x_ptr + i)), mask=i < LIMIT)
"""


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """The hash of KERNEL with its helpers, after a replacement in their sources, and with the globals `after`; a
    new pair of modules each time."""
    from funcops.engine.backend.launch import Launched
    from funcops.testing.fingerprint import fingerprint

    monkeypatch.syspath_prepend(tmp_path)

    def hashed(old="", new="", key=("float32", 64, 4, 3), target="sm_90", after=()):
        number = next(NUMBERS)
        helpers, name = f"aot_helpers_{number}", f"aot_kernel_{number}"
        for module, text in ((helpers, HELPERS), (name, KERNEL.format(helpers=helpers))):
            assert not old or old in HELPERS + KERNEL
            (tmp_path / f"{module}.py").write_text(text.replace(old, new) if old else text)
        importlib.invalidate_caches()
        kernel = importlib.import_module(name).kernel
        vars(sys.modules[name]).update(after)
        for module in (helpers, name):  # the modules' names are not compared
            for value in vars(sys.modules[module]).values():
                if hasattr(value, "fn"):
                    value.fn.__module__ = "aot"
        return fingerprint(Launched(kernel, (1, 1, 1), {}, key, None), target)

    return hashed


def test_the_hash_is_of_the_source_its_helpers_and_the_launch(hashed):
    first = hashed()
    assert hashed() == first
    changes = [
        {"old": "tl.load(x_ptr + i)", "new": "tl.load(x_ptr + i, mask=i < 2)"},
        {"old": "* 2", "new": "* 3"},  # a helper
        {"old": "x + 1", "new": "x - 1"},  # a helper's helper
        {"old": "constexpr(4)", "new": "constexpr(5)"},  # a value that it reads
        {"key": ("float16", 64, 4, 3)},
        {"key": ("float32", 64, 8, 3)},
        {"key": ("float32", 64, 4, 2)},
        {"target": "sm_100"},
    ]
    assert len({first, *(hashed(**change) for change in changes)}) == 1 + len(changes)


def test_a_global_that_has_the_name_of_a_parameter_or_an_attribute_is_not_read(hashed):
    """Triton's interpreter leaves names such as T in a kernel's module, where others are arguments, and `t.T` is a transpose."""
    named = "x_ptr, BLOCK: tl.constexpr):\n    i ="
    plain = hashed(named, "x_ptr, T, BLOCK: tl.constexpr):\n    t = x_ptr.T + T\n    i =")
    assert hashed(named, "x_ptr, T, BLOCK: tl.constexpr):\n    t = x_ptr.T + T\n    i =", after={"T": "left here"}) == plain


def test_the_hash_is_not_of_comments_and_layout(hashed):
    first = hashed()
    for old, new in (
        ("\n\n@triton", "\n\n\n# why\n@triton"),
        ("return deep(x) * 2", "'''What it does.'''\n    return (deep(x)\n        * 2)  # why"),
        ("helpers.helper(tl.load(x_ptr + i)), mask", "helpers.helper(tl.load(x_ptr+i)),\n        mask"),
        ("LIMIT = ", "UNREAD = 1\nLIMIT = "),
    ):
        assert hashed(old, new) == first, new


def test_the_bench_compiles_what_changed_alone(monkeypatch, tmp_path):
    from benchmarks import aot
    from benchmarks.measure import BenchError, write_csv
    from funcops.testing.aot import COMPILER, Build

    def made(launched, target):
        return Build(launched, "", target, 4, 8, 0, 0, "", 16, launched + target, COMPILER)

    monkeypatch.setattr(aot, "plan", lambda target: ["a", "b", "c"])
    monkeypatch.setattr(aot, "fingerprint", lambda launched, target: launched + target)
    monkeypatch.setattr(aot, "build", made)
    every = aot.run()
    changed = [every[0]._replace(hash="other"), every[1]._replace(compiler="triton 3.0"), *every[2:]]
    write_csv(tmp_path / "table.csv", changed)
    monkeypatch.setattr(aot, "build", lambda *args: made(*args)._replace(registers=9))
    again = aot.run(changed=tmp_path / "table.csv")
    assert again == [every[0]._replace(registers=9), every[1]._replace(registers=9), *every[2:]]
    with pytest.raises(BenchError, match="must be a table of `bench aot`"):
        aot.run(changed=tmp_path / "none.csv")
