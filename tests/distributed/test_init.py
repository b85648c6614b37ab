"""Params by shard: slices of what one process draws, without drawing the rest."""

import math
import random as python_random

import pytest
import torch

from funcops import (
    ChainConfig,
    EmbeddingConfig,
    GLUConfig,
    LayerNormConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    chain,
    dist,
    embedding,
    glu,
    layer_norm,
    linear,
    linear_cross_entropy,
    random,
    repeat,
    rms_norm,
    skip,
)
from funcops.distributed import Mesh, Spec
from funcops.distributed.init import own_parts
from funcops.engine.program.values import abstract_params
from funcops.engine.trees import paths
from funcops.testing.checks import same_bits


def drawn_ranges(draw, n):
    cuts = [sorted((draw.randint(0, n), draw.randint(0, n))) for _ in range(draw.randint(1, 2))]
    return draw.choice([((0, n),), tuple((a, b - a) for a, b in cuts)])


def taken(t, ranges):
    for dim, pieces in enumerate(ranges):
        t = torch.cat([t.narrow(dim, *piece) for piece in pieces], dim)
    return t


def test_a_part_of_a_draw_has_its_bits_in_the_whole():
    """60 shapes, odd and empty ones among them, and parts of up to two ranges along each dimension."""
    draw, key = python_random.Random(0), random.key(5)
    for _ in range(60):
        shape = [draw.randint(0, 9) for _ in range(draw.randint(0, 3))]
        ranges, dtype = [drawn_ranges(draw, n) for n in shape], draw.choice([torch.float64, torch.float32, torch.bfloat16])
        words = random.bits(key, math.prod(shape)).reshape(shape)
        same_bits(random.bits_of(key, shape, ranges), taken(words, ranges), "bits")
        for fn in (random.uniform, random.normal):
            with random.put_off() as drawn:
                assert fn(key, shape, dtype=dtype).is_meta
            same_bits(drawn[0][1].part(ranges), taken(fn(key, shape, dtype=dtype), ranges), f"{fn.__name__} {shape} {ranges}")


def model(draw):
    """Every way in which an op makes params: uniform, normal, changed after the draw, not drawn; in layers, stacked, tied."""
    d, hidden, vocab = 4 * draw.randint(1, 3), 8 * draw.randint(1, 2), 8 * draw.randint(1, 2)
    mlp = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(d)),
            Step("up", linear, LinearConfig(d, 2 * hidden)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(hidden, d, bias=False)),
        )
    )
    ends = draw.choice(
        [
            (Step("loss", linear_cross_entropy, LinearCrossEntropyConfig(d, vocab), takes=("labels",)),),
            (Step("norm", layer_norm, LayerNormConfig(d)), Step("head", linear, LinearConfig(d, vocab, bias=False))),
        ]
    )
    steps = (
        Step("embed", embedding, EmbeddingConfig(vocab, d, padding_idx=draw.choice([None, 3]))),
        Step("blocks", repeat, RepeatConfig(skip, SkipConfig(chain, mlp), 2, stacked=draw.random() < 0.5)),
        *ends,
    )
    tied = {"head.weight": "embed.weight"} if ends[-1].name == "head" and draw.random() < 0.5 else {}
    return ChainConfig(steps=steps, extras=("labels",) * (ends[-1].name == "loss"), ties=tied)


