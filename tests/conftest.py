import torch
from hypothesis import settings

settings.register_profile("funcops", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("funcops")
torch.set_num_threads(1)
