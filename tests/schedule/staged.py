"""A small decoder as a staged op, its microbatches, and the results of one chain."""

import dataclasses

import torch
from tally import routed

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    EmbeddingConfig,
    GLUConfig,
    LinearConfig,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    dropout,
    embedding,
    glu,
    linear,
    random,
    repeat,
    rms_norm,
    skip,
)
from funcops import nn as fnn
from funcops.engine.trees import tree_map

VOCAB, DIM = 11, 8


def block(keyed=False):
    inner = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(DIM)),
            Step("up", linear, LinearConfig(DIM, 2 * DIM)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            *((Step("drop", dropout, DropoutConfig(0.2), takes=("key",)),) if keyed else ()),
            Step("down", linear, LinearConfig(DIM, DIM, bias=False)),
        ),
        extras=("key",) if keyed else (),
    )
    return Step("mlp", skip, SkipConfig(chain, inner))


def decoder(stages=4, keyed=False, ties=()):
    """From tokens to the mean loss, in any number of stages from 2."""
    extras = ("key",) if keyed else ()
    first = ChainConfig(steps=(Step("embed", embedding, EmbeddingConfig(VOCAB, DIM)), block(keyed)), extras=extras)
    middle = ChainConfig(steps=(block(keyed),), extras=extras)
    last = ChainConfig(
        steps=(
            block(keyed),
            Step("head", linear, LinearConfig(DIM, VOCAB, bias=False)),
            Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
        ),
        extras=(*extras, "labels"),
    )
    every = [first, *[middle] * (stages - 2), last]
    return ChainConfig(steps=tuple(Step(f"s{i}", chain, cfg) for i, cfg in enumerate(every)), extras=(*extras, "labels"), ties=ties)


def layered(stages, layers):
    """From tokens to the mean loss, in stages that are each a repeat of so many blocks."""
    body = Step("blocks", repeat, RepeatConfig(chain, ChainConfig(steps=(block(),)), layers))
    first, *rest = decoder(stages).steps
    ends = [dataclasses.replace(first.cfg, steps=(first.cfg.steps[0], body))]
    ends += [dataclasses.replace(step.cfg, steps=(body, *step.cfg.steps[1:])) for step in rest]
    steps = [dataclasses.replace(step, cfg=cfg) for step, cfg in zip((first, *rest), ends, strict=True)]
    return ChainConfig(steps=tuple(steps), extras=("labels",))


def microbatches(count, cfg, rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (count, 2, rows, 5), generator=generator)
    keys = {"key": random.key(3)} if "key" in cfg.extras else {}
    return [WithExtras(x, {**{n: random.fold_in(k, i) for n, k in keys.items()}, "labels": y}) for i, (x, y) in enumerate(ids)]


def reference(params, xs, cfg):
    """Losses and the gradients of their mean, one microbatch after another."""
    total, losses = None, []
    for x in xs:
        loss, residuals = chain.fwd(params, x, cfg)
        dparams, _ = chain.bwd(residuals, torch.full_like(loss, 1 / len(xs)), cfg)
        total = dparams if total is None else tree_map(lambda a, b: None if a is None else a + b, total, dparams)
        losses.append(loss)
    return losses, total


def routed_stages(stages=4):
    """A chain that ends in a scalar; every stage gives its load, loss and logits under its own names. With params and
    microbatches."""
    given = ("load", "loss", "logits")
    names = [tuple(f"{name}{i}" for name in given) for i in range(stages)]
    steps = [Step(f"s{i}", skip, SkipConfig(chain, routed(DIM)), gives=own) for i, own in enumerate(names[:-1])]
    head = (Step("mlp", chain, routed(DIM)), Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)))
    last = ChainConfig(steps=head, extras=("labels",), outputs=given)
    steps.append(Step("last", chain, last, gives=names[-1]))
    cfg = ChainConfig(steps=tuple(steps), extras=("labels",), outputs=tuple(name for own in names for name in own))
    generator = torch.Generator().manual_seed(0)
    data, labels = torch.randn(8, 5, DIM, dtype=torch.float64, generator=generator), torch.arange(5)
    xs = [WithExtras(x, {"labels": labels}) for x in data]
    return cfg, chain.init(cfg, key=random.key(0), dtype=torch.float64), xs


def gated(count=2, rows=6):
    """Two stages, of which the first keeps its main value and its extra unchanged; with params, microbatches and dys."""
    gate = Step("gate", glu, GLUConfig(kind="swiglu", paired=True), takes=("by",))
    cfg = ChainConfig(steps=(gate, Step("out", linear, LinearConfig(DIM, 3, bias=False))), extras=("by",))
    xs = [WithExtras(x, {"by": by}) for x, by in torch.randn(count, 2, rows, DIM)]
    return cfg, chain.init(cfg, key=random.key(0)), xs, list(torch.randn(count, rows, 3))


USER = "0F0,2F0,0F1,2F1,2I1,0B1,2I0,0I0,0W0,2W1,2W0\n1F0,3F0,1F1,3F1,3B1,1I1,3I0,1I0,1W0,3W0,1W1\n"


def linears(made, dim=2):
    """A linear layer a stage, its params, and x and dy of every microbatch."""
    cfg = ChainConfig(steps=tuple(Step(f"s{i}", linear, LinearConfig(dim, dim)) for i in range(made.stages)))
    params = chain.init(cfg, key=random.key(0))
    generator = torch.Generator().manual_seed(0)
    xs, dys = torch.randn(2, made.microbatches, 3, dim, generator=generator)
    return cfg, params, list(xs), list(dys)


def stages_of_modules(count=4):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        *[torch.nn.Sequential(fnn.Linear(DIM, DIM), torch.nn.Tanh(), fnn.Linear(DIM, DIM)) for _ in range(count)]
    ).double()


def square_error(y, target):
    return (y - target).square().mean()