def drawn_specs(draw, cfg, sizes):
    """For every leaf a dimension, and axes that divide it."""
    specs = {}
    for path, t in paths(abstract_params(chain, cfg)).items():
        axis, fsdp = draw.sample(["", *sizes], 2)
        dims = [dim for dim, n in enumerate(t.shape) if n % 8 == 0] if t is not None and axis else []
        if dims and (dim := draw.choice(dims)) is not None:
            n = t.shape[dim]
            halves = (n // 2, n // 2) if draw.random() < 0.5 and n % 16 == 0 else ()
            rest = t.shape[0] // (sizes[axis] if dim == 0 else 1)
            fits = fsdp and rest % sizes[fsdp] == 0
            specs[path] = Spec(axis, dim, parts=halves, fsdp=fsdp if fits else "")
    return specs


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_parts_are_slices_of_what_one_process_draws(sizes):
    """Four models for each mesh."""
    draw, key = python_random.Random(str(sizes)), random.key(1)
    for _ in range(4):
        cfg, dtype = model(draw), draw.choice([torch.float64, torch.float32, torch.bfloat16])
        specs = drawn_specs(draw, cfg, sizes)
        whole = chain.init(cfg, key=key, dtype=dtype)
        for rank in range(math.prod(sizes.values())):
            mesh = Mesh.abstract(sizes, rank)
            same_bits(dist.init(chain, cfg, specs, mesh, key=key, dtype=dtype), dist.shard(whole, specs, mesh), str(specs))
            meta = dist.init(chain, cfg, specs, mesh, device="meta", dtype=dtype)
            same = zip(paths(meta).values(), paths(dist.shard(whole, specs, mesh)).values(), strict=True)
            assert all(a is b if b is None else a.is_meta and a.shape == b.shape and a.dtype is b.dtype for a, b in same)


@pytest.mark.parametrize(("dim", "stacked"), [(0, False), (1, False), (0, True), (1, True)])
def test_no_more_is_drawn_than_a_rank_has(dim, stacked, monkeypatch):
    """Except for up to 12 words a run, if it begins and ends within blocks."""
    blocks, words = random._blocks, []
    monkeypatch.setattr(random, "_blocks", lambda key, block: words.append(4 * block.numel()) or blocks(key, block))
    cfg, mesh = RepeatConfig(linear, LinearConfig(128, 128, bias=False), 3, stacked=stacked), Mesh.abstract({"tp": 4}, 2)
    spec = Spec("tp", dim + stacked)
    own = dist.init(repeat, cfg, {"*weight": spec}, mesh, key=random.key(0))
    total = sum(t.numel() for t in paths(own).values() if t is not None)
    runs = 3 * (1 if dim == 0 else 128)
    assert total == 3 * 128 * 128 // 4 and total <= sum(words) <= total + 12 * runs


def test_parallel_layers_draw_the_shards_of_plain_layers():
    mesh, key = Mesh.abstract({"dp": 2, "tp": 2}, 3), random.key(2)
    up = dist.ColumnLinearConfig(4, 16, axis=mesh["tp"], parts=(8, 8))
    down = dist.RowLinearConfig(16, 4, axis=mesh["tp"])
    body = ChainConfig(steps=(Step("up", dist.column_linear, up), Step("down", dist.row_linear, down)))
    plain = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 16)), Step("down", linear, LinearConfig(16, 4))))
    for stacked in (False, True):
        cfg = RepeatConfig(chain, body, 2, stacked=stacked)
        whole = repeat.init(RepeatConfig(chain, plain, 2, stacked=stacked), key=key)
        leaves = {"up.weight": Spec("tp", int(stacked), parts=(8, 8))}
        leaves |= {"up.bias": leaves["up.weight"], "down.weight": Spec("tp", 1 + stacked)}
        specs = leaves if stacked else {f"{i}.{path}": spec for i in range(2) for path, spec in leaves.items()}
        assert dist.specs_of(repeat, cfg) == specs
        same_bits(repeat.init(cfg, key=key), dist.shard(whole, specs, mesh), "by its layers")
        same_bits(dist.init(repeat, cfg, specs, mesh, key=key), dist.shard(whole, specs, mesh), "by specs")
        wider = {path: Spec(spec.axis, spec.dim, parts=spec.parts, fsdp="dp") for path, spec in specs.items()}
        same_bits(dist.init(repeat, cfg, wider, mesh, key=key), dist.shard(whole, wider, mesh), "of their parts a part")
    cfg = RepeatConfig(chain, body, 2)
    specs = dist.specs_of(repeat, cfg)
    other = Mesh.abstract({"dp": 2, "tp": 2}, 2)
    bad = {
        r"^init: the spec of 0.up.weight must be Spec\(axis='tp', .* as its layer shards it, got Spec\(\)": ({}, mesh),
        r"^init: the axis of 0.up.weight must be one of the mesh, got axis 'tp' of 2 with rank 1": (specs, other),
        r"^init: specs must be paths, or globs that are the first to match a leaf": ({"2.up.weight": Spec()}, mesh),
    }
    for said, (given, on) in bad.items():
        with pytest.raises(ValueError, match=said):
            dist.init(repeat, cfg, given, on, key=key)


