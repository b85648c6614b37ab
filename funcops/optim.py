"""Functional optimisers over any pytree of params: AdamW and SGD on torch's fused multi-tensor ops.

    params, state = adamw_update(params, grads, state, cfg)                  # pure: the arguments stay as they are
    params, state = adamw_update(params, grads, state, cfg, in_place=True)   # the same bits, written into the arguments

AdamW (arXiv:1711.05101), with m and v the running means of g and g^2, after t steps of a leaf:

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    p <- p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

SGD, with g' = g + weight_decay p:

    u <- momentum u + g'          p <- p - lr u        (nesterov: p <- p - lr (g' + momentum u))

The fused ops are those of `torch.optim.AdamW(fused=True)` and `torch.optim.SGD(fused=True)`: equal bits. While tracing
(torch.compile, make_fx) the same formulas are written in `torch._foreach_*` ops, which a compiler can fuse.

A leaf whose gradient is None is skipped: no decay, no step; a pure update returns that very tensor. Gradients have the
dtype of their param, or a narrower one (bfloat16 gradients of float32 master weights).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.backend import tracing
from funcops.errors import GradModeError, describe, fail, require, require_type, short
from funcops.op import config
from funcops.trees import leaf, leaves, paths, same_structure, tree, tree_map, tree_map_with_path, with_leaves

T = TypeVar("T")
FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
NO_DECAY = ("*norm*", "*.bias")


@config
class AdamWConfig:
    """`lr`, `betas` (b1, b2), `eps`, and `weight_decay`, which is decoupled (lr * weight_decay of p is taken off)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _not_negative("AdamWConfig", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        ok = isinstance(self.betas, tuple) and len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)
        require(ok, "AdamWConfig", "betas", "a pair of numbers in [0, 1)", self.betas)


@config
class SGDConfig:
    """`lr`, `momentum`, `nesterov` (needs momentum), and `weight_decay`, which is added to the gradient."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _not_negative("SGDConfig", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        require(self.momentum > 0 or not self.nesterov, "SGDConfig", "momentum", "positive for nesterov", self.momentum)


def _not_negative(where: str, **given: float) -> None:
    for name, value in given.items():
        require_type(where, name, value, float, int)
        require(math.isfinite(value) and value >= 0, where, name, "finite and not negative", value)


@tree
class AdamWState:
    """`step` counts the updates of each tensor in params, in the tree's order; the means are trees like params."""

    step: Tensor = leaf("[tensors in params], float32")
    exp_avg: Any = None
    exp_avg_sq: Any = None
    _unbound: Any = dataclasses.field(default=None, init=False, metadata={"hidden": True})  # step, and its elements


@tree
class SGDState:
    """`momentum` is a tree like params, with None leaves where cfg.momentum is 0."""

    momentum: Any = None


def adamw_init(params: Any, cfg: AdamWConfig) -> AdamWState:
    """Zero means in the dtype of each param, and zero steps. Raises for leaves that are no float tensors, and for a
    tensor that stands at two paths (it would be updated twice)."""
    require_type("adamw_init", "cfg", cfg, AdamWConfig)
    given = _check_params("adamw_init", params)
    step = torch.zeros(len(given), dtype=torch.float32, device=given[0].device if given else None)
    return AdamWState(step, _zeros_like(params), _zeros_like(params))


