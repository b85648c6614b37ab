"""`funcops.nn`: modules with torch.nn's names that run on funcops' operators."""

from funcops.adapters.nn.from_torch import from_torch, to_torch
from funcops.adapters.nn.kept import kept_bytes, kept_report
from funcops.adapters.nn.layers import (
    GELU,
    GLU,
    Dropout,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    ReLU,
    RMSNorm,
    Sigmoid,
    SiLU,
    Softmax,
    SwiGLU,
    Tanh,
)
from funcops.adapters.nn.losses import CrossEntropyLoss, LinearCrossEntropyLoss
from funcops.adapters.nn.module import OpModule, functional
from funcops.adapters.nn.preview import preview
from funcops.adapters.nn.quantized import quantize_weights
from funcops.adapters.nn.sequential import Sequential
from funcops.adapters.nn.trainer import trainer_callback

__all__ = ["CrossEntropyLoss", "Dropout", "Embedding", "GELU", "GLU", "GroupNorm", "LayerNorm", "Linear"]
__all__ += ["LinearCrossEntropyLoss", "OpModule", "RMSNorm", "ReLU", "Sequential", "SiLU", "Sigmoid", "Softmax", "SwiGLU", "Tanh"]
__all__ += ["from_torch", "functional", "kept_bytes", "kept_report", "preview", "quantize_weights", "to_torch"]
__all__ += ["trainer_callback"]
