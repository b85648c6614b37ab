"""The Triton implementations, one file for each family of `funcops.library.kernels`, imported when a kernel first needs one.

Rules that hold in all of them: 16-bit values are loaded, widened to float32 at once and rounded once at the end; offsets
are 64-bit; no atomics, so that the same call gives the same bits; a tensor that is not contiguous is copied first.
"""
