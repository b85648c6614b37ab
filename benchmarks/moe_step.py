"""A whole training step of a decoder with experts: forward, backward, clipping, AdamW; against Hugging Face's Qwen3-MoE of the same
sizes and weights, whose experts are a loop ("eager") or grouped products.

The steps take turns: in float32 on the CPU, in bfloat16, weights and AdamW's moments too, on a GPU. A chain runs its norms twice,
as it does by default.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Row, interleaved, interval
from benchmarks.settings import BETAS, CLIP, DECAY, LR, Step, finished
from funcops import ExpertsConfig, RopeConfig, RouteConfig, WithExtras, chain, donate, rope_table
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import short
from funcops.engine.trees import tree_map_with_path
from funcops.models import MoEConfig
from funcops.models.blocks import Sizes, decoder_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_by_global_norm

EXPERTS, CHOICES, HIDDEN = 8, 2, 256  # two experts are as wide as the MLP of `bench step`
ROUNDS = 15
# for a GPU, in the proportions of Qwen3-30B-A3B: experts, choices, and the rest
LARGE_EXPERTS, LARGE_CHOICES = 32, 4
LARGE = Sizes(dim=2048, layers=4, heads=16, kv_heads=4, hidden=768, vocab=32000, context=1024, batch=8)
THEIRS = ("eager", "grouped_mm")
NAMES = {  # from our names to theirs
    "embed.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attn.norm.": "input_layernorm.",
    "attn.qkv.q.proj.": "self_attn.q_proj.",
    "attn.qkv.k.proj.": "self_attn.k_proj.",
    "attn.qkv.v.proj.": "self_attn.v_proj.",
    "attn.qkv.q.norm.": "self_attn.q_norm.",
    "attn.qkv.k.norm.": "self_attn.k_norm.",
    "attn.out.": "self_attn.o_proj.",
    "mlp.norm.": "post_attention_layernorm.",
    "mlp.experts.up.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.down.weight": "mlp.experts.down_proj",
    "head.": "lm_head.",
}


def their_name(path: str) -> str:
    for ours, theirs in NAMES.items():
        path = path.replace(ours, theirs)
    return f"model.{path}" if path.startswith("norm.") else path


def their_module(sizes: Sizes, experts: int, choices: int, how: str = "eager") -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    cfg = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.dim,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.dim // sizes.heads,
        moe_intermediate_size=sizes.hidden,
        num_experts=experts,
        num_experts_per_tok=choices,
        norm_topk_prob=True,
        max_position_embeddings=sizes.context,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    module = Qwen3MoeForCausalLM(cfg).train()
    module.config._experts_implementation = how
    return module


def funcops_step(sizes: Sizes, experts: int, choices: int, weights: dict[str, Tensor], x: Tensor, labels: Tensor) -> Step:
    """A step of ours on their weights; each call does one more training step and returns the loss."""
    mixture = MoEConfig(route=RouteConfig(experts, choices), experts=ExpertsConfig(experts, sizes.dim, sizes.hidden))
    cfg, adamw = decoder_config(sizes, mixture), AdamWConfig(lr=LR, betas=BETAS, weight_decay=DECAY)
    params = tree_map_with_path(
        lambda path, t: None if t is None else weights[their_name(path)].detach().clone(), chain.init(cfg, key=None, device="meta")
    )
    state = adamw_init(params, adamw)
    table = rope_table(torch.arange(x.shape[1], device=x.device), RopeConfig(sizes.dim // sizes.heads))
    given, needs = WithExtras(x, {"positions": table, "labels": labels}), Needs(x=False)

    def step() -> Tensor:
        nonlocal params, state
        y, residuals = chain.fwd(params, given, cfg, needs=needs)
        dy = WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras))
        grads, _ = chain.bwd(donate(residuals), dy, cfg)
        grads, _ = clip_by_global_norm(grads, CLIP, in_place=True)
        params, state = adamw_update(params, grads, state, adamw, in_place=True)
        loss: Tensor = y.main
        return loss

    return step


def their_step(module: nn.Module, x: Tensor, labels: Tensor) -> Step:
    optimiser = torch.optim.AdamW(module.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step() -> Tensor:
        loss = F.cross_entropy(module(x).logits.flatten(0, 1), labels.flatten())
        module.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP, foreach=True)
        optimiser.step()
        return loss.detach()

    return step


def steps(sizes: Sizes, experts: int, choices: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Step]:
    """The providers' steps, all from the same weights on the same batch."""
    torch.manual_seed(0)
    with torch.device(device):
        modules = {how: their_module(sizes, experts, choices, how).to(device, dtype) for how in THEIRS}
    weights = modules[THEIRS[0]].state_dict()
    x, labels = torch.randint(0, sizes.vocab, (2, sizes.batch, sizes.context)).to(device)
    found = {"funcops": funcops_step(sizes, experts, choices, weights, x, labels)}
    for how, module in modules.items():
        module.load_state_dict(weights)
        found[f"transformers, {how}"] = their_step(module, x, labels)
    return found


def run(rounds: int = ROUNDS, device: str = "cpu") -> Iterator[Row]:
    """The rows; none if transformers is not installed."""
    if not importlib.util.find_spec("transformers"):
        return
    if device == "cpu":
        of, dtype, sizes = (EXPERTS, CHOICES), torch.float32, Sizes(hidden=HIDDEN)
    else:
        of, dtype, sizes = (LARGE_EXPERTS, LARGE_CHOICES), torch.bfloat16, LARGE
    made = steps(sizes, *of, device, dtype)
    case = f"mixture of {of[1]} of {of[0]} experts, {short(dtype)}" + ("" if device == "cpu" else f", {device}")
    samples = interleaved(
        made if device == "cpu" else {name: finished(step) for name, step in made.items()}, rounds=rounds, calls=1
    )
    for name, times in samples.items():
        yield Row("step", case, name, "median", statistics.median(times) / 1e3, "ms")
    for rival in list(samples)[1:]:
        ratios = [a / b for a, b in zip(samples["funcops"], samples[rival], strict=True)]
        for label, value in zip(("median", "95 % low", "95 % high"), interval(ratios), strict=True):
            yield Row("step", case, "funcops", f"ratio to {rival}, {label}", value, "")
