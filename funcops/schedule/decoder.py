"""A decoder as a planner sees it: sizes, and from them matrix products, params, and the bytes that a layer saves."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.compose.chain import ChainConfig, chain
from funcops.compose.step import check_body
from funcops.contract.configs import Composite
from funcops.errors import describe, fail, require, require_count, require_flag, require_number
from funcops.memory.fit import _follow, _held
from funcops.memory.parts import leaves_of
from funcops.ops.embedding import EmbeddingConfig
from funcops.ops.glu import glu
from funcops.trees import tensors


class Product(NamedTuple):
    """The matrix of a linear layer, [n, k]; `column`: whether the axis tp shards n, rather than k."""

    n: int
    k: int
    column: bool


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model to plan for, and its step: `batch` sequences of `seq` tokens. `kv_heads`: as many as `heads` by default; `gated`: an
    MLP of three matrices, not two; `flash`: attention saves no scores; without it they are written out, over all pairs, and
    recomputed in the backward; `window`: the keys that a query sees at most, by default all before it. `residual_bytes`: the bytes
    that a layer saves per token; by default as many as a block of funcops in 16 bits. `low`: whether the products of the layers are
    in 8 bits, by a recipe that quantises both operands of each; the head's is not.

    >>> from funcops.schedule import Decoder
    >>> model = Decoder(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, seq=8192, batch=128)
    >>> f"{model.params:,}"
    '8,030,261,248'
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocab: int
    seq: int
    batch: int
    kv_heads: int | None = None
    gated: bool = True
    flash: bool = True
    window: int | None = None
    residual_bytes: float | None = None
    low: bool = False

    def __post_init__(self) -> None:
        counts = ("hidden", "ffn", "layers", "heads", "vocab", "seq", "batch")
        require_count("Decoder", **{name: getattr(self, name) for name in counts})
        require_flag("Decoder", gated=self.gated, flash=self.flash, low=self.low)
        require(self.hidden % self.heads == 0, "Decoder", "heads", f"a divisor of hidden {self.hidden}", self.heads)
        if self.kv_heads is not None:
            require_count("Decoder", kv_heads=self.kv_heads)
            require(self.heads % self.kv_heads == 0, "Decoder", "kv_heads", f"a divisor of heads {self.heads}", self.kv_heads)
        if self.window is not None:
            require_count("Decoder", window=self.window)
            require(self.flash, "Decoder", "window", "None without flash, which writes out all pairs", self.window)
        if self.residual_bytes is not None:
            require_number("Decoder", 0, residual_bytes=self.residual_bytes)

    @staticmethod
    def of(cfg: ChainConfig, x: Any, batch: int) -> Decoder:
        """Return the sizes of a chain of an embedding, a repeat of blocks and a head, for microbatches like x (tokens [B, T];
        nothing is run) and a step of `batch` sequences. The bytes that a layer saves are counted in bfloat16, under the config's
        policies and recipe. Raises `ValueError` for a chain whose blocks are not attention and one MLP."""
        return _described(cfg, x, batch)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @functools.cached_property
    def kv_width(self) -> int:
        """The width of k, and of v."""
        return (self.kv_heads or self.heads) * self.head_dim

    @property
    def up(self) -> int:
        """The width of the MLP's first product."""
        return (2 if self.gated else 1) * self.ffn

    @functools.cached_property
    def keys(self) -> float:
        """The keys whose scores a query computes, on average over a sequence."""
        if not self.flash:
            return self.seq
        most = min(self.window or self.seq, self.seq)
        return most - most**2 / (2 * self.seq)

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """The matrix products of a layer."""
        h = self.hidden
        return Product(h + 2 * self.kv_width, h, True), Product(h, h, False), Product(self.up, h, True), Product(h, self.ffn, False)

    @functools.cached_property
    def layer_params(self) -> int:
        """The number of params in a layer's matrices and two norms."""
        return sum(one.n * one.k for one in self.products) + 2 * self.hidden

    @functools.cached_property
    def params(self) -> int:
        """The number of params, with the embedding, the last norm and the head, which is not tied."""
        return self.layers * self.layer_params + 2 * self.vocab * self.hidden + self.hidden

    @property
    def flops(self) -> float:
        """The flops of a step's forward and backward, as published tables count them: without recomputation, and with `flash`, over
        half of attention's pairs, or the pairs within its window."""
        layer = 2 * sum(one.n * one.k for one in self.products) + 4 * self.keys * self.hidden
        return 3 * self.batch * self.seq * (self.layers * layer + 2 * self.hidden * self.vocab)

    def kept(self, recompute: str) -> float:
        """The bytes that a layer saves per token: with "mlp", all but the MLP's first product; with "block", its input."""
        if recompute == "block":
            return 2 * self.hidden
        by_formula = 2 * (4 * self.hidden + 2 * self.kv_width + self.up) + 4 * self.heads + 8
        whole = by_formula if self.residual_bytes is None else self.residual_bytes
        return whole if recompute == "none" else max(2 * self.hidden, whole - 2 * self.up)


