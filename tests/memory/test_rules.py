"""Rules of policies: each changes what is kept or raises, however it names fields; and the forms of a tensor that several fields
hold."""

import dataclasses
import random as pyrandom
import re

import pytest
import torch
from policy_cases import MLP, SMALL, TIES, X, decoder
from torch import Tensor

from funcops import (
    ChainConfig,
    Compress,
    Drop,
    LinearConfig,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    Save,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    linear,
    pack,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    unpack,
    with_policy,
)
from funcops.engine.residuals.forms import Packed, from_form, one_form_each, to_form
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.memory.policy import kept_paths
from funcops.models.blocks import mlp_config
from funcops.testing.checks import same_bits

IDS = torch.tensor([[0, 4, 1], [2, 3, 3]])
MODELS = {
    **SMALL,
    "layers": (repeat, RepeatConfig(skip, SkipConfig(chain, MLP), 2), X),
    "decoder": (chain, decoder(TIES), WithExtras(IDS, {"labels": IDS})),
    "remat": (chain, ChainConfig(steps=(Step("a", remat(chain), MLP), Step("b", linear, LinearConfig(8, 8)))), X),
    "shared": (chain, ChainConfig(steps=(Step("n", rms_norm, RMSNormConfig(8)), Step("m", skip, SkipConfig(chain, MLP)))), X),
}
ACTIONS = (Save(), Recompute(), Offload(), Compress("int8"), Compress("int8") | Offload(), Drop())


