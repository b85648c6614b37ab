"""Models of Hugging Face after `from_torch`, against torch: the bytes that a forward keeps, and the CPU time of both passes.

Each model is drawn at random with two layers of width 256 and runs in float32 on the CPU, 4 sequences of 128. Only the last has
dropout, of 0.1, but none in attention, as torch then keeps all scores on a CPU. Single layers follow that a swap leaves, or made
slower before, with x alone requiring grad beside their parameters.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.measure import BenchError, Row, interleaved
from benchmarks.saved import saved_by
from funcops import nn as fnn

SIZES = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
GPT2 = dict(n_embd=256, n_layer=2, n_head=4, n_positions=128, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
HEADS = dict(head_dim=64)
BERT = dict(intermediate_size=1024, max_position_embeddings=128, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
KNOWN: dict[str, dict[str, dict[str, Any]]] = {  # by how `from_torch` knows their classes
    "with a row": {
        "Bert": BERT,
        "GPT2": {},
        "Gemma": HEADS,
        "Gemma2": HEADS,
        "Gemma3": HEADS,
        "Granite": {},
        "Llama": {},
        "Mistral": {},
        "Olmo2": {},
        "Phi3": {},
        "Qwen2": {},
        "Qwen3": HEADS,
        "SmolLM3": {},
    },
    "without a row": {
        "Arcee": {},
        "Cohere": {},
        "Cohere2": {},
        "Ernie4_5": HEADS,
        "Exaone4": {},
        "GPTNeoX": {},
        "Glm4": HEADS,
        "Helium": HEADS,
        "HunYuanDenseV1": HEADS,
        "Llama4": dict(HEADS, intermediate_size_mlp=704, interleave_moe_layer_step=3, num_local_experts=2),
        "Ministral": HEADS,
        "Nemotron": {},
        "Olmo3": {},
        "Phi": {},
        "SeedOss": HEADS,
        "StableLm": {},
        "Starcoder2": {},
    },
    "with dropout": {"GPT2": dict(resid_pdrop=0.1, embd_pdrop=0.1)},
}


# Layers that no other layer joins: each with the shape of its x.
ALONE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "GroupNorm": (nn.GroupNorm(32, 256), (2, 256, 32, 32)),
    "GLU": (nn.GLU(), (4, 128, 2 * 704)),
    "Dropout": (nn.Dropout(0.1), (4, 128, 256)),
}


def run(rounds: int = 9) -> list[Row]:
    try:
        import transformers
    except ImportError:
        raise BenchError("swapped: transformers must be installed") from None
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning)
    rows: list[Row] = []
    for kind, name, more in [(kind, *one) for kind, models in KNOWN.items() for one in models.items()]:
        torch.manual_seed(0)
        model = _model(transformers, name, more)
        ids = torch.randint(1, 1024, (4, 128))

        def loss_of(one: Any, ids: Any = ids) -> Any:
            return one(input_ids=ids, labels=ids).loss

        rows += _rows(f"{name}, {kind}", model, loss_of, rounds)
    for name, (layer, shape) in ALONE.items():
        x = torch.randn(shape, requires_grad=True)
        rows += _rows(f"{name}, alone", layer, lambda one, x=x: one(x).sum(), rounds)
    return rows


def _rows(case: str, model: Any, loss_of: Callable[[Any], Any], rounds: int) -> list[Row]:
    ours = copy.deepcopy(model)
    fnn.from_torch(ours)
    both = {"torch": model, "funcops": ours}
    kept = {way: saved_by(one, lambda one=one: loss_of(one)) for way, one in both.items()}
    with torch.autocast("cpu", torch.bfloat16):
        cast = {way: saved_by(one, lambda one=one: loss_of(one)) for way, one in both.items()}
    steps: dict[str, Callable[[], Any]] = {way: lambda one=one: loss_of(one).backward() for way, one in both.items()}
    samples = interleaved(steps, rounds=rounds, calls=3, cpu=True)
    paired = zip(samples["funcops"], samples["torch"], strict=True)
    rows = [Row("swapped", case, way, "bytes kept", float(size), "bytes") for way, size in kept.items()]
    if kept["torch"]:
        rows.append(Row("swapped", case, "funcops", "bytes, ratio to torch", kept["funcops"] / kept["torch"], ""))
    if cast["torch"]:
        rows.append(Row("swapped", case, "funcops", "bytes under autocast, ratio to torch", cast["funcops"] / cast["torch"], ""))
    rows += [Row("swapped", case, way, "median CPU time", statistics.median(t) / 1e3, "ms") for way, t in samples.items()]
    rows.append(Row("swapped", case, "funcops", "CPU time, ratio to torch", statistics.median(a / b for a, b in paired), ""))
    return rows


def _model(transformers: Any, name: str, more: dict[str, Any]) -> Any:
    text = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}.get(name, f"{name}Config")
    sizes: dict[str, Any] = dict(SIZES, vocab_size=1024, pad_token_id=0, attention_dropout=0.0)
    sizes = dict(GPT2, vocab_size=1024) if name == "GPT2" else sizes
    head = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, head)(getattr(transformers, text)(**{**sizes, **more}))
