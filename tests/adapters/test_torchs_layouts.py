"""For any layout of x, the outputs and gradients of a module of funcops.nn have the strides of torch's own module; what a traced op
has kept may come back in any layout."""

import copy

import pytest
import torch
from own_models import CFG
from torch import nn

from funcops import nn as fnn
from funcops import op_from_torch
from funcops.engine.trees import tree_map_tensors
from funcops.testing.checks import same_bits

LAYOUTS = {
    "contiguous": lambda s: torch.randn(s),
    "transposed": lambda s: torch.randn(*s[:-2], s[-1], s[-2]).mT,
    "first two swapped": lambda s: torch.randn(s[1], s[0], *s[2:]).transpose(0, 1),
    "every second row": lambda s: torch.randn(2 * s[0], *s[1:])[::2],
    "slice of the second": lambda s: torch.randn(s[0], s[1] + 3, *s[2:])[:, 1:-2],
    "every second of the last": lambda s: torch.randn(*s[:-1], 2 * s[-1])[..., ::2],
    "half of the last": lambda s: torch.randn(*s[:-1], 2 * s[-1])[..., : s[-1]],
    "expanded first": lambda s: torch.randn(1, *s[1:]).expand(s),
    "expanded second": lambda s: torch.randn(s[0], 1, *s[2:]).expand(s),
    "expanded last": lambda s: torch.randn(*s[:-1], 1).expand(s),
    "no rows": lambda s: torch.randn(0, *s[1:]),
    "no rows, transposed": lambda s: torch.randn(*s[1:], 0).movedim(-1, 0),
}
OF_IMAGES = {
    "channels last": lambda s: torch.randn(s).to(memory_format=_last(s)),
    "rows of channels last": lambda s: torch.randn(2 * s[0], *s[1:]).to(memory_format=_last(s))[::2],
    "one channel, channels last": lambda s: torch.randn(s).movedim(1, -1).contiguous().movedim(-1, 1),
}
SHAPES = (4, 8), (2, 4, 8), (2, 4, 3, 8), (2, 4, 2, 3, 8)
MODULES = {
    "Linear": lambda lib: lib.Linear(8, 6),
    "LayerNorm": lambda lib: lib.LayerNorm(8),
    "LayerNorm of two": lambda lib: lib.LayerNorm((3, 8)),
    "LayerNorm without weight": lambda lib: lib.LayerNorm(8, elementwise_affine=False),
    "RMSNorm": lambda lib: lib.RMSNorm(8),
    "RMSNorm of two": lambda lib: lib.RMSNorm((3, 8), eps=1e-6),
    "GroupNorm": lambda lib: lib.GroupNorm(2, 4),
    "GroupNorm without weight": lambda lib: lib.GroupNorm(2, 4, affine=False),
    "GELU": lambda lib: lib.GELU(),
    "GELU by tanh": lambda lib: lib.GELU(approximate="tanh"),
    "ReLU": lambda lib: lib.ReLU(),
    "SiLU": lambda lib: lib.SiLU(),
    "Sigmoid": lambda lib: lib.Sigmoid(),
    "Tanh": lambda lib: lib.Tanh(),
    "Dropout": lambda lib: lib.Dropout(0.5),
    "Softmax": lambda lib: lib.Softmax(-1),
    "Softmax along 1": lambda lib: lib.Softmax(1),
    "Softmax along 0": lambda lib: lib.Softmax(0),
    "GLU": lambda lib: lib.GLU(),
    "GLU along 1": lambda lib: lib.GLU(1),
    "GLU along 0": lambda lib: lib.GLU(0),
    "CrossEntropyLoss": lambda lib: lib.CrossEntropyLoss(reduction="none"),
}
CHOSEN = "Linear", "CrossEntropyLoss"  # torch chooses the strides of dx by the fastest product; only a leaf's are determined


def _last(shape):
    return {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]


