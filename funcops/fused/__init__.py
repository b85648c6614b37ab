"""Fusion rules, one per file: the steps that a rule covers, and the kernel that runs them. Importing a file registers its rules."""

from funcops.fused import add_norm as add_norm
from funcops.fused import bias_activation as bias_activation
from funcops.fused import bias_gradients as bias_gradients
from funcops.fused import dropout_add as dropout_add
from funcops.fused import experts as experts
from funcops.fused import fork as fork
from funcops.fused import linear_cross_entropy as linear_cross_entropy
from funcops.fused import linear_dgrad as linear_dgrad
from funcops.fused import linear_epilogue as linear_epilogue
from funcops.fused import qkv as qkv
from funcops.fused import quantized as quantized
from funcops.fused import recomputed_glu as recomputed_glu
from funcops.fused import siblings as siblings
from funcops.fused.packed import pack_qkv as pack_qkv