def adamw_update(
    params: T,
    grads: T,
    state: AdamWState,
    cfg: AdamWConfig,
    *,
    lr: float | Tensor | None = None,
    decay: Any = None,
    in_place: bool = False,
) -> tuple[T, AdamWState]:
    """One step of AdamW. `lr` overrides cfg.lr (a tensor: no host sync on CUDA); `decay` is a tree of bools like params,
    as `decay_mask` makes: a leaf with False is not decayed. `in_place` writes into params and state and returns them.

    Raises `ValueError` (structure, shape, device) or `TypeError` (not a float tensor, dtype), naming the path.

    >>> params, cfg = {"w": torch.ones(2)}, AdamWConfig(lr=0.1, weight_decay=0.0)
    >>> params, state = adamw_update(params, {"w": torch.ones(2)}, adamw_init(params, cfg), cfg)
    >>> params["w"]
    tensor([0.9000, 0.9000])
    """
    where = "adamw_update"
    require_type(where, "cfg", cfg, AdamWConfig)
    require_type(where, "state", state, AdamWState)
    trees = (params, grads, state.exp_avg, state.exp_avg_sq)
    rows, wanted, decayed = _open(
        where, trees, ("params", "grads", "state.exp_avg", "state.exp_avg_sq"), decay, in_place
    )
    step, rate = state.step, _rate(where, cfg.lr if lr is None else lr)
    if not isinstance(step, Tensor) or step.shape != (len(wanted),) or step.dtype is not torch.float32:
        fail(where, "state.step", f"float32[{len(wanted)}]", describe(step))
    with torch.no_grad():
        whole = len(rows[0]) == len(wanted)
        if not in_place:
            rows = _copied(rows)
            step = step + 1 if whole else step.clone()
        elif whole:
            step.add_(1)
        steps = _elements(state, step) if in_place else step.unbind()
        if not whole and rows[0]:
            steps = [s for s, w in zip(steps, wanted, strict=True) if w]
            torch._foreach_add_(steps, 1)
        run = _fused_adamw_ if _fusable(rows) else _foreach_adamw_
        for device, decays, (p, g, m, v, t) in _groups((*rows, steps), decayed):
            t = [s.to(device) for s in t] if t[0].device != device else t
            run(p, _like(g, p), m, v, t, _on(rate, device), cfg, cfg.weight_decay if decays else 0.0)
    if in_place:
        return params, state
    new = [_rebuilt(tree, old, values) for tree, old, values in _changed(trees, rows)]
    return new[0], AdamWState(step, new[1], new[2])


def sgd_init(params: Any, cfg: SGDConfig) -> SGDState:
    """Zero momentum in the dtype of each param, or None leaves where cfg.momentum is 0. Raises as `adamw_init`."""
    require_type("sgd_init", "cfg", cfg, SGDConfig)
    _check_params("sgd_init", params)
    return SGDState(_zeros_like(params) if cfg.momentum else tree_map(lambda _: None, params))


def sgd_update(
    params: T,
    grads: T,
    state: SGDState,
    cfg: SGDConfig,
    *,
    lr: float | Tensor | None = None,
    decay: Any = None,
    in_place: bool = False,
) -> tuple[T, SGDState]:
    """One step of SGD; arguments and errors as for `adamw_update`.

    >>> params, cfg = {"w": torch.ones(2)}, SGDConfig(lr=0.25)
    >>> sgd_update(params, {"w": torch.ones(2)}, sgd_init(params, cfg), cfg)[0]["w"]
    tensor([0.7500, 0.7500])
    """
    where = "sgd_update"
    require_type(where, "cfg", cfg, SGDConfig)
    require_type(where, "state", state, SGDState)
    trees = (params, grads, state.momentum) if cfg.momentum else (params, grads)
    rows, _, decayed = _open(where, trees, ("params", "grads", "state.momentum"), decay, in_place)
    rate = _rate(where, cfg.lr if lr is None else lr)
    with torch.no_grad():
        if not in_place:
            rows = _copied(rows)
        run = _fused_sgd_ if _fusable(rows) else _foreach_sgd_
        for device, decays, (p, g, *u) in _groups(rows, decayed):
            run(p, _like(g, p), u[0] if u else [], _on(rate, device), cfg, cfg.weight_decay if decays else 0.0)
    if in_place:
        return params, state
    new = [_rebuilt(tree, old, values) for tree, old, values in _changed(trees, rows)]
    return new[0], SGDState(new[1]) if cfg.momentum else state


def global_norm(tree: Any) -> Tensor:
    """The 2-norm over all tensors of a tree, a 0-d tensor, in float32 (float64 for float64). No host sync.

    >>> global_norm({"a": torch.tensor([3.0]), "b": (None, torch.tensor(4.0))})
    tensor(5.)
    """
    given = _float_tensors("global_norm", tree)
    if not given:
        return torch.zeros(())
    dtype = torch.float64 if any(t.dtype is torch.float64 for t in given) else torch.float32
    with torch.no_grad():
        norms = (
            torch._foreach_norm(given, 2, dtype=dtype)
            if _alike(given)
            else [torch.linalg.vector_norm(t, dtype=dtype).to(given[0].device) for t in given]
        )
        return torch.linalg.vector_norm(torch.stack(norms))


