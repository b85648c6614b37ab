"""Bytes that a block keeps for its backward, per token and hidden unit, against the bytes that autograd saves; and bytes that a
mixture of experts keeps per token, against the block of Hugging Face's transformers, if that is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Row
from benchmarks.plain import PlainBlock, PlainGPT2Block, as_on_a_gpu
from benchmarks.saved import saved_by, saved_by_autograd
from funcops import Compress, ExpertsConfig, Policy, Recompute, RopeConfig, WithExtras, chain, experts, random, report, with_policy
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.trees import nbytes, tensors
from funcops.lora import lora_init, lora_needs, with_lora
from funcops.low_precision import NF4, Fp8Block, quantize_weights, with_recipe, with_weight_only
from funcops.models import DecoderConfig, decoder, decoder_x, pack
from funcops.models.blocks import block_config, gpt2_block_config

DIM, HEADS, LENGTH = 512, 8, 512
MIXTURE = dict(dim=256, hidden=96, experts=16, choices=8)
UNIT = "bytes per token and unit"
FP8 = Compress("fp8")
LOW = {  # the tensors of a Llama block that are kept in 8 bits
    "the SwiGLU's input": Policy({"mlp.act.x": FP8}),
    "the inputs of the SwiGLU and of norms": Policy({"mlp.act.x": FP8, "*.norm.x": FP8}),
}
RECIPE = Fp8Block(keep="input")
LOW_ATTENTION: dict[str, Policy | str] = {  # of the same block with linears and attention in 8 bits
    "compress_fp8": "compress_fp8",
    "MLP recomputed": Policy({"mlp": Recompute(), "attn.norm.x": FP8, "attn.out.x": FP8}),
}


def run(rivals: bool = True) -> list[Row]:
    """The rows; with `rivals` also for a mixture of experts and for LoRA, which import transformers and PEFT."""
    torch.manual_seed(0)
    llama = _llama()
    gpt2 = gpt2_block_config(DIM, HEADS, 2048, 0.1), {"key": random.key(0)}, PlainGPT2Block(DIM, HEADS, 2048, 0.1)
    plain = [row for name, case in (("llama block", llama), ("gpt-2 block", gpt2)) for row in _measure(name, *case)]
    found = plain + list(_low(*llama[:2])) + list(_decoder()) + list(_documents()) + list(_frozen_in_4_bits())
    if rivals:
        found += [*_of_transformers(), *_mixture(**MIXTURE), *_lora()]
    return found


def _llama() -> tuple[Any, dict[str, Tensor], nn.Module]:
    """A Llama block, its extras, and the same in torch."""
    return block_config(DIM, HEADS, 1408), {"positions": torch.arange(LENGTH)}, PlainBlock(DIM, HEADS, 1408, LENGTH)


def _of_transformers() -> Iterator[Row]:
    """The bytes that the same Llama block of Hugging Face's keeps, if transformers is installed."""
    if importlib.util.find_spec("transformers"):
        block, tables = llama_of_transformers(DIM, HEADS, 1408, HEADS, LENGTH)
        x = torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16)
        found = saved_by(block, lambda: block(x.requires_grad_(), position_embeddings=tables), tables)
        yield Row("residuals", "llama block", "transformers", "kept", found / (LENGTH * DIM), UNIT)


