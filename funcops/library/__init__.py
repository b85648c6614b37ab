"""The library: the operators of `funcops`, and what they are made of. It imports the engine, and nothing else of funcops.

kernels: tensor functions, in torch and in Triton
formats: tensors in few bits, and recipes
ops: an operator a file
fused: fusion rules, a file each
"""
