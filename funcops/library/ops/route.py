"""Router of a mixture of experts: chooses K of E experts for each token from logits, and weighs them.

    s = softmax(l) or sigmoid(l)        i = the K best of s + b        w_k = c s_ik / sum_j s_ij, or c s_ik
    n_e = how often e was chosen        q = s / sum_e s_e
    loss = aux E / (K T^2) sum_e n_e sum_t q_te + z mean_t (log sum_e exp l_te)^2

x, dx: logits [*, E] of one float dtype. y is `(weights, indices, load, loss)`: w [*, K] and loss [] in float32 (float64 for
float64), i [*, K] and n [E] int32. dy is `(dw, None, None, dloss)`: integers have no gradient, and a part that is None is zero.
With g = c dw, a_e = dloss aux E n_e / (K T^2), and S the sum of the chosen s:

    normalised:        ds_i = (g_i - sum_j g_j s_j / S) / S, for softmax: dl_i = s_i ds_i, s the softmax of the chosen logits
    not normalised:    ds_i = g_i
    losses:            dq = a,  dl = dloss 2 z lse softmax(l) / T
    dl = s (ds - sum_e ds_e s_e) for softmax, s (1 - s) ds for sigmoid

Computation is in float32 (float64 for float64), whatever the logits' dtype. The choice has no gradient, nor has its bias b [E], a
parameter that `optim.balance` updates; optimisers skip it, as its gradient is None. Of equal scores the lowest index is chosen; NaN
is the highest score.
Kept: indices, and weights (softmax, normalised; sigmoid, not normalised), the chosen s (sigmoid, normalised), or logits if the
gradient reads whole rows: softmax, not normalised, or a loss. All but the chosen s are aliases of x or of parts of y.

In models: softmax, then the K best (Qwen2-MoE) is normalize=False. Normalising these (Mixtral, Qwen3-MoE), and a softmax over the
K best logits (GPT-OSS), are one function: normalize=True. DeepSeek-V3 and GLM-4.5: score="sigmoid", bias=True,
scale, and groups, of which the top_groups best take part; a group's score is the sum of its two best s + b.

The first loss is Switch's (arXiv 2101.03961), which is `aux` if every expert has the same load. Hugging Face's
`load_balancing_loss_func` lacks 1/K, so it is K times this loss with aux=1, and it takes means over the tokens of all layers before
their product. `sequence_wise` (DeepSeek-V3, arXiv 2412.19437, eq. 17): this loss for each sequence, logits [*, T, E], then their
mean; aux is the paper's alpha. The second is ST-MoE's z loss (arXiv 2202.08906). The loss over no tokens is 0.

`jitter`: x is `(logits, key)`, and logits are multiplied by u, uniform in [1 - jitter, 1 + jitter), which the backward redraws.
`capacity`: an expert takes its first ceil(capacity T K / E) choices, by token. Further ones are dropped: their index is E, their
weight and its gradient are 0; w_k is normalised before the drop, and n counts them. Then a tensor [*, K] is kept each for weights
and indices.

`packed`: x is `(logits, cu_seqlens)`, logits [1, T, E]; rows cu_seqlens[i] to cu_seqlens[i + 1], [N + 1] int32, are document i.
Rows from the last end on are padding: their choices are dropped, take no room of `capacity`, and count in neither n nor the losses.
So all results are as for the documents alone, whose rows are the T of the formulas.
With `sequence_wise` each document is a sequence, and the mean is over those that are not empty. The losses read logits a second
time, by operators of torch.

`replays`: x has `choices` [*, R, K] as its last part, what R routers of a model chose before, in the order of their layers; this
one takes those at [..., replays, :] in place of its own: i is given, and w, n, the losses and all gradients follow from it as from
a choice (rollout routing replay, arXiv:2510.11370). Where they are -1, the token's choice is the router's. Given indices that are
the router's own give the same bits.

>>> import torch
>>> from funcops import RouteConfig, RouteParams, route_bwd, route_fwd
>>> cfg = RouteConfig(4, 2)
>>> logits = torch.tensor([[0.0, 1.0, -1.0, 1.0]])
>>> (weights, indices, load, loss), residuals = route_fwd(RouteParams(None), logits, cfg)
>>> weights, indices, load
(tensor([[0.5000, 0.5000]]), tensor([[1, 3]], dtype=torch.int32), tensor([0, 1, 0, 1], dtype=torch.int32))
>>> route_bwd(residuals, (torch.tensor([[1.0, 0.0]]), None, None, None), cfg)[1]
tensor([[ 0.0000,  0.2500,  0.0000, -0.2500]])
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.backend.declare import readable
from funcops.engine.contract.configs import OpConfig, require_config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import check, check_rows, describe, fail, not_a_tuple, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import route as kernels
from funcops.library.kernels.routing import over_capacity
from funcops.library.ops._ids import INDICES
from funcops.library.ops.dropout import MASK, check_shared, in_whole

__all__ = ["RouteConfig", "RouteParams", "RouteResiduals"]
__all__ += ["route", "route_bwd", "route_dgrad", "route_fwd", "route_init", "route_wgrad"]

Routed = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor | None, None, None, Tensor | None]


@config
class RouteConfig(OpConfig):
    """`experts` (E), of which a token gets `top_k` (K); `score`: "softmax" or "sigmoid"; `normalize`: weights sum to `scale`;
    `bias`: a parameter that is added to the scores for the choice; `groups` of experts, of which the `top_groups` best take part;
    `aux` and `z`: factors of the losses, the first per sequence if `sequence_wise`; `jitter`: how far the random factors of the
    logits are from 1, at most; `capacity`: an expert's, as a multiple of its fair share; `packed`: x has `cu_seqlens`, the ends of
    the documents in a row; `replays`: x has the `choices` of several routers, of which this is number `replays`; `shared`: how
    ranks share the tokens, so that each draws its part of the factors, and finds its part of the documents (`dist.parallel` says
    it)."""

    experts: int = field(kw_only=False)
    top_k: int = field(kw_only=False)
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    aux: float = 0.0
    sequence_wise: bool = False
    z: float = 0.0
    jitter: float = 0.0
    capacity: float | None = None
    packed: bool = False
    replays: int | None = None
    shared: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        where, experts, groups = "RouteConfig", self.experts, self.groups
        for name in ("experts", "top_k", "groups", "top_groups"):
            require(getattr(self, name) >= 1, where, name, "at least 1", getattr(self, name))
        require(self.score in ("softmax", "sigmoid"), where, "score", "'softmax' or 'sigmoid'", repr(self.score))
        require(self.top_k <= experts, where, "top_k", f"at most experts, {experts}", self.top_k)
        require(experts % groups == 0, where, "groups", f"a number that divides experts, {experts}", groups)
        require(groups == 1 or experts // groups >= 2, where, "groups", f"at most {experts // 2}: two experts each", groups)
        require(self.top_groups <= groups, where, "top_groups", f"at most groups, {groups}", self.top_groups)
        part = experts // groups * self.top_groups
        require(self.top_k <= part, where, "top_k", f"at most {part}, the experts of the top_groups", self.top_k)
        require(0.0 < self.scale < math.inf, where, "scale", "above 0 and finite", self.scale)
        for name in ("aux", "z"):
            require(0.0 <= getattr(self, name) < math.inf, where, name, "at least 0 and finite", getattr(self, name))
        require(0.0 <= self.jitter <= 1.0, where, "jitter", "in [0, 1]", self.jitter)
        right = self.capacity is None or 0.0 < self.capacity < math.inf
        require(right, where, "capacity", "None or above 0 and finite", self.capacity)
        require(not (self.packed and self.jitter), where, "jitter", "0 with packed (noise of a row has no documents)", self.jitter)
        require(self.replays is None or self.replays >= 0, where, "replays", "None or at least 0", self.replays)
        require(self.replays is None or not self.jitter, where, "jitter", "0 with replays (no sampler has noise)", self.jitter)
        require(isinstance(self.shared, tuple), where, "shared", "a tuple of dist.Shared", describe(self.shared))

    @property
    def draws_mask(self) -> bool:  # type: ignore[override]
        return self.jitter > 0.0

    @property
    def mixes_positions(self) -> bool:  # type: ignore[override]
        """A sequence has one loss, and an expert takes the first tokens; the losses of packed rows are means over all that are not
        padding, of which ranks have different numbers."""
        whole = self.aux > 0.0 and self.sequence_wise, self.packed and (self.aux > 0.0 or self.z > 0.0)
        return self.capacity is not None or any(whole)

    @property
    def has_place(self) -> bool:  # type: ignore[override]
        return self.packed

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.experts, self.top_k


def mixed_by(cfg: RouteConfig) -> str:
    """The options by which other tokens change a token's choice or gradient: `Op.mixes`."""
    said = {"aux": "a loss of all tokens", "z": "a mean over all tokens", "jitter": MASK, "capacity": "what others chose before"}
    return "; ".join([f"{name}, {why}" for name, why in said.items() if getattr(cfg, name)])


