import dataclasses

import torch
from hypothesis import strategies as st

import funcops
from funcops import RouteConfig, RouteParams, random, route, route_dgrad, route_fwd
from funcops.testing import Case, Error


def chosen(preferred, cfg):
    """The K best, by a walk over each row: the first of equal scores, and the groups whose two best are best."""
    size = cfg.experts // cfg.groups
    rows = []
    for row in preferred.reshape(-1, cfg.experts).tolist():
        groups = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(cfg.groups)]
        best = sorted(range(cfg.groups), key=lambda g, groups=groups: (-groups[g], g))[: cfg.top_groups]
        open_to = [e for e in range(cfg.experts) if e // size in best]
        rows.append(sorted(open_to, key=lambda e, row=row: (-row[e], e))[: cfg.top_k])
    return torch.tensor(rows, dtype=torch.int64).view(*preferred.shape[:-1], cfg.top_k)


def in_time(indices, cfg):
    """Which choices find a slot at their expert."""
    room, taken, found = -(-cfg.capacity * indices.numel() // cfg.experts), [0] * cfg.experts, []
    for e in indices.flatten().tolist():
        found.append(taken[e] < room)
        taken[e] += 1
    return torch.tensor(found, dtype=torch.bool).view(indices.shape)


def of_documents(params, x, cfg):
    """The reference of each document, without the padding: rows one by one, the first loss of each document, the second of all."""
    (logits, ends), plain = x, dataclasses.replace(cfg, packed=False, sequence_wise=False)
    rows = logits[0, : int(ends[-1])]
    weights, indices, load, loss = reference(params, rows, plain)
    if cfg.sequence_wise:
        one, every = dataclasses.replace(plain, z=0.0, capacity=None), dataclasses.replace(plain, aux=0.0)
        documents = [rows[a:b] for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False) if a < b]
        losses = [reference(params, each, one)[3] for each in documents]
        loss = sum(losses, reference(params, rows, every)[3] * max(len(losses), 1)) / max(len(losses), 1)
    padding = logits.shape[1] - len(rows)
    weights = torch.cat((weights, 0 * weights.new_ones(padding, cfg.top_k)))
    indices = torch.cat((indices, torch.full((padding, cfg.top_k), cfg.experts, dtype=torch.int32)))
    return weights[None], indices[None], load, loss


def reference(params, x, cfg):
    if cfg.packed:
        return of_documents(params, x, cfg)
    logits = x
    if cfg.jitter:
        t, key = x
        words = random.bits(key, t.numel()).reshape(t.shape).double() / 2**32
        logits = t * (1 - cfg.jitter + 2 * cfg.jitter * words)
    s = logits.exp() / logits.exp().sum(-1, keepdim=True) if cfg.score == "softmax" else 1 / (1 + (-logits).exp())
    by_score = cfg.bias or cfg.groups > 1
    preferred = (s + params.bias if cfg.bias else s) if by_score else logits
    indices = chosen(preferred.detach(), cfg)
    of_chosen = s.gather(-1, indices)
    weights = of_chosen / of_chosen.sum(-1, keepdim=True) if cfg.normalize else of_chosen
    onehot = torch.nn.functional.one_hot(indices, cfg.experts).double()
    flat = (-1, logits.shape[-2], cfg.experts) if cfg.sequence_wise else (1, -1, cfg.experts)
    loss = 0.0 * logits.sum()
    if logits.numel():
        q, n = (s / s.sum(-1, keepdim=True)).reshape(flat), onehot.sum(-2).reshape(flat)
        fraction = n.mean(1) / cfg.top_k
        loss = loss + cfg.aux * cfg.experts * (fraction * q.mean(1)).sum(-1).mean()
        loss = loss + cfg.z * logits.exp().sum(-1).log().square().mean()
    load = onehot.sum(-2).reshape(-1, cfg.experts).sum(0).to(torch.int32)
    weights = cfg.scale * weights
    if cfg.capacity is not None:
        kept = in_time(indices, cfg)
        weights, indices = weights * kept, torch.where(kept, indices, cfg.experts)
    return weights, indices.to(torch.int32), load, loss


def case(rows, experts, top_k, ends=None, **options):
    cfg = RouteConfig(experts, top_k, packed=ends is not None, **options)

    def x(d):
        t = d.randn(*rows, experts)
        if cfg.packed:
            return t, torch.tensor(ends, dtype=torch.int32)
        return (t, d.key()) if cfg.jitter else t

    def params(d):
        return RouteParams(d.randn(experts) / 4 if cfg.bias else None)

    name = f"route-{list(rows)}-{ends or ''}{experts}-{top_k}-" + ",".join(f"{k}={v}" for k, v in options.items())
    one = experts == 1 or (top_k == 1 and cfg.normalize)  # a softmax, or a share, of one: its gradient is 0
    cancels = ("x",) if one else ()
    free = ("x.1",) if cfg.packed else ()  # any number of documents
    return Case(op=route, cfg=cfg, x=x, params=params, reference=reference, name=name, cancels=cancels, casts=True, free=free)


LOSSES = dict(aux=0.3, z=0.05)
DEEPSEEK = dict(score="sigmoid", bias=True, groups=4, top_groups=2, scale=2.5)
CASES = [
    case((2, 5), 8, 3, **LOSSES),
    case((7,), 4, 2),
    case((2, 3), 5, 2, normalize=False, scale=1.5),
    case((2, 6), 16, 4, **DEEPSEEK),
    case((2, 6), 24, 5, **DEEPSEEK, aux=0.2, sequence_wise=True),
    case((9,), 6, 2, score="sigmoid", normalize=False, z=0.1),
    case((9,), 6, 2, score="sigmoid", normalize=False, scale=2.0),
    case((11,), 3, 2, capacity=0.7),
    case((3, 4), 4, 2, score="sigmoid", capacity=0.6, jitter=0.1),
    case((3, 4), 4, 2, normalize=False, jitter=0.3, capacity=0.5, **LOSSES),
    case((2, 3), 6, 2, bias=True, jitter=0.2),
    case((5,), 1, 1, **LOSSES),
    case((0, 3), 4, 2, score="sigmoid", **LOSSES),
    case((3, 0), 4, 1, sequence_wise=True, **LOSSES),
    case((), 4, 2),
    case((4,), 64, 8, normalize=False, **LOSSES),
    case((4,), 64, 1, score="sigmoid"),
    case((3,), 64, 2, z=0.1),
    case((1, 9), 8, 3, [0, 3, 3, 7], sequence_wise=True, **LOSSES),
    case((1, 7), 6, 2, [0, 2, 5], score="sigmoid", capacity=0.7, **LOSSES),
    case((1, 6), 16, 4, [0, 5, 6], **DEEPSEEK),
]


@st.composite
def drawn(draw):
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    experts = groups * draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, experts // groups * top_groups))
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    return case(
        rows,
        experts,
        top_k,
        groups=groups,
        top_groups=top_groups,
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize=draw(st.booleans()) and top_k > 1,
        bias=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        aux=draw(st.sampled_from([0.0, 0.3])),
        z=draw(st.sampled_from([0.0, 0.1])),
        capacity=draw(st.sampled_from([None, 0.5, 1.25])),
        sequence_wise=len(rows) == 2 and draw(st.booleans()),
    )


LOGITS, ROUTED, ENDS = torch.ones(3, 4), RouteConfig(4, 2), torch.tensor([0, 2], dtype=torch.int32)
ERRORS = [
    Error(call=lambda: RouteConfig(4, 5), match="RouteConfig: top_k must be at most experts, 4, got 5"),
    Error(call=lambda: RouteConfig(4, 0), match="RouteConfig: top_k must be at least 1, got 0"),
    Error(call=lambda: RouteConfig(6, 2, groups=4), match="RouteConfig: groups must be a number that divides experts, 6, got 4"),
    Error(call=lambda: RouteConfig(4, 2, groups=4), match="RouteConfig: groups must be at most 2: two experts each, got 4"),
    Error(
        call=lambda: RouteConfig(8, 5, groups=4, top_groups=2),
        match="RouteConfig: top_k must be at most 4, the experts of the top_groups, got 5",
    ),
    Error(call=lambda: route_fwd(RouteParams(), torch.ones(3, 5), ROUTED), match="route_fwd: x must be [..., 4], got [3, 5]"),
    Error(
        call=lambda: route_fwd(RouteParams(torch.ones(4)), LOGITS, ROUTED),
        match="route_fwd: params.bias must be None (cfg.bias is False), got float32[4]",
    ),
    Error(
        call=lambda: route_fwd(RouteParams(), LOGITS, RouteConfig(4, 2, jitter=0.1)),
        match="route_fwd: x must be a tuple (logits, key), as cfg.jitter says",
        error=TypeError,
    ),
    Error(
        call=lambda: route_dgrad(route_fwd(RouteParams(), LOGITS, ROUTED)[1], torch.ones(3, 2), ROUTED),
        match="route_dgrad: dy must be a tuple (dweights, None, None, dloss), got float32[3, 2]",
        error=TypeError,
    ),
    Error(
        call=lambda: route_dgrad(route_fwd(RouteParams(), LOGITS, ROUTED)[1], (None, None, torch.ones(4), None), ROUTED),
        match="route_dgrad: dy.2 must be None (load are integers, without a gradient), got float32[4]",
        error=TypeError,
    ),
    Error(call=lambda: RouteConfig(4, 2, packed=True, jitter=0.1), match="RouteConfig: jitter must be 0 with packed"),
    Error(
        call=lambda: route_fwd(RouteParams(), LOGITS, RouteConfig(4, 2, packed=True)),
        match="route_fwd: x must be a tuple (logits, cu_seqlens), as cfg.packed says",
        error=TypeError,
    ),
    *[
        Error(call=lambda x=x: route_fwd(RouteParams(), x, RouteConfig(4, 2, packed=True)), match=match)
        for x, match in (
            ((LOGITS, ENDS), "route_fwd: x.0 (logits) must be [1, T, 4], one row of documents (cfg.packed), got [3, 4]"),
            ((LOGITS[None], ENDS[None]), "route_fwd: x.1 (cu_seqlens) must be [N + 1], got [1, 2]"),
            ((LOGITS[None], 2 * ENDS), "x.1 (cu_seqlens) must be ascending, from 0 to at most 3, the row's length, got [0, 4]"),
            ((LOGITS[None], ENDS.flip(0)), "x.1 (cu_seqlens) must be ascending, from 0 to at most 3, the row's length, got [2, 0]"),
        )
    ],
    Error(
        call=lambda: route_fwd(RouteParams(), (LOGITS[None], ENDS.long()), RouteConfig(4, 2, packed=True)),
        match="route_fwd: x.1 (cu_seqlens) must be int32, got int64",
        error=TypeError,
    ),
    Error(call=lambda: funcops.optim.balance(torch.ones(4), torch.ones(3), 0.1), match="balance: load must be [4], got [3]"),
    Error(call=lambda: RouteConfig(4, 2, groups=2, top_groups=3), match="RouteConfig: top_groups must be at most groups, 2, got 3"),
    Error(
        call=lambda: route_fwd(RouteParams(), (LOGITS, torch.ones(2)), RouteConfig(4, 2, jitter=0.1)),
        match="route_fwd: x.1 (the key) must be int64, got float32",
        error=TypeError,
    ),
    Error(
        call=lambda: route_fwd(RouteParams(torch.ones(3)), LOGITS, RouteConfig(4, 2, bias=True)),
        match="route_fwd: params.bias must be [4], got [3]",
    ),
]
