"""Every entry of `torch.autograd` and `torch.func`, over every way to call an op: plain torch's results in float64, or an error by
name."""

import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.functional as AF
from faces import FACES, D, made
from tiers import drawn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from funcops import ActivationConfig, activation, backend, differentiable

WHICH = ("x", "params", "both")


class Given:
    """A model as a function of the tensors to differentiate; the others are constants. v has their shapes, u has y's."""

    def __init__(self, model, which):
        generator = torch.Generator().manual_seed(1)
        names = [name for name, _ in model.named_parameters()]
        tensors = [torch.randn(3, D, dtype=torch.float64, generator=generator), *[p.detach().clone() for p in model.parameters()]]
        at = {"x": [0], "params": list(range(1, len(tensors))), "both": list(range(len(tensors)))}[which]
        self.at, self.w = at, tuple([tensors[i] for i in at])

        def f(*w):
            full = list(tensors)
            for i, t in zip(at, w, strict=True):
                full[i] = t
            return functional_call(model, dict(zip(names, full[1:], strict=True)), (full[0],))

        self.f = f
        self.v = tuple([torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in self.w])
        y = f(*self.w)
        self.u = torch.randn(4, *y.shape, dtype=y.dtype, generator=generator)

    def loss(self, *w):
        return self.f(*w).square().sum()

    def asking(self):
        return tuple([t.clone().requires_grad_() for t in self.w])


def grad(y, inputs, **options):
    return torch.autograd.grad(y, inputs, allow_unused=True, **options)


def dot(a, b):
    return sum((s * t).sum() for s, t in zip(a, b, strict=True) if s is not None)


def first(g):
    w = g.asking()
    return grad(g.loss(*w), w)


def created(g):
    w = g.asking()
    return [t.detach() for t in grad(g.loss(*w), w, create_graph=True)]


def batched(g):
    w = g.asking()
    return grad(g.f(*w), w, grad_outputs=g.u, is_grads_batched=True)


def backward(g):
    w = g.asking()
    g.loss(*w).backward(retain_graph=True)
    g.loss(*w).backward(inputs=w)
    return [t.grad for t in w]


def backward_of_edges(g):
    w = g.asking()
    return grad(g.loss(*w), [get_gradient_edge(t) for t in w])


def penalty(g):
    w = g.asking()
    loss = g.loss(*w)
    return grad(loss + dot(*[grad(loss, w, create_graph=True)] * 2), w)


def penalty_of_a_sum(g):
    w = g.asking()
    y = g.f(*w).sum()
    return grad(y + dot(*[grad(y, w, create_graph=True)] * 2), w)


def penalty_by_backward(g):
    w = g.asking()
    loss = g.loss(*w)
    (loss + dot(grad(loss, w, create_graph=True), g.v)).backward(inputs=w)
    return [t.grad for t in w]


def penalty_of_edges(g):
    w = g.asking()
    loss = g.loss(*w)
    return grad(loss + dot(grad(loss, w, create_graph=True), g.v), [get_gradient_edge(t) for t in w])


def upstream(g):
    """Second derivatives with respect to the leaves and to values in between."""
    w = g.asking()
    h = tuple([t.sin() for t in w])
    loss = g.loss(*h)
    outer = loss + dot(grad(loss, h, create_graph=True), g.v)
    return *grad(outer, h, retain_graph=True), *grad(outer, w)


def downstream(g):
    """Second derivative with respect to dy, in which the gradient is linear."""
    w = g.asking()
    y = g.f(*w)
    dy = g.u[0].clone().requires_grad_()
    return grad(dot(grad(y, w, grad_outputs=dy, create_graph=True), g.v), dy)


def by_y(g):
    w = g.asking()
    y = g.f(*w).exp()
    return grad(dot(grad(y.sum(), w, create_graph=True), g.v) + y.sum(), y)


def maml(g):
    w = g.asking()
    fast = [t - 0.1 * d for t, d in zip(w, grad(g.loss(*w), w, create_graph=True), strict=True)]
    return grad(g.loss(*fast), w)


