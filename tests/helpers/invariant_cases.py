"""Drawn decoders, batches and orders of decoding, for the promise that training and decoding give the same log-probabilities.

python tests/helpers/invariant_cases.py 1000 200      draws so many cases, and batches around a sequence, and counts what differs
"""

import dataclasses
import random as chance
import sys

import torch

from funcops import ExpertsConfig, LinearParams, Needs, RopeConfig, RouteConfig, WithExtras, chain, random
from funcops.invariant import with_invariant
from funcops.lora import lora_init, with_lora
from funcops.models import DecoderConfig, MoEConfig, SamplingConfig, cache_init, decode, decoder, decoder_x, generate, pack
from funcops.models import log_probabilities as log_probabilities_of
from funcops.trees import tree_map_tensors

DTYPES = torch.float32, torch.bfloat16


@dataclasses.dataclass
class Drawn:
    """A decoder, its chain in the mode with and without packing, its params, and sequences of ids."""

    cfg: DecoderConfig
    params: object
    model: object
    packed: object
    dtype: torch.dtype
    sequences: list
    chance: chance.Random

    def ids(self, *shape):
        generator = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        return torch.randint(0, self.cfg.vocab, shape, generator=generator)


def drawn(seed, longest=150, free=False):
    draw = chance.Random(seed)
    heads = draw.choice((1, 2, 4))
    size = draw.choice((8, 16, 24))
    layers = draw.choice((1, 2, 3))
    sizes = dict(
        vocab=draw.choice((64, 101, 333)), dim=draw.choice((32, 48, 100)), layers=layers, heads=heads * draw.choice((1, 2))
    )
    sizes |= dict(kv_heads=heads, head_size=size, hidden=draw.choice((40, 64, 130)), context=256)
    options = dict(
        mlp=draw.choice(("swiglu", "geglu", "relu", "gelu_tanh", "silu", "gelu")), norm=draw.choice(("rms_norm", "layer_norm"))
    )
    options |= dict(qk_norm=draw.choice((None, None, "head", "all")), tied=draw.random() < 0.3, sinks=draw.random() < 0.3)
    options |= dict(qkv_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3, norm_after=draw.random() < 0.2)
    options |= dict(logit_softcap=draw.choice((None, None, 20.0)), attention_gate=draw.random() < 0.2)
    if draw.random() < 0.5:
        options["windows"] = tuple(draw.choice((None, 7, 40, 100)) for _ in range(layers))
    if draw.random() < 0.3:
        options["chunks"] = tuple(draw.choice((None, 16, 50)) for _ in range(layers))
    if draw.random() < 0.25:
        of = ExpertsConfig(4, dim=sizes["dim"], hidden=draw.choice((24, 33)))
        scored = dict(score=draw.choice(("softmax", "sigmoid")), normalize=draw.random() < 0.5, bias=draw.random() < 0.3)
        options |= dict(
            moe=MoEConfig(route=RouteConfig(4, draw.choice((1, 2, 3)), **scored), experts=of), mlp="swiglu", mlp_bias=False
        )
    rope = RopeConfig(size, interleaved=draw.random() < 0.3) if draw.random() < 0.9 else None
    cfg = DecoderConfig(**sizes, **options, rope=rope, places=rope is None)
    blocks = dict(rows=draw.choice((16, 64, 128)), queries=draw.choice((32, 64, 96, 128)))
    dtype = draw.choice(DTYPES)
    plain = [decoder(cfg), decoder(cfg, packed=True)]
    params = chain.init(plain[0], key=random.key(seed), dtype=dtype)
    if draw.random() < 0.25:
        plain = [with_lora(one, rank=4, targets=("*.attn.*proj", "*.out"), alpha=8.0) for one in plain]
        params = lora_init(params, plain[0], key=random.key(seed + 1))
    generator = torch.Generator().manual_seed(seed)  # no zeros, as of biases, sinks or adapters
    params = tree_map_tensors(lambda t: t + 0.05 * torch.randn(t.shape, generator=generator).to(t.dtype), params)
    models = plain if free else [with_invariant(one, **blocks) for one in plain]
    made = Drawn(cfg, params, *models, dtype, [], draw)
    made.sequences = [made.ids(draw.randint(2, longest)) for _ in range(draw.randint(1, 4))]
    return made


def logits_of(made, model, x):
    y = chain.fwd(made.params, x, model, needs=Needs.NONE)[0]
    return y.main if type(y) is WithExtras else y


def trained(made, number):
    """The log-probabilities of a sequence's tokens after its first by the training forward: alone, in a padded batch and packed."""
    ids = made.sequences[number]
    alone = logits_of(made, made.model, decoder_x(made.cfg, ids[None], made.dtype))[0]
    found = {"alone": alone}
    others = [one for i, one in enumerate(made.sequences) if i != number] + [made.ids(made.chance.randint(1, 170))]
    made.chance.shuffle(others)
    at = made.chance.randint(0, len(others))
    rows = [*others[:at], ids, *others[at:]]
    batch = made.ids(len(rows), max(map(len, rows)) + made.chance.randint(0, 40))  # padding of random tokens
    for i, one in enumerate(rows):
        batch[i, : len(one)] = one
    found["padded"] = logits_of(made, made.model, decoder_x(made.cfg, batch, made.dtype))[at, : len(ids)]
    packed = pack(rows, length=sum(map(len, rows)) + made.chance.randint(0, 30))
    given = dict(cu_seqlens=packed.cu_seqlens, tokens=sum(map(len, rows)))
    first = sum(map(len, rows[:at]))
    whole = logits_of(made, made.packed, decoder_x(made.cfg, packed.ids, made.dtype, **given))[0]
    found["packed"] = whole[first : first + len(ids)]
    return {name: log_probabilities_of(logits[:-1], ids[1:]) for name, logits in found.items()}


