"""The engine: what an operator is, what a backward keeps, and how operators are combined. It knows no operator but the three that
combinators need (add, fork, identity), and imports nothing of funcops outside this folder.

errors, backend, trees, random: the one wording of errors; which implementation of a kernel runs; trees with paths; keys
contract: configs, needs, declared residuals, guards, the functions of an op, `make_op`
residuals: reports, donation, forms in which a tensor is kept, policies' actions
program: a combinator as rows of straight-line Python
compose: chain, skip, parallel, repeat, interleave
"""
