"""More programs than a grid's second dimension takes: attention goes by parts of the batch, and any other launch is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from funcops.engine import random
from funcops.engine.backend import backend, launch
from funcops.library.kernels import pointwise
from funcops.library.kernels.activation import activation_bwd, activation_fwd
from funcops.library.kernels.softcap import softcap_bwd, softcap_fwd
from funcops.library.kernels.triton import scored_attention as kernels
from funcops.library.kernels.triton.modulate import modulate_fwd
from funcops.testing.tolerances import assert_close

BIASES = {"none": None, "one": (1, 1), "a head": (1, 2), "a batch": (7, 1), "each": (7, 2)}
MANY = """
import torch
from funcops.testing.aot import stubbed
from funcops.engine.backend.launch import planned_launches
from funcops.library.kernels.triton.scored_attention import scored_attention_bwd, scored_attention_fwd
from funcops.library.kernels.triton.modulate import modulate_fwd

q, k, v, dy = (torch.empty(70_000, 49, heads, 32, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2, 4))
bias, score = torch.empty(1, 4, 49, 49, dtype=torch.bfloat16, device="meta"), (False, 0, 0.0, False, 0.2)
with stubbed(), planned_launches() as planned:
    out, lse = scored_attention_fwd(q, k, v, bias, None, *score)
    found = scored_attention_bwd(dy, q, k, v, bias, None, out, lse, *score, True)
    print([tuple(t.shape) for t in (out, lse, *found)], max(one.grid[1] for one in planned))
    try:
        modulate_fwd(torch.empty(70_000, 2, 8, device="meta"), *torch.empty(2, 70_000, 8, device="meta"))
    except ValueError as error:
        print(error)
"""


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", BIASES)
def test_parts_of_a_batch_give_the_bits_of_the_whole(name, monkeypatch):
    """Also for heads of a group that share keys, and a last part that is shorter; a bias for all gets the sum of the parts."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(7, 18, heads, 16, generator=draw) for heads in (2, 1, 1, 2))
    bias = None if BIASES[name] is None else torch.randn(*BIASES[name], 18, 18, generator=draw)
    score = (True, 5, 3.0, True, 0.3)

    def both():
        out, lse = kernels.scored_attention_fwd(q, k, v, bias, None, *score)
        return out, lse, *kernels.scored_attention_bwd(dy, q, k, v, bias, None, out, lse, *score, bias is not None)

    *whole, dbias = both()
    monkeypatch.setattr(launch, "MOST", 5)
    monkeypatch.setattr(kernels, "MOST", 5)
    *parts, of_parts = both()
    assert all(a.equal(b) for a, b in zip(parts, whole, strict=True))
    assert (dbias is None) == (of_parts is None)
    if dbias is not None:
        assert_close(of_parts, dbias, dtype=torch.float32, length=7)


def test_a_launch_of_too_many_programs_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "MOST", 5)
    with pytest.raises(
        ValueError, match=r"kernel forward: grid must be of at most 5 programs along its second and third dimension: "
    ):
        modulate_fwd(torch.ones(6, 2, 8), torch.ones(6, 8), torch.ones(6, 8))


def test_more_heads_than_a_grid_takes_are_refused(monkeypatch):
    """No part of the batch has fewer heads than one sequence."""
    monkeypatch.setattr(launch, "MOST", 5)
    monkeypatch.setattr(kernels, "MOST", 5)
    q = torch.ones(2, 3, 6, 16)
    with pytest.raises(ValueError, match="kernel forward: grid must be of at most 5 programs"):
        kernels.scored_attention_fwd(q, q, q, None, None, True, 2, 0.0, False, 0.3)


@pytest.mark.slow
def test_swins_windows_on_a_device():
    """Planned for an H100: 70,000 windows of 4 heads."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", MANY], cwd=root, env={"PATH": "", "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    shapes, error = run.stdout.splitlines()
    q, k = (70_000, 49, 4, 32), (70_000, 49, 2, 32)
    assert shapes == f"{[q, (70_000, 4, 49), q, k, k, (1, 4, 49, 49)]} 65532", run.stderr
    assert error == (
        "kernel forward: grid must be of at most 65,535 programs along its second and third dimension: call the op on parts of the "
        "batch, got (1, 1, 70000)"
    )


def test_elementwise_kernels_of_several_programs():
    """More elements than a program takes, the last ones a part of a program's."""
    x, y, b = torch.randn(3, 7001), torch.randn(3, 7001), torch.randn(7001)
    calls = [
        (pointwise.scale, x, 0.3),
        (pointwise.add, x, y),
        (pointwise.add, x, b),
        (pointwise.dropout, x, random.key(3), 0.25),
        (pointwise.dropout_add, x, b, y, random.key(3), 0.25),
        (activation_fwd, x, "gelu"),
        (activation_bwd, y, x, "silu"),
        (softcap_fwd, x, 3.0),
        (softcap_bwd, y, x, 3.0),
    ]
    for kernel, *args in calls:
        with backend("triton"):
            got = kernel(*args)
        assert_close(got, kernel(*args), dtype=torch.float32, length=4, what=kernel.__name__)