def layout(t):
    """The strides that a view can notice, of dimensions of more than one, in a tensor with elements."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]


def run(module, name, x):
    y_of_leaf, leaf = x.detach(), x.detach().requires_grad_()
    target = (torch.zeros(x[:, 0].shape, dtype=torch.long),) if name == "CrossEntropyLoss" else ()
    y = module(leaf, *target)
    dy = torch.randn(y.shape)
    (dx,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
    y.backward(dy)
    found = [y, leaf.grad, module(y_of_leaf, *target)]
    return [(t.shape, layout(t)) for t in (found if name in CHOSEN else [*found, dx])]


def cases(name):
    for shape in SHAPES:
        if (name.endswith("of two") and len(shape) != 4) or (name.startswith("GroupNorm") and len(shape) == 2):
            continue
        for kind, make in (LAYOUTS | (OF_IMAGES if len(shape) in (4, 5) else {})).items():
            if name != "GLU along 0" or shape[0] % 2 == 0:
                yield kind, make(shape)


@pytest.mark.turns("name", every=3)
@pytest.mark.parametrize("name", MODULES)
def test_strides_are_torchs(name):
    theirs, ours = (MODULES[name](lib) for lib in (nn, fnn))
    seen = [(kind, x.shape, run(theirs, name, x), run(ours, name, x)) for kind, x in cases(name)]
    assert len(seen) >= 15
    wrong = [one for one in seen if one[2] != one[3]]
    assert not wrong, wrong


def norm_of(family, name):
    return lambda: getattr(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"), name)(8)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.eps = 1e-5


class Centred(Normed):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


class ByTorch(Normed):
    def forward(self, x):
        return nn.functional.layer_norm(x, (8,), self.weight, self.bias, self.eps)


class Rms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Silu(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


SWAPPED = {
    "LlamaRMSNorm": norm_of("llama", "LlamaRMSNorm"),
    "GemmaRMSNorm": norm_of("gemma", "GemmaRMSNorm"),
    "Olmo2RMSNorm": norm_of("olmo2", "Olmo2RMSNorm"),
    "T5LayerNorm": norm_of("t5", "T5LayerNorm"),
    "a LayerNorm by its formula": Centred,
    "a LayerNorm by torch's function": ByTorch,
    "an RMSNorm by its formula": Rms,
    "a SiLU by its formula": Silu,
}


@pytest.mark.turns("name", every=3)
@pytest.mark.parametrize("name", SWAPPED)
def test_strides_of_swapped_norms_are_torchs(name):
    theirs = SWAPPED[name]()
    ours = copy.deepcopy(theirs)
    assert len(fnn.from_torch(ours).replaced) == 1
    seen = []
    for kind, x in cases(name):
        want, got = theirs(x), ours(x)
        if kind != "expanded last":  # of constant rows nothing but rounding is left
            leaf, dy = x.detach().requires_grad_(), torch.randn(want.shape)
            gradients = [torch.autograd.grad(m(leaf), [leaf, *m.parameters()], dy) for m in (ours, theirs)]
            torch.testing.assert_close((got, gradients[0]), (want, gradients[1]), rtol=1e-4, atol=1e-4)
        seen.append((kind, x.shape, layout(want), layout(got)))
    wrong = [one for one in seen if one[2] != one[3]]
    assert not wrong, wrong


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("gate", ["first", "second"])
def test_a_gate_along_another_dimension_has_its_layout_and_values(dim, gate):
    layer, last = fnn.GLU(dim, kind="swiglu", gate=gate), fnn.GLU(kind="swiglu", gate=gate)
    for x in (torch.randn(2, 4, 6), torch.randn(6, 4, 2).transpose(0, 2), torch.randn(4, 4, 6)[::2]):
        a, b = (x.detach().requires_grad_() for _ in range(2))
        y, want = layer(a), last(b.movedim(dim, -1)).movedim(-1, dim)
        torch.testing.assert_close(y, want)
        assert y.stride() == nn.functional.glu(x, dim).stride()
        torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), leaf)[0] for t, leaf in ((y, a), (want, b))))
    with pytest.raises(ValueError, match=rf"GLU: x must be of an even size along dimension {dim}, got"):
        layer(torch.randn(3, 3, 3))


EDITS = {  # of a kept tensor: the edited one, and what is said of it
    "a copy": (torch.clone, None),
    "other strides": (lambda t: t.mT.contiguous().mT, None),
    "a lazy negation": (lambda t: torch.complex(t, -t).conj().imag, None),
    "another dtype": (torch.Tensor.float, r"got float32\[4, 4\]"),
    "another shape": (lambda t: t[:2], r"got float64\[2, 4\]"),
}


@pytest.mark.parametrize("half", ["bwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("edit", EDITS)
def test_a_kept_tensor_serves_in_any_layout_and_in_no_other_shape_or_dtype(edit, half):
    """The graph of a trace holds views that only the traced strides allow."""
    op = op_from_torch(lambda p, x, cfg: ((x @ p).tanh().view(2, 8) * 2).exp(), name="bent", init=lambda cfg, **_: None)
    p, x = (torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    change, said = EDITS[edit]

    def gradients(edited):
        y, kept = op.fwd(p, x, CFG)
        if half == "wgrad":
            _, pending = op.dgrad(kept, torch.ones_like(y), CFG)
            return op.wgrad(edited(pending), CFG)
        found = getattr(op, half)(edited(kept), torch.ones_like(y), CFG)
        return found if half == "bwd" else found[0]

    def edited(tree):
        return tree_map_tensors(lambda t: change(t) if t.shape == (4, 4) else t, tree)

    if said is None:
        same_bits(gradients(edited), gradients(lambda tree: tree), edit)
    else:
        with pytest.raises(
            (TypeError, ValueError), match=rf"bent_{half}: (residuals|pending).kept\..* must be float64\[4, 4\], .*{said}"
        ):
            gradients(edited)
