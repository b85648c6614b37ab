"""The choice of fusion rules: of all covers of a program's calls, the one that saves most."""

from random import Random

import pytest
import torch
from fusion_cases import made

from funcops import plan
from funcops.engine.program import rules
from funcops.engine.program.rules import FORWARD, Rule, Saving
from funcops.models.blocks import block_config


def drawn_rules(draw, length):
    """Rules that cover calls from some places of a chain of scales, and save something."""

    def rule(name):
        starts, size = set(draw.sample(range(length), 3)), draw.randint(2, 4)
        saves = Saving(draw.randint(-1, 3), draw.randint(0, 2))

        def match(window):
            return size if len(window.calls) >= size and int(window.calls[0].path.rpartition("_")[2]) in starts else None

        return Rule(f"rule {name}", FORWARD, match, lambda *given: NotImplemented, saves), starts, size, saves

    return [rule(name) for name in range(draw.randint(1, 6))]


def most(found, length, i=0):
    """The savings of the best cover from call i on, found by trying all covers."""
    if i >= length:
        return 0, 0
    best = most(found, length, i + 1)
    for _, starts, size, saves in found:
        if i in starts and i + size <= length:
            best = max(best, tuple(map(sum, zip(saves, most(found, length, i + size), strict=True))))
    return best


def test_a_cover_is_the_cheapest(monkeypatch):
    length, longest_first = 7, 0
    cfg = made(" ".join(["scale"] * length))
    for seed in range(60):
        found = drawn_rules(Random(seed), length)
        monkeypatch.setattr(rules, "_rules", [one[0] for one in found])
        lines = plan(cfg).forward
        saved = [sum(parts) for parts in zip(*(line.saves for line in lines), strict=True)]
        assert tuple(saved) == most(found, length), seed
        greedy = max((size for _, starts, size, _ in found if 0 in starts), default=1)
        longest_first += len(lines[0].calls) == greedy
        assert [call.path for line in lines for call in line.calls] == [step.name for step in cfg.steps]
    assert longest_first < 55, "the draw must hold covers that begin otherwise than with the longest piece"


@pytest.mark.parametrize(
    ("dtype", "cover"), [(torch.bfloat16, "attn.out + attn.add"), (torch.float32, "attn.add + mlp.fork + mlp.norm")]
)
def test_who_multiplies_decides_who_adds(dtype, cover):
    """A residual is added by our product, or by the norm after the library's product."""
    lines = plan(block_config(256, 4, 512), dtype=dtype).forward
    assert cover in [" + ".join(line.paths) for line in lines if line.rule]
