"""Everything that takes a tensor refuses a donated one: operators, conversions, attributes, torch, NumPy, copies, pickles."""

import copy
import inspect
import io
import math
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from funcops import DonatedError, LinearConfig, donate, linear, random

CFG = LinearConfig(3, 3)
SAYS = "LinearResiduals.x was given away with donate()"
BUILTINS = (
    abs,
    all,
    any,
    bin,
    bool,
    bytes,
    chr,
    complex,
    divmod,
    float,
    hex,
    int,
    iter,
    len,
    list,
    max,
    min,
    oct,
    pow,
    range,
    reversed,
    round,
    set,
    slice(0).indices,
    sorted,
    sum,
    tuple,
)
OTHER = torch.tensor([1.0, 2.0, 3.0])
STAND = torch.tensor([4.0, 5.0, 6.0])  # where the tensor goes
TENSORS = (STAND, torch.tensor(3.0), torch.tensor(3), torch.tensor([True, False, True]))
ARGUMENTS = (
    (STAND,),
    (STAND, 2),
    (2, STAND),
    (STAND, OTHER),
    (OTHER, STAND),
    (STAND, STAND),
    (STAND, 1, 2.0),
    (OTHER, 1, STAND),
    (OTHER, STAND, 2.0),
    (np.ones(3), STAND),
    (STAND, np.ones(3)),
)
IN_LISTS = (([STAND],), ([STAND, OTHER],), ((OTHER, STAND),))  # where a function looks into these
NUMPY = (np.asarray, np.array, np.add, np.exp, np.matmul, np.stack, np.mean, np.savetxt, np.isnan, np.less)
TORCH = (
    torch.as_tensor,
    torch.tensor,
    torch.asarray,
    torch.stack,
    torch.cat,
    torch.add,
    torch.exp,
    torch.matmul,
    torch.where,
    torch.equal,
    torch.is_floating_point,
    torch.numel,
    torch.allclose,
    torch.einsum,
    torch.broadcast_tensors,
    torch.block_diag,
    F.relu,
    F.linear,
    F.pad,
    F.mse_loss,
    torch._foreach_add_,
    torch._foreach_norm,
    torch.autograd.grad,
    torch.nn.Parameter,
    torch.from_dlpack,
    torch.linalg.vector_norm,
    torch.nn.utils.clip_grad_norm_,
)
USES = {
    "format": lambda t: format(t[0], ".3f"),
    "f-string": lambda t: f"{t[0]:.3f}",
    "a += t": lambda t: operator.iadd(OTHER.clone(), t),
    "a[t]": lambda t: OTHER[t > 0],
    "a[0] = t": lambda t: OTHER.clone().__setitem__(slice(None), t),
    "t[0] = a": lambda t: t.__setitem__(0, 1.0),
    "a @ t": lambda t: OTHER @ t,
    "unpacked": lambda t: print(*t, file=io.StringIO()),
    "in": lambda t: 4.0 in t,
    "branch": lambda t: 1 if t.sum() else 2,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy of a list": lambda t: copy.deepcopy([t]),
    "torch.save": lambda t: torch.save({"x": t}, io.BytesIO()),
    **{f"pickle {n}": lambda t, n=n: pickle.dumps(t, n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
}


def gone():
    """A linear layer's donated `residuals.x`."""
    _, residuals = linear.fwd(linear.init(CFG, key=random.key(0)), torch.ones(3, 3), CFG)
    donate(residuals)
    return residuals.x


def put(arguments, value):
    """Replace STAND by the tensor."""
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(put(one, value) for one in arguments)
    return value if arguments is STAND else arguments.clone() if arguments is OTHER else copy.copy(arguments)


def works(call, arguments):
    for t in TENSORS:
        try:
            call(*put(arguments, t.clone()))
        except Exception:
            continue
        return True
    return False


def calls():
    modules = [f for m in (operator, math) for name, f in vars(m).items() if inspect.isbuiltin(f) and not name.startswith("is_")]
    left = {operator.contains}  # a tensor's own refuses anything but a tensor; USES has the other way round
    for call in dict.fromkeys((*modules, *BUILTINS)).keys() - left:
        yield from ((call, arguments) for arguments in ARGUMENTS)
    for call in (*NUMPY, *TORCH):
        yield from ((call, arguments) for arguments in (*ARGUMENTS, *IN_LISTS))


@pytest.mark.filterwarnings("ignore")
def test_functions_that_take_a_tensor_raise():
    """Every function of Python's operators and numbers, and some of torch and NumPy, with the tensor in any place."""
    wrong, asked, t = [], 0, gone()
    for call, arguments in calls():
        if works(call, arguments):
            asked += 1
            try:
                call(*put(arguments, t))
            except DonatedError as error:
                assert str(error).startswith(SAYS)
            except Exception as error:
                wrong.append((call, arguments, repr(error)))
            else:
                wrong.append((call, arguments))
    assert asked > 200 and not wrong, "\n".join(map(str, [asked, *wrong]))


@pytest.mark.parametrize("name", USES)
def test_uses(name):
    USES[name](STAND.clone())
    with pytest.raises(DonatedError, match=SAYS[:-2]):
        USES[name](gone())


KEPT = {  # what Python asks of any object
    "__class__",
    "__delattr__",
    "__dict__",
    "__dir__",
    "__doc__",
    "__getattribute__",
    "__getstate__",
    "__hash__",
    "__init__",
    "__init_subclass__",
    "__module__",
    "__new__",
    "__repr__",
    "__setattr__",
    "__sizeof__",
    "__str__",
    "__subclasshook__",
    "__weakref__",
    "__torch_function__",
    "__format__",
    "__annotations__",
    "__slotnames__",
}


def test_every_attribute_of_a_tensor_is_refused():
    """Python looks up methods with two underscores on the type."""
    t, left = gone(), []
    for name in dir(torch.Tensor):
        special = name.startswith("__") and callable(getattr(torch.Tensor, name))
        try:
            getattr(type(t), name)(t) if special else getattr(t, name)
        except DonatedError as error:
            assert str(error).startswith(SAYS)
        except (AttributeError, TypeError):
            left.append(name)
        else:
            left.append(name)
    assert set(left) <= KEPT, sorted(set(left) - KEPT)


def test_functions_of_any_object_still_work():
    t = gone()
    assert {t: 1}[t] == 1 and hash(t) == hash(t) and isinstance(t, object) and not isinstance(t, torch.Tensor)
    assert repr(t) == str(t) == f"{t}" == "donated" and t is not None and not callable(t)


@pytest.mark.parametrize("half", ["bwd", "wgrad"])
def test_the_call_that_takes_a_donated_node_empties_it(half):
    """A copy of the cell, as of a tree that holds it, has the same node: neither can be used again, and no tensor is kept."""
    y, node = linear.fwd(linear.init(CFG, key=random.key(0)), torch.ones(2, 3), CFG)
    if half == "wgrad":
        node = linear.dgrad(node, y, CFG)[1]
    given = donate(node)
    other = copy.copy(given)
    run = (lambda one: linear.bwd(one, y, CFG)) if half == "bwd" else (lambda one: linear.wgrad(one, CFG))
    run(given)
    for one in (given, other):
        with pytest.raises(DonatedError, match=f"^linear_{half}: "):
            run(one)


def test_a_node_equals_only_itself_and_a_cell_has_no_protocols():
    params = linear.init(CFG, key=random.key(0))
    one, other = [linear.fwd(params, torch.ones(2, 3), CFG)[1] for _ in range(2)]
    assert one == one and one != other and one != 3
    cell = donate(one)
    assert not hasattr(cell, "__array__") and copy.copy(linear) is linear
    with pytest.raises(DonatedError, match="x of donated LinearResiduals must not be used"):
        _ = cell.x
