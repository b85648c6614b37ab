"""`help(op)` at the prompt: the op's own page, not its class's."""

import inspect
import pydoc
import sys

import pytest

import funcops
from funcops import Op, chain, linear, remat, with_policy

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
