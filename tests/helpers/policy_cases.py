"""Blocks under policies: what to run, the ways of a backward, drawn needs, reports before a run, and the errors of codecs."""

import os

import torch
from law_cases import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    Ledger,
    Needs,
    RMSNormConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    donate,
    embedding,
    linear,
    random,
    report,
    rms_norm,
)
from funcops.engine.trees import fake, leaves, paths, tensors, tree_map_tensors
from funcops.library.ops.linear import LinearConfig
from funcops.memory import disk
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config

LLAMA = block_config(64, 4, 96), {"positions": torch.arange(16)}


GPT2 = gpt2_block_config(64, 4, 96, 0.1), {"key": random.key(3)}


BLOCKS = {"llama": LLAMA, "gpt-2": GPT2}


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
MLP = mlp_config(8, 12)
SMALL = {
    "mlp": (chain, MLP, X),
    "llama": (chain, block_config(8, 2, 12), WithExtras(X, {"positions": torch.arange(3)})),
    "gpt-2": (chain, gpt2_block_config(8, 2, 12, 0.1), WithExtras(X, {"key": random.key(3)})),
}


COMBINED = [
    c
    for c, d in CASES
    if d is torch.float64 and c.op.name in ("chain", "skip", "parallel", "repeat", "dropout", "linear", "rms_norm")
]


def made(block, dtype=torch.float32):
    cfg, extras = BLOCKS[block]
    params = chain.init(cfg, key=random.key(0), dtype=dtype)
    x, dy = (random.uniform(random.key(i), (2, 16, 64), low=-1, high=1, dtype=dtype) for i in (1, 2))
    return cfg, params, WithExtras(x, dict(extras)), dy


def bits(tree):
    return [None if t is None else t.clone() for t in leaves(tree)]


def same(a, b):
    return all((s is None and t is None) or torch.equal(s, t) for s, t in zip(leaves(a), leaves(b), strict=True))


TIES = {"head.weight": "embed.weight"}


def decoder(ties=(), bias=False, **options):
    steps = (
        Step("embed", embedding, EmbeddingConfig(11, 6)),
        Step("norm", rms_norm, RMSNormConfig(6)),
        Step("head", linear, LinearConfig(6, 11, bias=bias)),
        Step("loss", cross_entropy, CrossEntropyConfig(**options), takes=("labels",)),
    )
    return ChainConfig(steps=steps, extras=("labels",), ties=ties)


WAYS = ("whole", "halves", "given away", "halves given away")


def by_backward(op, residuals, dy, cfg, how, into=None):
    """The gradients by one way to run a backward."""
    given = donate(residuals) if how.endswith("given away") else residuals
    if not how.startswith("halves"):
        return op.bwd(given, dy, cfg, into=into)
    with Ledger() as ledger:
        dx, pending = op.dgrad(given, dy, cfg)
        ledger.keep("pending", pending)
        pending = ledger.take("pending")
        return op.wgrad(donate(pending) if how.endswith("given away") else pending, cfg, into=into), dx


def drawn_needs(rng, params):
    """Needs of x or of params, or both; of all params or of some."""
    known = [path for path, t in paths(params).items() if t is not None]
    x = rng.choice([True, True, False])
    every = [True, True, True, *([False] if x else [])]
    return Needs(x=x, params=rng.choice([*every, tuple(rng.sample(known, rng.randint(1, len(known))))]) if known else x)


def report_before(op, params, x, cfg, needs=Needs.ALL):
    """The report of a forward on shapes alone."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [tree_map_tensors(fake, one) for one in (params, x)]
        return report(op.fwd(*shapes, cfg, needs=needs)[1], *shapes)


def bytes_of(tree, *besides):
    """The bytes of the storages of a tree, each once, without the storages that the trees besides hold."""
    owned = {t.untyped_storage()._cdata for one in besides for t in tensors(one)}
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(tree)}
    return sum(size for storage, size in found.items() if storage not in owned)


def largest(t, width):
    """The largest value of each element's block, of `width` elements along the last dimension, or all if width is 0."""
    width = width or max(t.shape[-1], 1)
    wide = torch.nn.functional.pad(t.double().abs(), (0, -t.shape[-1] % width)).unflatten(-1, (-1, width)).amax(-1)
    return wide.repeat_interleave(width, -1)[..., : t.shape[-1]]


def _of_blocks(width):
    return lambda t: torch.maximum(t.double().abs() * 2.0**-4, largest(t, width) * 2.0**-17).clamp(min=2.0**-137)


BOUNDS = {  # the largest errors of the codecs, as `engine/residuals/codec.py` states them
    "bf16": lambda t: t.double().abs() * 2.0**-8,
    "fp8": _of_blocks(128),
    "mxfp8": _of_blocks(32),
    "int8": lambda t: (largest(t, 0) / 253).clamp(min=2.0**-143),
}


def within_bounds(codec, got, want):
    """Whether a tensor that a codec kept is within the codec's error, and a rounding to 16 bits."""
    rounding = want.double().abs() * 2.0**-8 if want.dtype.itemsize == 2 else 0
    return bool(((got.double() - want.double()).abs() <= BOUNDS[codec](want) * 1.001 + rounding).all())


def written(folder):
    """The bytes of the files in a folder, once all are written."""
    disk._threads(os.getpid())[0].submit(lambda: None).result()
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".residual"))
