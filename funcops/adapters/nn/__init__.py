"""`funcops.nn`: modules with torch.nn's names that run on funcops' operators."""

from funcops.adapters.nn.from_torch import from_torch as from_torch
from funcops.adapters.nn.from_torch import to_torch as to_torch
from funcops.adapters.nn.layers import GELU as GELU
from funcops.adapters.nn.layers import GLU as GLU
from funcops.adapters.nn.layers import Dropout as Dropout
from funcops.adapters.nn.layers import Embedding as Embedding
from funcops.adapters.nn.layers import GroupNorm as GroupNorm
from funcops.adapters.nn.layers import LayerNorm as LayerNorm
from funcops.adapters.nn.layers import Linear as Linear
from funcops.adapters.nn.layers import ReLU as ReLU
from funcops.adapters.nn.layers import RMSNorm as RMSNorm
from funcops.adapters.nn.layers import Sigmoid as Sigmoid
from funcops.adapters.nn.layers import SiLU as SiLU
from funcops.adapters.nn.layers import Softmax as Softmax
from funcops.adapters.nn.layers import SwiGLU as SwiGLU
from funcops.adapters.nn.layers import Tanh as Tanh
from funcops.adapters.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from funcops.adapters.nn.losses import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from funcops.adapters.nn.module import OpModule as OpModule
from funcops.adapters.nn.module import functional as functional
from funcops.adapters.nn.quantized import quantize_weights as quantize_weights
from funcops.adapters.nn.sequential import Sequential as Sequential
