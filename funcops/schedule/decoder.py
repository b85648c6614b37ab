"""A decoder as a planner sees it: sizes, and from them matrix products, params, and the bytes that a layer saves."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.step import check_body
from funcops.engine.contract.configs import Composite
from funcops.engine.errors import describe, fail, require, require_count, require_flag, require_number, require_type
from funcops.engine.trees import tensors
from funcops.library.formats.recipes import Recipe
from funcops.library.ops.embedding import EmbeddingConfig
from funcops.library.ops.experts import ExpertsConfig
from funcops.library.ops.glu import glu
from funcops.memory.fit import _follow, _held
from funcops.memory.parts import leaves_of
from funcops.schedule.mixture import Mixture


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
    that a layer saves per token; by default as many as a block of funcops in 16 bits. `low`: the recipe of the layers' products,
    which quantises both operands of each to 8 bits; the head's has none. True: any that sends no codes. `mixture`: each layer has
    experts, of `ffn` hidden features, instead of one MLP; `residual_bytes` is then for a layer with all of them on one GPU.
    `head_size`: by default hidden / heads. `tied`: the head has the embedding's weight, once on a rank with both ends; in a
    pipeline each end has a copy, and what they exchange is not counted.

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
    low: bool | Recipe = False
    mixture: Mixture | None = None
    head_size: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        counts = ("hidden", "ffn", "layers", "heads", "vocab", "seq", "batch")
        require_count("Decoder", **{name: getattr(self, name) for name in counts})
        require_flag("Decoder", gated=self.gated, flash=self.flash, tied=self.tied)
        require_type("Decoder", "low", self.low, bool, Recipe)
        require_type("Decoder", "mixture", self.mixture, Mixture, type(None))
        if self.head_size is not None:
            require_count("Decoder", head_size=self.head_size)
        divides = self.head_size is not None or self.hidden % self.heads == 0
        require(divides, "Decoder", "heads", f"a divisor of hidden {self.hidden}", self.heads)
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
        policies and recipe. Raises `ValueError` for a chain whose blocks are not attention and one MLP or experts."""
        return _described(cfg, x, batch)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe whose codes may be sent."""
        return self.low if isinstance(self.low, Recipe) else None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def width(self) -> int:
        """The width of q, and of attention's output."""
        return self.heads * self.head_dim

    @functools.cached_property
    def kv_width(self) -> int:
        """The width of k, and of v."""
        return (self.kv_heads or self.heads) * self.head_dim

    @property
    def up(self) -> int:
        """The width of the first product of the MLP, or of an expert."""
        return (2 if self.gated else 1) * self.ffn

    @property
    def passed(self) -> int:
        """The hidden features of a token: of the MLP, or of its experts and the shared MLP."""
        return self.ffn if self.mixture is None else self.mixture.choices * self.ffn + self.mixture.shared

    @functools.cached_property
    def keys(self) -> float:
        """The keys whose scores a query computes, on average over a sequence."""
        if not self.flash:
            return self.seq
        most = min(self.window or self.seq, self.seq)
        return most - most**2 / (2 * self.seq)

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """The matrix products of a layer that every token goes through, but for a router's."""
        h, ffn = self.hidden, self.ffn if self.mixture is None else self.mixture.shared
        mlp = (Product((2 if self.gated else 1) * ffn, h, True), Product(h, ffn, False)) if ffn else ()
        return Product(self.width + 2 * self.kv_width, h, True), Product(h, self.width, False), *mlp

    @functools.cached_property
    def expert_products(self) -> tuple[Product, ...]:
        """The matrix products of an expert; none without experts."""
        return () if self.mixture is None else (Product(self.up, self.hidden, True), Product(self.hidden, self.ffn, False))

    @functools.cached_property
    def expert_params(self) -> int:
        """The number of params of a layer's experts."""
        return 0 if self.mixture is None else self.mixture.experts * sum(one.n * one.k for one in self.expert_products)

    @property
    def router_params(self) -> int:
        return 0 if self.mixture is None else self.mixture.experts * self.hidden

    @functools.cached_property
    def layer_params(self) -> int:
        """The number of params in a layer's matrices, experts and router included, and two norms."""
        return sum(one.n * one.k for one in self.products) + self.expert_params + self.router_params + 2 * self.hidden

    @functools.cached_property
    def params(self) -> int:
        """The number of params, with the embedding, the last norm and the head."""
        return self.layers * self.layer_params + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    @property
    def flops(self) -> float:
        """The flops of a step's forward and backward, as published tables count them: without recomputation, and with `flash`, over
        half of attention's pairs, or the pairs within its window; of experts, those that a token has."""
        active = 0 if self.mixture is None else self.expert_params * self.mixture.choices // self.mixture.experts
        matrices = sum(one.n * one.k for one in self.products) + self.router_params + active
        layer = 2 * matrices + 4 * self.keys * self.width
        return 3 * self.batch * self.seq * (self.layers * layer + 2 * self.hidden * self.vocab)

    def kept_by_experts(self, ep: int) -> float:
        """See `Mixture.kept`; 0 without experts."""
        return 0.0 if self.mixture is None else self.mixture.kept(self.hidden, self.up, ep)

    def kept(self, recompute: str, ep: int = 1) -> float:
        """The bytes that a layer saves per token, with experts over `ep` ranks: with "mlp", all but the first product of the MLP or
        experts; with "block", its input."""
        if recompute == "block":
            return 2 * self.hidden
        dense = self.passed if self.mixture is None else self.mixture.shared
        first = (2 if self.gated else 1) * dense
        by_formula = 2 * (2 * self.hidden + 2 * self.width + 2 * self.kv_width + first) + 4 * self.heads + 8
        alone, over_ranks = (self.kept_by_experts(n) for n in (1, ep))
        whole = by_formula + alone if self.residual_bytes is None else self.residual_bytes
        whole += over_ranks - alone
        rows = 0.0 if self.mixture is None else self.mixture.choices * self.mixture.ranks(ep)
        return whole if recompute == "none" else max(2 * self.hidden, whole - 2 * (first + rows * self.up))


