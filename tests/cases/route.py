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
    (logits, ends, *given), plain = x, dataclasses.replace(cfg, packed=False, sequence_wise=False)
    rows = logits[0, : int(ends[-1])]

    def alone(a, b, cfg):
        return reference(params, (rows[a:b], given[0][0, a:b]) if given else rows[a:b], cfg)

    weights, indices, load, loss = alone(0, len(rows), plain)
    if cfg.sequence_wise:
        one, every = dataclasses.replace(plain, z=0.0, capacity=None), dataclasses.replace(plain, aux=0.0)
        documents = [(a, b) for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False) if a < b]
        losses = [alone(a, b, one)[3] for a, b in documents]
        loss = sum(losses, alone(0, len(rows), every)[3] * max(len(losses), 1)) / max(len(losses), 1)
    padding = logits.shape[1] - len(rows)
    weights = torch.cat((weights, 0 * weights.new_ones(padding, cfg.top_k)))
    indices = torch.cat((indices, torch.full((padding, cfg.top_k), cfg.experts, dtype=torch.int32)))
    return weights[None], indices[None], load, loss


def reference(params, x, cfg):
    if cfg.packed:
        return of_documents(params, x, cfg)
    logits, given = x if cfg.replays is not None else (x, None)
    if cfg.jitter:
        t, key = x
        words = random.bits(key, t.numel()).reshape(t.shape).double() / 2**32
        logits = t * (1 - cfg.jitter + 2 * cfg.jitter * words)
    s = logits.exp() / logits.exp().sum(-1, keepdim=True) if cfg.score == "softmax" else 1 / (1 + (-logits).exp())
    by_score = cfg.bias or cfg.groups > 1
    preferred = (s + params.bias if cfg.bias else s) if by_score else logits
    indices = chosen(preferred.detach(), cfg)
    if given is not None:
        own = given[..., cfg.replays, :].long()
        indices = torch.where(own < 0, indices, own)
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
        if cfg.packed or cfg.replays is not None:
            documents = (torch.tensor(ends, dtype=torch.int32),) if cfg.packed else ()
            return t, *documents, *((given(d),) if cfg.replays is not None else ())
        return (t, d.key()) if cfg.jitter else t

    def given(d):
        """For 2 routers more than there need be: for a third of the tokens none, for the others different experts."""
        choices = d.rand(*rows, 2 + cfg.replays, experts).argsort(-1)[..., :top_k]
        return choices.masked_fill(d.rand(*choices.shape[:-1], 1) < 1 / 3, -1).to(torch.int32)

    def params(d):
        return RouteParams(d.randn(experts) / 4 if cfg.bias else None)

    name = f"route-{list(rows)}-{ends or ''}{experts}-{top_k}-" + ",".join(f"{k}={v}" for k, v in options.items())
    one = experts == 1 or (top_k == 1 and cfg.normalize)  # a softmax, or a share, of one: its gradient is 0
    cancels = ("x",) if one else ()
    parts = (cfg.packed, cfg.replays is not None)
    free = tuple(f"x.{i + 1}" for i in range(sum(parts)))  # any number of documents, and of routers
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
    case((2, 5), 8, 3, replays=1, **LOSSES),
    case((7,), 6, 2, replays=0, score="sigmoid", bias=True),
    case((2, 3), 5, 2, replays=2, normalize=False, capacity=0.6),
    case((1, 7), 8, 2, [0, 3, 5], replays=0, score="sigmoid", normalize=False, sequence_wise=True, **LOSSES),
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
        replays=draw(st.sampled_from([None, None, 0, 1])),
    )


LOGITS, ROUTED, ENDS = torch.ones(3, 4), RouteConfig(4, 2), torch.tensor([0, 2], dtype=torch.int32)
REPLAYED, TAKEN = RouteConfig(4, 2, replays=1), torch.zeros(3, 2, 2, dtype=torch.int64)
TAKEN[..., 1] = 1


def taken(*others):
    """Choices whose second router has other ones for its second token."""
    choices = TAKEN.clone()
    choices[1, 1] = torch.tensor(others)
    return choices


ERRORS = [
    Error(call=lambda: RouteConfig(4, 2, replays=-1), match="RouteConfig: replays must be None or at least 0, got -1"),
    Error(call=lambda: RouteConfig(4, 2, replays=0, jitter=0.1), match="RouteConfig: jitter must be 0 with replays"),
    *[
        Error(call=lambda x=x: route_fwd(RouteParams(), x, REPLAYED), match=match, error=error)
        for x, match, error in (
            (LOGITS, "route_fwd: x must be a tuple (logits, choices), as cfg.replays says", TypeError),
            ((LOGITS, TAKEN.float()), "route_fwd: x.1 (choices) must be int32 or int64, got float32", TypeError),
            ((LOGITS, TAKEN[:, 1]), "x.1 (choices) must be [3, R, 2] with R above 1, got [3, 2]", ValueError),
            ((LOGITS, TAKEN[:, :1]), "x.1 (choices) must be [3, R, 2] with R above 1, got [3, 1, 2]", ValueError),
            ((LOGITS, TAKEN[:2]), "x.1 (choices) must be [3, R, 2] with R above 1, got [2, 2, 2]", ValueError),
            ((LOGITS, TAKEN[..., :1]), "x.1 (choices) must be [3, R, 2] with R above 1, got [3, 2, 1]", ValueError),
            ((LOGITS, taken(0, 4)), "x.1 (choices) must be experts from 0 to 3, or -1 where a router chooses, got 4", IndexError),
            ((LOGITS, taken(-2, -2)), "(choices) must be experts from 0 to 3, or -1 where a router chooses, got -2", IndexError),
            ((LOGITS, taken(3, 3)), "x.1 (choices) must be 2 different experts for each token, or -1 in all places", ValueError),
            ((LOGITS, taken(3, -1)), "different experts for each token, or -1 in all places, got [3, -1] of token 1", ValueError),
        )
    ],
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