@tree
class RouteParams:
    bias: Tensor | None = leaf("[E]", gradient=False)


class RouteResiduals(Residuals, static=("inputs", "shape", "dtype")):
    logits: Tensor | None = saved("[*, E]", alias="x", needed_by=DGRAD)
    key: Tensor | None = saved("[2]", alias="x.1", needed_by=DGRAD)
    weights: Tensor | None = saved("[*, K]", alias="y.0", needed_by=DGRAD)
    indices: Tensor | None = saved("[*, K]", alias="y.1", needed_by=DGRAD)
    load: Tensor | None = saved("[E]", alias="y.2", needed_by=DGRAD)
    scores: Tensor | None = saved("[*, K]", needed_by=DGRAD)  # s of the chosen experts; with a capacity, w before the drop
    choice: Tensor | None = saved("[*, K]", needed_by=DGRAD)  # with a capacity: indices, -1 - e for a dropped choice of e
    counts: Tensor | None = saved("[S, E]", needed_by=DGRAD)  # the load of each sequence
    ends: Tensor | None = saved("[N + 1]", alias="x.1", needed_by=DGRAD)  # cu_seqlens, if the gradient has a loss's


@init_of(RouteConfig)
def route_init(cfg: RouteConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None) -> RouteParams:
    """A bias of zeros, or None without cfg.bias; draws nothing."""
    return RouteParams(torch.zeros(cfg.experts, device=device, dtype=dtype) if cfg.bias else None)