def llama_of_transformers(dim: int, heads: int, hidden: int, kv_heads: int, tokens: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A block in bfloat16, and the tables of rotations, which the blocks of a model share."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    cfg = LlamaConfig(hidden_size=dim, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=hidden)
    cfg._attn_implementation = "sdpa"
    tables = LlamaRotaryEmbedding(cfg)(torch.zeros(1, tokens, dim, dtype=torch.bfloat16), torch.arange(tokens)[None])
    return LlamaDecoderLayer(cfg, 0).to(torch.bfloat16), tables


def _mixture(dim: int, hidden: int, experts: int, choices: int) -> Iterator[Row]:
    """Bytes beside x and params. Ours include the weights and indices that a router gives; theirs include what their router
    saves."""
    case, data = f"mixture of {choices} of {experts} experts, {dim} to {hidden}", torch.randn(1, LENGTH, dim, dtype=torch.bfloat16)
    yield Row("residuals", case, "funcops", "kept", _experts_keep(data, hidden, experts, choices) / LENGTH, "bytes per token")
    if importlib.util.find_spec("transformers"):
        for how in ("eager", "grouped_mm"):
            saved = saved_by_autograd(_theirs(how, dim, hidden, experts, choices), data) - data.nbytes
            yield Row("residuals", case, f"transformers, {how}", "kept", saved / LENGTH, "bytes per token")


def _experts_keep(data: Tensor, hidden: int, count: int, choices: int) -> int:
    cfg = ExpertsConfig(count, data.shape[-1], hidden)
    params = experts.init(cfg, key=random.key(0), dtype=torch.bfloat16)
    indices = torch.rand(1, LENGTH, count).argsort(-1)[..., :choices].to(torch.int32)
    weights = torch.rand(indices.shape)
    _, residuals = experts.fwd(params, (weights, data, indices), cfg)
    return report(residuals, params, data).kept_bytes + indices.nbytes


def _theirs(how: str, dim: int, hidden: int, count: int, choices: int) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    cfg = Qwen3MoeConfig(hidden_size=dim, moe_intermediate_size=hidden, num_experts=count, num_experts_per_tok=choices)
    cfg._experts_implementation = how
    block = Qwen3MoeSparseMoeBlock(cfg)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    return block.to(torch.bfloat16)


def _low(cfg: Any, extras: dict[str, Tensor]) -> Iterator[Row]:
    """The bytes that a Llama block keeps under 8-bit policies, also with linears and attention in 8 bits, and the linears' dys that
    its pending holds."""
    params = chain.init(cfg, key=random.key(0), dtype=torch.bfloat16)
    x = WithExtras(torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16), extras)
    units = LENGTH * DIM
    for name, policy in LOW.items():
        kept = report(with_policy(chain, policy).fwd(params, x, cfg)[1], params, extras).kept_bytes
        yield Row("residuals", "llama block", f"funcops, fp8: {name}", "kept", kept / units, UNIT)
    low = with_recipe(cfg, RECIPE, attention=("attn.mix",))
    for name, rules in LOW_ATTENTION.items():
        kept = report(with_policy(chain, rules).fwd(params, x, low)[1], params, extras).kept_bytes
        yield Row("residuals", "llama block", f"funcops, Fp8Block with attention, {name}", "kept", kept / units, UNIT)
    for provider, policy in (("funcops", Policy()), ("funcops, fp8: *.dy", Policy({"*.dy": FP8}))):
        op = with_policy(chain, policy)
        y, residuals = op.fwd(params, x, cfg)
        _, pending = op.dgrad(residuals, torch.randn_like(y), cfg)
        waiting = sum(row.bytes for row in report(pending, params, x).rows if row.path.endswith(".dy"))
        yield Row("residuals", "llama block", provider, "pending dy", waiting / units, UNIT)


def _lora() -> Iterator[Row]:
    """The bytes kept by a frozen Llama block with adapters of rank 8 on all its linears, and by PEFT's, if it is installed."""
    case, (base, extras, module) = "frozen llama block, LoRA", _llama()
    cfg = with_lora(base, 8, ("*",), alpha=16.0)
    params = lora_init(chain.init(base, key=random.key(0), dtype=torch.bfloat16), cfg, key=random.key(1))
    x = WithExtras(torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16), extras)
    _, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg, x=("main",)))
    kept = {"funcops": report(residuals, params, extras).kept_bytes}
    if importlib.util.find_spec("peft"):
        import peft

        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        found = peft.LoraConfig(r=8, lora_alpha=16, target_modules=names)
        frozen: Any = peft.inject_adapter_in_model(found, module.to(torch.bfloat16))
        kept["autograd, peft"] = saved_by_autograd(frozen, x.main)
        kept["autograd, peft, as on a GPU"] = saved_by_autograd(as_on_a_gpu(frozen), x.main)
    for provider, value in kept.items():
        yield Row("residuals", case, provider, "kept", value / (LENGTH * DIM), UNIT)


def _frozen_in_4_bits() -> Iterator[Row]:
    """Bytes of the same block's frozen layers in NF4, and what is kept beside adapters."""
    base, extras, _ = _llama()
    x = WithExtras(torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16), extras)
    for format in (NF4(), NF4(double=True)):
        case, frozen = f"frozen llama block in {format.name}, LoRA", with_weight_only(base, format)
        params = chain.init(base, key=random.key(0), dtype=torch.bfloat16)
        count = sum(t.numel() for t in tensors(params))
        params = quantize_weights(params, frozen)
        yield Row("residuals", case, "funcops", "frozen params", nbytes(params) / count, "bytes per param")
        cfg = with_lora(frozen, 8, ("*",), alpha=16.0)
        params = lora_init(params, cfg, key=random.key(1))
        residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg, x=("main",)))[1]
        yield Row("residuals", case, "funcops", "kept", report(residuals, params, extras).kept_bytes / (LENGTH * DIM), UNIT)


