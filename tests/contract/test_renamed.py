"""Old names of arguments, attributes, functions and values: each still works, and says what it is called now."""

import importlib

import pytest
import torch

import funcops
from funcops import Needs, Policy, Rule, activation, dist, rms_norm
from funcops.contract.op import OpConfig, config, make_op
from funcops.contract.schema import RECOMPUTE
from funcops.ops.activation import activation_recompute

MODULES = {
    ("funcops", "fetch"): "unpack",
    ("funcops", "stow"): "pack",
    ("funcops.contract.fields", "AGAIN"): "RECOMPUTE",
    ("funcops.contract.op", "Ahead"): "Prefetch",
    ("funcops.contract.op", "again_of"): "recompute_of",
    ("funcops.contract.schema", "AGAIN"): "RECOMPUTE",
    ("funcops.dist", "everywhere"): "all_ranks",
    ("funcops.dist", "raise_everywhere"): "raise_on_all_ranks",
    ("funcops.distributed", "everywhere"): "all_ranks",
    ("funcops.distributed", "raise_everywhere"): "raise_on_all_ranks",
    ("funcops.distributed.norms", "everywhere"): "all_ranks",
    ("funcops.distributed.norms", "raise_everywhere"): "raise_on_all_ranks",
    ("funcops.residuals", "fetch"): "unpack",
    ("funcops.residuals", "stow"): "pack",
}


def warns(where, old, new):
    return pytest.warns(DeprecationWarning, match=f"^{where}: {old} is now {new}; the old name goes in version 0.4$")


@pytest.mark.parametrize("module, old", MODULES)
def test_a_module_serves_its_old_names(module, old):
    new, room = MODULES[module, old], importlib.import_module(module)
    with warns(module, old, new) as caught:
        assert getattr(room, old) is getattr(room, new)
    assert caught[0].filename == __file__ and old not in dir(room)


def test_a_module_has_no_other_names():
    for room in (funcops, dist, importlib.import_module("funcops.contract.schema")):
        with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
            room.no_such  # noqa: B018


def test_make_op_takes_its_old_arguments():
    with pytest.warns(DeprecationWarning) as caught:
        old = make_op(
            "mine",
            activation.config,
            fwd=activation.fwd,
            dgrad=activation.dgrad,
            cheap="elementwise",
            again=activation_recompute,
            ahead=None,
        )
    assert [str(one.message).partition(";")[0] for one in caught] == [
        "make_op: cheap is now recomputable",
        "make_op: again is now recompute",
        "make_op: ahead is now prefetch",
    ]
    assert {one.filename for one in caught} == {__file__}
    assert (old.recomputable, old.recompute) == ("elementwise", activation_recompute)


@pytest.mark.parametrize("old, new", [("cheap", "recomputable"), ("again", "recompute"), ("ahead", "prefetch")])
def test_an_op_has_its_old_attributes(old, new):
    with warns("Op", old, new):
        assert getattr(rms_norm, old) is getattr(rms_norm, new)


def test_needs_have_their_old_names():
    with warns("Needs", "with_again", "with_recompute"):
        needs = Needs.ALL.with_again()
    assert needs is Needs.ALL.with_recompute()
    with warns("Needs", "again", "recompute"):
        assert needs.again is True


def test_a_policy_takes_the_old_value():
    with pytest.warns(DeprecationWarning, match="^Policy: outputs='cheap' is now outputs='recomputable';") as caught:
        assert Policy(outputs="cheap") == Policy(outputs="recomputable")
    assert caught[0].filename == __file__


def test_a_rule_takes_and_has_its_old_fields():
    with pytest.warns(DeprecationWarning, match="^Rule: (everywhere is now on_cpu|again is now recompute);") as caught:
        rule = Rule("r", "backward", lambda window: None, lambda *_: None, everywhere=True, again=True)
    assert len(caught) == 2 and rule.on_cpu and rule.recompute
    with warns("Rule", "everywhere", "on_cpu"):
        assert rule.everywhere
    with warns("Rule", "again", "recompute"):
        assert rule.again


def test_a_config_may_have_hooks_of_the_old_names():
    @config
    class HalvedConfig(OpConfig):
        apart = True
        gives_by_place = False

        def shared_out(self, dim, n):
            return self, dim + n

    hooks = {"apart": "shards_features", "gives_by_place": "gives_by_position", "shared_out": "sharded"}
    with pytest.warns(DeprecationWarning) as caught:
        make_op("halved", HalvedConfig, fwd=activation.fwd, dgrad=activation.dgrad)
    said = [f"HalvedConfig: {old} is now {new}; the old name goes in version 0.4" for old, new in hooks.items()]
    assert [str(one.message) for one in caught] == said and {one.filename for one in caught} == {__file__}
    cfg = HalvedConfig()
    assert cfg.shards_features and not cfg.gives_by_position and cfg.sharded(1, 2)[1] == 3


def test_what_is_packed_under_the_old_name_is_unpacked_under_the_new():
    kept = {"x": torch.ones(2)}
    with warns("funcops", "stow", "pack"):
        stow = funcops.stow
    assert torch.equal(funcops.unpack(stow(kept, funcops.Offload()))["x"], kept["x"]) and RECOMPUTE.name == "RECOMPUTE"
