"""The repr of configs: source that makes an equal config, without defaults, over lines that are not too long."""

import dataclasses

import pytest
import tally
import torch
from law_cases import CASES

import funcops
from funcops import ChainConfig, LinearConfig, RepeatConfig, RopeConfig, Step, chain, dist, linear, lora, low_precision, repeat
from funcops.engine.errors import describe_tree
from funcops.engine.trees import paths, put
from funcops.library.ops import expert_steps
from funcops.models import DecoderConfig, decoder
from funcops.models.blocks import block_config, gpt2_block_config

NAMES = {
    **vars(tally),
    **vars(expert_steps),
    **vars(torch),
    "torch": torch,
    **vars(low_precision),
    **vars(lora),
    **vars(dist),
    **vars(funcops),
}
MODELS = {
    "GPT-2": gpt2_block_config(32, 2, 64, 0.1),
    "Llama": block_config(32, 2, 64, 1),
    "FP8": low_precision.with_recipe(block_config(32, 2, 64, 1), low_precision.Fp8Block()),
    "LoRA": lora.with_lora(block_config(32, 2, 64, 1), 4, ("*",)),
    "decoder": decoder(
        DecoderConfig(vocab=8, dim=8, layers=2, heads=2, kv_heads=1, head_size=4, hidden=8, context=4, rope=RopeConfig(4))
    ),
}
CONFIGS = {f"{case}": case.cfg for case, _ in CASES} | MODELS


@pytest.mark.parametrize("name", CONFIGS)
def test_the_repr_makes_an_equal_config(name):
    cfg = CONFIGS[name]
    text = repr(cfg)
    assert eval(text, dict(NAMES)) == cfg
    assert max(map(len, text.split("\n"))) <= 140 and cfg._repr_html_().startswith("<pre>")


def test_only_what_is_not_at_its_default_is_shown():
    assert repr(LinearConfig(4, 4)) == "LinearConfig(in_features=4, out_features=4)"
    assert repr(LinearConfig(4, 4, bias=False)) == "LinearConfig(in_features=4, out_features=4, bias=False)"
    assert repr(low_precision.Fp8Block()) == "Fp8Block()"
    small = ChainConfig(steps=(Step("a", linear, LinearConfig(4, 4)),))
    assert repr(small) == "ChainConfig(steps=(Step(name='a', op=linear, cfg=LinearConfig(in_features=4, out_features=4)),))"
    assert repr(RepeatConfig(chain, small, times=2)).split("\n")[:2] == ["RepeatConfig(", "    op=chain,"]


def test_a_deep_config_is_shown_at_once():
    """Each part is written once, however deep it lies: 2^60 texts of parts would take for ever."""
    cfg, op = LinearConfig(4, 4), linear
    for _ in range(60):
        cfg, op = RepeatConfig(op, cfg, times=1), repeat
    assert repr(cfg).count("RepeatConfig(") == 60


@pytest.mark.parametrize("case,dtype", {str(case): (case, dtype) for case, dtype in CASES}.values(), ids=lambda one: str(one))
def test_no_tensor_is_printed_with_its_values(case, dtype):
    """Params and residuals of every op as text, and the error for accumulators of another structure."""
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg)
    said = [describe_tree(params), describe_tree(residuals)]
    for path, t in paths(params).items():
        if t is not None:
            try:
                case.op.bwd(residuals, y, case.cfg, into=put(params, path, (t,)))
            except (TypeError, ValueError) as error:
                said.append(str(error))
    assert not [text for text in said if "tensor(" in text]


def test_a_tree_as_text():
    tree = {"w": (torch.ones(2), None), "layers": [torch.ones(1, 3, dtype=torch.int64)], "one": (1,)}
    assert describe_tree(tree) == "{'w': (float32[2], None), 'layers': [int64[1, 3]], 'one': (1,)}"


def test_completion_lists_the_fields_of_a_config():
    """Without the hooks for rewrites, but with Python's own names."""
    found = dir(funcops.LinearConfig(4, 8))
    shown = {name for name in found if not name.startswith("__")}
    assert shown == {field.name for field in dataclasses.fields(funcops.LinearConfig)} and "__class__" in found
    assert found == sorted(found)
