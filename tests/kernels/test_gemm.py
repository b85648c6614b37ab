"""Both GEMM kernels in the interpreter, with every epilogue, against products in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcops.engine.backend import backend, gemm
from funcops.engine.backend.shared import HOPPER, SharedMemory
from funcops.engine.trees import tree_map_tensors
from funcops.library.kernels import fused_linear, linear
from funcops.library.kernels.activation import ACTIVATIONS
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
from funcops.library.kernels.triton import matmul as products  # noqa: E402
from funcops.library.kernels.triton.common import cdiv, next_power_of_2  # noqa: E402
from funcops.library.kernels.triton.gemm import shared_of  # noqa: E402
from funcops.library.kernels.triton.gemm_table import DEEP, SQUARE, TABLE, WIDE, Choice, Tile, choose  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
TILE = Tile(16, 32, 16, 4, 3)
KERNELS = {"descriptor": Choice(False, TILE, TILE), "pointer": Choice(False, None, TILE)}


@pytest.fixture(autouse=True)
def planned_anew():
    """A plan that another test has made, or made with a function replaced, would hide what a test replaces."""
    products.plan_of.cache_clear()
    yield
    products.plan_of.cache_clear()


@pytest.fixture
def added(monkeypatch):
    """How many parts each launch that adds parts has added: a product without splits has the same result."""
    found, launch = [], products.launch_sum_splits
    monkeypatch.setattr(products, "launch_sum_splits", lambda *args, **options: found.append(args[7]) or launch(*args, **options))
    return found


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def product(a, b, choice, epilogue=products.Epilogue(), dtype=None):
    out = a.new_full((a.shape[0], b.shape[1]), float("nan"), dtype=dtype or a.dtype)
    products.matmul(products.rows_of(a), products.rows_of(b), out, epilogue, choice)
    return out


@pytest.mark.parametrize("programs", [1, 3, 5])
def test_splits_keep_apart_whatever_the_number_of_programs(programs, monkeypatch, added):
    """If slices overlapped, the result would still be right if the right tile is written last."""
    a, b = draw(136, 100, dtype=torch.float32), draw(100, 24, dtype=torch.float32, seed=1)
    want = a.double() @ b.double()
    monkeypatch.setattr(products, "device_facts", lambda: products.Facts(True, programs, HOPPER))
    monkeypatch.setattr(products, "number_of_splits", lambda tiles, k: 3)
    for kernel in KERNELS.values():
        assert_close(product(a, b, kernel), want, dtype=torch.float32)
    assert added == [3] * len(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("flips", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_layouts(kernel, dtype, flips):
    a, b = draw(40, 24, dtype=dtype), draw(24, 48, dtype=dtype, seed=1)
    a, b = (t.mT.contiguous().mT if flip else t for t, flip in zip((a, b), flips, strict=True))
    assert products.descriptors_serve(products.rows_of(a), products.rows_of(b), a.new_empty(40, 48))
    got = product(a, b, KERNELS[kernel])
    assert_close(got, a.double() @ b.double(), dtype=dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_descriptor_and_pointer_split_alike(kernel, dtype, monkeypatch, added):
    """K in three parts whose slices of the workspace end inside a tile; accumulated, with row sums."""
    monkeypatch.setattr(products, "number_of_splits", lambda tiles, k: 3)
    a, b = draw(40, 72, dtype=dtype), draw(72, 48, dtype=dtype, seed=1)
    into, sums = torch.ones(40, 48), torch.ones(40)
    products.matmul(
        products.rows_of(a), products.rows_of(b), into, products.Epilogue(add=into, sums=sums, scale=0.5), KERNELS[kernel]
    )
    assert_close(into, 1 + 0.5 * (a.double() @ b.double()), dtype=torch.float32)
    assert_close(sums, 1 + a.double().sum(1), dtype=torch.float32)
    plain = product(a, b, KERNELS[kernel])
    assert_close(plain, a.double() @ b.double(), dtype=dtype)
    assert torch.equal(plain, product(a, b, KERNELS[kernel]))
    assert added == [3] * 4, "the product and the sums, then two products"


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("flips", [(False, False), (False, True), (True, False)], ids=str)
def test_specialised_warps(dtype, flips):
    a, b = draw(136, 24, dtype=dtype), draw(24, 48, dtype=dtype, seed=1)
    a, b = (t.mT.contiguous().mT if flip else t for t, flip in zip((a, b), flips, strict=True))
    bias, add, z = draw(48, dtype=dtype, seed=2), draw(136, 48, dtype=dtype, seed=3), torch.empty(136, 48, dtype=dtype)
    launched = []
    launch = products.launch_specialised
    products.launch_specialised = lambda *args, **options: launched.append(args) or launch(*args, **options)
    try:
        with gemm("specialised"):
            plain = product(a, b, KERNELS["descriptor"])
            fused = product(a, b, KERNELS["descriptor"], products.Epilogue(bias, z, "keep", "silu", add, 0.5))
    finally:
        products.launch_specialised = launch
    want = 0.5 * (a.double() @ b.double()) + bias.double()
    assert len(launched) == 2
    assert_close(plain, a.double() @ b.double(), dtype=dtype)
    assert_close(z, want, dtype=dtype)
    assert_close(fused, torch.nn.functional.silu(want) + add.double(), dtype=dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_specialised_warps_accumulate_once(dtype):
    a, b, into = draw(136, 24, dtype=dtype), draw(24, 48, dtype=dtype, seed=1), draw(136, 48, dtype=dtype, seed=2)
    want = into.double() + a.double() @ b.double()
    with gemm("specialised"):
        products.matmul(products.rows_of(a), products.rows_of(b), into, products.Epilogue(add=into), KERNELS["descriptor"])
    assert_close(into, want, dtype=dtype)


IN_PARTS = {  # what is asked of a product, its dtype of C and the columns that are finished at a time, of 32 or 128
    "plain": ({}, torch.bfloat16, 32, 256),
    "bias": ({"bias": (48,)}, torch.bfloat16, 16, 64),
    "added": ({"bias": (48,), "add": (40, 48), "kind": "silu"}, torch.bfloat16, 16, 64),
    "kept": ({"z": (40, 48), "add": (40, 48), "mode": "keep", "kind": "gelu"}, torch.float16, 16, 16),
    "derivative": ({"z": (40, 48), "mode": "derivative", "kind": "tanh"}, torch.bfloat16, 16, 16),
    "wide": ({"add": (40, 48)}, torch.float32, 16, 64),
}


@pytest.mark.parametrize("asked", IN_PARTS)
def test_a_tile_is_finished_in_halves_where_sums_have_memory_of_their_own(asked, monkeypatch):
    """The same bits, and what is kept, too. Warps are not specialised if a tensor is kept."""
    given, into, columns, specialised_columns = IN_PARTS[asked]
    dtype, launched = (torch.bfloat16 if into is torch.float32 else into), []
    a, b = draw(40, 24, dtype=dtype), draw(24, 48, dtype=dtype, seed=1)

    def run(apart, provider):
        monkeypatch.setattr(products, "device_facts", lambda: products.Facts(True, 3, HOPPER, apart))
        tensors = {name: draw(*of, dtype=into, seed=2) for name, of in given.items() if isinstance(of, tuple)}
        with gemm(provider):
            c = product(a, b, KERNELS["descriptor"], products.Epilogue(**{**given, **tensors}), into)
        return c, tensors.get("z")

    for name in ("by_descriptor", "by_specialised"):
        launch = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *args, launch=launch: launched.append(args[4]) or launch(*args))
    for provider, wanted in (("triton", columns), ("specialised", specialised_columns)):
        specialised = provider == "specialised" and wanted > 16
        whole, parts = run(False, provider if specialised else "triton"), run(True, provider)
        assert launched[-1].columns == wanted and launched[-2].columns == launched[-2].tile.n
        assert [plan.specialised for plan in launched[-2:]] == [specialised] * 2
        assert torch.equal(whole[0], parts[0])
        assert whole[1] is parts[1] is None or torch.equal(whole[1], parts[1])


@settings(max_examples=25)
@given(st.tuples(*[st.integers(1, 40)] * 3), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_any_shape(shape, dtype, a_flipped, b_flipped):
    m, n, k = shape
    a, b = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype, seed=1)
    a, b = (t.mT.contiguous().mT if flip else t for t, flip in ((a, a_flipped), (b, b_flipped)))
    assert_close(product(a, b, KERNELS["descriptor"]), a.double() @ b.double(), dtype=dtype)


@pytest.mark.parametrize("kind", ["", *ACTIVATIONS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_epilogues(kind, dtype):
    x, w, b, r = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 3, 24), (32, 24), (32,), (5, 3, 32)]))
    for bias, residual, keep in itertools.product((None, b), (None, r), (False, True)):
        exact = [None if t is None else t.double() for t in (x, w, bias, residual)]
        want = fused_linear.fused_linear_fwd(*exact, kind, 0.5, keep)
        with backend("triton"):
            got = fused_linear.fused_linear_fwd(x, w, bias, residual, kind, 0.5, keep)
        assert_close(got, want, dtype=dtype)
        assert_close(fused_linear.fused_linear_fwd(x, w, bias, residual, kind, 0.5, keep), want, dtype=dtype)


@pytest.mark.parametrize("kind", ["", *ACTIVATIONS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dgrad_epilogues(kind, dtype):
    dy, w, z = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 3, 32), (32, 24), (5, 3, 24)]))
    want = fused_linear.fused_linear_dgrad(dy.double(), w.double(), z.double(), kind, 2.0)
    with backend("triton"):
        got = fused_linear.fused_linear_dgrad(dy, w, z, kind, 2.0)
        into = torch.ones(5, 3, 24, dtype=dtype)
        fused_linear.fused_linear_dgrad_into(dy, w, 2.0, into)
        added = fused_linear.fused_linear_dgrad_add(dy, w, 2.0, z)
    assert_close(got, want, dtype=dtype)
    assert_close(into, 1 + 2 * (dy.double() @ w.double()), dtype=dtype)
    assert_close(added, z.double() + 2 * (dy.double() @ w.double()), dtype=dtype)
    assert_close(fused_linear.fused_linear_dgrad_add(dy, w, 2.0, z), z.double() + 2 * (dy.double() @ w.double()), dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgrad_accumulates_with_the_bias_gradient(dtype, bias):
    dy, x = draw(5, 7, 32, dtype=dtype), draw(5, 7, 24, dtype=dtype, seed=1)
    dw, db = 0.5 * (dy.double().flatten(0, 1).mT @ x.double().flatten(0, 1)), dy.double().sum((0, 1))
    for name in ("torch", "triton"):
        main_dw, main_db = torch.ones(32, 24), torch.ones(32) if bias else None
        with backend(name):
            fresh = fused_linear.fused_linear_wgrad(dy, x, 0.5, bias)
            fused_linear.fused_linear_wgrad_into(dy, x, 0.5, main_dw, main_db)
        assert_close(fresh, (dw, db if bias else None), dtype=dtype, length=35)
        # the torch body multiplies in the dtype of dy before it adds
        assert_close(main_dw, 1 + dw, dtype=dtype if name == "torch" else torch.float32)
        if bias:
            assert_close(main_db, 1 + db, dtype=torch.float32)


@pytest.mark.parametrize(("splits", "shares"), [(1, 2), (1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_row_sums_are_shared_among_tiles(kernel, splits, shares, monkeypatch, added):
    """Shares that end within K or beyond it; added or not."""
    monkeypatch.setattr(products, "number_of_splits", lambda tiles, k: splits)
    monkeypatch.setattr(products, "SHARE", 16)
    monkeypatch.setattr(products, "MOST_SHARES", shares)
    for k, add in ((33, True), (72, False)):
        a, b = draw(k, 16, dtype=torch.bfloat16).mT, draw(k, 72, dtype=torch.bfloat16, seed=1)
        into, sums = torch.ones(16, 72), torch.ones(16)
        products.matmul(
            products.rows_of(a), products.rows_of(b), into, products.Epilogue(add=into if add else None, sums=sums), KERNELS[kernel]
        )
        assert_close(into, add + a.double() @ b.double(), dtype=torch.float32)
        assert_close(sums, add + a.double().sum(1), dtype=torch.float32)
        assert max(added) > 1 and (splits == 1 or splits in added)
        added.clear()


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["", *ACTIVATIONS])
def test_a_product_is_the_librarys_and_its_epilogue_ours(kind, dtype, monkeypatch):
    """`gemm` chooses the product; arguments may require grad."""
    x, w, z, residual = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 24), (40, 24), (5, 24), (5, 40)]))
    b, dy, wide = draw(40, dtype=dtype), draw(5, 40, dtype=dtype), [torch.ones(s) for s in [(5, 24), (40, 24), (40,)]]
    w.requires_grad_()

    def run(main_dx, main_dw, main_db):
        found = [fused_linear.fused_linear_fwd(x, w, b, r, kind, 0.5, keep) for r in (None, residual) for keep in (False, True)]
        found += [
            fused_linear.fused_linear_dgrad(dy, w, z if kind else None, kind, 0.5),
            fused_linear.fused_linear_wgrad(dy, x, 0.5, True),
        ]
        fused_linear.fused_linear_dgrad_into(dy, w, 0.5, main_dx)
        fused_linear.fused_linear_wgrad_into(dy, x, 0.5, main_dw, main_db)
        return found, fused_linear.fused_linear_dgrad_add(dy, w, 0.5, z), main_dx, main_dw, main_db

    called, ours = [], products.matmul
    monkeypatch.setattr(products, "matmul", lambda *args: called.append(args) or ours(*args))
    want = run(*(t.clone() for t in wide))
    for provider in ("cublas", "triton"):
        with backend("triton"), gemm(provider):
            got = run(*(t.clone() for t in wide))
        assert_close(tree_map_tensors(torch.detach, got), tree_map_tensors(torch.detach, want), dtype=dtype)
        assert len(called) == (0 if provider == "cublas" else 9)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(1, 1030), (3, 1030), (70, 24)], ids=str)
def test_an_epilogue_after_the_librarys_product_reaches_every_block(shape, keep):
    """A tile has 2048 elements, of at most 1024 columns; some shapes take several blocks of rows, some of columns."""
    (m, n), dtype = shape, torch.float32
    args = *(draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(m, 4), (n, 4), (n,), (m, n)])), "gelu", 0.5, keep
    with backend("triton"), gemm("cublas"):
        got = fused_linear.fused_linear_fwd(*args)
    assert_close(got, fused_linear.fused_linear_fwd(*args), dtype=dtype)


@pytest.mark.parametrize("provider", ["auto", "cublas", "triton"])
@pytest.mark.parametrize("rows", [5, 0])
def test_every_argument_may_ask_for_gradients(rows, provider, monkeypatch):
    """Sums of rows are torch's or ours."""
    shapes = [(rows, 24), (40, 24), (rows, 40), (40,), (rows, 24), (rows, 40)]
    given = [draw(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]

    def run(x, w, dy, b, z, residual):
        return [
            linear.linear_fwd(x, w, b),
            linear.linear_dgrad(dy, w),
            linear.linear_wgrad(dy, x, True),
            linear.linear_wgrad(dy, None, True),
            linear.linear_bwd(dy, x, w, True),
            fused_linear.fused_linear_fwd(x, w, b, residual, "gelu", 0.5, True),
            fused_linear.fused_linear_dgrad(dy, w, z, "gelu", 0.5),
            fused_linear.fused_linear_wgrad(dy, x, 0.5, True),
            fused_linear.fused_linear_dgrad_add(dy, w, 0.5, z),
        ]

    want = run(*given)
    for many in (products.MANY, 1):
        monkeypatch.setattr(products, "MANY", many)
        with backend("triton"), gemm(provider):
            got = run(*[t.clone().requires_grad_() for t in given])
        assert_close(tree_map_tensors(torch.detach, got), want, dtype=torch.float32)


@pytest.mark.parametrize("columns", [32, 256, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_any_size_are_left_to_the_library_unless_they_add_another_tensor(dtype, columns):
    """Narrow ones and float32 are left to it even then."""
    with gemm("auto"):
        for family in ("none", "fused", "added", "kept", "three", "accumulate"):
            ours = family == "added" and dtype is not torch.float32 and columns > 64
            assert products.left_to_library(family, dtype, 4096, columns) != ours, family


# by the memory of a program: sm_90, an sm_120, and a device of less
MEMORIES = HOPPER, SharedMemory(101_376, True, False), SharedMemory(65_536, True, False)
TILES = {  # of "added" of 16 bits, of a sum into float32, and of the float32 parts of a split product, in these
    "added": (WIDE, SQUARE, SQUARE._replace(n=64, stages=2)),
    "accumulate": (DEEP, SQUARE._replace(stages=2), SQUARE._replace(n=64, stages=2)),
    "split": (SQUARE, SQUARE._replace(stages=2), SQUARE._replace(n=64, stages=2)),
}


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_a_tile_over_descriptors_is_of_the_size_that_the_device_holds(memory, monkeypatch):
    """A product whose tile in the table is too large is left to the library, unless ours is requested. Splits depend on shapes
    alone, and so do the bits of a sum. Warps are not specialised there."""
    facts, size, place = products.Facts(True, 4, memory), (4096, 4096), MEMORIES.index(memory)

    def plan(family, into, k, specialised=False, sums=False):
        strides = (k, 1), (1, k)
        of = torch.bfloat16, into, (size[0], k), strides[0], size[1], strides[1], family, sums, True, facts, specialised, None
        return products.plan_of(*of)

    for family, into in (("added", torch.bfloat16), ("accumulate", torch.float32)):
        tile = plan(family, into, 512).tile
        assert tile == TILES[family][place] and plan(family, into, 512).described
        needed = shared_of(tile.m, tile.n, tile.k, tile.stages, 2, into.itemsize, memory)
        assert needed <= memory.limit
    size = 512, 512
    split = plan("none", torch.bfloat16, 16384)
    assert split.tile == TILES["split"][place] and split.splits == 8
    assert plan("added", torch.bfloat16, 512, specialised=True).specialised is (memory == HOPPER)
    assert not plan("added", torch.bfloat16, 512, specialised=True, sums=True).tile.specialised
    monkeypatch.setattr(products, "device_facts", lambda: facts)
    with gemm("auto"):
        assert products.left_to_library("added", torch.bfloat16, 4096, 4096) is (memory != HOPPER)
    with gemm("triton"):
        assert not products.left_to_library("added", torch.bfloat16, 4096, 4096)


def test_ours_is_taken_where_another_tensor_is_added(monkeypatch):
    """The table says which: ours needs tensor descriptors, and 16-bit dtypes."""
    monkeypatch.setattr(products, "device_facts", lambda: products.Facts(True, 4, HOPPER))

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def left(dtype=torch.bfloat16, n=1024, **of):
        out = empty(1024, n, dtype=torch.float32 if of.get("add") == "main_grad" else dtype)
        add = {"another": empty(1024, n, dtype=dtype), "main_grad": out, "out": out}.get(of.pop("add", None))
        a, b = (products.rows_of(empty(*shape, dtype=dtype)) for shape in ((1024, 256), (256, n)))
        return products._library_serves(a, b, out, products.Epilogue(add=add, **of))

    bias, z = empty(1024), empty(1024, 1024)
    of = [{}, {"bias": bias}, {"bias": bias, "kind": "gelu"}, {"z": z, "mode": "keep", "kind": "gelu"}, {"add": "main_grad"}]
    added = [{"add": "another"}, {"add": "another", "bias": bias, "kind": "gelu"}]
    with gemm("auto"):
        assert all(left(**one) for one in of) and not any(left(**one) for one in added)
        assert left(torch.float32, add="another") and left(n=1001, add="another")
        monkeypatch.setattr(products, "device_facts", lambda: products.Facts(False, 4, HOPPER))
        assert all(left(**one) for one in added)
    for provider in ("auto", "cublas", "triton"):
        with gemm(provider):
            assert not left(bias=bias, add="out"), "what the library would write over"
    with gemm("cublas"):
        assert all(left(**one) for one in (*of, *added))
    with gemm("triton"):
        assert not any(left(**one) for one in (*of, *added))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_row_and_one(rows, dtype):
    x, w, b, dy = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, 24), (32, 24), (32,), (rows, 32)]))
    into, into_b = torch.ones(32, 24), torch.ones(32)

    def everything():
        fused_linear.fused_linear_wgrad_into(dy, x, 1.0, into, into_b)
        return (
            fused_linear.fused_linear_fwd(x, w, b, None, "gelu", 1.0, True),
            fused_linear.fused_linear_dgrad(dy, w, x, "gelu", 1.0),
            fused_linear.fused_linear_wgrad(dy, x, 1.0, True),
            linear.linear_bwd(dy, x, w, True),
        )

    want = everything()
    with backend("triton"):
        assert_close(everything(), want, dtype=dtype)
    if not rows:
        assert torch.equal(into, torch.ones(32, 24)) and torch.equal(into_b, torch.ones(32))


