"""A layout of a decoder on a mesh: whether it divides, the bytes of each GPU, and the costs of its pipeline's stages."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from funcops.distributed.ops.sharded import gathers_codes
from funcops.engine.errors import fail, join_path, require, require_count, require_type
from funcops.schedule.actions import is_count
from funcops.schedule.collectives import Collective
from funcops.schedule.decoder import Decoder
from funcops.schedule.gpus import GPU
from funcops.schedule.mixture import COUNT, INDEX, WEIGHT
from funcops.schedule.simulate import Costs, Network


class ExpertTimes(NamedTuple):
    """Seconds of a layer's experts and its router; `up`: of the experts' first product, forward."""

    forward: float
    dgrad: float
    wgrad: float
    up: float


def expert_times(model: Decoder, gpu: GPU, tokens: int, ep: int) -> ExpertTimes:
    """The times for `tokens` of each rank: grouped products of E/n experts, of as many rows each, and rows that are moved: read and
    written to be sent, and to be summed by token."""
    mixture = model.mixture
    if mixture is None:
        return ExpertTimes(0.0, 0.0, 0.0, 0.0)
    own, h, low = mixture.experts // ep, model.hidden, bool(model.low)
    rows = math.ceil(tokens * mixture.choices / own)
    sizes = [(one.n, one.k) for one in model.expert_products]
    forwards = [gpu.product(rows, n, k, low=low, groups=own) for n, k in sizes]
    dgrads = [gpu.product(rows, k, n, low=low, groups=own) for n, k in sizes]
    wgrads = [gpu.product(n, k, rows, 8, low=low, groups=own) for n, k in sizes]  # float32 sums, read and written
    sent = mixture.ranks(ep) if ep > 1 else 0.0
    moved = gpu.moved(2 * h * tokens * (mixture.choices + 1 + 4 * sent))
    count = mixture.experts
    router = [gpu.product(*shape) for shape in ((tokens, count, h), (tokens, h, count), (count, h, tokens))]
    forward, dgrad, wgrad = (sum(products) + one for products, one in zip((forwards, dgrads, wgrads), router, strict=True))
    return ExpertTimes(forward + moved, dgrad + moved, wgrad, forwards[0])


def of_experts(model: Decoder, gpu: GPU, count: int, tokens: int, ep: int, recompute: str) -> list[Collective]:
    """The messages of `parallel_experts` in `count` layers: each token with its weights and indices to the ranks of its experts,
    and the results back; in the backward dy there, and the gradients of weights and x back during the experts' wgrad. In low
    precision they are steps, which send codes and scales if the recipe allows, and wait for the gradients."""
    mixture = model.mixture
    if mixture is None or ep == 1 or not count:
        return []
    rows, k = mixture.ranks(ep) * tokens * ep, mixture.choices  # the rows of all ranks

    def sent(nbytes: float, during: str = "F", under: float = 0.0) -> Collective:
        return Collective("all_to_all", "ep", nbytes, under, during, count)

    x, weights, indices = 2.0 * model.hidden * rows, float(WEIGHT * k) * rows, float(INDEX * k) * rows
    codes = None if model.recipe is None else model.recipe.takes_codes
    given = [x] if codes is None else [rows * nbytes for nbytes in codes.nbytes(1, model.hidden)]
    forward = [float(COUNT * ep * ep), weights, *given, indices, x]
    found = [sent(nbytes) for nbytes in forward]
    if recompute == "block":
        found += [sent(nbytes, "I") for nbytes in forward]
    when, under = ("I", 0.0) if model.low else ("W", expert_times(model, gpu, tokens, ep).wgrad)
    found.append(sent(x, "I"))
    return found + [sent(nbytes, when, under * nbytes / (x + weights)) for nbytes in (weights, x)]


RECOMPUTE = ("none", "mlp", "block")
PARAM, GRAD, STATE = 2, 4, 12  # bytes: bfloat16; float32 sums of gradients; float32 params and two moments
ATTENTION_BACKWARD = 2.5  # fused attention's products over the forward's: scores recomputed, and two gradients for each product
QUANTISED = 4  # bytes moved per element: read in 16 bits, written in 8 for the products over rows, and for those over columns
SCORES = (13, 32)  # bytes moved per score that is written out: product, softmax and dropout; these recomputed, and their backward


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a step is distributed: data, tensor (with sequence parallelism), pipeline and context parallel sizes; `chunks`: stages
    per pipeline rank; `microbatch`: its number of sequences; `zero`: what is sharded over replicas, 1 the optimiser's state, 2
    gradients too, 3 params too; `recompute`: "none", "mlp" (its first product) or "block", all but a block's input; `ep`: over how
    many ranks, with sequences of their own, experts are sharded. dp is outermost, then pp, ep, cp, tp.

    >>> from funcops.schedule import Layout
    >>> layout = Layout(dp=4, tp=8, pp=2, chunks=3)
    >>> layout.gpus, layout.replicas, layout.stages
    (64, 4, 6)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    microbatch: int = 1
    zero: int = 0
    recompute: str = "none"
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "chunks", "microbatch", "ep"):
            if not is_count(value := getattr(self, name), 1):  # a search makes many layouts
                require_count("Layout", **{name: value})
        require_type("Layout", "zero", self.zero, int)
        require(is_count(self.zero, 0) and self.zero <= 3, "Layout", "zero", "0, 1, 2 or 3", self.zero)
        require_type("Layout", "recompute", self.recompute, str)
        require(self.recompute in RECOMPUTE, "Layout", "recompute", " or ".join(RECOMPUTE), repr(self.recompute))

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp * self.ep

    @property
    def rows(self) -> int:
        """The number of parts of a batch: of sequences, over dp and ep."""
        return self.dp * self.ep

    @property
    def replicas(self) -> int:
        """The number of ranks that have the same params, but for experts, over dp, ep and cp."""
        return self.dp * self.ep * self.cp

    @property
    def expert_replicas(self) -> int:
        """The number of ranks that have the same experts, over dp, cp and tp."""
        return self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    def __str__(self) -> str:
        return f"{self.mesh()}, V {self.chunks}, microbatch {self.microbatch}, zero {self.zero}, recompute {self.recompute}"

    def mesh(self) -> str:
        names = ("pp", "dp", *(("ep",) if self.ep > 1 else ()), "cp", "tp")
        return " x ".join(f"{name} {getattr(self, name)}" for name in names)


class Problem(NamedTuple):
    """Why a layout is impossible."""

    name: str
    expected: str
    got: Any

    def __str__(self) -> str:
        return f"{self.name} must be {self.expected}, got {self.got}"


def mesh_problem(model: Decoder, layout: Layout, gpu: GPU) -> Problem | None:
    """The first size of the mesh that does not divide the model; None if all do."""
    kv, tp = model.kv_heads or model.heads, layout.tp
    if model.heads % tp:
        return Problem("tp", f"a divisor of heads {model.heads}", tp)
    if kv % tp and tp % kv:
        return Problem("tp", f"a divisor or a multiple of kv_heads {kv}", tp)
    mixture = model.mixture
    if mixture is None and model.ffn % tp:
        return Problem("tp", f"a divisor of ffn {model.ffn}", tp)
    if mixture is not None and mixture.shared % tp:
        return Problem("tp", f"a divisor of shared {mixture.shared}", tp)
    if (1 if mixture is None else mixture.experts) % layout.ep:
        return Problem("ep", "1 without experts" if mixture is None else f"a divisor of experts {mixture.experts}", layout.ep)
    if model.low and not gpu.flops8:
        return Problem("gpu", "one with products in 8 bits (flops8) for a model with low=True", gpu.name)
    if tp > gpu.per_node:
        return Problem("tp", f"at most {gpu.per_node}, the GPUs of a node", tp)
    if layout.cp > 1 and model.seq % (2 * layout.cp):
        return Problem("cp", f"a divisor of half of seq {model.seq}", layout.cp)
    if model.seq // layout.cp % tp:
        return Problem("tp", f"a divisor of the {model.seq // layout.cp} tokens that cp {layout.cp} leaves of seq {model.seq}", tp)
    if layout.pp > model.layers:
        return Problem("pp", f"at most layers {model.layers}", layout.pp)
    if model.batch % layout.rows:
        name, got = ("dp", layout.dp) if layout.ep == 1 else ("dp x ep", f"{layout.dp} x {layout.ep}")
        return Problem(name, f"a divisor of batch {model.batch}", got)
    return None


def problem(model: Decoder, layout: Layout, gpu: GPU) -> Problem | None:
    """The first size of the layout that does not divide the model, or does not go with the others; None if all do."""
    found = mesh_problem(model, layout, gpu)
    if found is not None:
        return found
    if model.batch % (layout.rows * layout.microbatch):
        return Problem("microbatch", f"a divisor of the {model.batch // layout.rows} sequences of a replica", layout.microbatch)
    if layout.pp == 1 and layout.chunks > 1:
        return Problem("chunks", "1 without a pipeline", layout.chunks)
    if layers_of(model, layout) is None:
        wanted = f"such that pp x chunks divides layers {model.layers}, or {model.layers + 2} with embedding and head"
        return Problem("pp", wanted, f"{layout.pp} x {layout.chunks}")
    count = microbatches(model, layout)
    if layout.chunks > 1 and count % layout.pp:
        return Problem("chunks", f"1 if microbatches ({count}) are not a multiple of pp {layout.pp}", layout.chunks)
    if layout.zero and layout.replicas == 1:
        return Problem("zero", "0 if params have one replica", layout.zero)
    return None


def check_layout(where: str, model: Decoder, layout: Layout, gpu: GPU) -> None:
    found = problem(model, layout, gpu)
    if found is not None:
        fail(where, found.name if found.name == "gpu" else join_path("layout", found.name), found.expected, found.got)


def microbatches(model: Decoder, layout: Layout) -> int:
    """The number of microbatches of a step on each replica."""
    return model.batch // (layout.rows * layout.microbatch)


class Layers(NamedTuple):
    """The numbers of layers of the first and of the last stage, and of each stage between."""

    ends: int
    between: int


def layers_of(model: Decoder, layout: Layout) -> Layers | None:
    return split_layers(model.layers, layout.pp * layout.chunks)


@functools.lru_cache(maxsize=4096)
def split_layers(layers: int, stages: int) -> Layers | None:
    """Split layers evenly over stages; if that does not divide, the embedding and the head count as a layer each. None if neither
    divides."""
    if layers % stages == 0:
        return Layers(*[layers // stages] * 2)
    each = (layers + 2) // stages
    return Layers(each - 1, each) if (layers + 2) % stages == 0 else None


def least_layers(model: Decoder, layout: Layout) -> int:
    """The number of layers, run one after another, that bound a step's time from below: on the way to the last rank, and on it."""
    layers = layers_of(model, layout)
    assert layers is not None
    own = layout.chunks * layers.between - (layers.between - layers.ends)
    return (layout.pp - 1) * layers.ends + microbatches(model, layout) * own


