"""Decoding a token at a time on this CPU: ours against Hugging Face's `generate` with its static cache, on the same tiny Llama."""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import torch

from benchmarks.measure import BenchError, Row, interleaved
from funcops.models import from_hf, generate

SIZES: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=512,
)
PROMPT, TOKENS, BATCHES = 16, 64, (1, 8)


def run() -> list[Row]:
    try:
        import transformers
    except ImportError:
        raise BenchError("decode: transformers must be installed") from None
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        params, cfg = from_hf(folder)
    how = transformers.GenerationConfig(
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
        pad_token_id=0,
    )
    rows: list[Row] = []
    for batch in BATCHES:
        ids = torch.randint(1, SIZES["vocab_size"], (batch, PROMPT))

        def ours(ids: torch.Tensor = ids) -> torch.Tensor:
            return torch.stack(list(generate(params, cfg, ids, TOKENS)), 1)

        def other(ids: torch.Tensor = ids) -> torch.Tensor:
            return theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)[:, PROMPT:]

        if not torch.equal(ours(), other()):
            raise BenchError("decode: both must give the same tokens")
        samples = interleaved({"funcops": ours, "transformers": other}, rounds=7, calls=1)
        case = f"batch {batch}, {TOKENS} tokens after {PROMPT}, float32"
        for name, values in samples.items():
            rows.append(Row("decode", case, name, "median a token", statistics.median(values) / 1e3 / TOKENS, "ms"))
        ratio = statistics.median(a / b for a, b in zip(samples["funcops"], samples["transformers"], strict=True))
        rows.append(Row("decode", case, "funcops", "ratio to transformers", ratio, ""))
    return rows
