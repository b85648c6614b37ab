"""Every kernel and configuration compiles for every target, within its limits; no GPU is needed.

The committed table holds every build, and a hash of what it was compiled from. What has another hash now is compiled here,
and of the rest a few, drawn anew each day; `make aot` compiles what changed and writes the table,
`python -m benchmarks aot` all.
"""

import json
import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
import torch
import triton
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.engine.backend.launch import Launched
from funcops.testing import aot
from funcops.testing.aot import TARGETS, TOOLS, _code_bytes, _read_amd, _read_nvidia, config_of, stubbed, takes_descriptors

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "benchmarks" / "aot.csv"
DRAWN = 4  # for each target
PINNED = "triton " + re.search(r"^triton==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)[1]  # the table's compiler
OF_EXPERTS = ("grouped.product", "grouped.wgrad", "experts.up", "experts.down_dgrad")
PROGRAM = """
import dataclasses, json, random, sys, torch, triton, triton.language as tl
from funcops import (
    ActivationConfig, ChainConfig, LayerNormConfig, LinearConfig, RMSNormConfig, Step, activation, chain, layer_norm, linear,
    rms_norm,
)
from funcops.testing.aot import COMPILER, TARGETS, config_of, inspect, name_of, stubbed
from funcops.testing.fingerprint import fingerprint
from funcops.engine.backend import backend
from funcops.engine.backend.launch import compiled_launches, launcher, need_of, planned_launches
from funcops.engine.backend.shared import shared_memory
from benchmarks.aot import never_built, plan, read
from benchmarks.choices import norms, recipes, scaled_product
from funcops.library.kernels import quantize, quantize_after
from funcops.library.kernels.triton.matmul import Epilogue, matmul, rows_of
from funcops.low_precision import NVFP4, Fp8Block, Fp8Delayed, quantize_params, recipe_init, with_recipe
from funcops.engine.residuals.codec import CODECS

@triton.jit
def greedy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x - tl.sum(x, 0))

def drawn_products(dtype):
    # of any size, layout and epilogue, as linear layers ask for them
    def size(*more):
        return draw.choice(
            [draw.randint(1, 80), draw.randint(1, 300), 16 * draw.randint(1, 160), draw.choice([512, 1024, 2048, 4096]), *more]
        )

    def lies(rows, columns):
        pad = draw.choice([0, 0, 0, 3, 16])
        t = torch.empty(rows, columns + pad, dtype=dtype, device="meta")[:, :columns]
        return t if draw.random() < 0.5 else torch.empty(columns, rows + pad, dtype=dtype, device="meta")[:, :rows].mT

    for _ in range(120):
        m, n, k = size(), size(), size(4096, 8192, 16384)
        out, bias = torch.empty(m, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
        wide = torch.empty(m, n, device="meta")
        sums = Epilogue(sums=torch.empty(m, dtype=dtype, device="meta"))
        epilogue, out = draw.choice([(Epilogue(), out), (Epilogue(bias), out), (Epilogue(add=wide), wide), (sums, out)])
        matmul(rows_of(lies(m, k)), rows_of(lies(k, n)), out, epilogue)

def drawn_norms(dtype):
    # of any width, and of every power of two and its neighbours
    widths = [draw.randint(1, 40000) for _ in range(10)] + [16 * draw.randint(1, 2500) for _ in range(10)]
    for width in [*widths, *(2**i + d for i in range(16) for d in (-1, 0, 1, 16) if 2**i + d)]:
        for norm in norms(dtype, width, rows=draw.choice([3, 4096])):
            norm()

def drawn_recipes():
    # layers of any size, by recipes of any options, and what each of them reads of the op before it
    some = [Fp8Delayed(), Fp8Block(keep="input"), NVFP4(stochastic=False, hadamard=False)]
    for recipe in [draw.choice(list(recipes())) for _ in range(12)] + some:
        recipe = dataclasses.replace(recipe, emulate=True)
        if recipe.x.turns and not (recipe.delayed or recipe.hadamard):
            recipe = dataclasses.replace(recipe, keep=draw.choice(["input", "row", "col"]))
        i, o = (32 * draw.randint(1, 40) for _ in range(2))
        ops = [(rms_norm, RMSNormConfig(o)), (layer_norm, LayerNormConfig(o)), (activation, ActivationConfig("gelu"))]
        steps = Step("up", linear, LinearConfig(i, o)), Step("op", *draw.choice(ops)), Step("down", linear, LinearConfig(o, i))
        cfg = with_recipe(ChainConfig(steps=steps), recipe)
        params = chain.init(cfg, key=None, dtype=torch.float32, device="meta")
        work = quantize_params(params, cfg, recipe_init(cfg, params), columns=draw.random() < 0.5)
        y, kept = chain.fwd(work, torch.empty(draw.randint(1, 500), i, dtype=torch.bfloat16, device="meta"), cfg)
        chain.bwd(kept, y, cfg)
    for codec in CODECS.values():
        x = torch.empty(draw.randint(1, 500), draw.randint(1, 500), dtype=torch.bfloat16, device="meta")
        codec.decode(codec.encode(x), x.dtype)

table, seed, drawn, chosen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split()
sys.path.insert(0, sys.argv[5])
from races import memory_of, races

def built(launched, target):
    with stubbed(TARGETS[target].gpu):
        compiled = launched.compile()
    row = inspect(compiled, target)._asdict()
    seen = races(compiled.compiled.asm["ttgir"], memory_of(launched))
    found["races"] += [f"{row['kernel']} {row['config']} {target}: {race}" for race in seen]
    return row

known = {row.hash for row in read(table)}  # of any Triton; what is built is held to limits, and compared where it is the table's
draw = random.Random(seed)
found = {"targets": chosen, "compiler": COMPILER}
found |= {"planned": [], "built": [], "missing": [], "races": [], "products": [], "norms": [], "recipes": [], "needs": []}

def declared(launched):
    # what a launch declares to need of shared memory
    need = need_of(launched.kernel)
    return None if need is None else need(launched.arguments, launched.stages, shared_memory())

for target in chosen:
    planned = plan(target)
    hashes = [fingerprint(launched, target) for launched in planned]
    found["planned"] += [(h, name_of(p.kernel), config_of(p), target) for h, p in zip(hashes, planned)]
    found["missing"] += never_built(planned, target)
    with stubbed(TARGETS[target].gpu):
        found["needs"] += [(h, target, name_of(p.kernel), declared(p)) for h, p in zip(hashes, planned)]
    old = [launched for h, launched in zip(hashes, planned) if h in known]
    new = [launched for h, launched in zip(hashes, planned) if h not in known]
    with stubbed(TARGETS[target].gpu), planned_launches() as products:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            drawn_products(dtype)
        found["needs"] += [("", target, name_of(p.kernel), declared(p)) for p in products]
    found["products"] += [(name_of(p.kernel), config_of(p), target, p.key[-2]) for p in products]
    with stubbed(TARGETS[target].gpu), planned_launches() as launches, backend("triton"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            drawn_norms(dtype)
        found["needs"] += [("", target, name_of(p.kernel), declared(p)) for p in launches]
    found["norms"] += [(name_of(p.kernel), config_of(p), target, p.key[-2]) for p in launches]
    with stubbed(TARGETS[target].gpu), planned_launches() as launches, backend("triton"):
        drawn_recipes()
    found["recipes"] += [(name_of(p.kernel), config_of(p), target, p.key[-2]) for p in launches]
    found["built"] += [built(launched, target) for launched in new + draw.sample(old, min(drawn, len(old)))]
with stubbed(), compiled_launches() as launches:
    x = torch.empty(8192, device="meta")
    launcher(greedy)(1, 1, 1, x, x, 8192, num_warps=1)
with stubbed(), compiled_launches() as quantisers, backend("triton"):
    x, w, one = (torch.empty(n, dtype=torch.bfloat16, device="meta") for n in ((512, 512), 512, 1))
    codes, scales, *_ = quantize.quantize_both(x, "e4m3", 1, 128, "pow2", None)
    quantize.retile(codes, scales.mT, "e5m2", 1, 128)
    quantize.quantize_scaled(x, "e5m2", one.float())
    quantize_after.rms_norm_quantize(x, w, 1e-5, False, "e4m3", 128, "pow2")
    quantize_after.glu_quantize(x, "swiglu", True, "e5m2", 128, "pow2")
found["ptx"] = {f"{name_of(one.kernel)} {config_of(one)}": one.compiled.asm["ptx"] for one in quantisers}
found["epilogues"] = {}
for target in ("sm_90", "sm_100", "sm_120"):
    with stubbed(TARGETS[target].gpu), compiled_launches() as described:
        a, b, c = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(3))
        for epilogue in (Epilogue(), Epilogue(add=a), Epilogue(z=a, mode="derivative", kind="gelu")):
            matmul(rows_of(a), rows_of(b), c, epilogue)
    found["epilogues"][target] = [one.compiled.asm["ptx"] for one in described]
with stubbed(), compiled_launches() as rooted, backend("triton"):
    for width in (4096, 4099, 65536):
        next(norms(torch.bfloat16, width))()
found["roots"] = {name_of(one.kernel): one.compiled.asm["ptx"] for one in [*rooted, *quantisers]}

def refused(target, *product):
    with stubbed(TARGETS[target].gpu), planned_launches() as planned, backend("triton"):
        try:
            scaled_product(*product, emulate=False)
        except ValueError as error:
            assert not planned
            return str(error)
        return ""

PRODUCTS = [
    ("e4m3", "e5m2", "float32", (0, 0), (0, 0)), ("e4m3", "e4m3", "pow2", (1, 128), (128, 128)),
    ("e4m3", "e4m3", "e8m0", (1, 32), (1, 32)), ("e2m1", "e2m1", "e4m3", (1, 16), (16, 16)),
]
found["refused"] = {target: [refused(target, *product) for product in PRODUCTS] for target in TARGETS}
with stubbed(TARGETS["sm_90"].gpu), planned_launches() as planned, backend("triton"):
    for product in PRODUCTS[2:]:
        scaled_product(*product)
found["decoded"] = [name_of(one.kernel) for one in planned]
found["greedy"] = inspect(launches[0], "sm_90")._asdict()
print(json.dumps(found))
"""


def rows():
    from benchmarks.aot import read

    return [row._asdict() for row in read(TABLE)]


@pytest.fixture(scope="module", params=[pytest.param("every target", marks=pytest.mark.slow)])
def found(tmp_path_factory):
    from funcops.testing.aot import TARGETS

    seed = int(time.time() // 86400)
    path = tmp_path_factory.mktemp("aot") / "program.py"
    path.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, path, TABLE, str(seed), str(DRAWN), " ".join(TARGETS), Path(__file__).parents[1] / "helpers"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    print(f"seed {seed}: built", *(f"{b['kernel']} {b['config']} {b['target']}" for b in found["built"]), sep="\n  ")
    return found


def spills_on_sm_90(build):
    """The one build that does: a LayerNorm's backward of 1,024 numbers that adds a residual's gradient and makes the output again,
    as GPT-2's. With one stage it has registers enough, but waits for every load: no device has said which is faster."""
    words = (
        "ADD=True CENTRE=True WEIGHT=True SHIFTED=False BIAS=True NORMED=True DX=True DW=True DB=True AGAIN=False STAGES=3 ROWS=8"
    )
    return build["kernel"] == "norm_kernels.backward" and f"{words} BLOCK=1024" in build["config"] and build["spills"] <= 72


def within_limits(build):
    from funcops.testing.aot import TARGETS

    target = build["target"]
    assert build["shared"] <= TARGETS[target].shared_limit, build
    assert target != "sm_90" or build["spills"] == 0 or spills_on_sm_90(build), build
    multiplies = build["kernel"].startswith("gemm") and build["kernel"] != "gemm.after" or build["kernel"] in OF_EXPERTS
    if multiplies and build["config"].startswith(("bfloat16", "float16")):
        assert build["matrix"] and (target != "sm_90" or "HGMMA" in build["matrix"]), build
    assert build["kernel"] not in ("gemm.descriptor", "gemm_specialised.specialised") or not build["spills"], build
    if build["kernel"] == "scaled_mm.product":
        assert set(build["matrix"].split(", ")) & multipliers(target, build["config"]), build
    if build["kernel"].startswith(("quantize", "scaled_mm")):
        assert target not in ("sm_90", "sm_100", "sm_120") or not build["spills"], build
    if build["kernel"].startswith(("grouped", "experts")):
        assert target in ("gfx942", "gfx950", "sm_120") or not build["spills"], build


def multipliers(target, config):
    """The tensor-core opcodes of products of codes: Hopper multiplies codes with MX scales as bfloat16."""
    if target == "sm_90":
        return {"HGMMA"} if "KIND=e8m0" in config else {"QGMMA"}
    return {("UTC" if target == "sm_100" else "") + ("OMMA" if "A=e2m1 B=e2m1" in config else "QMMA")}


def wrong_rows(planned, table, compiler):
    """The rows that the table lacks, and the rows that it should not have."""
    want = {tuple(row) for row in planned}
    have = {(row["hash"], row["kernel"], row["config"], row["target"]) for row in table if row["compiler"] == compiler}
    return sorted(want - have), sorted(have - want) + [row for row in table if row["compiler"] != compiler]


@pytest.mark.slow
def test_every_build_keeps_its_limits(found):
    assert not found["missing"], "kernels without a call in benchmarks/kernel_calls.py"
    assert len(found["built"]) >= len(found["targets"]) * DRAWN
    for build in [*rows(), *found["built"]]:
        within_limits(build)
    assert not found["races"]


def test_drawn_builds_equal_the_table(found):
    table = {row["hash"]: row for row in rows()}
    for build in found["built"]:
        row = table.get(build["hash"])
        assert row is None or row["compiler"] != build["compiler"] or row == build


def test_the_committed_table_is_of_these_kernels(found):
    table = [row for row in rows() if row["target"] in found["targets"]]
    missing, over = wrong_rows(found["planned"], table, PINNED)  # the hashes are of sources and launches: the same for every Triton
    assert not missing and not over, (
        f"{TABLE.name} lacks {len(missing)} rows and has {len(over)} too many; `make aot` mends it: {missing[:3]} {over[:3]}"
    )


def test_launches_declare_enough_shared_memory_and_no_more_than_a_card_has(found):
    """At least what the compiler takes; so what is planned within a card's memory compiles within it. Every kernel that exceeded
    the memory of a card declares its need."""
    taken = {row["hash"]: row["shared"] for row in rows()} | {build["hash"]: build["shared"] for build in found["built"]}
    declaring = [row for row in found["needs"] if row[-1] is not None]
    for known, target, kernel, need in declaring:
        assert taken.get(known, 0) <= need <= TARGETS[target].shared_limit, (kernel, target, known, need)
    assert {kernel for _, _, kernel, _ in declaring} == {
        *("gemm.descriptor", "gemm_specialised.specialised", "scaled_mm.product", "slot_attention.slots"),
        *("norm_kernels.backward", "norm_odd.forward"),
    }
    assert len(declaring) > 150 * len(found["targets"])


def choice_of(kernel, config, target, warps):
    """A product's choice: kernel, dtypes (16-bit ones are one class), tile, target and warps."""
    words = dict(word.split("=", 1) for word in config.split() if "=" in word)
    dtypes = [word.replace("bfloat16", "16-bit").replace("float16", "16-bit") for word in config.split() if "=" not in word]
    blocks = tuple(words.get(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK", "SUMS"))
    return kernel, tuple(dtypes[:1] if words.get("BIAS") == "True" else dtypes), blocks, target, int(warps)


def test_no_product_makes_a_choice_without_a_row(found):
    known = {choice_of(row["kernel"], row["config"], row["target"], row["warps"]) for row in rows()}
    made = {choice_of(*product) for product in found["products"]}
    assert len(made) > 15 * len(found["targets"]) and not made - known


def way_of(kernel, config, target, warps):
    """The way in which a norm takes rows: kernel, dtypes, elements at a time, whether it loads them twice, and whether rows are
    aligned."""
    words = dict(word.split("=", 1) for word in config.split() if "=" in word)
    dtypes = tuple(word.replace("bfloat16", "16-bit").replace("float16", "16-bit") for word in config.split() if "=" not in word)
    elements = int(words.get("ROWS", 1)) * int(words.get("PIECES", 1)) * int(words["BLOCK"])
    return kernel, dtypes, elements, words.get("AGAIN"), "width%16" in words, target, int(warps)


def test_no_norm_takes_rows_in_a_way_without_a_row(found):
    names = {name for name, *_ in found["norms"]}
    known = {way_of(row["kernel"], row["config"], row["target"], row["warps"]) for row in rows() if row["kernel"] in names}
    taken = {way_of(*norm) for norm in found["norms"]}
    assert len(names) == 10 and len(taken) > 37 * len(found["targets"]) and not taken - known


def codes_of(kernel, config, target, warps):
    """The choice of a kernel that makes, decodes or multiplies codes: kernel, dtypes, elements, tiles and scales, but not sizes."""
    sized = ("ROWS", "BLOCK") if kernel == "quantize_after.norm" else ()
    return kernel, target, *(word for word in config.split() if "%16" not in word and word.split("=")[0] not in sized)


def test_no_recipe_makes_a_choice_without_a_row(found):
    names = "quantize.", "quantize_after.", "scaled_mm."
    known = {codes_of(row["kernel"], row["config"], row["target"], row["warps"]) for row in rows()}
    made = {codes_of(*launch) for launch in found["recipes"] if launch[0].startswith(names)}
    assert len(made) > 20 * len(found["targets"])
    assert not (made - known), sorted(map(str, made - known))


def test_products_of_codes_use_tensor_cores():
    """Every pair of elements and kind of scales, on Hopper and both Blackwells."""
    seen = {}
    for row in rows():
        words = dict(word.split("=", 1) for word in row["config"].split() if "=" in word)
        if row["kernel"] == "scaled_mm.product":
            seen.setdefault((row["target"], words["KIND"]), set()).add((words["A"], words["B"], row["matrix"]))
    eights = [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    want = {("sm_90", kind): {(*pair, "QGMMA") for pair in eights} for kind in ("pow2", "float32")}
    for target, of in (("sm_100", "UTC"), ("sm_120", "")):
        want |= {(target, kind): {(*pair, f"{of}QMMA") for pair in eights} for kind in ("pow2", "float32", "e8m0")}
        want |= {(target, "e4m3"): {("e2m1", "e2m1", f"{of}OMMA")}}
    assert seen == want


def test_a_table_that_is_not_of_these_kernels_is_seen():
    table = rows()
    compiler = PINNED
    planned = [tuple(row[name] for name in ("hash", "kernel", "config", "target")) for row in table]
    assert wrong_rows(planned, table, compiler) == ([], [])
    draw = random.Random(0)
    for i in draw.sample(range(len(table)), 5):
        row = table[i]
        assert wrong_rows(planned, table[:i] + table[i + 1 :], compiler) == ([planned[i]], [])  # a choice without a row
        assert wrong_rows(planned[:i] + planned[i + 1 :], table, compiler) == ([], [planned[i]])  # a row without a choice
        for name, value in (("hash", "0" * 12), ("compiler", "triton 3.6.0")):
            missing, over = wrong_rows(planned, [*table[:i], {**row, name: value}, *table[i + 1 :]], compiler)
            assert missing == [planned[i]] and len(over) == 1


def before_casts(ptx):
    """The instructions that produce the operands of casts to 8 bits."""
    made = {register: opcode for opcode, register in re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.]*)\s+(%\w+),", ptx, re.M)}
    casts = re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+%\w+, (%\w+), (%\w+);", ptx)
    return [made[register] for cast in casts for register in cast]


def test_nothing_is_clamped_before_a_cast(found):
    """min and max of NaN and a number return the number, so a clamp would hide a NaN."""
    assert {name.split()[0] for name in found["ptx"]} == {"quantize.tiles", "quantize_after.norm", "quantize_after.pointwise"}
    assert len(found["ptx"]) == 5
    for name, ptx in found["ptx"].items():
        made = before_casts(ptx)
        assert len(made) >= 16 and set(made) == {"mul.f32"}, name
        assert "min.f32" in before_casts(ptx.replace("mul.f32", "min.f32")), name


def test_the_root_of_a_rows_mean_square_is_rounded(found):
    """An approximate root is 0 for a row of subnormal squares, whose output would be infinite."""
    roots = {name: set(re.findall(r"\bsqrt[.\w]*", ptx)) for name, ptx in found["roots"].items()}
    rounded = {"norm_kernels.forward", "norm_odd.forward", "norm_kernels.forward_long", "quantize_after.norm"}
    assert {name: of for name, of in roots.items() if of} == dict.fromkeys(rounded, {"sqrt.rn.f32"})


def test_a_device_that_lacks_a_format_says_so(found):
    wanted = "scaled_mm: device must be of sm_{} or later for {} products of {} by {} (or emulate=True), got {}"
    eight = [("90", "8-bit", "e4m3", "e5m2"), ("90", "8-bit", "e4m3", "e4m3")]
    few = [("100", "MX", "e4m3", "e4m3"), ("100", "NVFP4", "e2m1", "e2m1")]
    assert found["refused"].pop("sm_100") == found["refused"].pop("sm_120") == [""] * 4
    assert found["refused"].pop("sm_90") == ["", "", *(wanted.format(*words, "sm_90") for words in few)]
    for target, messages in found["refused"].items():
        assert messages == [wanted.format(*words, target) for words in eight + few]


def test_hopper_decodes_both_operands_of_formats_that_it_lacks(found):
    """And multiplies them as any bfloat16."""
    decode, product = "quantize.decode", "gemm.descriptor"
    assert found["decoded"] == [decode, product, decode, decode, product]  # MX operands share a build


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_a_product_asks_for_what_its_epilogue_reads_while_it_runs(found, target, tmp_path):
    """The requests are under a predicate: after a branch, no wgmma overlaps with the one before."""
    for ptx, wanted in zip(found["epilogues"][target], (False, True, True), strict=True):
        lines = [line for line in ptx.splitlines() if "prefetch.global.L2" in line]
        assert bool(lines) is wanted and all("@now prefetch" in line for line in lines)
        if target == "sm_90":
            (tmp_path / "kernel.ptx").write_text(ptx)
            command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
            said = subprocess.run(command, capture_output=True, text=True, check=True)
            assert "wgmma" in ptx and "serialized" not in said.stdout + said.stderr


def test_a_kernel_that_spills_is_seen(found):
    assert found["greedy"]["spills"] > 0 and found["greedy"]["matrix"] == ""
    with pytest.raises(AssertionError):
        within_limits(found["greedy"])


@pytest.mark.parametrize("seed", range(8))
def test_figures_of_an_amd_build_are_read_from_its_text(seed):
    """Registers are counted; spilled registers, vector and scalar, have four bytes; instructions are counted once each."""
    drawn = random.Random(seed)
    registers, vector, scalar = (drawn.randrange(1, 512) for _ in range(3))
    opcodes = drawn.choices(["v_add_f32", "s_waitcnt", "v_mfma_f32_32x32x8_bf16", "global_load_dwordx4"], k=drawn.randrange(1, 30))
    code = "".join(f"\t{opcode} v0, v1\n" for opcode in opcodes)
    counts = {"sgpr_count": 7, "sgpr_spill_count": scalar, "vgpr_count": registers, "vgpr_spill_count": vector}
    said = "".join(f"    .{name}:     {count}\n" for name, count in counts.items())
    assert _read_amd({"amdgcn": f"kernel:\n; %bb.0:\n{code}.Lfunc_end0:\n{said}"}) == (
        registers,
        4 * (vector + scalar),
        set(opcodes),
        len(opcodes),
    )


def elf(*sizes):
    """A 64-bit ELF file of executable sections of these sizes, and one of data."""
    head = bytearray(64)
    struct.pack_into("<Q", head, 40, 64)
    struct.pack_into("<HH", head, 58, 64, len(sizes) + 1)
    sections = [*[(4, size) for size in sizes], (2, 999)]
    return bytes(head) + b"".join(struct.pack("<IIQQQQ", 7, 1, flags, 9, 11, size) + bytes(24) for flags, size in sections)


SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 IMAD.MOV.U32 R2, RZ, RZ, R1 ;
        /*0020*/             @UP1  HGMMA.64x64x16.F32 R24, gdesc[UR4] ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0040*/                   EXIT ;
"""


@pytest.fixture
def tools(monkeypatch):
    """The tools that Triton ships, which need a compiled kernel: their calls, in order, each with the bytes of its file."""
    calls = []

    def run(command, **options):
        tool, option, path = command
        assert tool.parent == aot.TOOLS and options == {"capture_output": True, "text": True, "check": True}
        calls.append((tool.name, option, Path(path).read_bytes()))
        said = " Function kernel:\n  REG:40 STACK:24 SHARED:0 LOCAL:0\n"
        return SimpleNamespace(stdout=said if tool.name == "cuobjdump" else SASS)

    monkeypatch.setattr(aot, "subprocess", SimpleNamespace(run=run))
    return calls


@pytest.mark.parametrize("ptx", ["wgmma.mma_async.sync", "ld.global"])
def test_figures_of_an_nvidia_build_are_read_from_its_file(ptx, tools):
    """Registers and stack are counted by one tool; another, which is slow, lists opcodes if the PTX has a product of matrices."""
    cubin = elf(160, 320)
    found = _read_nvidia({"cubin": cubin, "ptx": ptx})
    opcodes = {"LDC", "IMAD", "HGMMA", "HMMA", "EXIT"} if "mma" in ptx else set()
    assert found == (40, 24, opcodes, 480 // 16)
    assert tools == [("cuobjdump", "-res-usage", cubin), ("nvdisasm", "-c", cubin)][: 1 + bool(opcodes)]


def kernel_of(*names, module="funcops.library.kernels.triton.norm", name="_forward", src=""):
    params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in names]
    return SimpleNamespace(params=params, __module__=module, __name__=name, src=src)


def test_a_config_names_dtypes_constants_and_multiples_of_16():
    """A dtype is named once, and before all else; a descriptor has its tensor's."""
    x = torch.zeros(16, 16)
    given = {
        "n": 64,
        "x_ptr": x.bfloat16(),
        "BLOCK": 128,
        "y_desc": TensorDescriptor(x.half(), [16, 16], [16, 1], [16, 16]),
        "z_ptr": x,
        "m": 63,
        "none_ptr": None,
        "scale": 16.0,
        "k": 0,
        "FUSED": True,
    }
    launched = Launched(kernel_of(*given), (1, 1, 1), given, (), None)
    assert config_of(launched) == "bfloat16 float16 float32 n%16=0 BLOCK=128 k%16=0 FUSED=True"


@pytest.mark.parametrize(
    ("kernel", "takes"),
    [
        (kernel_of("x_ptr", "n"), False),
        (kernel_of("x_ptr", "y_desc"), True),
        (kernel_of("x_ptr", src="d = tl.make_tensor_descriptor(x_ptr)"), True),
        (kernel_of("described"), False),
    ],
)
def test_a_kernel_takes_descriptors_or_makes_them(kernel, takes):
    assert takes_descriptors(kernel) is takes


@pytest.mark.parametrize("target", TARGETS)
def test_a_build_is_read_by_the_tools_of_its_target(target, tools, monkeypatch):
    monkeypatch.setattr(aot, "fingerprint", lambda launched, target: f"hash for {target}")
    said = "\tv_mfma_f32_32x32x8_bf16 v0\n\ts_endpgm \n .vgpr_count: 50\n .vgpr_spill_count: 1\n .sgpr_spill_count: 2\n"
    amd = target.startswith("gfx")
    asm = {"amdgcn": said} if amd else {"cubin": elf(160), "ptx": "mma"}
    compiled = SimpleNamespace(asm=asm, metadata=SimpleNamespace(num_warps=8, shared=4096))
    build = aot.inspect(Launched(kernel_of("BLOCK"), (1, 1, 1), {"BLOCK": 64}, (), compiled), target)
    read = (50, 4096, 12, "v_mfma_f32_32x32x8_bf16", 2) if amd else (40, 4096, 24, "HGMMA, HMMA", 10)
    assert build == ("norm.forward", "BLOCK=64", target, 8, *read, f"hash for {target}", f"triton {triton.__version__}")
    assert bool(tools) is not amd


def test_a_stub_is_the_driver_in_its_block_and_a_device_of_its_own():
    before, seen = driver._active, []
    for target in TARGETS.values():
        with pytest.raises(ValueError, match="in the block"), stubbed(target.gpu):
            stub = driver._active
            seen.append(stub.get_current_device())
            assert stub.get_current_target() is target.gpu and stub.get_current_stream(0) == 0 and stub.stands_in
            assert stub.get_active_torch_device() == torch.device("cpu")
            raise ValueError("in the block")
        assert driver._active is before
    assert len(set(seen)) == len(TARGETS)
    with stubbed():
        assert driver._active.get_current_target() == TARGETS["sm_90"].gpu


@pytest.mark.parametrize("seed", range(8))
def test_code_is_the_executable_sections_of_a_file(seed):
    """The file is a 64-bit ELF made here; its header says where its section headers lie, their size and their number."""
    drawn = random.Random(seed)
    sections = [(drawn.randrange(8), drawn.randrange(1, 1 << 20)) for _ in range(drawn.randrange(1, 9))]  # flags and size
    before, entry = drawn.randrange(64, 200), 64 + 8 * drawn.randrange(2)
    head = bytearray(drawn.randbytes(before))
    struct.pack_into("<Q", head, 40, before)
    struct.pack_into("<HH", head, 58, entry, len(sections))
    table = b"".join(struct.pack("<IIQQQQ", 7, 1, flags, 9, 11, size) + drawn.randbytes(entry - 40) for flags, size in sections)
    assert _code_bytes(bytes(head) + table + drawn.randbytes(64)) == sum(size for flags, size in sections if flags & 4)


def test_every_format_of_a_recipe_has_its_fused_quantisers(monkeypatch):
    """Each with its element, the length of its tiles, and its kind of scales."""
    from benchmarks import choices

    asked = []
    for name in ("rms_norm", "layer_norm", "glu", "activation"):
        monkeypatch.setattr(choices.quantize_after, f"{name}_quantize", lambda *args, name=name: asked.append((name, *args[-4:])))
    for call in choices._quantised_outputs():
        call()
    formats = {r.x for r in choices.recipes() if r.x.tile[0] == 1 and r.x.element != "e2m1"}
    assert set(asked) == {(name, f.element, f.tile[1], f.how()[3], f.amax_epsilon) for name, *_ in asked for f in formats}
    assert len(asked) == 4 * len(formats) > 0
