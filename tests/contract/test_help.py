"""`help(op)` at the prompt: the op's own page, not its class's."""

import inspect
import pydoc
import sys

import pytest
import torch

import funcops
from funcops import Op, chain, linear, remat, with_policy
from funcops.engine.contract.op import make_op

OPS = {name: value for room in (funcops, funcops.dist) for name, value in vars(room).items() if isinstance(value, Op)}


@pytest.mark.parametrize("name", OPS)
def test_help_shows_the_math_the_config_and_the_functions(name):
    op = OPS[name]
    text = pydoc.render_doc(op, renderer=pydoc.plaintext)
    told = inspect.getdoc(sys.modules[op.fwd.__module__]).splitlines()
    assert told[0] in text and "Gradients in one call" in text
    assert f"{op.config.__name__}(" in text
    assert all(f"{op.name}.{part}(" in text for part in ("init", "fwd", "bwd", "dgrad", "wgrad"))
    assert "An operator as data" not in text


def test_an_op_made_of_another_and_the_class_have_theirs():
    for op in (remat(linear), with_policy(chain, "minimal")):
        assert f"{op.name}.fwd(" in pydoc.render_doc(op, renderer=pydoc.plaintext)
    assert pydoc.render_doc(Op, renderer=pydoc.plaintext).count("An operator as data") == 1
    assert inspect.getdoc(Op).startswith("An operator as data")
    assert "cfg: LinearConfig, *, needs: Needs" in inspect.getdoc(linear)


def test_a_function_without_a_signature_is_shown_with_dots():
    """Python knows no signature of most of torch's functions."""
    op = make_op("made", linear.config, init=torch.ones, fwd=linear.fwd, dgrad=linear.dgrad, wgrad=linear.wgrad)
    text = pydoc.render_doc(op, renderer=pydoc.plaintext)
    assert "made.init(...)\n" in text and "made.fwd(params: " in text and text.count("(...)") == 1