def test_a_leaf_that_is_made_of_a_draw_has_its_values():
    def make():
        drawn = random.uniform(random.key(0), (4, 3))
        return {"drawn": drawn, "zeros": drawn.new_zeros(2, 3), "twice": 2 * drawn}

    found = own_parts(make, lambda path, shape: (Spec("tp", 0), Mesh.abstract({"tp": 2}, 0)))
    same_bits(found, {path: t[: len(t) // 2].clone() for path, t in make().items()}, "parts")


def to_bfloat16(t):
    t.data = t.data.to(torch.bfloat16)


CHANGED = {
    "a row of data": lambda t: t.data[0].zero_(),
    "an element of data": lambda t: t.data.__setitem__((0, 1), 3.0),
    "data": lambda t: t.data.mul_(2),
    "data of a view": lambda t: t.T.data[0].fill_(1.0),
    "other data": to_bfloat16,
    "detached": lambda t: t.detach()[:, 1].add_(1),
    "as a result": lambda t: torch.mul(t, 2, out=t),
    "in a list": lambda t: torch._foreach_add_([t.data], 1.0),
    "turned": lambda t: t.t_(),
    "torch's init": lambda t: torch.nn.init.zeros_(t.data),
}


@pytest.mark.turns("way", every=4)
@pytest.mark.parametrize("way", CHANGED)
def test_a_write_to_a_draw_is_not_lost(way):
    """Also one that counts as no version of the draw; to a leaf, to a stack, and to what is stacked, before and after."""

    def made(i):
        return random.normal(random.key(i), (4, 4))

    def changed(t):
        CHANGED[way](t)
        return t

    def after():
        parts = [made(0), made(1)]
        stack = torch.stack(parts)
        changed(parts[0])
        return stack

    def make():
        before = torch.stack([changed(made(i)) for i in (2, 3)])
        return {"leaf": changed(made(4)), "of changed": before, "changed after": after(), "drawn": made(5)}

    whole = make()
    for rank in range(2):
        for dim in (0, 1):
            specs, mesh = {"*": Spec("tp", dim)}, Mesh.abstract({"tp": 2}, rank)
            same_bits(dist.init_tree(make, specs, mesh), dist.shard(whole, specs, mesh), way)


def test_a_write_to_a_stack_is_not_lost():
    def make():
        stack = torch.stack([random.normal(random.key(i), (4, 4)) for i in (0, 1)])
        stack.data[1, 2] = 0
        return stack

    specs, mesh = {"": Spec("tp", 1)}, Mesh.abstract({"tp": 2}, 1)
    same_bits(dist.init_tree(make, specs, mesh), dist.shard(make(), specs, mesh), "stack")


@pytest.mark.parametrize("along", [0, 1, 2, -1])
def test_a_stack_along_any_dimension_is_of_its_draws(along):
    """Only one along the first is drawn in part."""

    def make():
        return torch.stack([random.normal(random.key(i), (4, 6)) for i in range(4)], along)

    for rank in range(2):
        for dim in range(3):
            specs, mesh = {"": Spec("tp", dim)}, Mesh.abstract({"tp": 2}, rank)
            same_bits(dist.init_tree(make, specs, mesh), dist.shard(make(), specs, mesh), f"a part along {dim}")