class Memory(NamedTuple):
    """Bytes of a GPU at its peak."""

    params: float
    grads: float
    optimiser: float
    residuals: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(self)


def in_flight(layout: Layout, rank: int, count: int) -> int:
    """The most chunks of microbatches that a pipeline rank holds, in 1F1B or its interleaved form."""
    p, v = layout.pp, layout.chunks
    return min(p - rank, count) if v == 1 else min((v - 1) * p + 2 * (p - 1 - rank) + 1, v * count)


def peak(model: Decoder, layout: Layout) -> tuple[int, Memory]:
    """The pipeline rank that needs most memory, and its bytes."""
    most = 0, rank_memory(model, layout, 0)
    for rank in range(1, layout.pp) if layout.pp < 3 else (1, layout.pp - 1):  # ranks between hold at most what the second holds
        found = rank_memory(model, layout, rank)
        if found.total > most[1].total:
            most = rank, found
    return most


def rank_memory(model: Decoder, layout: Layout, rank: int) -> Memory:
    """The bytes of a rank, with the residuals of the most microbatches in flight, each chunk as large as the rank's largest."""
    layers = layers_of(model, layout)
    assert layers is not None
    first, last = rank == 0, rank == layout.pp - 1
    own = layout.chunks * layers.between - (first + last) * (layers.between - layers.ends)
    if layout.stages == 1:
        own = model.layers
    copies = 1 if model.tied and first and last else first + last
    ends = copies * model.vocab * model.hidden
    sharded, experts = layer_params(model, layout)
    layer, zero = sharded + experts, layout.zero
    tokens = layout.microbatch * model.seq / layout.cp
    chunk = layers.between if layout.chunks > 1 or not (first or last) else layers.ends
    kept = model.kept(layout.recompute, layout.ep)
    held = in_flight(layout, rank, microbatches(model, layout)) * chunk * kept * tokens / layout.tp
    again = (model.kept("none", layout.ep) - kept) * tokens / layout.tp
    if model.mixture is not None and layout.ep > 1:  # the rows that are sent, and those that come back
        again += 2 * model.mixture.ranks(layout.ep) * 2 * model.hidden * tokens / layout.tp
    logits = 2 * 2 * tokens * model.vocab / layout.tp if last else 0.0  # logits and their gradient
    gathered = GRAD * layer if zero == 2 else 0.0
    if zero == 3:
        gathered = 2 * (sum(_gathered(model, layout)) + GRAD * layer)  # prefetched by a layer
    gathered += (PARAM + GRAD) * last * model.vocab * model.hidden / layout.tp * (zero == 3)  # the head, until its backward is done

    def each(nbytes: int, over: bool) -> float:
        """The bytes of all params of the rank, if they are sharded over replicas or not."""
        n, m = (layout.replicas, layout.expert_replicas) if over else (1, 1)
        return nbytes * ((own * sharded + ends / layout.tp) / n + own * experts / m)

    return Memory(each(PARAM, zero == 3), each(GRAD, zero >= 2), each(STATE, zero >= 1), held, max(again, logits) + gathered)


