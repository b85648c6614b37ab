"""torch.compile(fullgraph=True) as the first thing that a process does: no call in eager mode has filled a memo, or imported a
kernel, before. What is compiled stays cold for the next, as a tracer fills no memo: so one process compiles all,
and calls in eager mode last."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES_DRAWN = 6  # law cases, of other operators each day
HEAD = """
import contextlib, importlib.util, random as drawing, sys
from pathlib import Path
import torch
import funcops.nn as fnn
from funcops import *
from funcops import ActivationConfig, ChainConfig, LinearConfig, LinearParams, RMSNormConfig
from funcops import chain_dgrad, chain_fwd, chain_wgrad, linear_bwd, linear_fwd
from funcops.engine import random
from funcops.engine.backend import backend
from funcops.testing.tolerances import assert_close
from funcops.engine.trees import stands_for_one, tree_map
torch.manual_seed(0)
eager = []
def check(call, *args, backward=False, dtype=torch.float32, name="", within=contextlib.nullcontext):
    torch._dynamo.reset()
    with within():
        try:
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*args)
        except Exception as error:
            raise AssertionError(name) from error
        if backward:
            compiled.sum().backward()
    eager.append(lambda: assert_close(compiled, call(*args), dtype=dtype, what=name))
"""
PROGRAMS = {
    "pair": """
cfg, needs = LinearConfig(8, 4), Needs(params=("bias",))
def step(params, x, dy):
    y, residuals = linear_fwd(params, x, cfg, needs=needs)
    dparams, dx = linear_bwd(donate(residuals), dy, cfg)
    return y, dparams.bias, dx
check(step, LinearParams(torch.randn(4, 8), torch.randn(4)), torch.randn(3, 8), torch.randn(3, 4))
""",
    "chain": """
chain_cfg = ChainConfig(steps=(
    Step("norm", rms_norm, RMSNormConfig(8)), Step("up", linear, LinearConfig(8, 16)),
    Step("act", activation, ActivationConfig("gelu")), Step("down", linear, LinearConfig(16, 8)),
))
def chain_step(params, x, dy):
    y, residuals = chain_fwd(params, x, chain_cfg, needs=Needs(x=False, params=("up", "down.weight")))
    dx, pending = chain_dgrad(residuals, dy, chain_cfg)
    return y, dx, chain_wgrad(pending, chain_cfg)["down"].weight
check(chain_step, chain.init(chain_cfg, key=random.key(0)), torch.randn(3, 8), torch.randn(3, 8))
""",
    "modules": """
model = torch.nn.Sequential(fnn.Linear(8, 16), fnn.Sequential(fnn.GELU(), fnn.RMSNorm(16), fnn.Linear(16, 4)), fnn.Dropout(0.0))
check(model, torch.randn(3, 8), backward=True)
""",
    "llama": """
from transformers import LlamaConfig, LlamaForCausalLM
llama = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64
))
fnn.from_torch(llama)
check(lambda ids: llama(input_ids=ids, labels=ids).loss, torch.randint(0, 64, (2, 8)), backward=True)
""",
    "laws": """
def law(case):
    def gradient_of(t):
        if stands_for_one(t):  # codes and scales, whose gradient is a tensor
            return torch.ones(t.shape, dtype=t.dtype)
        return torch.ones_like(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else None

    def step(params, x):
        y, residuals = case.op.fwd(params, x, case.cfg)
        dy = tree_map(gradient_of, y, is_leaf=stands_for_one)
        return y, case.op.bwd(residuals, dy, case.cfg)
    check(step, *case.make(torch.float32), name=str(case), within=lambda: backend("triton"))

draw = drawing.Random(int(sys.argv[1]))
files = sorted(Path(sys.argv[3]).glob("*.py"))
for path in draw.sample(files, int(sys.argv[2])):
    spec = importlib.util.spec_from_file_location(f"cases_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    law(draw.choice([case for case in module.CASES if "compiles" not in case.exempt]))
""",
}
TAIL = """
for call in eager:
    call()
"""


@pytest.mark.slow
def test_a_cold_compile_has_no_graph_break():
    """Programs run the torch bodies; drawn cases of the laws run Triton."""
    needed = {"llama": "transformers", "laws": "triton"}
    programs = [text for what, text in PROGRAMS.items() if importlib.util.find_spec(needed.get(what, "torch"))]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    seed = int(time.time() // 86400)
    args = [str(seed), str(CASES_DRAWN), str(ROOT / "tests" / "cases")]
    command = [sys.executable, "-W", "ignore", "-c", "\n".join((HEAD, *programs, TAIL)), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
