"""Residuals as data: printed, edited, aliased, guarded, given away."""

import builtins
import copy
import dataclasses
import pickle
import random as draws
import string

import pytest
import torch

import funcops as fo
from funcops import (
    ChainConfig,
    DonatedError,
    GradModeError,
    LinearConfig,
    LinearParams,
    Needs,
    StaleResidualError,
    Step,
    chain,
    donate,
    linear,
    linear_bwd,
    linear_dgrad,
    linear_fwd,
    linear_wgrad,
    random,
    report,
    unpack,
)
from funcops.engine.contract.schema import DGRAD, WGRAD, Pending, Residuals, saved
from funcops.engine.contract.schema import pending as pending_decorator
from funcops.engine.contract.schema import residuals as residuals_decorator
from funcops.engine.errors import SHORT, differing_parts
from funcops.engine.trees import nbytes, paths, replace, static, tree_map_tensors

CFG = LinearConfig(4, 3)
DY = torch.ones(2, 3)


def fresh():
    params = LinearParams(torch.randn(3, 4), torch.randn(3))
    x = torch.randn(2, 4)
    return params, x, linear_fwd(params, x, CFG)[1]


def test_residuals_are_the_inputs_themselves():
    params, x, residuals = fresh()
    assert residuals.x is x and residuals.weight is params.weight
    assert repr(residuals) == "LinearResiduals(x=float32[2, 4], weight=float32[3, 4])"
    assert list(paths(residuals)) == ["x", "weight"]
    assert nbytes(residuals) == 4 * (8 + 12)
    table = report(residuals, params, x)
    assert (table.kept_bytes, [row.alias_of for row in table.rows]) == (0, ["x", "params.weight"])
    assert "<table>" in table._repr_html_() and table.dicts()[0]["path"] == "x"


@pytest.mark.parametrize("which", ["x", "weight"])
def test_a_change_in_place_is_seen(which):
    params, x, residuals = fresh()
    (x if which == "x" else params.weight).add_(1)
    with pytest.raises(StaleResidualError, match=f"linear_bwd: residuals.{which} must be as the forward left it"):
        linear_bwd(residuals, DY, CFG)


def test_pending_is_guarded_too():
    _, _, residuals = fresh()
    dy = DY.clone()
    _, pending = linear_dgrad(residuals, dy, CFG)
    dy.mul_(2)
    with pytest.raises(StaleResidualError, match="linear_wgrad: pending.dy must be as the forward left it"):
        linear_wgrad(pending, CFG)


def test_an_edited_copy_passes_the_guard():
    params, x, residuals = fresh()
    x.add_(1)
    edited = replace(residuals, x=x.clone())
    assert torch.equal(linear_bwd(edited, DY, CFG)[0].weight, DY.t() @ x)
    mapped = tree_map_tensors(torch.clone, linear_fwd(params, x, CFG)[1])
    assert torch.equal(linear_bwd(mapped, DY, CFG)[1], DY @ params.weight)


def test_donation_empties_and_is_used_once():
    _, _, residuals = fresh()
    cell = donate(residuals)
    with pytest.raises(DonatedError, match="LinearResiduals.x was given away"):
        residuals.x.shape  # noqa: B018
    linear_bwd(cell, DY, CFG)
    assert repr(cell) == "Donated(spent)"
    with pytest.raises(DonatedError, match="linear_bwd: donated LinearResiduals must be unused"):
        linear_bwd(cell, DY, CFG)
    with pytest.raises(DonatedError, match="donate: residuals must be unused"):
        donate(residuals)
    with pytest.raises(TypeError, match="donate: kept must be residuals or pending of an op, or a cache, got 3.0"):
        donate(3.0)
    assert donate(None) is None


def test_grad_mode_is_refused():
    params, x, _ = fresh()
    with pytest.raises(GradModeError, match="linear_fwd: x must be a tensor that does not require grad"):
        linear_fwd(params, x.requires_grad_(), CFG)
    with torch.no_grad():
        linear_fwd(params, x, CFG)