def layer_params(model: Decoder, layout: Layout) -> tuple[float, float]:
    """The numbers of params of a layer on a rank: but for experts, and of experts."""
    return (model.layer_params - model.expert_params) / layout.tp, model.expert_params / layout.ep


@functools.lru_cache(maxsize=4096)
def gathered_bytes(model: Decoder, tp: int, ep: int, replicas: int, expert_replicas: int) -> tuple[float, float]:
    """The bytes of a layer's params on a rank as ZeRO-3 gathers them: but for experts, and of experts. Weights go in codes and
    scales by the rule of `dist.zero3`, all else in two bytes."""
    sharded, recipe = Layout(tp=tp, ep=ep), model.recipe
    dense, experts = (PARAM * params for params in layer_params(model, sharded))
    if recipe is None:
        return dense, experts

    def less(shape: tuple[int, ...], ranks: int) -> int:
        """The bytes that codes of a weight save."""
        n, k = shape[-2:]
        return math.prod(shape[:-2]) * (PARAM * n * k - sum(recipe.w.nbytes(n, k))) if gathers_codes(recipe, shape, ranks) else 0

    (_, h, _), *others = model.products
    weights = [(model.width // tp, h), *[(model.kv_width // tp, h)] * 2]  # of q, k and v
    weights += [(n // tp, k) if column else (n, k // tp) for n, k, column in others]
    stacked = [(model.mixture.experts // ep, one.n, one.k) for one in model.expert_products] if model.mixture else []
    return dense - sum(less(one, replicas) for one in weights), experts - sum(less(one, expert_replicas) for one in stacked)


class Layer(NamedTuple):
    """Seconds of a layer, without communication; `column`: the dgrad and the wgrad of each column-sharded product."""

    forward: float
    dgrad: float
    wgrad: float
    column: tuple[tuple[float, float], ...]


@functools.lru_cache(maxsize=4096)
def layer_times(model: Decoder, gpu: GPU, tp: int, cp: int, microbatch: int, recompute: str, ep: int = 1) -> Layer:
    rows, low = microbatch * model.seq // cp, bool(model.low)
    sizes = []
    kv = max(model.kv_width // tp, model.head_dim)  # kv heads are replicated if there are fewer than tp
    for i, (n, k, column) in enumerate(model.products):
        width = model.width // tp + 2 * kv if i == 0 else n // tp
        sizes.append((width, k) if column else (n, k // tp))
    forwards = [gpu.product(rows, n, k, low=low) + _quantised(model, gpu, rows * k + n * k) for n, k in sizes]
    dgrads = [gpu.product(rows, k, n, low=low) + _quantised(model, gpu, rows * n) for n, k in sizes]
    wgrads = [gpu.product(n, k, rows, 2 * GRAD, low=low) for n, k in sizes]  # read and written
    mix, mix_backward = _attention(model, gpu, tp, rows)
    h, experts = model.hidden, expert_times(model, gpu, rows // tp, ep)
    around = 20 * h + (3 if model.gated else 4) * 2 * model.passed  # norms, sums, activation
    plain = gpu.moved(rows * (around + 4 * (model.width + model.kv_width)) / tp)  # and rotation
    forward = sum(forwards) + mix + plain + experts.forward
    again = {"none": 0.0, "mlp": sum(forwards[2:3]) + experts.up, "block": forward}[recompute]
    backward = sum(dgrads) + mix_backward + 2 * plain + experts.dgrad + again
    columns = tuple((dgrads[i], wgrads[i]) for i in range(0, len(sizes), 2))
    return Layer(forward, backward, sum(wgrads) + experts.wgrad, columns)


def _quantised(model: Decoder, gpu: GPU, elements: int) -> float:
    """The seconds in which operands become codes, along both of their dimensions."""
    return gpu.moved(QUANTISED * elements) if model.low else 0.0


def _attention(model: Decoder, gpu: GPU, tp: int, rows: int) -> tuple[float, float]:
    """The seconds of attention, forward and backward."""
    pairs = rows * model.keys * (model.heads // tp)
    arithmetic = 4 * pairs * model.head_dim / (gpu.flops * gpu.efficiency)
    if model.flash:
        fused = arithmetic / gpu.attention
        return fused, ATTENTION_BACKWARD * fused
    return arithmetic + gpu.moved(SCORES[0] * pairs), 2.5 * arithmetic + gpu.moved(SCORES[1] * pairs)


def network_of(layout: Layout, gpu: GPU) -> Network:
    """The axes of the mesh. Replicas are one axis, dp, and replicas of experts another, edp."""
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    near = tp * cp * max(1, gpu.per_node // (tp * cp * ep * layout.pp))  # replicas of experts in a node
    return Network(
        axes=(
            gpu.link("tp", tp, 1),
            gpu.link("cp", cp, tp),
            gpu.link("ep", ep, tp * cp, direct=True),
            gpu.link("pp", layout.pp, tp * cp * ep),
            gpu.link("dp", layout.replicas, tp if cp * ep > 1 else tp * layout.pp),
            gpu.link("edp", layout.expert_replicas, max(1, gpu.per_node // near)),
        )
    )


class Stages(NamedTuple):
    """A value, such as costs, for the first stage, for each stage between, and for the last."""

    first: Any
    between: Any
    last: Any

    def all(self, count: int) -> list[Any]:
        return [self.first] if count == 1 else [self.first, *[self.between] * (count - 2), self.last]


def plain_stages(model: Decoder, layout: Layout, gpu: GPU) -> Stages:
    """The costs of stages, in seconds and bytes of a microbatch, without communication between replicas."""
    layers = layers_of(model, layout)
    assert layers is not None
    one = layout.stages == 1
    fields = layout.tp, layout.cp, layout.ep, layout.microbatch, layout.recompute, layout.pp > 1, layout.chunks > 1
    return Stages(
        _stage(model, gpu, layers.ends, one, *fields),
        _stage(model, gpu, layers.between, False, *fields),
        _stage(model, gpu, layers.ends, True, *fields),
    )


@functools.lru_cache(maxsize=4096)
def _stage(
    model: Decoder, gpu: GPU, count: int, last: bool, tp: int, cp: int, ep: int, microbatch: int, recompute: str, *piped: bool
) -> Costs:
    """The costs of a stage of `count` layers, with the head if it is the last. `piped`: whether in a pipeline, and of several
    chunks."""
    layer = layer_times(model, gpu, tp, cp, microbatch, recompute, ep)
    rows, width = microbatch * model.seq // cp, -(-model.vocab // tp)  # padded
    forward, dgrad, wgrad = (count * one for one in layer[:3])
    if last:
        forward += gpu.product(rows, width, model.hidden)
        dgrad += gpu.product(rows, model.hidden, width)
        wgrad += gpu.product(width, model.hidden, rows, 2 * GRAD)
    said = _of_tp(model, layer, count, tp, rows, recompute) if tp > 1 and count else []
    said += _of_cp(model, count, tp, cp, microbatch, recompute) if cp > 1 and count else []
    said += of_experts(model, gpu, count, rows // tp, ep, recompute)
    in_pipeline, chunked = piped
    if in_pipeline:  # from stage to stage; overlaps with another chunk's work if a rank has several
        y = 2.0 * rows * model.hidden / tp
        said += [Collective("p2p", "pp", y, under if chunked else 0.0, when) for under, when in ((forward, "F"), (dgrad, "I"))]
    kept = count * model.kept(recompute, ep) * rows / tp
    return Costs(forward, dgrad, wgrad, residual_bytes=kept, collectives=tuple(said))


def stages_of(model: Decoder, layout: Layout, gpu: GPU) -> Stages:
    """The costs of stages, in seconds and bytes of a microbatch."""
    layers, plain = layers_of(model, layout), plain_stages(model, layout, gpu)
    assert layers is not None
    sharded, experts = layer_params(model, layout)
    if layout.replicas == 1 and (not experts or layout.expert_replicas == 1):
        return plain
    table, alone = model.vocab * model.hidden / layout.tp, layout.stages == 1 and not model.tied
    counts = layers.ends, layers.between, layers.ends
    made = []
    for count, one, embed, head in zip(counts, plain, (table, 0.0, table * alone), (table * alone, 0.0, table), strict=True):
        said = _of_replicas(layout, _Params(count, sharded, experts, embed, head), _gathered(model, layout), one)
        made.append(dataclasses.replace(one, collectives=(*one.collectives, *said)))
    return Stages(*made)


def _of_tp(model: Decoder, layer: Layer, count: int, tp: int, rows: int, recompute: str) -> list[Collective]:
    """Sequence parallelism: a gather before and a reduce-scatter after each pair of products. In the backward the second gather of
    x overlaps with a dgrad, the reduce-scatter of dx with a wgrad."""
    x, pairs = 2.0 * rows * model.hidden, len(layer.column)
    found = [Collective(kind, "tp", x, times=pairs * count) for kind in ("all_gather", "reduce_scatter")]
    if recompute == "block":
        found += [dataclasses.replace(one, during="I") for one in found]
    if recompute == "mlp" and pairs > 1:
        found.append(Collective("all_gather", "tp", x, during="I", times=count))
    found.append(Collective("all_gather", "tp", x, during="I", times=pairs * count))
    for dgrad, wgrad in layer.column:
        found.append(Collective("all_gather", "tp", x, dgrad, "I", count))
        found.append(Collective("reduce_scatter", "tp", x, wgrad, "W", count))
    return found


def _of_cp(model: Decoder, count: int, tp: int, cp: int, microbatch: int, recompute: str) -> list[Collective]:
    """Context parallelism: k and v are gathered, in the backward again, and their gradients reduce-scattered."""
    kv = 2 * 2.0 * microbatch * model.seq * max(model.kv_width // tp, model.head_dim)
    return [
        Collective("all_gather", "cp", kv, times=count),
        Collective("all_gather", "cp", kv, during="I", times=(2 if recompute == "block" else 1) * count),
        Collective("reduce_scatter", "cp", kv, during="I", times=count),
    ]


def _gathered(model: Decoder, layout: Layout) -> tuple[float, float]:
    return gathered_bytes(model, layout.tp, layout.ep, layout.replicas, layout.expert_replicas)


class _Params(NamedTuple):
    """The params of a stage of `layers`: of each layer but for experts, of its experts, and of the embedding and the head if the
    stage has them."""

    layers: int
    layer: float
    experts: float
    embed: float
    head: float


def _of_replicas(layout: Layout, own: _Params, gathered: tuple[float, float], costs: Costs) -> list[Collective]:
    """Data parallelism, layer by layer as in `funcops.dist.data_parallel` and `zero3`: the gather of a layer's params overlaps with
    the layer before, the sum of its gradients with the wgrad of the next one of the backward. So the first layer's gather of each
    pass and the last one's sum are exposed, and the embedding's; the head's overlap with all layers, and ZeRO-3 gathers it once.
    Sums are sent for each microbatch from ZeRO-2 on, else once a step, as ZeRO-1 and 2 gather params."""
    zero = layout.zero
    backward = costs.wgrad if zero == 3 else costs.dgrad + costs.wgrad  # gathers of ZeRO-3 overlap with the dgrads
    sent = [("all_reduce" if zero == 0 else "reduce_scatter", GRAD, backward, "W" if zero > 1 else "step")]
    sent += [("all_gather", PARAM, costs.forward, "F" if zero == 3 else "step")] * (zero > 0)
    sent += [("all_gather", PARAM, costs.dgrad, "I")] * (zero == 3)
    found = []
    for kind, size, time, when in sent:
        under = time / max(1, own.layers)
        first = under if layout.chunks > 1 else 0.0  # a rank's other stages hide what a stage's own layers do not
        ends = [] if when == "I" else [("dp", size * own.embed, first, 1), ("dp", size * own.head, time, 1)]
        layer = gathered if kind == "all_gather" and zero == 3 else (size * own.layer, size * own.experts)
        for axis, params, nbytes in zip(("dp", "edp"), (own.layer, own.experts), layer, strict=True):
            part = params / (own.layer + own.experts)  # both overlap with one layer's work
            ends += [(axis, nbytes, first * part, min(1, own.layers)), (axis, nbytes, under * part, own.layers - 1)]
        for axis, nbytes, hidden, times in ends:
            if nbytes and times > 0 and (layout.replicas if axis == "dp" else layout.expert_replicas) > 1:
                found.append(Collective(kind, axis, nbytes, hidden, when, times))
    return found
