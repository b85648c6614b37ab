"""torch's own sample inputs (OpInfo) through our ops, forward and gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import funcops as fo
from funcops.engine import trees
from funcops.testing import assert_close

pytestmark = pytest.mark.slow
DTYPE = torch.float64


def samples(name):
    info = next(op for op in op_db if op.name == name)
    for sample in info.sample_inputs("cpu", DTYPE, requires_grad=False):
        yield sample.input, tuple(sample.args), dict(sample.kwargs)


def compare(op, cfg, params, x, reference):
    """y and every gradient of our op against autograd through `reference(params, x)`."""
    y, residuals = op.fwd(params, x, cfg)
    grad = trees.tree_map_tensors(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, (params, x))
    want = reference(*grad)
    assert_close(y, want.detach(), dtype=DTYPE, length=max(want.numel(), 256), what=op.name)
    dy = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(0))
    got = op.bwd(residuals, dy, cfg)
    wanted = [t for t in trees.tensors(grad) if t.requires_grad]
    found = iter(torch.autograd.grad(want, wanted, dy))
    reference_grads = [next(found) if isinstance(t, torch.Tensor) and t.requires_grad else None for t in trees.leaves(grad)]
    assert_close(trees.leaves(got), reference_grads, dtype=DTYPE, length=1024, what=f"gradients of {op.name}")


def activation(kind):
    def one(x, args, kwargs):
        plain = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[kind]
        chosen = "gelu_tanh" if kwargs.get("approximate") == "tanh" else kind
        compare(fo.activation, fo.ActivationConfig(chosen), None, x, lambda p, t: plain(t, **kwargs))
        return True

    return one


def linear(x, args, kwargs):
    weight, bias = (*args, None)[:2]
    if weight.dim() != 2 or 0 in weight.shape:
        return False  # a vector weight is not a linear layer; ours takes no feature count of 0
    cfg = fo.LinearConfig(weight.shape[1], weight.shape[0], bias=bias is not None)
    compare(fo.linear, cfg, fo.LinearParams(weight, bias), x, lambda p, t: F.linear(t, p.weight, p.bias))
    return True


def layer_norm(x, args, kwargs):
    shape, weight, bias = (*args, None, None)[:3]
    weight, bias = kwargs.get("weight", weight), kwargs.get("bias", bias)
    if weight is None or 0 in shape or kwargs.get("eps", 1) < 0:
        return False  # ours has a weight, no dimension of size 0, and no negative eps
    cfg = fo.LayerNormConfig(tuple(shape), eps=kwargs.get("eps", 1e-5), bias=bias is not None)
    plain = lambda p, t: F.layer_norm(t, cfg.dim, p.weight, p.bias, cfg.eps)  # noqa: E731
    compare(fo.layer_norm, cfg, fo.LayerNormParams(weight, bias), x, plain)
    return True


def rms_norm(x, args, kwargs):
    shape, weight = (*args, None)[:2]
    weight = kwargs.get("weight", weight)
    if weight is None or 0 in shape or (kwargs.get("eps") or 1) < 0:
        return False  # ours has a weight, no dimension of size 0, and no negative eps
    cfg = fo.RMSNormConfig(tuple(shape), eps=kwargs.get("eps") or torch.finfo(DTYPE).eps)
    compare(fo.rms_norm, cfg, fo.RMSNormParams(weight), x, lambda p, t: F.rms_norm(t, cfg.dim, p.weight, cfg.eps))
    return True


def embedding(weight, args, kwargs):
    ids = args[0]
    if kwargs.get("max_norm") or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        return False  # options of nn.Embedding that ours does not have
    pad = kwargs.get("padding_idx")
    pad = pad % weight.shape[0] if pad is not None else None
    cfg = fo.EmbeddingConfig(*weight.shape, padding_idx=pad)
    compare(fo.embedding, cfg, fo.EmbeddingParams(weight), ids, lambda p, i: F.embedding(i, p.weight, cfg.padding_idx))
    return True


def cross_entropy(logits, args, kwargs):
    labels = args[0]
    if labels.is_floating_point() or kwargs.get("weight") is not None:
        return False  # class probabilities and class weights are not ours
    if logits.dim() > labels.dim() and logits.dim() > 2:
        logits = logits.movedim(1, -1).contiguous()  # torch has the classes second, ours last
    cfg = fo.CrossEntropyConfig(
        label_smoothing=kwargs.get("label_smoothing", 0.0),
        ignore_index=kwargs.get("ignore_index", -100),
        reduction=kwargs.get("reduction", "mean"),
    )
    options = dict(label_smoothing=cfg.label_smoothing, ignore_index=cfg.ignore_index, reduction=cfg.reduction)

    def plain(p, x):
        t, ids = x
        return F.cross_entropy(t.movedim(-1, 1) if t.dim() > 2 else t, ids, **options)

    compare(fo.cross_entropy, cfg, None, (logits, labels), plain)
    return True


TABLE = [
    ("nn.functional.gelu", activation("gelu"), 2),
    ("nn.functional.silu", activation("silu"), 2),
    ("nn.functional.relu", activation("relu"), 2),
    ("tanh", activation("tanh"), 1),
    ("sigmoid", activation("sigmoid"), 1),
    ("nn.functional.linear", linear, 4),
    ("nn.functional.layer_norm", layer_norm, 3),
    ("nn.functional.rms_norm", rms_norm, 2),
    ("nn.functional.embedding", embedding, 4),
    ("nn.functional.cross_entropy", cross_entropy, 8),
]


@pytest.mark.parametrize(("name", "run", "least"), TABLE, ids=[row[0] for row in TABLE])
@pytest.mark.filterwarnings("ignore")
def test_samples(name, run, least):
    ran = sum(run(*sample) for sample in samples(name))
    assert ran >= least, f"only {ran} samples of {name} ran"