def decoded(made, number):
    """The same log-probabilities by decoding beside other sequences, in drawn chunks."""
    ids, others = made.sequences[number], made.chance.randint(0, 3)
    at, chunk = made.chance.randint(0, others), made.chance.choice((1, 5, 64, 200))
    batch = made.ids(others + 1, len(ids))
    batch[at] = ids
    cache, logits, done = (
        cache_init(made.cfg, others + 1, context=len(ids) + made.chance.randint(0, 60), chunk=chunk, dtype=made.dtype),
        [],
        0,
    )
    while done < len(ids):
        most = min(cache.chunk, len(ids) - done)
        step = made.chance.randint(1, most) if most > 1 and len(logits) < 12 else most
        found, cache = decode(made.params, cache, batch[:, done : done + step], made.cfg, model=made.model)
        logits.append(found[at])
        done += step
    return log_probabilities_of(torch.cat(logits)[:-1], ids[1:])


def sampled(made, tokens):
    """Sequences that `generate` made after prompts of different lengths, and the log-probabilities of its tokens, by sequence."""
    prompts = [one[: made.chance.randint(1, 60)] for one in made.sequences]
    ids, lengths = made.ids(len(prompts), max(map(len, prompts))), torch.tensor([len(one) for one in prompts])
    for i, one in enumerate(prompts):
        ids[i, : len(one)] = one
    options = dict(lengths=lengths, key=random.key(made.chance.randrange(99)), sampling=SamplingConfig(temperature=1.0))
    options |= dict(chunk=made.chance.choice((16, 50, 256)), model=made.model, log_probabilities=True)
    found = list(generate(made.params, made.cfg, ids, tokens, **options))
    values = torch.stack([one.log_probabilities for one in found], 1)
    made.sequences = [torch.cat((one, torch.stack([step.tokens[i] for step in found]))) for i, one in enumerate(prompts)]
    return list(values)


def one_case(seed, tokens=6, free=False, longest=150):
    """How many log-probabilities of one drawn case differ, by what was compared; and how many were. `free`: without the mode."""
    made = drawn(seed, longest, free=free)
    number = made.chance.randrange(len(made.sequences))
    wrong, count = {}, 0
    want = trained(made, number)
    found = {**want, "decoded": decoded(made, number)}
    for name, value in found.items():
        wrong[name], count = int((value != want["alone"]).sum()), count + value.numel()
    values = sampled(made, tokens)
    for name, value in trained(made, number).items():
        wrong[f"generated, {name}"], count = int((value[-tokens:] != values[number]).sum()), count + tokens
    return wrong, count


def gradients_case(seed, longest=90):
    """Whether the dx of a sequence's tokens, before the first layer, is the same alone, before more positions, and in a batch."""
    made = drawn(seed, longest=longest)
    body = dataclasses.replace(made.model, steps=made.model.steps[1:], ties={})
    own = {"head": LinearParams(made.params["embed"].weight, None)} if made.cfg.tied else {}
    params = {step.name: (made.params | own)[step.name] for step in body.steps}
    generator = torch.Generator().manual_seed(seed)
    length, count, more = made.chance.randint(1, longest), made.chance.randint(1, 4), made.chance.randint(0, 2 * longest // 3)
    x = torch.randn(count, length + more, made.cfg.dim, generator=generator).to(made.dtype)
    at = made.chance.randrange(count)

    def dx(part, upto):
        ids = torch.zeros(part.shape[:2], dtype=torch.int64)
        given = WithExtras(
            part, {name: t for name, t in decoder_x(made.cfg, ids, made.dtype).extras.items() if name in body.extras}
        )
        y, residuals = chain.fwd(params, given if body.extras else part, body)
        dy = torch.randn(count, length + more, made.cfg.vocab, generator=torch.Generator().manual_seed(seed + 1)).to(made.dtype)
        dy = dy[:, : part.shape[1]] if len(part) > 1 else dy[at : at + 1, : part.shape[1]]
        dy[:, upto:] = 0
        gradient = WithExtras(dy, dict.fromkeys(y.extras)) if type(y) is WithExtras else dy
        found = chain.bwd(residuals, gradient, body)[1]
        return found.main if type(found) is WithExtras else found

    alone = dx(x[at : at + 1, :length], length)[0]
    return torch.equal(alone, dx(x[at : at + 1], length)[0, :length]) and torch.equal(alone, dx(x, length)[at, :length])


def main(cases, batches):
    found = [one_case(seed) for seed in range(10_000, 10_000 + cases)]
    values, other = sum(count for _, count in found), sum(sum(wrong.values()) for wrong, _ in found)
    print(f"{cases:,} cases: {other} of {values:,} log-probabilities differ")
    same = [gradients_case(seed) for seed in range(20_000, 20_000 + batches)]
    print(f"{batches:,} batches: the gradients of {same.count(False)} sequences differ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