def clip_by_global_norm(grads: T, max_norm: float | Tensor, *, in_place: bool = False) -> tuple[T, Tensor]:
    """Gradients times `min(1, max_norm / (norm + 1e-6))`, as torch.nn.utils.clip_grad_norm_, and the norm before it.

    No host sync. A norm that is not finite spoils every gradient: see `funcops.precision.all_finite` and `select_step`.
    """
    if not isinstance(max_norm, Tensor):
        _not_negative("clip_by_global_norm", max_norm=max_norm)
    norm = global_norm(grads)
    old = [g for g in leaves(grads) if g is not None]
    with torch.no_grad():
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factors = {device: factor.to(device) for device in {g.device for g in old}}
        new: list[Tensor] = old
        if in_place:
            for device, by in factors.items():
                torch._foreach_mul_([g for g in old if g.device == device], by)
            return grads, norm
        if len(factors) == 1:
            new = list(torch._foreach_mul(old, factor))
        elif factors:
            new = [g * factors[g.device] for g in old]
    return _rebuilt(grads, leaves(grads), new), norm


def warmup_cosine(step: int | Tensor, *, peak: float, warmup: int, total: int, final: float = 0.0) -> Any:
    """Learning rate of update `step` (from 0): linear up to `peak` at the last of `warmup` steps, then half a cosine down
    to `final`, which it is from step `total` on. A tensor step gives a float32 tensor, without a host sync.

    >>> [round(warmup_cosine(s, peak=1.0, warmup=2, total=6), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    require(0 <= warmup <= total, "warmup_cosine", "warmup", f"from 0 to total ({total})", warmup)
    up, down = max(warmup, 1), max(total - warmup, 1)
    if isinstance(step, Tensor):
        s = step.to(torch.float32)
        fall = final + (peak - final) * 0.5 * (1.0 + torch.cos(math.pi * (s - warmup) / down))
        return torch.where(s < warmup, peak * (s + 1.0) / up, torch.where(s >= total, final, fall))
    if step < warmup:
        return peak * (step + 1.0) / up
    return final if step >= total else final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / down))


def decay_mask(params: T, exclude: Sequence[str] = NO_DECAY) -> T:
    """A tree of bools like params for `decay=`: False where a dotted path matches one of the globs.

    A glob that matches no path raises `ValueError` (the default ones may match nothing).

    >>> decay_mask({"norm": torch.ones(2), "up": torch.ones(2, 2)})
    {'norm': False, 'up': True}
    """
    if isinstance(exclude, str):
        fail("decay_mask", "exclude", "a sequence of globs", repr(exclude), TypeError)
    known = list(paths(params))
    for glob in exclude if tuple(exclude) != NO_DECAY else ():
        if not any(fnmatchcase(path, glob) for path in known):
            fail(
                "decay_mask", "exclude", f"globs that match paths among {', '.join(known) or '(no leaves)'}", repr(glob)
            )
    return tree_map_with_path(lambda path, _: not any(fnmatchcase(path, glob) for glob in exclude), params)


# The updates of one group: lists of tensors of one device and dtype.


def _fused_adamw_(p: Any, g: Any, m: Any, v: Any, t: Any, lr: Any, cfg: AdamWConfig, decay: float) -> None:
    b1, b2 = cfg.betas
    torch._fused_adamw_(
        p, g, m, v, [], t, lr=lr, beta1=b1, beta2=b2, weight_decay=decay, eps=cfg.eps, amsgrad=False, maximize=False
    )


def _foreach_adamw_(p: Any, g: Any, m: Any, v: Any, t: Any, lr: Any, cfg: AdamWConfig, decay: float) -> None:
    b1, b2 = cfg.betas
    if decay:
        torch._foreach_mul_(p, 1 - lr * decay)
    torch._foreach_lerp_(m, g, 1 - b1)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, g, g, 1 - b2)
    root = [(1 - b2**s).sqrt().to(x.dtype) for s, x in zip(t, p, strict=True)]
    rate = [(lr / (1 - b1**s)).to(x.dtype) for s, x in zip(t, p, strict=True)]
    scaled = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(v), root), cfg.eps)
    torch._foreach_sub_(p, torch._foreach_mul(torch._foreach_div(m, scaled), rate))


def _fused_sgd_(p: Any, g: Any, u: Any, lr: Any, cfg: SGDConfig, decay: float) -> None:
    torch._fused_sgd_(
        p, g, u, weight_decay=decay, momentum=cfg.momentum, lr=lr, dampening=0.0, nesterov=cfg.nesterov,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _foreach_sgd_(p: Any, g: Any, u: Any, lr: Any, cfg: SGDConfig, decay: float) -> None:
    if decay:
        g = torch._foreach_add(g, p, alpha=decay)
    if cfg.momentum:
        torch._foreach_mul_(u, cfg.momentum)
        torch._foreach_add_(u, g)
        g = torch._foreach_add(g, u, alpha=cfg.momentum) if cfg.nesterov else u
    torch._foreach_sub_(p, torch._foreach_mul(g, lr))


def _rate(where: str, lr: Any) -> Any:
    if isinstance(lr, Tensor):
        require(
            lr.numel() == 1 and lr.is_floating_point(),
            where,
            "lr",
            "a number or a float tensor of one element",
            describe(lr),
        )
        return lr.reshape(())
    require_type(where, "lr", lr, float, int)
    return float(lr)


def _on(rate: Any, device: torch.device) -> Any:
    """The rate where the fused op can read it: a host number serves every device."""
    return rate.to(device) if isinstance(rate, Tensor) and not rate.is_cpu and rate.device != device else rate


def _like(grads: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Contiguous gradients in the dtype of their params, as a fused op takes them."""
    dtype = params[0].dtype
    for g in grads:
        if g.dtype is not dtype or not g.is_contiguous():
            return [g.to(dtype).contiguous() for g in grads]
    return grads