def test_operands_that_are_expanded():
    """Rows, columns or elements repeated by a stride of 0, by every kernel, with and without an epilogue; and overlapping rows."""
    rows = draw(1, 200, dtype=torch.float32)
    lying = {
        "rows": lambda m, k, t: t[:1, :k].expand(m, k),
        "columns": lambda m, k, t: t[:1, :m].mT.expand(m, k),
        "elements": lambda m, k, t: t[:1, :1].expand(m, k),
        "overlapping": lambda m, k, t: t[0].as_strided((m, k), (4, 1)),
        "overlapping columns": lambda m, k, t: t[0].as_strided((m, k), (1, 4)),
        "dense": lambda m, k, t: draw(m, k, dtype=torch.float32, seed=1),
    }
    for first, second in zip(lying, [*list(lying)[2:], *list(lying)[:2]], strict=True):
        a, b = lying[first](16, 24, rows), lying[second](24, 32, rows)
        want = a.double() @ b.double()
        for kernel in KERNELS.values():
            assert_close(product(a, b, kernel), want, dtype=torch.float32, what=f"{first} by {second}")
        with gemm("specialised"):
            assert_close(product(a, b, KERNELS["descriptor"]), want, dtype=torch.float32, what=f"{first} by {second}, specialised")


def test_descriptors_take_no_matrix_that_begins_between_16_bytes():
    room = torch.zeros(32 * 64 + 16, dtype=torch.uint8)
    b, out = torch.zeros(64, 48, dtype=torch.float8_e4m3fn), torch.zeros(32, 48, dtype=torch.bfloat16)
    for i in range(16):
        a = room[i : i + 32 * 64].view(torch.float8_e4m3fn).view(32, 64)
        serves = products.descriptors_serve(products.rows_of(a), products.rows_of(b), out)
        assert serves == (a.data_ptr() % 16 == 0), i