def _described(cfg: ChainConfig, x: Any, batch: int) -> Decoder:
    check_body("Decoder.of", chain, cfg)
    require_count("Decoder.of", batch=batch)
    shapes = [t.shape for t in tensors(x) if t.dim() == 2 and not t.is_floating_point()]
    if not shapes:
        fail("Decoder.of", "x", "tokens [B, T], with the chain's extras", describe(x))
    rows, seq = shapes[0]
    repeats = [(i, step) for i, step in enumerate(cfg.steps) if isinstance(step.cfg, Composite) and step.cfg.times is not None]
    embeddings = [step.cfg for step in cfg.steps if type(step.cfg) is EmbeddingConfig]
    wanted = "a chain of an embedding, a repeat of blocks of attention and one MLP or experts, and a head"
    if len(repeats) != 1 or len(embeddings) != 1:
        fail("Decoder.of", "cfg", wanted, f"{len(embeddings)} embeddings and {len(repeats)} repeats")
    index, step = repeats[0]
    block: Any = step.cfg
    leaves = list(leaves_of(block.op, block.cfg))
    mixes = [(leaf.path, leaf.call.cfg) for leaf in leaves if leaf.call and leaf.call.cfg.attends]
    matrices = [leaf.call.cfg for leaf in leaves if leaf.call and leaf.op.layer is not None]
    experts = _experts(leaves)
    if len(mixes) != 1 or len(experts) > 1 or len(matrices) < (3 if experts else 4):
        counted = f"{len(mixes)} attentions, {len(matrices)} linear layers and {len(experts)} steps of experts"
        fail("Decoder.of", "cfg", wanted, f"a block of {counted}")

    def at_depth(times: int) -> Any:
        steps = list(cfg.steps)
        steps[index] = dataclasses.replace(step, cfg=dataclasses.replace(block, times=times))
        return dataclasses.replace(cfg, steps=tuple(steps), ties=())

    two, three = (_follow(chain, at_depth(times), x, torch.bfloat16) for times in (2, 3))
    layer = three.under(_held(chain, at_depth(3)))[0] - two.under(_held(chain, at_depth(2)))[0]
    q, k, size = next(_heads(part.x) for part in two.parts if part.path.endswith(mixes[0][0]))
    hidden = embeddings[0].dim
    routed = [one.number for one in experts]  # a router's outputs
    found = Decoder(
        hidden=hidden,
        ffn=experts[0].hidden if experts else matrices[-1].in_features,
        layers=block.times,
        heads=q,
        vocab=embeddings[0].num_embeddings,
        seq=seq,
        batch=batch,
        kv_heads=k,
        gated=bool(experts) or any(leaf.op is glu for leaf in leaves),
        window=mixes[0][1].window,
        residual_bytes=layer / (rows * seq),
        low=_low([one.low_recipe for one in matrices if one.out_features not in routed] + [one.recipe for one in experts]),
        mixture=_mixture(leaves, experts[0]) if experts else None,
        head_size=None if size * q == hidden else size,
        tied=bool(cfg.ties),
    )
    got = sum(one.in_features * one.out_features for one in matrices)
    count = sum(one.n * one.k for one in found.products) + found.router_params
    require(got == count, "Decoder.of", "cfg", f"{wanted}, of {count:,} elements a layer", f"{got:,}")
    return found


class _Experts(NamedTuple):
    """The experts of a block: the index of their leaf, or of the last with a weight; their number, hidden size and recipe."""

    at: int
    number: int
    hidden: int
    recipe: Recipe | None


def _experts(leaves: list[Any]) -> list[_Experts]:
    """The experts of each op, or with a recipe of each chain of steps."""
    found = []
    for i, cfg in enumerate([leaf.cfg for leaf in leaves]):
        if isinstance(cfg, ExpertsConfig):
            found.append(_Experts(i, cfg.experts, cfg.hidden, None))
        elif cfg.group_dims and leaves[i].path.endswith(".down"):
            found.append(_Experts(i, cfg.experts, cfg.in_features, cfg.low_recipe))
    return found


def _low(recipes: list[Recipe | None]) -> bool | Recipe:
    """The recipe of all of these matrices; if they differ, whether some have one."""
    return recipes[0] if recipes[0] is not None and len(set(recipes)) == 1 else any(one is not None for one in recipes)


def _mixture(leaves: list[Any], experts: _Experts) -> Mixture:
    """The experts of a block, and the shared MLP behind them, if there is one."""
    top = max([getattr(leaf.call.cfg, "top_k", 0) for leaf in leaves if leaf.call])
    shared = [leaf.call.cfg.in_features for leaf in leaves[experts.at + 1 :] if leaf.call and leaf.op.layer is not None]
    return Mixture(experts.number, top, shared[-1] if shared else 0)


def _heads(x: list[Tensor]) -> tuple[int, int, int]:
    """The numbers of heads of q and of k, [B, T, H, D], and their size."""
    return x[0].shape[2], x[1].shape[2], x[0].shape[3]