def _decoder() -> Iterator[Row]:
    """The bytes kept by a decoder with its loss, a sixteenth as wide as Llama 3.2 1B: without logits, and with them."""
    case, (cfg, params, x) = "sixteenth of Llama 3.2 1B, 256 tokens", sixteenth()
    model = decoder(cfg, loss=True)
    for name, one in (("funcops", model), ("funcops, logits kept", dataclasses.replace(model, joined=()))):
        for more, op in (("", chain), (", minimal", with_policy(chain, "minimal"))):
            kept = report(op.fwd(params, x, one, needs=Needs(x=False))[1], params, x).kept_bytes
            yield Row("residuals", case, name + more, "kept", kept / 1e6, "MB")


def _documents() -> Iterator[Row]:
    """The bytes kept by a token of 16 documents of 16 to 256 tokens: packed into a row, and padded to the longest."""
    for name, (params, x, model, tokens) in documents().items():
        kept = report(chain.fwd(params, x, model, needs=Needs(x=False))[1], params, x).kept_bytes
        yield Row("residuals", "16 documents of 16 to 256 tokens", f"funcops, {name}", "kept", kept / tokens, "bytes per token")


def documents() -> dict[str, tuple[Any, WithExtras, Any, int]]:
    """Params, x and model for the same documents, packed and padded, and the number of their tokens."""
    cfg, params, _ = sixteenth(layers=4)
    lengths = [16, 256, *torch.randint(16, 257, (14,), generator=torch.Generator().manual_seed(0)).tolist()]
    found = [torch.randint(cfg.vocab, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    ids, labels, ends = pack(found)
    packed = decoder_x(cfg, ids, torch.float32, labels=labels, cu_seqlens=ends)
    rows = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    following = [torch.cat((one[1:], one.new_full((1,), -100))) for one in found]
    shifted = torch.nn.utils.rnn.pad_sequence(following, batch_first=True, padding_value=-100)
    padded = decoder_x(cfg, rows, torch.float32, labels=shifted)
    tokens = sum(lengths)
    return {
        "packed": (params, packed, decoder(cfg, loss=True, packed=True), tokens),
        "padded": (params, padded, decoder(cfg, loss=True), tokens),
    }


def sixteenth(layers: int = 16, rows: int = 1) -> tuple[DecoderConfig, Any, WithExtras]:
    """A decoder with a sixteenth of the width, heads and vocabulary of Llama 3.2 1B, which has 16 layers; its params and x."""
    sizes: dict[str, Any] = dict(vocab=8016, dim=128, layers=layers, heads=2, kv_heads=1, head_size=64, hidden=512, context=256)
    cfg = DecoderConfig(**sizes, rope=RopeConfig(64, theta=500000.0), tied=True)
    ids = torch.randint(cfg.vocab, (rows, 257), generator=torch.Generator().manual_seed(0))
    params = chain.init(decoder(cfg, loss=True), key=random.key(0), dtype=torch.float32)
    return cfg, params, decoder_x(cfg, ids[:, :-1].contiguous(), torch.float32, labels=ids[:, 1:].contiguous())


def _measure(name: str, cfg: Any, extras: dict[str, Tensor], module: nn.Module) -> list[Row]:
    data = torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16)
    params = chain.init(cfg, key=random.key(0), dtype=torch.bfloat16)

    def ours(op: Op) -> int:
        _, residuals = op.fwd(params, WithExtras(data, extras), cfg)
        return report(residuals, params, extras).kept_bytes  # the block's input counts

    kept = {
        "funcops": ours(chain),
        "funcops, compress_fp8": ours(with_policy(chain, "compress_fp8")),
        "autograd": saved_by_autograd(module.to(torch.bfloat16), data),
    }
    kept["autograd, as on a GPU"] = saved_by_autograd(as_on_a_gpu(module), data)
    return [Row("residuals", name, provider, "kept", value / (LENGTH * DIM), UNIT) for provider, value in kept.items()]