@forward(RouteConfig, RouteParams)
def route_fwd(params: RouteParams, x: Any, cfg: RouteConfig, *, needs: Needs = Needs.ALL) -> tuple[Routed, RouteResiduals | None]:
    """x: logits [*, E], with jitter `(logits, key)`, packed `(logits, cu_seqlens)`, and with replays `choices` as the last part ->
    `(weights, indices, load, loss)`. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device, and on the CPU for
    cu_seqlens that do not ascend from 0 to at most T, and for choices that are not K different experts or all -1; `IndexError` for
    those out of range."""
    logits, key, ends, choices = _check_x(params.bias, x, cfg)
    rows, sequences = _jittered(logits, key, cfg), _sequences(logits, cfg)
    every = _takes_rows(cfg)
    documents = None if ends is None else _Documents.of(ends, logits.shape, cfg)
    keep = cfg.score == "sigmoid" and cfg.normalize and not every
    weights, indices, scores, counts, loss = kernels.route_fwd(
        rows.reshape(*sequences, cfg.experts),
        params.bias,
        cfg.top_k,
        cfg.score,
        cfg.normalize,
        cfg.scale,
        cfg.groups,
        cfg.top_groups,
        0.0 if documents is not None or choices is not None else cfg.aux,
        0.0 if documents is not None or choices is not None else cfg.z,
        keep,
    )
    if choices is not None:
        t = rows.reshape(*sequences, cfg.experts)
        weights, indices, scores = _replayed(t, choices, weights, indices, scores, cfg)
        counts = kernels.counts_of(indices.to(torch.int64), cfg.experts)
        if cfg.aux or cfg.z:
            loss = kernels.losses_of(t.to(wide(t.dtype)), None, cfg.score, counts, cfg.top_k, cfg.aux, cfg.z)
    if documents is not None:
        counts = documents.counts(indices[0], cfg.experts)
        if cfg.aux or cfg.z:
            loss = kernels.document_losses(rows[0], counts, *documents, cfg.top_k, cfg.score, cfg.aux, cfg.z)
    alone = counts.shape[0] == 1
    load = counts.view(cfg.experts) if alone else counts.sum(0, dtype=torch.int32)
    shape = (*logits.shape[:-1], cfg.top_k)
    y = weights.view(shape), indices.view(shape), load, loss
    kept: dict[str, Any] = dict(weights=None if every or keep else y[0], indices=y[1], scores=scores)
    if cfg.capacity is not None or documents is not None:
        y, kept = _dropped(y, kept, cfg, documents)
    if cfg.aux:
        kept["load" if alone else "counts"] = load if alone else counts
    kept["ends"] = ends if cfg.aux or cfg.z else None
    kept.update(logits=logits if every else None, key=key if cfg.jitter else None)
    inputs = Inputs.of(x) if isinstance(x, tuple) else None
    return y, RouteResiduals.keep(cfg, needs, **kept, inputs=inputs, shape=logits.shape, dtype=logits.dtype)


