"""Two devices without a second one: a mode notes which tensors would be on "cuda", and refuses an operator that would get tensors
of both, as torch does."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._pytree import tree_leaves, tree_map

INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)  # an index may be on the CPU


def placed(t):
    """The tensor, as one on "cuda"."""
    t.would_be_on_cuda = True
    return t


def is_placed(t):
    return getattr(t, "would_be_on_cuda", False)


def of_cuda(value):
    named = isinstance(value, str) and value.startswith("cuda")
    return named or (isinstance(value, torch.device) and value.type == "cuda")


class TwoDevices(TorchFunctionMode):
    """`torch.device("cuda")` may be entered inside. What runs is the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _device._device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = _device.CURRENT_DEVICE or torch.device("cpu")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda" if is_placed(args[0]) else "cpu")
        if func == torch.Tensor.is_cuda.__get__:
            return is_placed(args[0])
        named = [v for v in (*args, *kwargs.values()) if isinstance(v, (torch.device, str)) and _is_device(v)]
        if named or func in (torch.Tensor.cpu, torch.Tensor.cuda):
            on_cuda = any(map(of_cuda, named)) or func is torch.Tensor.cuda
        else:
            joined = given[:1] if func in INDEXED else [t for t in given if t.dim()]
            found = {is_placed(t) for t in joined}
            name = getattr(func, "__name__", func)
            assert len(found) < 2, f"{name} of tensors on cuda and on the CPU: {[(list(t.shape), is_placed(t)) for t in given]}"
            on_cuda = any(map(is_placed, given))
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.clone, args[:1]
        args, kwargs = tree_map(lambda v: "cpu" if of_cuda(v) else v, (args, kwargs))
        made = func(*args, **kwargs)
        if any(made is t for t in given) and is_placed(made) != on_cuda:
            made = made.view_as(made)  # moved, which on the CPU returns the same tensor
        if on_cuda:
            tree_map(lambda t: placed(t) if isinstance(t, torch.Tensor) else t, made)
        return made


def _is_device(value):
    return isinstance(value, torch.device) or value.partition(":")[0] in ("cpu", "cuda")
