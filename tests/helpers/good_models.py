"""Good arguments of `funcops.models`, for `good_arguments.py`."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from good_rows import ANY, Row

from funcops import ExpertsConfig, RopeConfig, RouteConfig, chain, models, random
from funcops.invariant import with_invariant
from funcops.lora import with_lora

SIZES = dict(vocab=8, dim=4, layers=2, heads=2, kv_heads=1, head_size=2, hidden=3, context=8)
LLAMA = models.DecoderConfig(**SIZES, rope=RopeConfig(2), family="llama")


def whole() -> dict[str, Any]:
    """Every field of a DecoderConfig, each with a value for which another type is wrong."""
    named = dict(mlp="swiglu", norm="rms_norm", qk_norm="all", family="any")
    numbers = dict(eps=1e-6, scale=0.5, softcap=2.0, embed_scale=2.0, residual_scale=0.5, logit_scale=0.5, logit_softcap=3.0)
    flags = "zero_centered norm_before norm_after qkv_bias out_bias mlp_bias places sinks attention_gate tied".split()
    parts = dict(rope=RopeConfig(2), local_rope=RopeConfig(2), unrotated=(1,), windows=(None, 3), latent=None, moe=None)
    parts |= dict(chunks=(4, None), temperature=(0.5, 2.0), linear=None)
    return {**SIZES, **named, **numbers, **dict.fromkeys(flags, True), **parts}


def latent() -> dict[str, Any]:
    return dict(kv_rank=3, rope_size=2, plain_size=2, value_size=2, q_rank=3, eps=1e-6)


def sparse() -> dict[str, Any]:
    return dict(
        route=RouteConfig(4, 2), experts=ExpertsConfig(4, 4, 3), shared=2, shared_gate=True, gate_bias=True, saves=True, dense=(0,)
    )


def params() -> Any:
    return chain.init(models.decoder(LLAMA), key=random.key(0))


def folder() -> Path:
    path = Path("good checkpoint")
    if not path.exists():
        models.to_hf(params(), LLAMA, path)
    return path


def new_folder() -> Path:
    path = Path("new checkpoint")
    shutil.rmtree(path, ignore_errors=True)
    return path


IDS = torch.zeros(2, 3, dtype=torch.int64)
ZERO = (0,)
SOME = {(name, "'no such'"): "any name" for name in ("family",)}
ONE = torch.zeros(2, 1, dtype=torch.int64)
COUNTS = torch.ones(2, dtype=torch.int64)


def cache() -> Any:
    return models.cache_init(LLAMA, 2, chunk=3, dtype=torch.float32)


def decoding() -> dict[str, Any]:
    return {"params": params(), "cache": cache(), "ids": ONE, "cfg": LLAMA, "counts": COUNTS, "model": models.decoder(LLAMA)}


def generating() -> dict[str, Any]:
    sampling = models.SamplingConfig(temperature=1.0)
    return {
        "params": params(),
        "cfg": LLAMA,
        "ids": ONE,
        "tokens": 2,
        "key": random.key(0),
        "sampling": sampling,
        "lengths": COUNTS,
        "stop": (3, 5),
        "chunk": 3,
        "model": models.decoder(LLAMA),
        "log_probabilities": True,
        "entropy": True,
        "choices": False,
    }


NO_FIELD = {("ignore", "[]"): "none"}
MODELS = {
    "models.DecoderConfig": Row(
        whole,
        dict.fromkeys(SIZES, ZERO)
        | {"chunks": ((3,), (None, 0), ("a", 1)), "temperature": ((0.5,), (-0.5, 2.0), (0.5, 0.0), ("a", 1.0))}
        | {"windows": ((3,), (None, 0), ("a", 1)), "kv_heads": ZERO, "scale": (0.0,), "softcap": (0.0,)}
        | {"unrotated": ((2,), (-1,), ("a",)), "residual_scale": (0.0,), "logit_scale": (0.0,)},
        {**SOME, ("family", "''"): "any name"},
    ),
    "models.LatentConfig": Row(latent, dict.fromkeys(("kv_rank", "rope_size", "q_rank"), ZERO)),
    "models.LinearAttentionConfig": Row(
        lambda: dict(key_heads=1, value_heads=2, key_size=3, value_size=4, width=2, layers=(0,)),
        dict.fromkeys(("key_heads", "value_heads", "key_size", "value_size", "width"), ZERO) | {"layers": ((-1,), ("a",), ())},
    ),
    "models.MoEConfig": Row(sparse, {"dense": ((-1,), ("a",))}, {("dense", "[]"): "none"}),
    "models.moe": Row(lambda: {"cfg": models.MoEConfig(**sparse())}),
    "models.plain_experts": Row(lambda: {"cfg": sparse()["experts"]}),
    "models.decoder": Row(
        lambda: {"cfg": LLAMA, "loss": True, "reduction": "none", "entropy": True, "packed": True, "max_seqlen": 4, "choices": None}
    ),
    "models.pack": Row(lambda: {"documents": [torch.arange(3), torch.arange(1)], "length": 6, "count": 4, "max_seqlen": 3}),
    "models.decoder_x": Row(
        lambda: {
            "cfg": dataclasses.replace(
                LLAMA, moe=models.MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, LLAMA.dim, 3))
            ),
            "ids": IDS,
            "dtype": torch.float32,
            "positions": torch.arange(3),
            "labels": IDS,
            "key": random.key(0),
            "length": 4,
            "cu_seqlens": None,
            "tokens": None,
            "choices": torch.zeros((*IDS.shape, LLAMA.layers, 2), dtype=torch.int32),
        },
        {"ids": (IDS[0],), "choices": (torch.zeros((*IDS.shape, 2), dtype=torch.int32),)},
        {("ids", "int64[2, 3]"): "one tensor may be anywhere"},
    ),
    "models.SamplingConfig": Row(
        lambda: {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2},
        {"top_k": ZERO, "top_p": (0.0, 1.5), "min_p": (-0.1, 1.5), "repetition_penalty": (0.0, -1.0)},
    ),
    "models.cache_init": Row(
        lambda: {"cfg": LLAMA, "batch": 2, "context": 6, "chunk": 3, "dtype": torch.float32, "device": "cpu", "latents": False},
        dict.fromkeys(("batch", "context", "chunk"), ZERO),
    ),
    "models.roll_back": Row(lambda: {"cache": cache(), "lengths": torch.zeros(2, dtype=torch.int64)}),
    "models.decode": Row(decoding, {"ids": (ONE[0], ONE[:, :0])}),
    "models.generate": Row(
        generating,
        {"tokens": ZERO, "chunk": ZERO, "lengths": (0 * COUNTS,), "stop": ((-1,), (10**6,), (1.5,))},
        {("stop", "[]"): "none"},
    ),
    "models.check_invariant": Row(
        lambda: {
            "params": params(),
            "cfg": LLAMA,
            "model": with_invariant(models.decoder(LLAMA)),
            "tokens": 4,
            "key": random.key(0),
        },
        {"tokens": (0, 1)},
    ),
    "models.log_probabilities": Row(
        lambda: {"logits": torch.ones(2, 5), "tokens": torch.tensor([1, 4])},
        {"logits": (torch.ones(2, 0), torch.ones(())), "tokens": (torch.tensor([1, 5]), torch.tensor([-1, 1]))},
    ),
    "models.sample": Row(
        lambda: {
            "logits": torch.ones(2, 5),
            "key": random.key(0),
            "cfg": models.SamplingConfig(temperature=1.0),
            "seen": torch.zeros(2, 5, dtype=torch.bool),
        },
        {"logits": (torch.ones(5), torch.ones(2, 0))},
        {("logits", "float32[3, 5]"): "rows of any number"},
    ),
    "models.roles": Row(lambda: {"cfg": LLAMA, "loss": True}),
    "models.peft_names": Row(lambda: {"cfg": LLAMA, "model": with_lora(models.decoder(LLAMA), 2, ("*.mlp.*",))}),
    "models.layer_paths": Row(lambda: {"cfg": LLAMA}),
    "models.hf_paths": Row(lambda: {"cfg": LLAMA}),
    "models.from_hf": Row(
        lambda: {"folder": folder(), "dtype": torch.float32, "device": "cpu", "length": 4, "ignore": ()}, accepts=NO_FIELD
    ),
    "models.open_hf": Row(lambda: {"folder": folder(), "length": 4, "ignore": ()}, accepts=NO_FIELD),
    "models.to_hf": Row(
        lambda: {
            "params": params(),
            "cfg": LLAMA,
            "folder": new_folder(),
            "fields": {"use_cache": True},
            "shard_bytes": 1000,
            "quant_method": None,
            "scale_dtype": torch.float32,
        },
        {"fields": ({"no such": 1},), "shard_bytes": ZERO, "folder": (Path("no such") / "folder",), "quant_method": ("fp8",)},
        {("fields", "None"): ANY, ("fields", "[]"): "none"},
    ),
}
