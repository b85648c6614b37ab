"""Private names of torch and Triton: the package uses exactly the names of the list, and each exists."""

import importlib
from pathlib import Path

import pytest
import torch
from private_names import NAMES, NOT_TORCH
from private_uses import private_uses

ROOT = Path(__file__).resolve().parents[2]
PLANTED = {  # a line of code: the name that is to be noticed, or None
    "import torch\ntorch._C._cuda_sleep(1)": "torch._C._cuda_sleep",
    "from torch._inductor import config": "torch._inductor.config",
    "from torch._C import _nn as them\nthem.mish_(x)": "torch._C._nn.mish_",
    "import torch.utils._sympy.functions": "torch.utils._sympy.functions",
    "import torch as t\nt._foreach_zero_(xs)": "torch._foreach_zero_",
    "import torch\na = torch.ops.aten\na._weight_norm(v, g)": "torch.ops.aten._weight_norm",
    "def f(t):\n    return t._is_zerotensor()": "._is_zerotensor",
    "def f(t):\n    return getattr(t, '_grad_fn', None)": "._grad_fn",
    "def f(module):\n    module._state_dict_hooks.clear()": "._state_dict_hooks",
    "SOURCE = 'def f(m):\\n    return m._load_state_dict_pre_hooks'": "._load_state_dict_pre_hooks",
    "SOURCE = 'return torch._C._get_tracing_state()'": "torch._C._get_tracing_state",
    "def f():\n    from torch.nn.modules.module import _global_parameter_registration_hooks": (
        "torch.nn.modules.module._global_parameter_registration_hooks"
    ),
    "from triton.compiler import ASTSource": "triton.compiler.ASTSource",
    "class A:\n    def f(self):\n        self._own = 1\n        return self._own": None,
    "import torch\ntorch.nn.functional.gelu(x)": None,
    "from triton import language as tl\ntl.load(p)": None,
    "'''Of torch._C._x, in a docstring.'''": None,
    "def f(row):\n    return row._replace(a=1)": None,
}


@pytest.fixture(scope="module")
def uses():
    return {name: files for name, files in private_uses(ROOT, "funcops", "benchmarks").items() if name not in NOT_TORCH}


@pytest.mark.slow
def test_every_private_name_is_in_the_list(uses):
    new = {name: sorted(files) for name, files in uses.items() if name not in NAMES}
    assert not new, f"take the public name instead, or say in tests/helpers/private_names.py why no public one serves: {new}"


@pytest.mark.slow
def test_every_name_of_the_list_is_used(uses):
    gone = sorted(NAMES.keys() - uses.keys())
    assert not gone, f"not used any more: take them from tests/helpers/private_names.py: {gone}"
    assert all(NAMES.values())


@pytest.mark.parametrize("code", PLANTED, ids=[repr(name) + str(i) for i, name in enumerate(PLANTED.values())])
def test_a_private_name_is_noticed_however_it_is_written(tmp_path, code):
    (tmp_path / "planted.py").write_text(code)
    found = {name for name in private_uses(tmp_path)}
    assert PLANTED[code] in found if PLANTED[code] else not found


def resolves(name):
    """Whether a dotted name leads to a module or an attribute. An attribute wins over a module of its name, as in code."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        try:
            value = importlib.import_module(".".join(parts[:i]))
            for part in parts[i:]:
                value = getattr(value, part)
        except (ImportError, AttributeError):
            continue
        except RuntimeError as error:  # Triton's driver, asked for where no device is
            assert "active" in name and "driver" in str(error), name
        return True
    return False


def dotted(name):
    """Whether a name exists without a CUDA device, in a process where Triton interprets."""
    return not name.startswith(".") and "_cuda_" not in name and "pipelining" not in name


def test_this_torch_and_triton_have_every_name():
    pytest.importorskip("triton")
    missing = [name for name in sorted(NAMES) if dotted(name) and not resolves(name)]
    assert not missing, f"torch {torch.__version__} has no more: {missing}"
    assert not resolves("torch._C._no_such_name") and not resolves("torch._no_such_module.name")


OWNERS = {
    "tensor": (torch.zeros(2), "._version ._base ._is_view ._backward_hooks ._post_accumulate_grad_hooks"),
    "storage": (torch.zeros(2).untyped_storage(), "._cdata"),
    "module": (torch.nn.Linear(1, 1), "._parameters ._modules ._apply ._forward_hooks ._forward_pre_hooks ._backward_pre_hooks"),
    "of all modules": (torch.nn.modules.module, "._global_forward_hooks ._global_forward_pre_hooks ._global_backward_hooks"),
    "operator": (torch.ops.aten.add.Tensor, "._schema"),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_attributes_are_where_the_package_looks(owner):
    value, names = OWNERS[owner]
    for name in names.split():
        assert name in NAMES and hasattr(value, name[1:]), name
