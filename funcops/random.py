"""Counter-based random bits: Philox 4x32-10 (Salmon et al., SC'11), keys as small int64 tensors.

A key is int64[2]: (seed, stream), 16 bytes. Draws are pure functions of the key and the element's index, so the same
key gives the same bits on every device and in every implementation, and a captured graph draws new bits when its key changes.
"""