def learning_rate(g):
    """The gradient of the rate, which only multiplies a gradient: no second derivative is needed."""
    w, rate = g.asking(), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    fast = [t - rate * d for t, d in zip(w, grad(g.loss(*w), w, create_graph=True), strict=True)]
    return grad(g.loss(*fast), rate)


def hutchinson(g):
    w = g.asking()
    found = grad(g.loss(*w), w, create_graph=True)
    return [v * h for v, h in zip(g.v, grad(found, w, grad_outputs=g.v), strict=True)]


def third(g):
    w = g.asking()
    second = grad(dot(grad(g.f(*w).exp().sum(), w, create_graph=True), g.v), w, create_graph=True)
    return grad(dot(second, g.v), w)


def of_functional(name, *arguments, **options):
    def run(g):
        given = {"v": g.v, "u": g.u[0]}
        fn = g.f if name in ("vjp", "jvp", "jacobian") else g.loss
        found = getattr(AF, name)(fn, g.w, *[given[a] for a in arguments], **options)
        return [t.detach() for t in flat(found)]

    run.__name__ = "_".join([name, *arguments, *options])
    return run


FUNCTIONAL = [
    of_functional("vjp", "u"),
    of_functional("vjp", "u", create_graph=True),
    of_functional("jvp", "v"),
    of_functional("jvp", "v", strict=True),
    of_functional("hvp", "v"),
    of_functional("hvp", "v", create_graph=True),
    of_functional("vhp", "v"),
    of_functional("vhp", "v", strict=True),
    of_functional("hessian"),
    of_functional("hessian", create_graph=True),
    of_functional("hessian", vectorize=True),
    of_functional("hessian", vectorize=True, outer_jacobian_strategy="forward-mode"),
    of_functional("jacobian"),
    of_functional("jacobian", create_graph=True),
    of_functional("jacobian", vectorize=True),
    of_functional("jacobian", vectorize=True, strategy="forward-mode"),
]


def dual(g):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(g.f(*map(forward_ad.make_dual, g.w, g.v))).tangent


def dual_that_asks(g):
    w = g.asking()
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(g.f(*map(forward_ad.make_dual, w, g.v)))
        return *grad(y.tangent.sum(), w, retain_graph=True), *grad(y.primal.sum(), w)


def dual_level_around(g):
    with forward_ad.dual_level():
        return first(g)


def checked(**options):
    def run(g):
        return torch.tensor(torch.autograd.gradcheck(g.f, g.asking(), fast_mode=True, **options))

    run.__name__ = "_".join(["gradcheck", *options])
    return run


def gradgradcheck(g):
    return torch.tensor(torch.autograd.gradgradcheck(g.f, g.asking(), fast_mode=True))


def hooked(g):
    w, seen = g.asking(), []
    y = g.f(*w)
    register_multi_grad_hook(w, lambda grads: seen.extend([None if t is None else t.clone() for t in grads]))
    y.grad_fn.register_prehook(lambda dys: (dys[0] * 2, *dys[1:]))
    y.register_hook(lambda dy: dy + 1)
    y.sum().backward()
    return *seen, *[t.grad for t in w]


def saved(hooks, entry):
    def run(g):
        plain = g.f

        def f(*w):
            with hooks():
                return plain(*w)

        g.f = f
        return entry(g)

    run.__name__ = f"{hooks.__name__}_{entry.__name__}"
    return run


def cloned():
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())


def checkpointed(reentrant, entry):
    def run(g):
        plain = g.f
        g.f = lambda *w: checkpoint(plain, *w, use_reentrant=reentrant)
        return entry(g)

    run.__name__ = f"checkpoint{int(reentrant)}_{entry.__name__}"
    return run


def numbers_from_zero(g):
    return tuple(range(len(g.w)))


