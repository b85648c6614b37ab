"""torch.compile(fullgraph=True) as the first thing that a process does: no call in eager mode has filled a memo before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import torch
import funcops.nn as fnn
from funcops import *
from funcops import random
torch.manual_seed(0)
def check(call, *args, backward=False):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*args)
    if backward:
        compiled.sum().backward()
    torch.testing.assert_close(compiled, call(*args))
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
cfg = ChainConfig(steps=(
    Step("norm", rms_norm, RMSNormConfig(8)), Step("up", linear, LinearConfig(8, 16)),
    Step("act", activation, ActivationConfig("gelu")), Step("down", linear, LinearConfig(16, 8)),
))
def step(params, x, dy):
    y, residuals = chain_fwd(params, x, cfg, needs=Needs(x=False, params=("up", "down.weight")))
    dx, pending = chain_dgrad(residuals, dy, cfg)
    return y, dx, chain_wgrad(pending, cfg)["down"].weight
check(step, chain.init(cfg, key=random.key(0)), torch.randn(3, 8), torch.randn(3, 8))
""",
    "modules": """
model = torch.nn.Sequential(fnn.Linear(8, 16), fnn.Sequential(fnn.GELU(), fnn.RMSNorm(16), fnn.Linear(16, 4)), fnn.Dropout(0.0))
check(model, torch.randn(3, 8), backward=True)
""",
    "llama": """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64
))
fnn.from_torch(model)
check(lambda ids: model(input_ids=ids, labels=ids).loss, torch.randint(0, 64, (2, 8)), backward=True)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_cold_compile_has_no_graph_break(program):
    if program == "llama":
        pytest.importorskip("transformers")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", HEAD + PROGRAMS[program]], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
