"""The models of Hugging Face that `from_torch` knows, one row each."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from funcops.adapters.nn import hugging_face as hf
from funcops.adapters.nn import layers, losses
from funcops.adapters.nn.parts import KINDS, ORIGINALS, known
from funcops.adapters.nn.sequential import Sequential

TORCH: dict[type, type] = {
    nn.Linear: layers.Linear,
    nn.Embedding: layers.Embedding,
    nn.LayerNorm: layers.LayerNorm,
    nn.RMSNorm: layers.RMSNorm,
    nn.GroupNorm: layers.GroupNorm,
    nn.Dropout: layers.Dropout,
    nn.GELU: layers.GELU,
    nn.ReLU: layers.ReLU,
    nn.SiLU: layers.SiLU,
    nn.Sigmoid: layers.Sigmoid,
    nn.Tanh: layers.Tanh,
    nn.GLU: layers.GLU,
    nn.Softmax: layers.Softmax,
    nn.CrossEntropyLoss: losses.CrossEntropyLoss,
    nn.Sequential: Sequential,
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # from torch 2.13 on
    TORCH[nn.LinearCrossEntropyLoss] = losses.LinearCrossEntropyLoss
# layers that no op stands in for by itself, with the reason and what to do about it
LEFT: dict[type, str] = {
    nn.MultiheadAttention: "funcops.nn has no layer for attention: write it as steps, qkv_split, attention and linear",
    nn.modules.linear.NonDynamicallyQuantizableLinear: "MultiheadAttention reads its weight and never calls it",
}

ROWS: tuple[tuple[str, dict[str, type]], ...] = (
    # the module of transformers.models that defines the classes, and the base for each class
    ("bert", {}),  # it only has layers of torch.nn and the activations below
    ("deepseek_v3", {"DeepseekV3RMSNorm": hf.RMSNorm, "DeepseekV3MLP": hf.GatedMLP}),
    ("gemma", {"GemmaRMSNorm": hf.GemmaRMSNorm, "GemmaMLP": hf.GatedMLP}),
    ("gemma2", {"Gemma2RMSNorm": hf.GemmaRMSNorm, "Gemma2MLP": hf.GatedMLP}),
    ("gemma3", {"Gemma3RMSNorm": hf.GemmaRMSNorm, "Gemma3MLP": hf.GatedMLP}),
    ("gpt2", {"GPT2MLP": hf.GPT2MLP}),
    ("granite", {"GraniteRMSNorm": hf.RMSNorm, "GraniteMLP": hf.GatedMLP}),
    ("llama", {"LlamaRMSNorm": hf.RMSNorm, "LlamaMLP": hf.GatedMLP}),
    ("mistral", {"MistralRMSNorm": hf.RMSNorm, "MistralMLP": hf.GatedMLP}),
    ("mixtral", {"MixtralRMSNorm": hf.RMSNorm}),
    ("olmo2", {"Olmo2RMSNorm": hf.RMSNormOfX, "Olmo2MLP": hf.GatedMLP}),
    ("phi3", {"Phi3RMSNorm": hf.RMSNorm, "Phi3MLP": hf.Phi3MLP}),
    ("qwen2", {"Qwen2RMSNorm": hf.RMSNorm, "Qwen2MLP": hf.GatedMLP}),
    ("qwen2_moe", {"Qwen2MoeRMSNorm": hf.RMSNorm, "Qwen2MoeMLP": hf.GatedMLP}),
    ("qwen3", {"Qwen3RMSNorm": hf.RMSNorm, "Qwen3MLP": hf.GatedMLP}),
    ("qwen3_moe", {"Qwen3MoeRMSNorm": hf.RMSNorm, "Qwen3MoeMLP": hf.GatedMLP}),
    ("smollm3", {"SmolLM3RMSNorm": hf.RMSNorm, "SmolLM3MLP": hf.GatedMLP}),
    ("t5", {"T5LayerNorm": hf.T5LayerNorm, "T5DenseActDense": hf.T5DenseActDense, "T5DenseGatedActDense": hf.T5DenseGatedActDense}),
    ("vit", {"ViTMLP": hf.ViTMLP}),
)
MODELS: dict[str, type] = {
    **{f"transformers.models.{model}.modeling_{model}.{name}": to for model, classes in ROWS for name, to in classes.items()},
    **{path: hf.Activation for path in KINDS if path.startswith("transformers.activations.")},
    "transformers.pytorch_utils.Conv1D": hf.Conv1D,
}
LOSSES = {"transformers.loss.loss_utils.ForCausalLMLoss": hf.causal_lm_loss}
_made: dict[type, type] = {}


def swapped(cls: type) -> type | None:
    """The new class for modules of `cls`: the one with torch's name, or a subclass of `cls` and of the class in its row; None if
    `cls` is not known."""
    found, to = TORCH.get(cls), known(cls, MODELS)
    if found is not None or to is None:
        return found
    if cls not in _made:
        names = {"__module__": __name__, "__qualname__": cls.__qualname__, "__doc__": to.__doc__}
        _made[cls] = type(cls.__name__, (to, cls), names)
        ORIGINALS[_made[cls]] = cls
    return _made[cls]


def __getattr__(name: str) -> Any:
    """The class that `swapped` makes for a known class of this name, so that pickles can be loaded."""
    for path in MODELS:
        module, _, own = path.rpartition(".")
        if own == name:
            found = swapped(getattr(importlib.import_module(module), name))
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