FUNC = {
    "func_grad": lambda g: torch.func.grad(g.loss, numbers_from_zero(g))(*g.w),
    "func_grad_and_value": lambda g: torch.func.grad_and_value(g.loss, numbers_from_zero(g))(*g.w),
    "func_vjp": lambda g: torch.func.vjp(g.f, *g.w)[1](g.u[0]),
    "func_jvp": lambda g: torch.func.jvp(g.f, g.w, g.v),
    "func_jacrev": lambda g: torch.func.jacrev(g.f, numbers_from_zero(g))(*g.w),
    "func_jacfwd": lambda g: torch.func.jacfwd(g.f, numbers_from_zero(g))(*g.w),
    "func_hessian": lambda g: torch.func.hessian(g.loss, numbers_from_zero(g))(*g.w),
    "func_vmap": lambda g: torch.func.vmap(lambda u: g.f(*[t + u for t in g.w]))(torch.ones(2, dtype=torch.float64)),
    "func_vmap_of_grad": lambda g: torch.func.vmap(torch.func.grad(lambda u: g.loss(*[t + u for t in g.w])))(
        torch.ones(2, dtype=torch.float64)
    ),
    "func_linearize": lambda g: torch.func.linearize(g.f, *g.w)[1](*g.v),
}

SERVED = [
    first,
    created,
    batched,
    backward,
    backward_of_edges,
    learning_rate,
    hooked,
    dual,
    dual_level_around,
    checked(),
    checked(check_batched_grad=True),
    saved(cloned, first),
    saved(save_on_cpu, first),
    checkpointed(False, first),
    *[run for run in FUNCTIONAL if run.__name__ in ("vjp_u", "vjp_u_create_graph", "jacobian", "jacobian_create_graph")],
    *[run for run in FUNCTIONAL if run.__name__ in ("jacobian_vectorize", "jacobian_vectorize_strategy")],
]
OTHERS = [
    penalty,
    penalty_of_a_sum,
    penalty_by_backward,
    penalty_of_edges,
    upstream,
    downstream,
    by_y,
    maml,
    hutchinson,
    third,
    dual_that_asks,
    gradgradcheck,
    checked(check_forward_ad=True),
    saved(cloned, penalty),
    saved(save_on_cpu, maml),
    checkpointed(False, penalty),
    checkpointed(True, penalty),
    *[run for run in FUNCTIONAL if run not in SERVED],
]
ENTRIES = {run.__name__: run for run in (*SERVED, *OTHERS)} | FUNC
BATCHES = ("batched", "jacobian_vectorize", "gradcheck_check_batched_grad")
NOT_SERVED = {(name, face) for name in BATCHES for face in ("policy", "llama_mlp")}  # a SiLU that multiplies in place
NAMED = re.compile(r"[a-z_]+: .*must .*got .*(\. [A-Z]|, or )")  # which op, what must be, what came, and the remedy


def flat(found):
    if found is None or isinstance(found, torch.Tensor):
        return [found]
    return [t for part in found for t in flat(part)]


def value_of(entry, model, which):
    """The values of the entry, or the error that it raises."""
    try:
        return flat(entry(Given(model, which)))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return error


def as_torch(got, want):
    """A gradient that is zero may be None."""
    for a, b in zip(got, want, strict=True):
        a, b = (torch.zeros(()) if t is None else t for t in (a, b))
        torch.testing.assert_close(*torch.broadcast_tensors(a.double(), b.double()), rtol=1e-9, atol=1e-9)


def test_a_backward_that_fails_on_a_batch_says_so():
    """The error names the op, what to do instead, and the error that it was."""
    pytest.importorskip("triton")
    x = torch.randn(3, 4, requires_grad=True)
    said = r"^activation_bwd: dy must be one gradient here, got a batch .*: .+\. Call autograd.grad once per gradient$"
    with backend("triton"):
        y = differentiable(activation)(None, x, ActivationConfig("silu"))
        with pytest.raises(RuntimeError, match=said):
            torch.autograd.grad(y, x, torch.ones(2, 3, 4), is_grads_batched=True)


@pytest.mark.turns("name", "face", every=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "face"), drawn(list(ENTRIES), FACES))
def test_every_entry(name, face):
    ours, plain = made(face)
    for which in WHICH if list(ours.parameters()) else ("x",):
        want, got = value_of(ENTRIES[name], plain, which), value_of(ENTRIES[name], ours, which)
        if isinstance(want, Exception):
            assert isinstance(got, Exception), (which, want)
        elif isinstance(got, Exception):
            assert NAMED.search(str(got)), (which, got)
            assert ENTRIES[name] not in SERVED or (name, face) in NOT_SERVED, (which, got)
        else:
            as_torch(got, want)
