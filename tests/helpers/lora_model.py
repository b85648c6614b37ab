"""A small Llama with adapters, in funcops and in PEFT on plain modules, with the same weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.plain import PlainLlama, plain_name
from funcops import RepeatConfig, WithExtras, chain, random
from funcops.engine.trees import paths, same_structure, tree_map_with_path
from funcops.lora import adapter, lora_init, with_lora
from funcops.models.blocks import Sizes, decoder_config

SIZES = Sizes(dim=16, layers=2, heads=2, kv_heads=1, hidden=24, vocab=32, context=9, batch=2)
TARGETS = ("*.q.proj", "*.v.proj", "*.out", "*.up", "*.down")
MODULES = ["q", "v", "out", "up", "down"]
NAMES = {  # funcops' linears in the plain model
    "blocks.*.attn.qkv.*.proj": "blocks.*.attn.*",
    "blocks.*.attn.out": "blocks.*.attn.out",
    "blocks.*.mlp.*": "blocks.*.mlp.*",
}


def base_config(stacked: bool = False, **sizes: int) -> Any:
    cfg = decoder_config(SIZES._replace(**sizes))
    return cfg.with_parts(lambda name, op, inner: (op, restacked(inner, stacked)))


def restacked(cfg: Any, stacked: bool) -> Any:
    return RepeatConfig(cfg.op, cfg.cfg, cfg.times, stacked=stacked) if type(cfg) is RepeatConfig else cfg


def batch() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """x of the model, and its tokens and labels."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(SIZES.vocab, (SIZES.batch, SIZES.context), generator=generator) for _ in range(2))
    return WithExtras(ids, {"positions": torch.arange(SIZES.context), "labels": labels}), ids, labels


def drawn(params: Any, cfg: Any) -> Any:
    """Adapters whose b is drawn, not zero."""
    generator = torch.Generator().manual_seed(1)
    given = {id(t) for made in adapter(params, cfg).values() for t in (made.a, made.b)}
    draw = lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) / 4  # noqa: E731
    return tree_map_with_path(lambda path, t: draw(t) if id(t) in given else t, params)


def ours(rank: int = 3, alpha: float = 6.0, stacked: bool = False, dtype: Any = torch.float64, **more: Any) -> tuple[Any, Any, Any]:
    """Base config, config and params."""
    base = base_config(stacked)
    cfg = with_lora(base, rank, TARGETS, alpha=alpha, **more)
    params = lora_init(chain.init(base, key=random.key(0), dtype=dtype), cfg, key=random.key(1))
    return base, cfg, drawn(params, cfg)


def layered(cfg: Any, tree: Any) -> dict[str, torch.Tensor]:
    """The leaves by path; stacked layers are split by layer."""
    found = {path: t for path, t in paths(tree).items() if t is not None}
    if not cfg.steps[1].cfg.stacked:
        return found
    split = {
        f"blocks.{i}{path.removeprefix('blocks')}": t[i]
        for path, t in found.items()
        if path.startswith("blocks.")
        for i in range(SIZES.layers)
    }
    return {path: t for path, t in found.items() if not path.startswith("blocks.")} | split


def peft_name(path: str) -> str:
    """The name of one of our leaves in PEFT's model."""
    before, both, after = path.partition(".both.")
    if not both:
        return f"base_model.model.{plain_name(path)}"
    module = f"base_model.model.{plain_name(before + '.weight').removesuffix('.weight')}"
    sides = {"lora.a": "lora_A.default.weight", "lora.b": "lora_B.default.weight", "base.weight": "base_layer.weight"}
    return f"{module}.{sides[after]}"


def plain() -> PlainLlama:
    return PlainLlama(
        dim=SIZES.dim,
        n_layers=SIZES.layers,
        n_heads=SIZES.heads,
        n_kv_heads=SIZES.kv_heads,
        hidden=SIZES.hidden,
        context=SIZES.context,
        vocab=SIZES.vocab,
    ).double()


def theirs(cfg: Any, params: Any, rank: int = 3, alpha: float = 6.0) -> Any:
    """PEFT's model with the same numbers."""
    import peft

    model = peft.get_peft_model(plain(), peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=MODULES)).double()
    values = {peft_name(path): t for path, t in layered(cfg, params).items()}
    model.load_state_dict(copy.deepcopy(values))
    return model


def same_bits(a: Any, b: Any) -> bool:
    """Trees of one structure, with equal tensors."""
    ours, theirs = paths(a), paths(b)
    return same_structure(a, b) and all(t is theirs[p] or torch.equal(t, theirs[p]) for p, t in ours.items())
