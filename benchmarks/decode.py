"""Decoding a token at a time: ours against Hugging Face's `generate` with its static cache, on the same Llama of random weights.

On the CPU the model is tiny, and all must give the same tokens. On a GPU it has the sizes of Llama-3.2-1B in bfloat16, whose tokens
may differ where two are as likely, and there our step runs as a captured graph, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import BenchError, NoDevice, Row, interleaved
from funcops import donate
from funcops.graphs import graphed
from funcops.models import cache_init, decode, from_hf, generate, roll_back


class Setting(NamedTuple):
    """The model, and how many tokens follow prompts of how many, in which batches. `rounds`: of measurements."""

    sizes: dict[str, Any]
    dtype: torch.dtype
    prompt: int
    tokens: int
    batches: tuple[int, ...]
    rounds: int


def sizes_of(vocab: int, dim: int, hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """A Llama with heads of 64."""
    widths = dict(vocab_size=vocab, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers)
    return widths | dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=8192)


SETTINGS = {
    "cpu": Setting(sizes_of(256, 192, 512, 4, 3, 1), torch.float32, 16, 64, (1, 8), 7),
    "cuda": Setting(sizes_of(32000, 2048, 8192, 16, 32, 8), torch.bfloat16, 4096, 64, (1, 16), 5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu, with a tiny model")


def run(device: str = "cpu") -> list[Row]:
    try:
        import transformers
    except ImportError:
        raise BenchError("decode: transformers must be installed") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise NoDevice("--device: expected cpu, as there is no CUDA device, got cuda")
    torch.manual_seed(0)
    setting = SETTINGS[device]
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**setting.sizes)).eval().to(setting.dtype)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        params, cfg = from_hf(folder, device=device)
    theirs.to(device)
    rows: list[Row] = []
    for batch in setting.batches:
        ids = torch.randint(1, setting.sizes["vocab_size"], (batch, setting.prompt), device=device)
        functions = {
            "funcops": lambda ids=ids: torch.stack(list(generate(params, cfg, ids, setting.tokens)), 1).cpu(),
            "transformers": _of_transformers(theirs, ids, setting),
        }
        if device == "cuda":
            functions["funcops, graphed"] = captured_decoding(params, cfg, ids, setting)
        found = [function() for function in functions.values()]
        if device == "cpu" and not all(torch.equal(found[0], other) for other in found[1:]):
            raise BenchError("decode: all must give the same tokens")
        samples = interleaved(functions, rounds=setting.rounds, calls=1)
        case = f"batch {batch}, {setting.tokens} tokens after {setting.prompt}, {str(setting.dtype).removeprefix('torch.')}"
        for name, values in samples.items():
            rows.append(Row("decode", case, name, "median a token", statistics.median(values) / 1e3 / setting.tokens, "ms"))
        for name in [name for name in samples if name != "transformers"]:
            ratio = statistics.median(a / b for a, b in zip(samples[name], samples["transformers"], strict=True))
            rows.append(Row("decode", case, name, "ratio to transformers", ratio, ""))
    return rows


def captured_decoding(params: Any, cfg: Any, ids: Tensor, setting: Setting) -> Callable[[], Tensor]:
    """The same tokens by a step that is captured once, before anything is measured."""

    def step(params: Any, cache: Any, token: Tensor) -> tuple[Tensor, Any]:
        logits, cache = decode(params, donate(cache), token.unsqueeze(1), cfg)
        return logits[:, -1].argmax(-1), cache

    cache = cache_init(cfg, len(ids), context=setting.prompt + setting.tokens, dtype=setting.dtype, device=ids.device)
    captured: Any = None

    def run() -> Tensor:
        nonlocal cache, captured
        cache = roll_back(donate(cache), ids.new_zeros(len(ids)))  # the same tensors, which a graph has captured
        for start in range(0, setting.prompt, cache.chunk):
            logits, cache = decode(params, donate(cache), ids[:, start : start + cache.chunk], cfg)
        token = logits[:, -1].argmax(-1)
        captured = captured or graphed(step, params, cache, token, inputs={"0": "pinned", "1": "donated"})
        found = [token]
        for _ in range(setting.tokens - 1):
            token, cache = captured(params, cache, token)
            found.append(token.clone())
        return torch.stack(found, 1).cpu()

    run()
    return run


def _of_transformers(model: Any, ids: Tensor, setting: Setting) -> Callable[[], Tensor]:
    import transformers

    how = transformers.GenerationConfig(
        max_new_tokens=setting.tokens,
        min_new_tokens=setting.tokens,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
        pad_token_id=0,
    )

    def run() -> Tensor:
        found: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        return found[:, ids.shape[1] :].cpu()

    return run