def _described(cfg: ChainConfig, x: Any, batch: int) -> Decoder:
    check_body("Decoder.of", chain, cfg)
    require_count("Decoder.of", batch=batch)
    shapes = [t.shape for t in tensors(x) if t.dim() == 2 and not t.is_floating_point()]
    if not shapes:
        fail("Decoder.of", "x", "tokens [B, T], with the chain's extras", describe(x))
    rows, seq = shapes[0]
    repeats = [(i, step) for i, step in enumerate(cfg.steps) if isinstance(step.cfg, Composite) and step.cfg.times is not None]
    embeddings = [step.cfg for step in cfg.steps if type(step.cfg) is EmbeddingConfig]
    wanted = "a chain of an embedding, a repeat of blocks of attention and one MLP, and a head"
    if len(repeats) != 1 or len(embeddings) != 1:
        fail("Decoder.of", "cfg", wanted, f"{len(embeddings)} embeddings and {len(repeats)} repeats")
    index, step = repeats[0]
    block: Any = step.cfg
    leaves = list(leaves_of(block.op, block.cfg))
    mixes = [(leaf.path, leaf.call.cfg) for leaf in leaves if leaf.call and leaf.call.cfg.attends]
    matrices = [leaf.call.cfg for leaf in leaves if leaf.call and leaf.op.layer is not None]
    if len(mixes) != 1 or len(matrices) < 4:
        fail("Decoder.of", "cfg", wanted, f"a block of {len(mixes)} attentions and {len(matrices)} linear layers")

    def at_depth(times: int) -> Any:
        steps = list(cfg.steps)
        steps[index] = dataclasses.replace(step, cfg=dataclasses.replace(block, times=times))
        return dataclasses.replace(cfg, steps=tuple(steps), ties=())

    two, three = (_follow(chain, at_depth(times), x, torch.bfloat16) for times in (2, 3))
    layer = three.under(_held(chain, at_depth(3)))[0] - two.under(_held(chain, at_depth(2)))[0]
    q, k = next(_heads(part.x) for part in two.parts if part.path.endswith(mixes[0][0]))
    found = Decoder(
        hidden=embeddings[0].dim,
        ffn=matrices[-1].in_features,
        layers=block.times,
        heads=q,
        vocab=embeddings[0].num_embeddings,
        seq=seq,
        batch=batch,
        kv_heads=k,
        gated=any(leaf.op is glu for leaf in leaves),
        window=mixes[0][1].window,
        residual_bytes=layer / (rows * seq),
        low=any(one.low_recipe is not None for one in matrices),
    )
    got = sum(one.in_features * one.out_features for one in matrices)
    count = sum(one.n * one.k for one in found.products)
    require(got == count, "Decoder.of", "cfg", f"{wanted}, of {count:,} elements a layer", f"{got:,}")
    return found


def _heads(x: list[Tensor]) -> tuple[int, int]:
    """The numbers of heads of q and of k, [B, T, H, D]."""
    return x[0].shape[2], x[1].shape[2]
