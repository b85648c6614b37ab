"""Rules for what is kept, where and in which form, drawn over blocks, layers, masks, recipes and ways to run a backward: lossless
rules give the bits of no policy, codecs have the errors that they state, and bytes by place are those that a report said."""

import dataclasses
import random as pyrandom
import re

import pytest
import torch
from policy_cases import WAYS, by_backward, drawn_needs, report_before, within_bounds, written

from funcops import (
    ActivationConfig,
    CausalConv1dConfig,
    ChainConfig,
    Compress,
    Disk,
    ExpertsConfig,
    GLUConfig,
    LinearConfig,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    RopeConfig,
    RouteConfig,
    Save,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    causal_conv1d,
    chain,
    glu,
    linear,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    unpack,
    with_policy,
)
from funcops.engine.errors import DonatedError
from funcops.engine.residuals.forms import Packed
from funcops.engine.residuals.offload import copies
from funcops.engine.residuals.report import kept_values
from funcops.engine.trees import tensors
from funcops.low_precision import Fp8Block, Fp8Current, with_recipe
from funcops.memory.parts import kept_paths
from funcops.models import DecoderConfig, LatentConfig, MoEConfig, decoder_x
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config
from funcops.models.decoder import block
from funcops.models.decoder_config import groups
from funcops.testing.checks import float_like, same_bits

D = 16
IDS, PLACES, KEY = torch.zeros(2, 4, dtype=torch.int64), {"positions": torch.arange(4)}, {"key": random.key(3)}
SPARSE = DecoderConfig(
    vocab=8,
    dim=D,
    layers=1,
    heads=2,
    kv_heads=2,
    head_size=12,
    hidden=24,
    context=8,
    rope=RopeConfig(4),
    latent=LatentConfig(kv_rank=8, rope_size=4, plain_size=8, value_size=8, q_rank=8),
    moe=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=D, hidden=16), shared=16),
)
CONV = ChainConfig(
    steps=(
        Step("norm", rms_norm, RMSNormConfig(D)),
        Step("up", linear, LinearConfig(D, 2 * D)),
        Step("gate", glu, GLUConfig("swiglu", gate="first")),
        Step("conv", causal_conv1d, CausalConv1dConfig(D)),
        Step("act", activation, ActivationConfig("silu")),
        Step("down", linear, LinearConfig(D, D)),
    )
)
AGAIN = ChainConfig(
    steps=(Step("block", remat(chain), block_config(D, 2, 24), takes=("positions",)), Step("norm", rms_norm, RMSNormConfig(D))),
    extras=("positions",),
)
BLOCKS = {
    "llama": (chain, block_config(D, 2, 24), PLACES),
    "gpt-2": (chain, gpt2_block_config(D, 2, 24, 0.1), KEY),
    "mixture": (chain, block(SPARSE, groups(SPARSE)[0].kinds[0]), decoder_x(SPARSE, IDS, torch.float32).extras),
    "runs again": (chain, AGAIN, PLACES),
    "conv": (skip, SkipConfig(chain, CONV), {}),
    "norm and mlp": (skip, SkipConfig(chain, mlp_config(D, 24)), {}),
}


def model(rng):
    """A drawn model: op, config, params, x."""
    name, times, shape = rng.choice(list(BLOCKS)), rng.randint(2, 3), rng.choice(["alone", "layers", "stacked", "in a model"])
    op, cfg, extras = BLOCKS[name]
    recipe, dtype = rng.choice([None, None, None, Fp8Current(), Fp8Block()]), rng.choice([torch.float32, torch.bfloat16])
    if shape != "alone":
        op, cfg = repeat, RepeatConfig(op, cfg, times, stacked=shape == "stacked" and name != "mixture")
    if shape == "in a model" and name != "mixture":
        stem, head = Step("stem", linear, LinearConfig(D, D)), Step("head", linear, LinearConfig(D, 5))
        steps = (stem, Step("blocks", op, cfg, takes=tuple(extras)), Step("norm", rms_norm, RMSNormConfig(D)), head)
        op, cfg = chain, ChainConfig(steps=steps, extras=tuple(extras))
    cfg = cfg if recipe is None else with_recipe(cfg, recipe)
    params, x = op.init(cfg, key=random.key(0), dtype=dtype), random.normal(random.key(1), (2, 4, D), dtype=dtype)
    return op, cfg, params, WithExtras(x, dict(extras)) if extras else x


def drawn_actions(rng, folder):
    """The actions of some rules, in their order."""
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        yield (
            rng.choice([Recompute(), Save(), Offload(), Disk(folder)])
            if rng.random() < 0.5
            else rng.choice([(one := Compress(rng.choice(["bf16", "fp8", "mxfp8", "int8"]))), one | Offload(), one | Disk(folder)])
        )


