from funcops.engine.backend.declare import Kernel, kernel, operators, tracing, wide
from funcops.engine.backend.select import backend, gemm, wants_triton

__all__ = ["Kernel", "backend", "gemm", "kernel", "operators", "tracing", "wants_triton", "wide"]
