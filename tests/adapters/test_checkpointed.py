"""`from_torch` inside `torch.utils.checkpoint`: a call and its second run do the same, whatever is traced since."""

import copy
import functools
import itertools
import random

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from funcops import nn as fnn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.up(h)) * torch.tanh(self.up(x)).exp())


class Blocks(nn.Module):
    """Blocks, of which the last runs twice."""

    def __init__(self, through):
        super().__init__()
        self.blocks, self.through = nn.ModuleList([Block(), Block()]), through

    def forward(self, x):
        for block in (*self.blocks, self.blocks[-1]):
            x = self.through(block, x)
        return x


def called(block, x):
    return block(x)


def twice(block, x):
    """A checkpoint inside another."""
    inner = functools.partial(checkpoint, block, use_reentrant=False)
    return checkpoint(inner, x, use_reentrant=False)


def to_the_end(block, x):
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def products_kept(block, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


WAYS = {
    "plain": called,
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "nested": twice,
    "to the end": to_the_end,
    "selective": products_kept,
    "wrapped": called,  # by a module of torch's around each block
}
AROUND = {
    "alone": lambda model: None,
    "a hook on a block": lambda model: model.blocks[0].register_forward_hook(lambda *_: None),
    "a hook on each part": lambda model: [part.register_forward_hook(lambda *_: None) for part in model.modules()],
}


def made(way, around, order):
    torch.manual_seed(0)
    model = Blocks(WAYS[way])
    for step in order:
        if step == "from_torch":
            fnn.from_torch(model)
        elif step == "hooks":
            AROUND[around](model)
        elif way == "wrapped":
            apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
    return model


def gradients(model, xs):
    """All gradients, of several forwards before their backwards."""
    xs = [x.clone().requires_grad_() for x in xs]
    for y in [model(x) for x in xs]:
        y.square().sum().backward()
    found = [x.grad for x in xs] + [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


CASES = list(itertools.product(WAYS, AROUND, itertools.permutations(["hooks", "wrap", "from_torch"])))


@pytest.mark.parametrize(
    ("way", "around", "order"), [c if i % 21 == 10 else pytest.param(*c, marks=pytest.mark.slow) for i, c in enumerate(CASES)]
)
def test_gradients_are_those_of_the_plain_model(way, around, order):
    """With lengths that come once or again, in calls one by one and several before their backwards."""
    plain, ours = made("plain", "alone", ()), made(way, around, order)
    draw = random.Random(f"{way} {around} {order}")
    for _ in range(4):
        xs = [torch.randn(2, draw.choice((3, 5, 7)), 8) for _ in range(draw.choice((1, 1, 2, 3)))]
        torch.testing.assert_close(gradients(ours, copy.deepcopy(xs)), gradients(plain, xs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_leaves_nothing_to_the_next_compiler(way):
    """A selective checkpoint notes its policy for the nodes that torch traces, which outlived our trace of it."""
    before = dict(get_current_meta())
    gradients(made(way, "alone", ["wrap", "from_torch"]), [torch.randn(2, 3, 8)])
    assert get_current_meta() == before


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # which newer torch says of selective ones
@pytest.mark.parametrize("order", [("wrap",), ("wrap", "from_torch"), ("from_torch", "wrap")], ids="-".join)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_reported(way, order):
    """A node inside a checkpoint holds no tensor of its own: the checkpoint keeps the inputs alone."""
    model, x = made(way, "alone", order), torch.randn(2, 3, 8, requires_grad=True)
    for _ in range(2):  # before and after the first call
        assert fnn.kept_report(model, x).kept_bytes == fnn.kept_bytes(model, x)
        assert fnn.preview(model, x).kept_bytes > 0
        model(x).sum().backward()