def drawn_policy(rng, known, actions):
    """Rules by path, glob, layer and range; several may match a field, and the last decides."""
    rules = []
    for action in actions:
        path = rng.choice([path for path in known if path[-1] in "xqkvy" or not isinstance(action, Compress)])
        if not isinstance(action, Compress):
            path = rng.choice([path, path.rpartition(".")[0] or path, path.rpartition(".")[0].rpartition(".")[0] or path])
        last = path.rpartition(".")[2]
        path = rng.choice([path, path, path, f"*.{last}" if "." in path else path, path.replace(last, f"{last[0]}*")])
        # layers by number, as each of the models has at least two
        rules.append((path.replace("*", rng.choice(["*", "0", "0-1", "1"]), 1) if re.search(r"(^|\.)\*\.", path) else path, action))
    kept = [path for path in known if path.endswith("mix.q")]
    if kept and rng.random() < 0.4:  # what attention keeps: products on the way to it run again
        rules.append((f"{rng.choice(kept)[:-1]}{rng.choice(['[qkv]', '[qkv]', '[kv]', 'q'])}", Recompute()))
    outputs = rng.choice(["recomputable", "recomputable", "norms", "none"])
    return Policy(rules, outputs=outputs, optional=rng.random() < 0.4)


def nowhere(policy):
    """The policy with every place the host's memory, which without a device is where the op computes."""

    def of(action):
        place = isinstance(getattr(action, "place", action), Disk)
        return action if not place else Offload() if isinstance(action, Disk) else Compress(action.codec) | Offload()

    return dataclasses.replace(policy, rules=[(pattern, of(action)) for pattern, action in policy.rules])


def taken(rng, op, cfg, params, x, needs, folder):
    """A drawn policy that the op takes, the op under it, and its forward; others are refused by rule."""
    known = [kept.path for kept in kept_paths(op, cfg) if kept.field is None or not kept.field.of_params]
    actions = list(drawn_actions(rng, folder))
    while True:
        policy = drawn_policy(rng, known, actions)
        under = with_policy(op, policy)
        try:
            y, kept = under.fwd(params, x, cfg, needs=needs)
            under.dgrad(kept, float_like(y, 0), cfg)  # the first tells whether a rule for a pending has an effect
            return policy, under, under.fwd(params, x, cfg, needs=needs)
        except ValueError as error:
            assert re.match(r"with_policy: rules .*must be .*, got .", str(error)), (policy, error)


def check(seed, folder, made, monkeypatch):
    """Every check of a drawn case."""
    rng = pyrandom.Random(seed)
    op, cfg, params, x = model(rng)
    needs, how = drawn_needs(rng, params), rng.choice(WAYS)
    policy, under, (y, kept) = taken(rng, op, cfg, params, x, needs, folder)
    said, plain = f"{seed}: {policy} {needs} {how}", with_policy(op, Policy(outputs="none"))
    want_y, every = plain.fwd(params, x, cfg, needs=needs)
    same_bits(y, want_y, said)
    if kept is None:
        return
    # the bytes by place as the report of the run says them, as the storages have them, and as a report says before a run
    places = report(kept, params, x).places
    host, given = {t._cdata: t.nbytes() for t in made}, {t.untyped_storage()._cdata for t in tensors([params, x])}
    own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(kept) if not t.is_meta}
    own = {storage: size for storage, size in own.items() if storage not in given}
    found = {"host": sum(size for storage, size in own.items() if storage in host), "file": written(folder)}
    assert places == {"here": sum(own.values()) - found["host"], **found}, said
    assert report_before(under, params, x, cfg, needs).places == places, said
    held = {path: value for path, value, _ in kept_values(every)}
    for path, value, _ in kept_values(kept):
        codec = getattr(value.action, "codec", None) if type(value) is Packed else None
        if path in held and isinstance(held[path], torch.Tensor) and type(value) is Packed:
            same = (lambda got, want: within_bounds(codec, got, want)) if codec else torch.equal  # noqa: B023
            assert same(unpack(value), held[path]), (said, path)
    value, dy = None, float_like(y, seed)  # a file goes with the last that holds its tensor
    got = by_backward(under, kept, dy, cfg, how)
    if how.endswith("given away"):
        with pytest.raises(DonatedError):
            under.bwd(kept, dy, cfg)
        assert written(folder) == 0, said
    else:
        same_bits(under.bwd(kept, dy, cfg), got, said)
    if any(isinstance(action, Compress) for _, action in policy.rules):
        with monkeypatch.context() as patch:
            patch.setattr(copies, "leaves", lambda t: False)
            alone = with_policy(op, nowhere(policy))
            same_bits(got, alone.bwd(alone.fwd(params, x, cfg, needs=needs)[1], dy, cfg), said)
    else:
        same_bits(got, plain.bwd(every, dy, cfg), said)


@pytest.mark.turns("seeds")
@pytest.mark.parametrize("seeds", [range(first, first + 2) for first in range(0, 500, 2)], ids=lambda of: f"{of[0]}-{of[-1]}")
def test_what_is_kept_where_and_in_which_form(seeds, folder, device, monkeypatch):
    for seed in seeds:
        check(seed, folder, device, monkeypatch)