def _elements(state: AdamWState, step: Tensor) -> Sequence[Tensor]:
    """Views of the elements of `state.step`, made once: they are a fifth of an update's host time."""
    if tracing():
        return step.unbind()
    kept = state._unbound
    if kept is None or kept[0] is not step or (kept[1] and kept[1][0].data_ptr() != step.data_ptr()):
        state._unbound = step, step.unbind()
    elements: Sequence[Tensor] = state._unbound[1]
    return elements


def _fusable(rows: list[Sequence[Tensor]]) -> bool:
    """Whether the fused op serves. It has no functional form that traces, and it walks memory, whatever the strides."""
    return not tracing() and all([all(map(Tensor.is_contiguous, row)) for i, row in enumerate(rows) if i != 1])


# From trees to lists and back.


def _open(
    where: str, trees: tuple[Any, ...], names: tuple[str, ...], decay: Any, in_place: bool
) -> tuple[list[Sequence[Tensor]], list[bool], list[bool] | None]:
    """After all checks: each tree's tensors where there is a gradient, then whether each of params' tensors has one,
    and their decay flags (None: decay everything)."""
    lists = _lists(where, trees, names)
    params, grads = lists[0], lists[1]
    kept = [row for row in zip(*lists, strict=True) if row[1] is not None]
    rows: list[Sequence[Tensor]] = list(zip(*kept, strict=True)) if kept else [() for _ in lists]
    if not _right(rows):
        _explain(where, trees, names)
    if not in_place and torch.is_grad_enabled() and any([p.requires_grad for p in rows[0]]):
        raise GradModeError(
            f"{where}: params must be tensors that do not require grad, got some that do, in grad mode. Pass in_place=True "
            "to update leaves of autograd, or call under torch.no_grad()"
        )
    wanted = [g is not None for p, g in zip(params, grads, strict=True) if p is not None]
    if decay is None:
        return rows, wanted, None
    (_, flags) = _lists(where, (trees[0], decay), ("params", "decay"))
    decayed = [flag for flag, g in zip(flags, grads, strict=True) if g is not None]
    if not all([flag is True or flag is False for flag in decayed]):
        bad = next(flag for flag in decayed if flag is not True and flag is not False)
        fail(where, "decay", "a tree of bools", describe(bad), TypeError)
    return rows, wanted, decayed


def _right(rows: list[Sequence[Tensor]]) -> bool:
    """Whether params, gradients and state agree in shapes, dtypes and devices. A few list comparisons: this is the
    launch path."""
    try:
        params, grads, *state = rows
        shapes, dtypes, devices = _traits(params)
        for row in state:
            if _traits(row) != (shapes, dtypes, devices):
                return False
        if not FLOATS.issuperset(dtypes):
            return False
        grad_shapes, grad_dtypes, grad_devices = _traits(grads)
        if grad_shapes != shapes or grad_devices != devices:
            return False
        if grad_dtypes == dtypes:
            return True
        return all([_fits(g, p) for g, p in zip(grads, params, strict=True)])
    except AttributeError:
        return False


