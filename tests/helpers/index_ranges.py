"""Interval arithmetic over a compiled kernel's Triton IR: which addresses may have gone through 32 bits that do not hold them.

Grid and arguments come from a launch, so every program index, range and loop variable has known bounds. An interval that
leaves 32 bits in a 32-bit operation, or a 32-bit value of unknown size, is `WRONG`; it matters only where it reaches an
address. 64-bit values of unknown size (what a kernel loads) are `ANY`. What a kernel loads in 32 bits are numbers of rows or of
experts: `MOST_ROWS` at most, as calls refuse more.
"""

import math
import re

from funcops.library.kernels.routing import MOST_ROWS

ANY, WRONG = "any", "wrong"
LOW, HIGH = -(2**31), 2**31 - 1
_OP = re.compile(r'^\s*(?:(%[\w#-]+)(?::\d+)? = )?"?([a-z_]+\.[a-z_]+)"?(.*)$')
_NAME = re.compile(r"%[\w#-]+")


def wrong_addresses(launched):
    """Lines of Triton IR that use an address or coordinate which 32 bits may not hold."""
    found, env = [], {}
    for line in launched.compiled.asm["ttir"].splitlines():
        line = re.sub(r" loc\(.*", "", line)
        if "tt.func" in line:
            known = {f"%{k}": (v, v) for k, v in launched.arguments.items() if isinstance(v, int)}
            env.update(known)
            continue
        match = _OP.match(line)
        if not match:
            continue
        result, op, rest = match.groups()
        names = _NAME.findall(rest)
        if op == "scf.for":
            loop, first, last = names[:3]
            env[loop] = _span(env.get(first, ANY), env.get(last, ANY), _is_narrow(line))
            carried = re.search(r"iter_args\((.*?)\)", rest)
            for name in re.findall(r"(%\w+) =", carried[1]) if carried else ():
                env.pop(name, None)
            continue
        if op in ("tt.addptr", "tt.descriptor_load", "tt.descriptor_store"):
            indices = names[1:2] if op == "tt.addptr" else re.findall(_NAME, re.search(r"\[(.*?)\]", rest)[1])
            if any(_value(env, name, line) == WRONG for name in indices):
                found.append(line.strip())
        if result:
            env[result] = _evaluate(op, rest, names, env, launched.grid, _is_narrow(line))
    return found


def _is_narrow(line):
    """Whether the result of an integer operation has 32 bits."""
    return bool(re.search(r"i32>*(?: \{)?\s*$", line))


def _value(env, name, line):
    if name in env:
        return env[name]
    return WRONG if re.search(r"i32>?\s*(?:,|->|$)", line.rpartition(":")[2]) else ANY


def _span(first, last, narrow):
    if WRONG in (first, last) or ANY in (first, last):
        return WRONG if narrow else ANY
    return first[0], max(first[0], last[1] - 1)


def _evaluate(op, rest, names, env, grid, narrow):
    if op == "arith.constant":
        number = re.search(r"(?:dense<)?(-?\d+)>? :", rest)
        return (int(number[1]),) * 2 if number else ANY
    if op == "tt.make_range":
        end, start = (int(re.search(rf"{key} = (-?\d+)", rest)[1]) for key in ("end", "start"))
        return start, end - 1
    if op in ("tt.get_program_id", "tt.get_num_programs"):
        size = grid["xyz".index(rest.split()[0])]
        return (0, size - 1) if op == "tt.get_program_id" else (size, size)
    if op in ("tt.addptr", "tt.load"):
        return (0, MOST_ROWS) if narrow and op == "tt.load" else ANY
    if op == "arith.extui" and re.search(r"i8>? to", rest):
        return 0, 255
    given = [env.get(name, WRONG if narrow else ANY) for name in names]
    if op in ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "arith.extsi", "arith.index_cast"):
        return given[0]
    if op == "arith.trunci":
        return given[0] if isinstance(given[0], tuple) and LOW <= given[0][0] and given[0][1] <= HIGH else WRONG
    if op == "arith.select":
        given = given[1:]
    if op in ("arith.minsi", "arith.maxsi"):
        given = [(-math.inf, math.inf) if g == ANY else g for g in given]
    known = all(isinstance(g, tuple) for g in given)
    if op not in _ARITHMETIC or not known:
        return WRONG if narrow or WRONG in given else ANY
    low, high = _ARITHMETIC[op](*given)
    return WRONG if narrow and not (LOW <= low and high <= HIGH) else (low, high)


def _corners(f):
    def both(a, b):
        values = [f(x, y) for x in a for y in b]
        return min(values), max(values)

    return both


def _divided(a, b):
    b = [y for y in (*b, 1, -1) if y and b[0] <= y <= b[1]] or [1]
    far = 2.0**70  # beyond all addresses; a bound of a range may be infinite
    values = [int(min(max(x / y, -far), far)) for x in a for y in b]
    return min(values), max(values)


def _remainder(a, b):
    most = max(abs(b[0]), abs(b[1])) - 1
    return (0 if a[0] >= 0 else -most), min(most, max(a[1], 0)) if a[1] < most else most


_ARITHMETIC = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": _corners(lambda x, y: x * y),
    "arith.divsi": _divided,
    "arith.remsi": _remainder,
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.xori": lambda a, b: (0, 2 ** max(a[1].bit_length(), b[1].bit_length()) - 1) if min(a[0], b[0]) >= 0 else (LOW, HIGH),
    "arith.andi": lambda a, b: (0, min([x[1] for x in (a, b) if x[0] >= 0])) if max(a[0], b[0]) >= 0 else (LOW, HIGH),
    "arith.shrsi": lambda a, b: (min(a[0] >> b[0], a[0] >> b[1]), max(a[1] >> b[0], a[1] >> b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.select": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
