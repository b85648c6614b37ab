"""Torch's tracer with less making: each value that is traced gets a fake of its shape, and for each the tracer makes a mode of fake
tensors anew, which notes the whole stack. Here they are made in one mode."""

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor


def quicken():
    """Patch torch once for a process. A tracer without such a function is left alone."""
    extract = getattr(proxy_tensor, "extract_val", None)
    if extract is None:
        return
    shared = FakeTensorMode(allow_fallback_kernels=True)

    def extract_val(val, *args, **kwargs):
        if type(val) is not torch.Tensor or val.layout is not torch.strided or detect_fake_mode(val) is not None:
            return extract(val, *args, **kwargs)
        with shared:
            return torch.empty_strided(val.shape, val.stride(), device=val.device, dtype=val.dtype)

    proxy_tensor.extract_val = extract_val