def _traits(row: Sequence[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    return [t.shape for t in row], [t.dtype for t in row], [t.device for t in row]


def _fits(grad: Tensor, param: Tensor) -> bool:
    if grad.device != param.device:
        return False
    return grad.dtype is param.dtype or (grad.dtype in FLOATS and grad.element_size() < param.element_size())


def _explain(where: str, trees: tuple[Any, ...], names: tuple[str, ...]) -> None:
    found = [paths(tree) for tree in trees]
    for path, g in found[1].items():
        if g is None:
            continue
        p = found[0][path]
        if not isinstance(p, Tensor):
            fail(where, f"grads.{path}", f"None, as params.{path} is no tensor", describe(g), TypeError)
        for name, leaves_ in zip(names, found, strict=False):
            t, at = leaves_[path], f"{name}.{path}" if path else name
            if not isinstance(t, Tensor) or t.dtype not in FLOATS:
                fail(where, at, "a float tensor", describe(t), TypeError)
            if t.shape != p.shape:
                fail(where, at, str(list(p.shape)), list(t.shape))
            if t.device != p.device:
                fail(where, at, f"on device {p.device}", t.device)
            if name == "grads" and not _fits(t, p):
                fail(where, at, f"{short(p.dtype)} or a narrower dtype", short(t.dtype), TypeError)
            if name.startswith("state") and t.dtype is not p.dtype:
                fail(where, at, short(p.dtype), short(t.dtype), TypeError)


def _check_params(where: str, params: Any) -> list[Tensor]:
    seen: dict[int, str] = {}
    given = []
    for path, p in paths(params).items():
        if p is None:
            continue
        if not isinstance(p, Tensor) or p.dtype not in FLOATS:
            fail(where, f"params.{path}", "a float tensor or None", describe(p), TypeError)
        if id(p) in seen:
            fail(
                where,
                f"params.{path}",
                "a tensor of its own",
                f"the tensor at {seen[id(p)]}, which would be updated twice",
            )
        seen[id(p)] = path
        given.append(p)
    return given


def _zeros_like(params: Any) -> Any:
    return tree_map(lambda p: None if p is None else torch.zeros_like(p, requires_grad=False), params)


def _float_tensors(where: str, tree: Any) -> list[Tensor]:
    given = [t for t in leaves(tree) if t is not None]
    if not all([isinstance(t, Tensor) and t.dtype in FLOATS for t in given]):
        path, t = next(
            (k, t) for k, t in paths(tree).items() if t is not None and getattr(t, "dtype", None) not in FLOATS
        )
        fail(where, path or "tree", "a float tensor or None", describe(t), TypeError)
    return given


def _alike(given: list[Tensor]) -> bool:
    return len({t.device for t in given}) == 1


def _groups(rows: Sequence[Sequence[Tensor]], decayed: list[bool] | None) -> list[tuple[torch.device, bool, Any]]:
    """The rows by device, dtype and decay flag of the params."""
    params = rows[0]
    if not params:
        return []
    if decayed is None:
        _, dtypes, devices = _traits(params)
        if dtypes.count(dtypes[0]) == len(dtypes) and devices.count(devices[0]) == len(devices):
            return [(devices[0], True, rows)]
        decayed = [True] * len(params)
    found: dict[Any, list[int]] = {}
    for i, (p, decays) in enumerate(zip(params, decayed, strict=True)):
        found.setdefault((p.device, p.dtype, decays), []).append(i)
    if len(found) == 1:
        return [(key[0], key[2], rows) for key in found]
    return [(key[0], key[2], [[row[i] for i in at] for row in rows]) for key, at in found.items()]


def _copied(rows: list[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Fresh tensors for all but the gradients."""
    return [row if i == 1 or not row else [t.clone() for t in row] for i, row in enumerate(rows)]


def _changed(trees: tuple[Any, ...], rows: list[Sequence[Tensor]]) -> list[tuple[Any, Any, Any]]:
    """Each tree but the gradients, with the places where there was one, and the tensors to put there."""
    places = leaves(trees[1])
    return [(tree, places, values) for i, (tree, values) in enumerate(zip(trees, rows, strict=True)) if i != 1]


def _rebuilt(tree: T, places: Sequence[Any], values: Sequence[Any]) -> T:
    """The tree with `values`, in order, at the leaves where `places` is not None."""
    new = iter(values)
    old = leaves(tree)
    return with_leaves(tree, [a if place is None else next(new) for a, place in zip(old, places, strict=True)])


def _lists(where: str, trees: tuple[Any, ...], names: tuple[str, ...]) -> list[list[Any]]:
    """The leaves of trees that must have one structure; the error names the paths that differ."""
    if not tracing():
        for read in _readers:
            lists = [read(tree) for tree in trees]
            if None not in lists:
                return lists  # type: ignore[return-value]
    for other, name in zip(trees[1:], names[1:], strict=False):
        if not same_structure(trees[0], other):
            _differ(where, trees[0], other, names[0], name)
    if not tracing() and not any([read(trees[0]) for read in _readers]):
        _remember(trees[0])
    return [leaves(tree) for tree in trees]


def _differ(where: str, a: Any, b: Any, name_a: str, name_b: str) -> None:
    have, got = paths(a), paths(b)
    missing, extra = [k for k in have if k not in got], [k for k in got if k not in have]
    said = [f"{what} {', '.join(which)}" for what, which in (("without", missing), ("with also", extra)) if which]
    said = said or [f"other containers, {describe(b)} for {describe(a)}"]
    fail(where, name_b, f"a tree like {name_a}", "one " + " and ".join(said))


# Reading the leaves of a tree whose nodes are Python classes costs the tree library about a microsecond a node, and an
# update reads four trees. So the walk over a structure seen before is written out as source, as dataclasses do: it checks
# every container and returns the leaves, or None for a tree of any other structure.

_readers: list[Callable[[Any], list[Any] | None]] = []
_READERS_KEPT = 8


def _remember(tree: Any) -> None:
    read = _written_reader(tree)
    if read is not None:
        _readers.insert(0, read)
        del _readers[_READERS_KEPT:]


def _written_reader(tree: Any) -> Callable[[Any], list[Any] | None] | None:
    """A fast `leaves` for trees of this structure; None where the tree holds containers that this does not know."""
    lines: list[str] = []
    found: list[str] = []
    scope: dict[str, Any] = {"Tensor": Tensor, "known": (Tensor, bool, type(None)), "map": map, "set": set}

    def constant(value: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = value
        return name

    def walk(node: Any, expression: str) -> bool:
        if node is None or isinstance(node, (Tensor, bool)):
            found.append(expression)
            return True
        name = f"n{len(lines)}"
        test = f"type({name}) is not {constant(type(node))}"
        children: list[tuple[Any, str]] = []
        if type(node) is dict:
            if not all(isinstance(k, str) for k in node):
                return False
            test += f" or {name}.keys() != {constant(set(node))}"
            children = [(node[k], f"{name}[{k!r}]") for k in sorted(node)]
        elif isinstance(node, (tuple, list)):
            test += f" or len({name}) != {len(node)}"
            children = [(child, f"{name}[{i}]") for i, child in enumerate(node)]
        elif dataclasses.is_dataclass(node):
            for field in dataclasses.fields(node):
                if field.metadata.get("static"):
                    test += f" or {name}.{field.name} != {constant(getattr(node, field.name))}"
                elif not field.metadata.get("hidden"):
                    children.append((getattr(node, field.name), f"{name}.{field.name}"))
        else:
            return False
        lines.append(f"    {name} = {expression}\n    if {test}: return None")
        return all([walk(*child) for child in children])

    if tree is None or isinstance(tree, Tensor) or not walk(tree, "tree"):
        return None
    lines.append(f"    found = [{', '.join(found)}]")
    lines.append("    for kind in set(map(type, found)):\n        if not issubclass(kind, known): return None")
    lines.append("    return found")
    exec("def read(tree):\n" + "\n".join(lines), scope)
    read = scope["read"]
    right, expected = read(tree), leaves(tree)
    same = (
        right is not None and len(right) == len(expected) and all(a is b for a, b in zip(right, expected, strict=True))
    )
    return read if same else None