@pytest.mark.parametrize("by", [1, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_addresses_and_strides(by, dtype):
    def moved(*shape, seed):
        wide = draw(shape[0], shape[1] + 8, dtype=dtype, seed=seed)
        return wide[:, by : by + shape[1]]

    x, w, r = moved(16, 24, seed=0), moved(32, 24, seed=1), moved(16, 32, seed=2)
    assert not products.descriptors_serve(products.rows_of(x), products.columns_of(w), x.new_empty(16, 32))
    with backend("triton"):
        got = fused_linear.fused_linear_fwd(x, w, None, r, "silu", 1.0, True)
    want = fused_linear.fused_linear_fwd(x.double(), w.double(), None, r.double(), "silu", 1.0, True)
    assert_close(got, want, dtype=dtype)


def test_a_descriptor_is_as_triton_makes_it():
    t = torch.randn(48, 64, dtype=torch.bfloat16)[:, :40]
    got, want = products.descriptor(t, 16, 32), products.TensorDescriptor(t, [48, 40], [64, 1], [16, 32])
    assert got.base is t and vars(got).keys() == vars(want).keys()
    assert all(vars(got)[name] == vars(want)[name] for name in vars(want) if name != "base")
    assert all(cdiv(n, 7) == math.ceil(n / 7) and next_power_of_2(n + 1) == 2 ** math.ceil(math.log2(n + 1)) for n in range(70))


def test_who_multiplies():
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    calls = []
    kernel = linear.linear_fwd.kernel
    body, kernel.torch_impl = kernel.torch_impl, lambda *args: calls.append(args) or body(*args)
    try:
        with backend("triton"):
            for name, count in (("auto", 1), ("cublas", 1), ("triton", 0)):
                calls.clear()
                with gemm(name):
                    linear.linear_fwd(x, w, None)
                assert len(calls) == count, name
            calls.clear()
            linear.linear_fwd(x, w, None)
            assert not calls
    finally:
        kernel.torch_impl = body
    with pytest.raises(
        ValueError, match="gemm: name must be 'auto' or 'cublas' or 'triton' or 'specialised' or 'quack', got 'cutlass'"
    ):
        with gemm("cutlass"):
            pass


SWITCHES = {  # torch's old one, and its new ones, of which a narrower goes before a wider
    "old": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "older": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "products": lambda on: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32" if on else "ieee"),
    "cuda": lambda on: setattr(torch.backends.cudnn, "fp32_precision", "tf32" if on else "ieee"),
    "all": lambda on: setattr(torch.backends, "fp32_precision", "tf32" if on else "ieee"),
}


@pytest.fixture
def switches():
    """Restores torch's switches; torch's own test helpers, which other tests import, forbid setting them otherwise."""
    with torch.backends.__allow_nonbracketed_mutation():
        yield
        for of in (torch.backends, torch.backends.cudnn, torch.backends.cuda.matmul):
            of.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_float32_products_are_exact_unless_torch_is_told_otherwise(switches):
    """Every switch, and every two in turn, has the effect that it has on cuBLAS."""
    assert products.precision(torch.float32) == "ieee"
    for first, second, on, then in itertools.product(SWITCHES, SWITCHES, (False, True), (False, True)):
        SWITCHES[first](on)
        SWITCHES[second](then)
        want = torch.backends.cuda.matmul.fp32_precision
        assert products.precision(torch.float32) == ("tf32" if want == "tf32" else "ieee"), (first, on, second, then)
        assert products.precision(torch.bfloat16) == "ieee"
        assert second not in ("old", "older", "products") or want == ("tf32" if then else "ieee")


def test_every_row_of_the_table_is_chosen():
    sizes = {"narrow": (8, 4096), "medium": (512, 512), "large": (4096, 4096), "any": (16, 16)}
    for (epilogue, dtype, size), choice in TABLE.items():
        assert choose(epilogue, torch.float32 if dtype == "float32" else torch.bfloat16, *sizes[size], True) == choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [None, 0, 1])
@pytest.mark.parametrize("large", [False, True])
def test_rows_that_are_not_aligned_have_a_tile_of_their_own(dtype, odd, large):
    """One width that 16 does not divide is enough; the large tile is for many rows of wide matrices."""
    from funcops.library.kernels.triton import grouped

    sizes = [4096, 4096] if large else [64, 4096]
    if odd is not None:
        sizes[odd] += 8
    found = grouped.tile_for(dtype, 1 << 16, 2, *sizes)
    if dtype is torch.float32:
        assert found == (grouped.FP32 if odd is None else grouped.FP32_ODD)
    else:
        assert found == (grouped.UNALIGNED_FUSED if odd is not None else grouped.SQUARE if large else grouped.SMALL)
    assert grouped.tile_for(dtype, 2, 2, 4096, 4096) == (grouped.FP32 if dtype is torch.float32 else grouped.SMALL)
