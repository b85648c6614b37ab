"""Fusion rules, one per file: the steps that a rule covers, and the kernel that runs them. Importing a file registers its rules."""

from funcops.library.fused import add_norm as add_norm
from funcops.library.fused import bias_activation as bias_activation
from funcops.library.fused import bias_gradients as bias_gradients
from funcops.library.fused import dropout_add as dropout_add
from funcops.library.fused import experts as experts
from funcops.library.fused import fork as fork
from funcops.library.fused import linear_cross_entropy as linear_cross_entropy
from funcops.library.fused import linear_dgrad as linear_dgrad
from funcops.library.fused import linear_epilogue as linear_epilogue
from funcops.library.fused import qkv as qkv
from funcops.library.fused import quantized as quantized
from funcops.library.fused import recomputed_glu as recomputed_glu
from funcops.library.fused import siblings as siblings
from funcops.library.fused.packed import pack_qkv as pack_qkv
