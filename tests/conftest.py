import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run their source on the CPU

settings.register_profile("funcops", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("funcops")
torch.set_num_threads(1)
