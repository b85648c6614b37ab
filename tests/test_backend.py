"""The kernel registry: which implementation runs, and how a Triton one is seen by a tracer."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.backend import backend, kernel


@kernel()
def registry_probe(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return x * factor


@registry_probe.triton
def launch(x, factor):
    return torch.add(x * factor, 0.0)


@kernel()
def torch_only(x: Tensor) -> Tensor:
    """2 x."""
    return x + x


def test_eager_calls_go_straight_to_the_chosen_implementation():
    x = torch.ones(2)
    calls = []
    registry_probe.kernel.triton_impl = lambda x, factor: calls.append(factor) or launch(x, factor)
    try:
        registry_probe(x, 2.0)
        assert calls == []
        with backend("triton"):
            assert torch.equal(registry_probe(x, 3.0), 3 * x)
        assert calls == [3.0]
    finally:
        registry_probe.kernel.triton_impl = launch


def test_a_tracer_sees_the_operator_of_triton_and_the_body_of_torch():
    x = torch.ones(2)

    def targets(graph):
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

    assert targets(make_fx(lambda x: registry_probe(x, 2.0))(x)) == ["aten.mul.Tensor"]
    with backend("triton"):
        assert targets(make_fx(lambda x: registry_probe(x, 2.0))(x)) == ["funcops.registry_probe.default"]
        compiled = torch.compile(lambda x: registry_probe(x, 2.0), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 2 * x)


def test_a_missing_implementation_is_named():
    with backend("triton"), pytest.raises(ValueError, match="torch_only: backend must be 'torch'"):
        torch_only(torch.ones(2))
    with pytest.raises(ValueError, match="backend: name must be 'torch' or 'triton', got 'cuda'"), backend("cuda"):
        pass


def test_the_environment_variable_is_checked():
    code = "import funcops"
    env = {**os.environ, "FUNCOPS_BACKEND": "fast"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "FUNCOPS_BACKEND: name must be 'torch' or 'triton', got 'fast'" in done.stderr
