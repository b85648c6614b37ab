"""Unmodified modules as ops (`op_from_module`), against autograd: the bytes that a forward keeps, and the CPU time of both passes.

Models of Hugging Face's, drawn at random, without dropout, in float32 on the CPU, by kind: tiny transformers, where the host's time
counts; conv nets; and a decoder of width 256, where products dominate. Autograd's step computes the gradients of all parameters,
as the op's forward and backward do, in one pass or in halves.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import BenchError, Row, interleaved
from benchmarks.rematerialized import INSTALLED, cost, cost_of_autograd, cost_of_torch_remat
from benchmarks.saved import saved_by
from funcops import Needs, TorchConfig, WithExtras, op_from_module, report

TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
DECODER = dict(TINY, vocab_size=64, num_key_value_heads=2, pad_token_id=0)
WIDE = dict(DECODER, hidden_size=256, intermediate_size=704, max_position_embeddings=128, vocab_size=1024)
STILL = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
STAGES = dict(hidden_sizes=[16, 32], depths=[1, 1])
T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
MODELS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {  # by kind: the model's class, and its config
    "tiny transformers": {
        "Llama": ("LlamaForCausalLM", DECODER),
        "Qwen3": ("Qwen3ForCausalLM", dict(DECODER, head_dim=8)),
        "GPT2": ("GPT2LMHeadModel", GPT2),
        "Bert": ("BertForMaskedLM", dict(TINY, **STILL, vocab_size=64)),
        "T5": ("T5ForConditionalGeneration", T5),
        "ViT": ("ViTForImageClassification", dict(TINY, **STILL, image_size=32, patch_size=8)),
    },
    "conv nets": {
        "ResNet": ("ResNetForImageClassification", dict(STAGES, embedding_size=16, layer_type="basic")),
        "RegNet": ("RegNetForImageClassification", dict(STAGES, embedding_size=16, groups_width=8)),
        "ConvNext": ("ConvNextForImageClassification", dict(STAGES, num_stages=2, patch_size=2)),
        "MobileNetV2": (
            "MobileNetV2ForImageClassification",
            dict(depth_multiplier=0.35, image_size=32, classifier_dropout_prob=0.0),
        ),
    },
    "products dominate": {"Llama, width 256": ("LlamaForCausalLM", WIDE)},
}
CFG = TorchConfig()


def run(rounds: int = 25) -> list[Row]:
    try:
        import transformers
    except ImportError:
        raise BenchError("modules: transformers must be installed") from None
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning)
    rows: list[Row] = []
    for kind, models in MODELS.items():
        ratios = []
        for name, (cls, sizes) in models.items():
            found, ratio = _rows(f"{name}, {kind}", *build(cls, sizes), rounds)
            rows += found
            ratios.append(ratio)
        rows.append(Row("modules", f"all, {kind}", "funcops", "CPU time, median ratio to autograd", statistics.median(ratios), ""))
    if not INSTALLED:
        rows.append(Row("modules", "all", "torch_remat", "not installed", None, ""))
    return rows


def build(cls: str, sizes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model of transformers, and a batch of its arguments by name."""
    import transformers

    torch.manual_seed(0)
    config = "".join(cls.partition("For")[0].partition("LMHead")[0])
    model = getattr(transformers, cls)(getattr(transformers, f"{config}Config")(**sizes))
    return model, _batch(model, sizes)


def costs(
    model: Any, batch: dict[str, Any], forward: Callable[[], Any], backward: Callable[[Any], Any]
) -> dict[str, tuple[int, int]]:
    """The bytes alive after a forward, and the products of a step, for each way. An op's `forward() -> (y, residuals)` and
    `backward(residuals)` give the gradients of all parameters."""
    weights = list(model.parameters())
    found = {
        "autograd": cost_of_autograd(lambda: _result(model(**batch)), weights),
        "funcops": cost(forward, lambda _, held: backward(held)),
    }
    if INSTALLED:
        found["torch_remat"] = cost_of_torch_remat(model, lambda: _result(model(**batch)), weights)
    return found


def _batch(model: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    if "pixel" in model.main_input_name:
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    shape = (4, 128) if sizes is WIDE else (2, 16)
    ids = torch.randint(1, sizes["vocab_size"], shape)
    return {"input_ids": ids, "labels": ids, **({} if "Bert" in type(model).__name__ else {"use_cache": False})}


def _result(out: Any) -> Any:
    return out[0] if out.get("loss") is None else out.loss


def _rows(case: str, model: Any, batch: dict[str, Any], rounds: int) -> tuple[list[Row], float]:
    kept = {"autograd": saved_by(model, lambda: _result(model(**batch)))}
    op, params = op_from_module(model, batch, output=_result)
    needs = Needs(x=False, params=True)
    y, residuals = op.fwd(params, batch, CFG, needs=needs)
    kept["funcops"] = report(residuals, params, batch).kept_bytes
    dy: Any = WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else torch.ones_like(y)
    weights = list(model.parameters())

    def ours() -> None:
        op.bwd(op.fwd(params, batch, CFG, needs=needs)[1], dy, CFG)

    def halves() -> None:
        _, pending = op.dgrad(op.fwd(params, batch, CFG, needs=needs)[1], dy, CFG)
        op.wgrad(pending, CFG)

    def autograds() -> None:
        y = _result(model(**batch))
        torch.autograd.grad(y, weights, torch.ones_like(y), allow_unused=True)

    found = costs(model, batch, lambda: op.fwd(params, batch, CFG, needs=needs), lambda held: op.bwd(held, dy, CFG))
    steps: dict[str, Callable[[], Any]] = {"autograd": autograds, "funcops": ours, "funcops, halves": halves}
    samples = interleaved(steps, rounds=rounds, calls=3, cpu=True)
    ratios = {way: statistics.median(a / b for a, b in zip(samples[way], samples["autograd"], strict=True)) for way in [*steps][1:]}
    rows = [Row("modules", case, way, "bytes kept", float(size), "bytes") for way, size in kept.items()]
    rows += [Row("modules", case, way, "bytes alive after the forward", float(size), "bytes") for way, (size, _) in found.items()]
    rows += [Row("modules", case, way, "products", float(count), "") for way, (_, count) in found.items()]
    rows.append(Row("modules", case, "funcops", "bytes, ratio to autograd", kept["funcops"] / kept["autograd"], ""))
    rows += [Row("modules", case, way, "median CPU time", statistics.median(t) / 1e3, "ms") for way, t in samples.items()]
    rows += [Row("modules", case, way, "CPU time, ratio to autograd", ratio, "") for way, ratio in ratios.items()]
    return rows, ratios["funcops"]
