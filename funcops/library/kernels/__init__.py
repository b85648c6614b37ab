"""Kernels: each is declared beside its torch implementation, and has its Triton implementation in the file of that name in
`triton`."""

from funcops.engine.backend.declare import FAMILIES

FAMILIES.append(f"{__name__}.triton")