def drawn_policy(rng, op, cfg):
    """Rules that name steps, fields, parts of both, and sometimes nothing."""
    known = [kept.path for kept in kept_paths(op, cfg) if not kept.waits]

    def pattern():
        path = rng.choice(known)
        head, _, last = path.rpartition(".")
        globs = (path, path, path, f"*.{last}", f"{head}.*" if head else "*", path.replace(last[:1], "?", 1), f"{path}s")
        return rng.choice(globs)

    rules = [(pattern(), rng.choice(ACTIONS)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return Policy(rules, outputs=rng.choice(("recomputable", "recomputable", "norms", "none")))


def rows(op, cfg, params, x):
    return {row[:4] for row in report(op.fwd(params, x, cfg)[1], params).rows}


@pytest.mark.turns("seed")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_each_rule_changes_a_row_or_raises(name, seed, device):
    op, cfg, x = MODELS[name]
    params, rng, taken = op.init(cfg, key=random.key(0)), pyrandom.Random(f"{name} {seed}"), 0
    y, plain = op.fwd(params, x, cfg)
    dy = torch.ones_like(y)
    want = op.bwd(plain, dy, cfg)
    while taken < 3:
        policy = drawn_policy(rng, op, cfg)
        under = with_policy(op, policy)
        try:
            got, kept = under.fwd(params, x, cfg)
        except ValueError as error:
            assert re.match(r"with_policy: rules .*must be .*, got .", str(error)), policy
            continue
        taken += 1
        assert torch.equal(got, y)
        found = {row[:4] for row in report(kept, params).rows}
        for i in range(len(policy.rules)):
            try:
                less = rows(
                    with_policy(op, dataclasses.replace(policy, rules=policy.rules[:i] + policy.rules[i + 1 :])), cfg, params, x
                )
            except ValueError:
                continue
            assert found != less, (policy, i)
        used = {action for _, action in policy.rules}
        if not any(isinstance(action, Compress | Drop) for action in used):
            same_bits(under.bwd(kept, dy, cfg), want, str(policy))
        elif Drop() not in used:
            assert all(torch.isfinite(t).all() for t in tensors(under.bwd(kept, dy, cfg)))


LLAMA = MODELS["llama"]
WRONG = {
    "a path that is not there": ({"attn.mix.w": Save()}, r"globs over .*, got 'attn.mix.w', nearest attn.mix.*\(66 in all"),
    "a glob that matches nothing": ({"*.mxi.*": Save()}, r"rules must be globs over the paths of cfg, got '\*.mxi.\*', nearest"),
    "a step for a field": (
        {"mlp.act": Compress("fp8")},
        r"a step itself takes only Save, Recompute and Offload; the fields of mlp.act are mlp.act.x",
    ),
    "a parameter": ({"mlp.up.weight": Offload()}, r"got Offload\(\), without effect: mlp.up.weight is a parameter"),
    "what is so by itself": ({"mlp.act.x": Save()}, "without effect: what is kept of mlp.act.x is the same without it"),
    "nothing to save": ({"mlp.down": Recompute()}, "without effect: what is kept of mlp.down is the same"),
    "an input": ({"attn.norm.x": Recompute()}, "without effect: what is kept of attn.norm.x is the same"),
    "later rules": ({"mlp.act.x": Compress("fp8"), "mlp.*": Compress("int8")}, "'mlp.act.x' .* later rules decide"),
    "a field inside of what is computed again": ({"mlp": Recompute(), "mlp.act.x": Offload()}, "kept of mlp.act.x is the same"),
    "one of two fields": (
        {"attn.out.x": Compress("fp8")},
        r"the same for each field that holds the output of attn.mix \(attn.mix.y, attn.out.x\), got Compress.* for attn.out.x only",
    ),
    "two forms": (
        {"attn.mix.y": Compress("fp8"), "attn.out.x": Compress("int8")},
        r"the same for each field .*got Compress\(codec='fp8'\) for attn.mix.y, Compress\(codec='int8'\) for attn.out.x",
    ),
    "an integer": (
        {"attn.qkv.q.rope.positions": Compress("int8")},
        r"the same for each field that holds the input|for tensors that it makes smaller, got Compress\(codec='int8'\) for int64",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_rule_without_effect_says_why(which):
    rules, message = WRONG[which]
    op, cfg, x = LLAMA
    with pytest.raises(ValueError, match=message):
        with_policy(op, Policy(rules)).fwd(op.init(cfg, key=random.key(0)), x, cfg)
    if "globs" not in message:
        optional = with_policy(op, Policy(rules, optional=True))
        assert optional.fwd(op.init(cfg, key=random.key(0)), x, cfg)[1] is not None, "an optional rule holds where it can"


def test_a_codec_that_makes_nothing_smaller_is_told_at_the_first_forward():
    op = with_policy(chain, Policy({"*x": Compress("bf16")}))
    for dtype in (torch.float32, torch.bfloat16):
        fresh = mlp_config(8, 16 if dtype is torch.float32 else 24)
        params = op.init(fresh, key=random.key(0), dtype=dtype)
        if dtype is torch.bfloat16:
            with pytest.raises(ValueError, match=r"rules at '\*x' must be for tensors that it makes smaller, got .* for bfloat16"):
                op.fwd(params, X.to(dtype), fresh)
        else:
            assert type(op.fwd(params, X, fresh)[1]["act"].x) is Packed


def test_a_place_is_no_reason_to_take_a_codec_that_makes_nothing_smaller(device):
    op, cfg, x = MODELS["gpt-2"]
    under = with_policy(op, Policy({"mlp.drop.key": Compress("bf16") | Offload()}))
    with pytest.raises(ValueError, match=r"must be for tensors that it makes smaller, got .*Offload\(\) for int64\[2\]"):
        under.fwd(op.init(cfg, key=random.key(0)), x, cfg)


@pytest.mark.parametrize("place", [None, Offload()])
def test_a_codec_takes_the_tensors_of_a_field_that_is_a_tree(place, device):
    _, body, x = MODELS["llama"]
    cfg = ChainConfig(
        steps=(Step("a", linear, LinearConfig(8, 8)), Step("b", remat(chain), body, takes=("positions",))), extras=("positions",)
    )
    action = Compress("int8") if place is None else Compress("int8") | place
    op, params = with_policy(chain, Policy({"b.x": action})), chain.init(cfg, key=random.key(0))
    y, kept = op.fwd(params, x, cfg)
    (row,) = [row for row in report(kept, params, x).rows if row.path == "b.x.main"]
    assert row.dtype.startswith("int8") and row.bytes == X.numel() + 4 * 6
    assert all(torch.isfinite(t).all() for t in tensors(op.bwd(kept, torch.ones_like(y), cfg)))


@pytest.mark.parametrize("rules", [{"norm": Recompute()}, {"norm.rstd": Recompute()}])
def test_a_norm_under_recompute_keeps_its_input_alone(rules):
    params = chain.init(MLP, key=random.key(0))
    y, kept = with_policy(chain, Policy(rules)).fwd(params, X, MLP)
    assert report(kept, params).kept_bytes == report(chain.fwd(params, X, MLP)[1], params).kept_bytes - kept["act"].x[..., 0].nbytes
    assert kept["up"].x is None, "its output is computed again all the same"


VIEWS = {"itself": lambda t: t, "another shape": lambda t: t.reshape(6, 8), "another order": lambda t: t.permute(2, 0, 1)}


@pytest.mark.parametrize("action", [Offload(), Compress("int8"), Compress("bf16")], ids=str)
@pytest.mark.parametrize("second", VIEWS)
@pytest.mark.parametrize("first", VIEWS)
def test_forms_of_views_share_their_bytes(first, second, action, device):
    t = torch.randn(2, 3, 8)
    a, b = VIEWS[first](t), VIEWS[second](t)
    with one_form_each():
        forms = to_form(a, action), to_form(b, action)
    assert [p.data_ptr() for p in forms[0].parts] == [p.data_ptr() for p in forms[1].parts]
    assert torch.equal(VIEWS[second](from_form(forms[0]).as_strided(t.shape, t.stride())), from_form(forms[1])) or first != "itself"
    for form, tensor in zip(forms, (a, b), strict=True):
        assert from_form(form).shape == tensor.shape
        torch.testing.assert_close(from_form(form), tensor, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("other", ["written to", "a part", "another dtype", "expanded", "another action", "of its own", "dead"])
def test_tensors_that_differ_are_packed_apart(other, device):
    t, action = torch.randn(4, 8), Compress("int8")
    with one_form_each():
        first = to_form(t, action)
        if other == "written to":
            t.mul_(2.0)
        elif other == "dead":
            t = None
        u = {
            "a part": lambda: t[1:],
            "another dtype": lambda: t.view(torch.float64),
            "expanded": lambda: t[:1].expand(4, 8),
            "of its own": lambda: t.clone(),
            "dead": lambda: torch.ones(4, 8),
        }.get(other, lambda: t)()
        second = to_form(u, Offload() if other == "another action" else action)
    assert second.parts[0] is not first.parts[0]
    step = float(u.abs().max()) / 127  # of the codes; floats read as doubles may be large
    torch.testing.assert_close(from_form(second), u, atol=step, rtol=0.0)


def test_packed_trees_share_and_come_back_unchanged(device):
    op, cfg, x = LLAMA
    params = op.init(cfg, key=random.key(0))
    y, kept = with_policy(op, "save_all").fwd(params, x, cfg)
    whole, small = report(kept).kept_bytes, report(pack(kept, Offload())).kept_bytes
    assert small == whole, "each storage once"
    want, got = (with_policy(op, "save_all").bwd(tree, torch.ones_like(y), cfg) for tree in (kept, unpack(pack(kept, Offload()))))
    same_bits(want, got, "packed")
    assert report(pack(tree_map_tensors(Tensor.clone, kept), Offload())).kept_bytes > small


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("llama", {"attn.mix.y": Compress("int8"), "attn.out.x": Compress("int8")}),
        ("llama", {"attn.qkv.*.proj.x": Compress("int8")}),
        ("gpt-2", {"attn.qkv.*.proj.x": Offload()}),
        ("shared", {"n.rstd": Recompute(), "m.norm.x": Compress("int8")}),
    ],
)
def test_fields_that_hold_one_tensor_hold_one_form(name, rules, device):
    op, cfg, x = MODELS[name]
    under, params = with_policy(op, Policy(rules)), op.init(cfg, key=random.key(0))
    y, kept = under.fwd(params, x, cfg)
    packed = [row for row in report(kept, params).rows if row.dtype == "int8" or row.dtype.endswith("on the host")]
    fields = {row.path for row in packed}
    held = {row.path for row in packed if row.bytes}
    assert len(held) == 1 and fields >= {path for path in rules if "*" not in path and Recompute() != rules[path]}
    dx, pending = under.dgrad(kept, torch.ones_like(y), cfg)
    same_bits((under.wgrad(pending, cfg), dx), under.bwd(kept, torch.ones_like(y), cfg), "halves")


CODECS = ("bf16", "fp8", "mxfp8", "int8")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["mlp", "llama", "layers", "shared"])
def test_a_codec_and_a_place_compose(name, codec, device):
    """The bits and bytes of the codec alone, in the host's memory; in either order, packed at once or one after the other."""
    op, cfg, x = MODELS[name]
    params = op.init(cfg, key=random.key(0))
    alone, both = Compress(codec), Compress(codec) | Offload()
    assert both == Offload() | Compress(codec) != alone and str(both) == f"Compress(codec='{codec}') | Offload()"
    kept, host = (
        with_policy(op, Policy({"*.x": action, "*.q": action, "*.y": action}, optional=True)).fwd(params, x, cfg)[1]
        for action in (alone, both)
    )
    rows = [report(one, params).rows for one in (kept, host)]
    changed = [(a, b) for a, b in zip(*rows, strict=True) if a != b]
    assert all(b == a._replace(dtype=f"{codec} on the host", place="host") and a.dtype == codec for a, b in changed) and changed
    y, plain = op.fwd(params, x, cfg)
    dy = torch.ones_like(y)
    want = op.bwd(unpack(pack(plain, alone)), dy, cfg)
    for packed in (pack(plain, both), pack(pack(plain, alone), Offload())):
        assert {row.dtype for row in report(packed).rows if codec in row.dtype} <= {f"{codec} on the host"}
        same_bits(op.bwd(unpack(packed), dy, cfg), want, str(both))


def test_only_a_codec_and_a_place_compose():
    for other in (Save(), Recompute(), Drop(), Compress("bf16"), "host"):
        with pytest.raises(TypeError, match=r"Compress: \| place must be Offload, got "):
            Compress("fp8") | other
    for other in (Offload(), Compress("int8"), Compress("int8") | Offload()):
        with pytest.raises(TypeError):
            (Compress("fp8") | Offload()) | other
    op, cfg, x = MODELS["llama"]
    with pytest.raises(ValueError, match="a step itself takes only Save, Recompute and Offload"):
        with_policy(op, Policy({"mlp.act": Compress("fp8") | Offload()})).init(cfg, device="meta")