def _replayed(
    logits: Tensor, choices: Tensor, weights: Tensor, indices: Tensor, scores: Tensor | None, cfg: RouteConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights, indices and kept scores with given choices in place of the router's, but for those that are -1. A token whose
    choices are the router's has the bits of its kernel, whose sums another one may order otherwise."""
    given = choices.reshape(indices.shape).to(indices.dtype)
    taken = torch.where(given < 0, indices, given)
    same = (taken == indices).all(-1, True)
    own = kernels.weights_at(logits, taken, cfg.score, cfg.normalize, cfg.scale)
    return torch.where(same, weights, own[0]), taken, None if scores is None else torch.where(same, scores, own[1])


class _Documents(NamedTuple):
    """The documents of a row; all of them count as one, unless each has a loss."""

    number: Tensor  # [T], of each token's document; N: padding
    ends: Tensor  # [N + 1]

    @staticmethod
    def of(ends: Tensor, shape: Any, cfg: RouteConfig) -> _Documents:
        if not (cfg.sequence_wise and cfg.aux):
            ends = torch.cat((ends[:1], ends[-1:]))
        ranges = in_whole(shape, cfg.shared)[1][1]
        at = torch.cat([torch.arange(first, first + length, device=ends.device) for first, length in ranges])
        return _Documents(kernels.document_of(ends, at), ends)

    @property
    def padding(self) -> Tensor:
        """[T, 1]: whether a token is in no document."""
        return (self.number >= self.ends.shape[0] - 1).unsqueeze(-1)

    def counts(self, indices: Tensor, experts: int) -> Tensor:
        return kernels.counts_of_documents(indices, self.number, self.ends.shape[0] - 1, experts)


def _check_x(bias: Any, x: Any, cfg: RouteConfig) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    flags = {"key": cfg.jitter > 0, "cu_seqlens": cfg.packed, "choices": cfg.replays is not None}
    names = [name for name, there in flags.items() if there]
    if names and (not isinstance(x, tuple) or len(x) != 1 + len(names)):
        said = " and ".join({"key": "jitter", "cu_seqlens": "packed", "choices": "replays"}[name] for name in names)
        not_a_tuple("route_fwd", x, "logits", *names, why=f", as cfg.{said} says")
    logits, given = x[0] if names else x, dict(zip(names, x[1:] if names else (), strict=True))
    check_rows("route_fwd", "x.0 (logits)" if names else "x", logits, cfg.experts)
    if cfg.jitter:
        check("route_fwd", "x.1 (the key)", given["key"], (2,), torch.int64, logits)
    if cfg.packed:
        _check_ends(given["cu_seqlens"], logits, cfg)
    if cfg.jitter or cfg.packed:
        check_shared("route_fwd", logits, cfg.shared)
    if cfg.bias:
        check("route_fwd", "params.bias", bias, (cfg.experts,), (logits.dtype, wide(logits.dtype)), logits)
    elif bias is not None:
        fail("route_fwd", "params.bias", "None (cfg.bias is False)", describe(bias))
    choices = _own_choices(f"x.{len(names)} (choices)", given["choices"], logits, cfg) if cfg.replays is not None else None
    return logits, given.get("key"), given.get("cu_seqlens"), choices


def _own_choices(name: str, choices: Any, logits: Tensor, cfg: RouteConfig) -> Tensor:
    """Check the choices of all routers, and return this router's, [*, K]."""
    where, rows, number = "route_fwd", logits.shape[:-1], cfg.replays or 0
    check(where, name, choices, (...,), INDICES, logits)
    if choices.shape[:-2] != rows or choices.dim() < 2 or choices.shape[-1] != cfg.top_k or choices.shape[-2] <= number:
        fail(where, name, f"[{', '.join(map(str, (*rows, 'R', cfg.top_k)))}] with R above {number}", list(choices.shape))
    own: Tensor = choices[..., number, :]
    if readable(own) and own.numel():
        outside = own[(own < -1) | (own >= cfg.experts)]
        if outside.numel():
            wanted = f"experts from 0 to {cfg.experts - 1}, or -1 where a router chooses"
            fail(where, name, wanted, int(outside[0]), IndexError)
        sorted_by_row = own.reshape(-1, cfg.top_k).sort(-1).values
        twice = (sorted_by_row[:, 1:] == sorted_by_row[:, :-1]) & (sorted_by_row[:, 1:] >= 0)
        wrong = twice.any(1) | ((sorted_by_row[:, 0] < 0) & (sorted_by_row[:, -1] >= 0))
        if wrong.any():
            row = int(wrong.int().argmax())
            got = f"{own.reshape(-1, cfg.top_k)[row].tolist()} of token {row}"
            fail(where, name, f"{cfg.top_k} different experts for each token, or -1 in all places", got)
    return own


def _check_ends(ends: Any, logits: Tensor, cfg: RouteConfig) -> None:
    if logits.dim() != 3 or logits.shape[0] != 1:
        fail("route_fwd", "x.0 (logits)", f"[1, T, {cfg.experts}], one row of documents (cfg.packed)", list(logits.shape))
    check("route_fwd", "x.1 (cu_seqlens)", ends, (...,), torch.int32, logits)
    if ends.dim() != 1 or ends.shape[0] < 1:
        fail("route_fwd", "x.1 (cu_seqlens)", "[N + 1]", list(ends.shape))
    if readable(ends):
        found, rows = ends.tolist(), in_whole(logits.shape, cfg.shared)[0][1]
        if found[0] != 0 or found[-1] > rows or any(a > b for a, b in zip(found, found[1:], strict=False)):
            fail("route_fwd", "x.1 (cu_seqlens)", f"ascending, from 0 to at most {rows}, the row's length", found)


def _takes_rows(cfg: RouteConfig) -> bool:
    """Whether the gradient reads whole rows of logits."""
    return bool(cfg.score == "softmax" and not cfg.normalize) or cfg.aux > 0 or cfg.z > 0


def _sequences(logits: Tensor, cfg: RouteConfig) -> tuple[int, int]:
    """S and L: the number and the length of the sequences, each of which has a loss."""
    tokens = math.prod(logits.shape[:-1])
    if not cfg.sequence_wise or cfg.packed or logits.dim() < 3:
        return 1, tokens
    return math.prod(logits.shape[:-2]), logits.shape[-2]


def _factors(shape: Any, key: Tensor, dtype: torch.dtype, cfg: RouteConfig) -> Tensor:
    whole, ranges = in_whole(shape, cfg.shared) if cfg.shared else (shape, None)
    return random.uniform(key, whole, low=1.0 - cfg.jitter, high=1.0 + cfg.jitter, dtype=wide(dtype), ranges=ranges)


def _jittered(logits: Tensor, key: Tensor | None, cfg: RouteConfig) -> Tensor:
    if key is None:
        return logits
    return logits.to(wide(logits.dtype)) * _factors(logits.shape, key, logits.dtype, cfg)


def _dropped(y: Routed, kept: dict[str, Any], cfg: RouteConfig, documents: _Documents | None) -> tuple[Routed, dict[str, Any]]:
    """Drop the choices of padding, and those beyond capacity. Returns y and the fields to keep."""
    weights, indices, load, loss = y
    taken, out = indices.view(-1, cfg.top_k), None
    if documents is not None:
        out = documents.padding.expand_as(taken)
        taken = taken.masked_fill(out, cfg.experts)
    if cfg.capacity is not None:
        late = over_capacity(taken, cfg.experts, _room(indices.numel(), cfg.capacity, cfg, documents))
        out = late if out is None else out | late
    assert out is not None
    out = out.view(indices.shape)
    scores = weights if kept["weights"] is not None else kept["scores"]
    kept = dict(scores=scores, choice=torch.where(out, -1 - indices, indices))
    return (weights.masked_fill(out, 0.0), indices.masked_fill(out, cfg.experts), load, loss), kept


def _room(choices: int, capacity: float, cfg: RouteConfig, documents: _Documents | None) -> int | Tensor:
    """How many choices an expert takes, at most; of packed rows on their device, as how many are padding is known there."""
    if documents is None:
        return min(choices, math.ceil(capacity * choices / cfg.experts))
    wanted = documents.ends[-1].to(torch.float64) * cfg.top_k
    return torch.minimum(wanted, (wanted * capacity / cfg.experts).ceil()).to(torch.int64)


@dgrad_of(RouteResiduals)
def route_dgrad(residuals: RouteResiduals, dy: Any, cfg: RouteConfig) -> tuple[Any, None]:
    """dy: `(dw, None, None, dloss)`, None for zero -> dx, with jitter `(dx, None)`. pending is None, as no parameter has a
    gradient."""
    return _gradient(residuals, dy, cfg), None


@bwd_of(RouteResiduals, RouteParams)
def route_bwd(residuals: RouteResiduals, dy: Any, cfg: RouteConfig, *, into: RouteParams | None = None) -> tuple[RouteParams, Any]:
    """The whole backward: `route_dgrad`, and `into` unchanged."""
    dx = _gradient(residuals, dy, cfg)
    return RouteParams(None) if into is None else into, dx


def route_wgrad(pending: None, cfg: RouteConfig, *, into: RouteParams | None = None) -> RouteParams:
    """A gradient of None, as the bias has no gradient; `into` unchanged."""
    require_config("route_wgrad", cfg, RouteConfig)
    if pending is not None:
        fail("route_wgrad", "pending", "None (no parameter has a gradient)", describe(pending), TypeError)
    if into is not None and type(into) is not RouteParams:
        fail("route_wgrad", "into", "RouteParams", describe(into), TypeError)
    return RouteParams(None) if into is None else into


route_wgrad.opens = None, RouteParams  # type: ignore[attr-defined]


def _gradient(residuals: RouteResiduals, dy: Any, cfg: RouteConfig) -> Any:
    shape, dtype = residuals.shape, residuals.dtype
    dweights, dloss = _check_dy(dy, (*shape[:-1], cfg.top_k), wide(dtype), residuals)
    needed = residuals.needs.x if residuals.inputs is None else residuals.needs.input(0)
    if not needed or (dweights is None and dloss is None):
        return residuals.nothing()
    logits, key = residuals.logits, residuals.key
    at = residuals.indices if residuals.choice is None else residuals.choice
    assert at is not None
    losses = dloss is not None and (cfg.aux or cfg.z)
    if not losses:
        dloss = torch.zeros((), dtype=wide(dtype), device=at.device)
    kept = residuals.weights if residuals.scores is None else residuals.scores
    counts = residuals.counts if residuals.load is None else residuals.load.unsqueeze(0)
    of_keys = None if key is None else _factors(shape, key, dtype, cfg)
    rows = None if logits is None else logits if of_keys is None else logits.to(of_keys.dtype) * of_keys
    size = (1, math.prod(shape[:-1])) if residuals.counts is None or cfg.packed else (math.prod(shape[:-2]), shape[-2])
    by_k, given = (*size, cfg.top_k), (dweights, at, kept)
    parts = [None if t is None else t.reshape(by_k) for t in given]
    dx = kernels.route_bwd(
        dloss,
        *parts,
        None if rows is None else rows.reshape(*size, cfg.experts),
        None if cfg.packed else counts,
        cfg.experts,
        dtype if residuals.inputs is None else wide(dtype),
        cfg.score,
        cfg.normalize,
        cfg.scale,
        0.0 if cfg.packed else cfg.aux,
        0.0 if cfg.packed else cfg.z,
    ).view(shape)
    if residuals.inputs is None:
        return dx
    if of_keys is not None:
        dx = dx * of_keys
    elif losses and cfg.packed:
        assert residuals.ends is not None and logits is not None
        documents = _Documents.of(residuals.ends, shape, cfg)
        own = kernels.document_losses_bwd(dloss, logits[0], counts, *documents, cfg.top_k, cfg.score, cfg.aux, cfg.z)
        dx = (dx + own).masked_fill_(documents.padding, 0.0)
    return residuals.inputs.make((dx.to(dtype), *[None] * (residuals.inputs.parts - 1)))


def _check_dy(dy: Any, shape: tuple[int, ...], dtype: torch.dtype, residuals: RouteResiduals) -> tuple[Any, Any]:
    """Check dy, and return dweights and dloss."""
    if not isinstance(dy, tuple) or len(dy) != 4:
        fail("route_dgrad", "dy", "a tuple (dweights, None, None, dloss)", describe(dy), TypeError)
    like = residuals.indices if residuals.choice is None else residuals.choice
    for i, name in ((1, "indices"), (2, "load")):
        if dy[i] is not None:
            fail("route_dgrad", f"dy.{i}", f"None ({name} are integers, without a gradient)", describe(dy[i]), TypeError)
    for i, wanted in ((0, shape), (3, ())):
        if dy[i] is not None:
            check("route_dgrad", f"dy.{i}", dy[i], wanted, dtype, like)
    return dy[0], dy[3]


def entropy(params: RouteParams, x: Any, y: Routed, cfg: RouteConfig) -> Tensor:
    """The mean over the tokens of the entropy of softmax(logits), in nats: log E for a router without a preference, 0 for a certain
    one. A value of `funcops.logs`."""
    logits = x[0] if isinstance(x, tuple) else x
    logs = torch.log_softmax(logits, -1, dtype=wide(logits.dtype))
    return -(logs.exp() * logs).sum(-1).mean()


route = make_op(
    "route",
    RouteConfig,
    init=route_init,
    fwd=route_fwd,
    dgrad=route_dgrad,
    wgrad=route_wgrad,
    bwd=route_bwd,
    keyed=lambda cfg: cfg.draws_mask,
    logs=(entropy,),
    mixes=mixed_by,
)