def test_another_config_is_refused():
    _, _, residuals = fresh()
    with pytest.raises(ValueError, match=r"linear_bwd: cfg must be the config of the forward, LinearConfig\(in"):
        linear_bwd(residuals, DY, LinearConfig(4, 3, bias=False))
    wide, narrow = LinearConfig(4, 4), LinearConfig(4, 4, bias=False)
    assert differing_parts(wide, narrow) == (str(wide), str(narrow))
    many = [
        ChainConfig(steps=tuple(Step(f"s{i}", linear, at if i == 30 else wide) for i in range(n)))
        for n, at in ((40, wide), (40, narrow), (39, wide))
    ]
    assert differing_parts(many[0], many[1]) == (f"steps.30.cfg={wide}", f"steps.30.cfg={narrow}")
    assert differing_parts(many[0], many[2]) == ("steps=40 of them", "steps=39")
    assert differing_parts(("a", "b"), ("a", "c"), 19) == ("('a', 'b' ...", "('a', 'c' ...")  # too short to be taken apart
    assert all(len(text) < 300 for text in differing_parts(many[0], wide))
    assert linear_bwd(residuals, DY, LinearConfig(4, 3))[1].shape == (2, 4)  # equal is as good as identical


WRAPPED = {
    "chain": lambda cfg: ChainConfig(steps=(Step("up", linear, cfg),)),
    "repeat": lambda cfg: fo.RepeatConfig(linear, cfg, times=2),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_two_configs_are_shown_in_full_up_to_a_length_together(wrap):
    wanted, got = wrap(LinearConfig(4, 4)), wrap(LinearConfig(4, 4, bias=False))
    together = len(str(wanted)) + len(str(got))
    assert SHORT < together < 240
    for longest in (240, together):
        assert differing_parts(wanted, got, longest) == (str(wanted), str(got))
    assert differing_parts(wanted, got, together - 1)[0].startswith(("steps.0.cfg=", "cfg="))


def test_inference_mode_works():
    with torch.inference_mode():
        params, x, residuals = fresh()
        assert torch.equal(linear_bwd(residuals, DY, CFG)[1], DY @ params.weight)


def test_needs():
    assert Needs(params={"weight": True, "bias": False}) is Needs(params=["weight"])
    assert Needs(x=False, params=[]) is Needs.NONE and not Needs.NONE
    assert Needs(params="blocks.0").param("blocks.0.weight") and not Needs(params="blocks.0").param("blocks.1")
    params, x, _ = fresh()
    with pytest.raises(ValueError, match="linear_fwd: needs.params must be paths among weight, bias, got 'wieght'"):
        linear_fwd(params, x, CFG, needs=Needs(params="wieght"))
    with pytest.raises(TypeError, match="linear_fwd: needs must be a Needs, got True"):
        linear_fwd(params, x, CFG, needs=True)


NODE_USES = {
    "a sum": lambda node: node.x + 1,
    "a sum from the right": lambda node: 1 + node.x,
    "a torch function": lambda node: torch.add(node.x, 1),
    "a method": lambda node: node.x.sum(),
    "an element": lambda node: node.x[0],
    "its length": lambda node: len(node.x),
    "whether it is": lambda node: bool(node.x),
    "a product": lambda node: node.x @ node.x,
    "its rows": lambda node: list(node.x),
    "a number": lambda node: float(node.x),
    "report": report,
    "donate": donate,
    "unpack": unpack,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "a comparison": lambda node: node.x == 1,
    "a comparison of nodes": lambda node: node == node,  # noqa: PLR0124
    "an edit in place": lambda node: node.set(x=torch.ones(2, 4)),
    "an edited copy": lambda node: node.copy(x=torch.ones(2, 4)),
    "giving": lambda node: node.give(),
    "a walk of torch's": torch.utils._pytree.tree_leaves,
}
DICT_USES = {
    "a part": lambda node: node["up"],
    "get": lambda node: node.get("up"),
    "items": lambda node: list(node.items()),
    "values": lambda node: list(node.values()),
    "keys": lambda node: list(node.keys()),
    "its length": len,
    "whether it is": bool,
    "its names": list,
    "its names, last first": lambda node: list(reversed(node)),
    "whether it has a part": lambda node: "up" in node,
    "a part taken out": lambda node: node.pop("up", None),
    "any part taken out": lambda node: node.popitem(),
    "a part deleted": lambda node: node.__delitem__("up"),
    "a part put in": lambda node: node.setdefault("up", None),
    "parts put in": lambda node: node.update(up=None),
    "parts joined": lambda node: node | {},
    "parts joined in place": lambda node: node.__ior__({}),
    "emptying": lambda node: node.clear(),
    "a dict's copy": lambda node: node.copy(),
    "a plain dict": dict,
    **{
        name: NODE_USES[name]
        for name in ("report", "donate", "unpack", "pickle", "deepcopy", "copy", "a comparison of nodes", "a walk of torch's")
    },
}
CELL_USES = {
    "a field": lambda cell: cell.x,
    "a part": lambda cell: cell["up"],
    "its length": len,
    "its names": list,
    "report": report,
    **{name: NODE_USES[name] for name in ("pickle", "deepcopy", "a walk of torch's")},
}


@pytest.mark.parametrize(("kind", "use"), [(k, use) for k, of in enumerate((NODE_USES, DICT_USES, CELL_USES)) for use in of])
def test_after_donate_every_use_raises(kind, use):
    up = LinearConfig(4, 4)
    cfg = ChainConfig(steps=(Step("up", linear, up),))
    op, cfg = (chain, cfg) if kind == 1 else (linear, up)
    y, residuals = op.fwd(op.init(cfg, key=random.key(0)), torch.ones(2, 4), cfg)
    cell = donate(residuals)
    with pytest.raises(DonatedError):
        (NODE_USES, DICT_USES, CELL_USES)[kind][use](cell if kind == 2 else residuals)
    if kind == 2:
        op.bwd(cell, y, cfg)


def declared(rng, phases):
    """A class body with drawn fields and statics, and the names of its fields."""
    names = rng.sample("abcdef", rng.randint(0, 4))
    body = {"__annotations__": dict.fromkeys(names, torch.Tensor), "__module__": __name__}
    for name in names:
        body[name] = saved("[*]", alias=rng.choice((None, "x")), needed_by=rng.choice(phases))
    return names, body, tuple(rng.sample(("inputs", "shape", "dtype"), rng.randint(0, 3)))


def test_a_subclass_is_what_the_decorators_make():
    """Fields, guards, the effect of masks, copies: both kinds of class agree, for drawn classes."""
    rng = draws.Random(0)
    for i in range(40):
        base, decorate = rng.choice(((Residuals, residuals_decorator), (Pending, pending_decorator)))
        names, body, statics = declared(rng, (WGRAD,) if base is Pending else (DGRAD, WGRAD, DGRAD | WGRAD))
        own = dict(body, __annotations__=body["__annotations__"] | dict.fromkeys(statics, object)) | {s: static() for s in statics}
        made = type(base)(f"Made{i}", (base,), dict(body), static=statics), decorate(type(f"Made{i}", (), own))
        mixed = decorate(type(base)(f"Mixed{i}", (base,), dict(body), static=statics))
        given = {name: torch.ones(2) for name in names} | dict.fromkeys(statics, 7)
        for needs in (Needs.ALL, Needs.NONE, Needs(x=False), Needs(params=False)):
            seen = []
            for cls in (*made, mixed):
                node = cls.keep("cfg", needs, **given)
                fresh = node is not None and node.fresh()
                if node is not None and cls.guarded and getattr(node, cls.guarded[0]) is not None:
                    getattr(node, cls.guarded[0]).add_(0)
                    fresh = fresh, node.fresh(), copy.copy(node).fresh()
                about = cls.kind, cls.fields, sorted(cls.names), cls.guarded, issubclass(cls, base)
                seen.append((about, fresh, paths(node).keys()))
                assert node is None or (not hasattr(node, "__dict__") and [getattr(node, s) for s in statics] == [7] * len(statics))
            assert seen[0] == seen[1] == seen[2]


def test_an_unknown_static_field_raises():
    with pytest.raises(ValueError, match="Wrong: static must be names among inputs, shape, dtype, got 'size'"):
        type(Residuals)("Wrong", (Residuals,), {}, static=("shape", "size"))


CONFIGS = {
    "linear": fo.LinearConfig(3, 4, bias=False),
    "attention": fo.AttentionConfig(causal=True, window=4),
    "chain": fo.ChainConfig(steps=(fo.Step("a", fo.linear, fo.LinearConfig(4, 4)),), recompute=True),
    "repeat": fo.RepeatConfig(fo.activation, fo.ActivationConfig("gelu"), 3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pickled_config_is_made_anew(name):
    """Hashes of strings differ between processes, so the config's hash, and all that follows from its fields, is recomputed."""
    cfg = CONFIGS[name]
    hash(cfg)
    made, fields = cfg.__reduce__()
    again = made(*fields)
    assert again is not cfg and again == cfg and hash(again) == hash(cfg)
    assert set(fields[1]) == {f.name for f in dataclasses.fields(cfg) if f.init} and "_hash" not in repr(fields)


def every_class(base):
    for one in base.__subclasses__():
        yield one
        yield from every_class(one)


def test_a_field_that_is_declared_as_a_tree_is_guarded_as_one():
    """Its shape is in braces; a tensor's is in brackets."""
    own = [cls for base in (Residuals, Pending) for cls in every_class(base) if cls.__module__.startswith("funcops.")]
    trees = [(cls, name) for cls in own for name, field in cls.fields.items() if field.shape.startswith("{")]
    assert len(own) > 60 and len(trees) >= 8
    assert [(cls.__name__, name) for cls, name in trees if not cls.fields[name].tree] == []


def test_a_tree_that_got_another_tensor_is_stale():
    class PartsResiduals(Residuals):
        parts: dict = saved("{*}", needed_by=DGRAD, tree=True)

    for change in (lambda parts: parts.update(c=torch.ones(1)), lambda parts: parts.pop("b")):
        kept = PartsResiduals.keep(CFG, Needs.ALL, parts={"a": torch.ones(2), "b": torch.ones(3)})
        assert kept.stale() is None
        change(kept.parts)
        assert kept.stale() == "parts"
        kept.parts["a"].add_(1)
        assert kept.stale() == "parts.a"


def test_functions_that_were_made_for_an_op_say_what_they_are():
    for op in (linear, fo.softcap, fo.activation):
        for half in ("init", "fwd", "bwd", "dgrad", "wgrad"):
            function = getattr(op, half)
            assert function.__name__ == function.__qualname__ == f"{op.name}_{half}" and function.__module__.startswith(
                "funcops.library.ops"
            )
            assert function.__doc__ and function.__doc__[0] in "`(" + string.ascii_letters, function.__name__
    assert fo.softcap.wgrad.__doc__ == "`softcap` has no params: takes None and returns None."
    assert fo.softcap.init.__doc__.startswith("`softcap` has no params: returns None.")
    assert fo.softcap.bwd.__doc__.startswith("The whole backward of `softcap_fwd`")


def with_field(name):
    """Residuals with a field of this name beside x."""
    fields = {name: saved("[*]", alias="y", needed_by=DGRAD), "x": saved("[*]", alias="x", needed_by=DGRAD)}
    return type(Residuals)(
        "Odd", (Residuals,), {"__module__": __name__, "__annotations__": dict.fromkeys(fields, torch.Tensor), **fields}
    )


def test_a_field_has_no_name_that_the_methods_written_for_it_use():
    """A method would read the tensor in the place of what it means, or the other way round."""
    used = set()
    for method in (getattr(with_field("free"), name) for name in ("keep", "twin", "empty", "cell", "fresh")):
        code = method.__code__
        used.update(code.co_varnames, {*code.co_names} & {*method.__globals__, *dir(builtins)})
    used = {name for name in used if not name.startswith("gone_")} - {"x", "free", "cfg", "needs", "kind"}
    assert len(used) > 15
    for name in used:
        with pytest.raises(ValueError, match=rf"^Odd.{name}: its name must be one that .* leave free, got '{name}'"):
            with_field(name)


@pytest.mark.parametrize("name", ["free", "node", "marked", "gone_x", "leaves", "fn"])
def test_a_field_of_another_name_is_kept_copied_and_given_away(name):
    one, x = torch.ones(2), torch.ones(3)
    node = with_field(name).keep(1, Needs.ALL, **{name: one, "x": x})
    for kept in (node, node.twin(), fo.donate(node.twin()).take("here")):
        assert getattr(kept, name) is one and kept.x is x and kept.fresh()
    one.add_(1)
    assert not node.fresh()
