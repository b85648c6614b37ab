"""The number of kernels that the models launch, now and in the best order that one would write by hand. If a number changes, change
it here and in the table of docs/kernels.md."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from launches import launches

from funcops import Needs, RopeConfig, SkipConfig, WithExtras, chain, donate, fused, rope_table, skip
from funcops import nn as fnn
from funcops.models.blocks import Sizes, block_config, decoder_config, gpt2_block_config, mlp_config

BATCH, LENGTH = 4, 2048
LLAMA = Sizes(dim=4096, layers=1, heads=32, kv_heads=8, hidden=11008, vocab=32000, context=LENGTH, batch=BATCH)

# Each kernel of the best order between bars. A product's epilogue, and what a kernel computes beside, follow a plus sign. A norm's
# derivative gives parts of its weight's gradient, whose sum is a kernel. What is kept is what the chain keeps: no norms,
# no activations.
MLP_FORWARD = "norm | up + glu | down + residual"
MLP_BACKWARD = (
    "down dgrad + glu derivative + recomputed glu | down wgrad | up dgrad | norm derivative + recomputed norm + residual | "
    "weight sum | up wgrad"
)
LLAMA_FORWARD = f"norm | q, k and v | rope of q and k | attention | out + residual | {MLP_FORWARD}"
LLAMA_BACKWARD = (
    f"{MLP_BACKWARD} | out dgrad | out wgrad | attention | rope of q and k | q, k and v dgrad | "
    "norm derivative + recomputed norm + residual | weight sum | q, k and v wgrad"
)
GPT2_FORWARD = (
    "norm | q, k and v + bias | attention | out | bias + dropout + residual + norm | up + bias + gelu | down | "
    "bias + dropout + residual"
)
GPT2_BACKWARD = (
    "dropout | down dgrad + gelu derivative + recomputed gelu | down wgrad + bias | up dgrad | "
    "norm derivative + recomputed norm + residual + dropout | weight and bias sums | up wgrad + bias | out dgrad | "
    "out wgrad + bias | attention | q, k and v dgrad | "
    "norm derivative + recomputed norm + residual | weight and bias sums | q, k and v wgrad + biases"
)
DECODER_FORWARD = f"embedding | {LLAMA_FORWARD} | norm | head | losses | mean"
DECODER_BACKWARD = (
    "loss derivative | head dgrad | norm derivative + recomputed norm | weight sum | head wgrad | "
    f"{LLAMA_BACKWARD} | order of ids | embedding"
)


class Row(NamedTuple):
    """Launches of both halves, and the best orders."""

    forward: int
    backward: int
    best_forward: str
    best_backward: str


ROWS = {
    "MLP": Row(4, 7, MLP_FORWARD, MLP_BACKWARD),
    "Llama block": Row(11, 16, LLAMA_FORWARD, LLAMA_BACKWARD),
    "Llama block, q, k and v in one memory": Row(9, 15, LLAMA_FORWARD, LLAMA_BACKWARD),
    "GPT-2 block": Row(15, 23, GPT2_FORWARD, GPT2_BACKWARD),
    "decoder of one Llama block": Row(20, 28, DECODER_FORWARD, DECODER_BACKWARD),
}
SWAPPED = {
    "Hugging Face's Llama block, swapped": Row(23, 40, LLAMA_FORWARD, LLAMA_BACKWARD),
    "Hugging Face's GPT-2 block, swapped": Row(14, 30, GPT2_FORWARD, GPT2_BACKWARD),
}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def a_model(name):
    """The op, its config, x, and whether a gradient of x is requested."""
    table = rope_table(meta(LENGTH, dtype=torch.int64), RopeConfig(LLAMA.dim // LLAMA.heads))
    x, ids = meta(BATCH, LENGTH, LLAMA.dim), meta(BATCH, LENGTH, dtype=torch.int64)
    if name == "MLP":
        return skip, SkipConfig(chain, mlp_config(LLAMA.dim, LLAMA.hidden)), x, True
    if name.startswith("Llama block"):
        return chain, block_config(LLAMA.dim, LLAMA.heads, LLAMA.hidden, LLAMA.kv_heads), WithExtras(x, {"positions": table}), True
    if name == "GPT-2 block":
        x = WithExtras(meta(BATCH, LENGTH, 768), {"key": meta(2, dtype=torch.int64)})
        return chain, gpt2_block_config(768, 12, 3072, 0.1), x, True
    return chain, decoder_config(LLAMA), WithExtras(ids, {"positions": table, "labels": ids}), False


def as_written(row, forward, backward):
    found = len(forward), len(backward)
    assert found == (row.forward, row.backward), (
        f"{found}, no more {row[:2]}: write it down\nforward {forward}\nbackward {backward}"
    )
    best = [len(order.split(" | ")) for order in (row.best_forward, row.best_backward)]
    assert best[0] <= row.forward and best[1] <= row.backward, "the best order is not the best"


@pytest.mark.parametrize("name", ROWS)
def test_launches_are_as_written_down(name, monkeypatch):
    op, cfg, x, of_x = a_model(name)
    params = op.init(cfg, device="meta", dtype=torch.bfloat16)
    params = fused.pack_qkv(params, cfg) if "one memory" in name else params
    with launches(monkeypatch) as forward:
        y, kept = op.fwd(params, x, cfg, needs=Needs(x=of_x))
    dy = torch.empty_like(y)
    with launches(monkeypatch) as backward:
        op.bwd(donate(kept), dy, cfg)
    as_written(ROWS[name], forward, backward)


@pytest.mark.slow
@pytest.mark.parametrize("name", SWAPPED)
@pytest.mark.filterwarnings("ignore")
def test_launches_of_swapped_models_are_as_written_down(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        if "Llama" in name:
            sizes = dict(hidden_size=LLAMA.dim, intermediate_size=LLAMA.hidden, num_attention_heads=LLAMA.heads)
            cfg = transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=LLAMA.kv_heads, vocab_size=64, **sizes)
            model = transformers.LlamaForCausalLM(cfg).to(torch.bfloat16)
            given = {"position_embeddings": (meta(1, LENGTH, LLAMA.dim // LLAMA.heads),) * 2}
        else:
            cfg = transformers.GPT2Config(n_layer=1, n_positions=LENGTH, vocab_size=64, attn_pdrop=0.0)
            model, given = transformers.GPT2LMHeadModel(cfg).to(torch.bfloat16), {}
    (block,) = model.model.layers if "Llama" in name else model.transformer.h
    fnn.from_torch(model)
    x = meta(BATCH, LENGTH, cfg.hidden_size).requires_grad_()
    with launches(monkeypatch) as forward:
        y = block(x, **given)
    y = y[0] if isinstance(y, tuple) else y
    with launches(monkeypatch) as backward:
        y.backward(torch.empty_like(y))
    as_written(SWAPPED[name], forward, backward)


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    found = re.findall(r"^\| ([\w' ,-]+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    rows = [
        (name, row.forward, len(row.best_forward.split(" | ")), row.backward, len(row.best_backward.split(" | ")))
        for name, row in (ROWS | SWAPPED).items()
    ]
    assert found == [tuple(map(str, row)) for row in rows]
