"""A field that config.json lacks, or that is null, is read as Hugging Face's own class reads it, or refused: nothing is guessed."""

import copy
import dataclasses
import json
import math
from random import Random

import pytest
from tiny_hf import BASE, FAMILIES, transformers

from funcops.models.families import FAMILIES as TABLE
from funcops.models.fields import read_config, write_config

FIRST = ("glm4", "mistral")
OTHERS = {  # what a default is seen in: windows that are used, and more layers than a default of theirs
    "qwen2, deep": ("qwen2", dict(num_hidden_layers=30, use_sliding_window=True, sliding_window=3)),
    "qwen3, deep": ("qwen3", dict(num_hidden_layers=30, use_sliding_window=True, sliding_window=3)),
    "qwen3_moe, windows": ("qwen3_moe", dict(FAMILIES["qwen3_moe"][1], use_sliding_window=True, sliding_window=3)),
}
KINDS = {**FAMILIES, **OTHERS}
KEPT = ("model_type", "architectures", "transformers_version")
ABSENT = object()
EACH = [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in KINDS]


def filled(kind, given):
    """All fields of Hugging Face's config of the given ones."""
    own = transformers.AutoConfig.for_model(kind, **{n: v for n, v in copy.deepcopy(given).items() if n != "model_type"})
    return json.loads(own.to_json_string(use_diff=False))


def as_before(given):
    """The same with the rope's fields as versions before 5 wrote them."""
    given = copy.deepcopy(given)
    rope = given.pop("rope_parameters", None)
    if not isinstance(rope, dict) or "full_attention" in rope:
        return None
    given |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return given | {"rope_scaling": rope if rope.get("rope_type", "default") != "default" else None}


def same(one, other):
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if a != b and not (type(a) is type(b) is float and math.isclose(a, b)):
            return False
    return True


def read(given):
    try:
        return read_config("test", given, 19)
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("before", [False, True], ids=["", "before 5"])
@pytest.mark.parametrize("name", EACH)
def test_what_is_absent_is_what_hugging_face_takes(name, before):
    """Each field alone, absent and null, and drawn sets of absent ones."""
    kind, options = KINDS[name]
    whole = filled(kind, options if kind == "gpt2" else {**BASE, **options})
    whole = as_before(whole) if before else whole
    if whole is None:  # its rope is by kind of layer, or it has none
        return
    assert read(whole) is not None
    names, draw, compared = [n for n in whole if n not in KEPT], Random(name), 0
    drawn = [draw.sample(names, draw.randint(2, 5)) for _ in range(40)] + [["layer_types", n] for n in names]
    cases = [{n: None} for n in names] + [dict.fromkeys(cut, ABSENT) for cut in ([[n] for n in names] + drawn)]
    for changed in cases:
        given = {n: v for n, v in (whole | changed).items() if v is not ABSENT}
        try:
            wanted = read(filled(kind, given))
        except Exception:  # what Hugging Face refuses, in many ways
            continue
        if wanted is not None and (got := read(given)) is not None:
            assert same(got, wanted), f"with {changed}: {got}, not {wanted}"
            compared += 1
    assert compared > len(names) / 2


@pytest.mark.parametrize("name", ["glm4", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_whole_head_that_rotates_is_written(name):
    """The families whose heads rotate by a part if nothing is said."""
    kind, options = FAMILIES[name]
    cfg = read_config("test", filled(kind, {**BASE, **options}), 19)
    cfg = dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, rotary_dim=None))
    assert cfg.rope.rotating == cfg.head_size
    assert read(filled(kind, write_config(cfg))) == cfg


# Fields that other classes than Hugging Face's present ones have read, and two for which it writes None.
THEIRS = {
    "qwen2": {"use_mrope": False},
    "phi3": dict(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1),
    "gemma2": {"use_bidirectional_attention": False},
    "qwen3_moe": {"sliding_window": 4096},
    "qwen3_next": {"use_sliding_window": False},
    "deepseek_v3": dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1),
}


@pytest.mark.parametrize("name", TABLE)
def test_values_of_absent_fields_are_those_of_hugging_faces_class(name):
    own, family = transformers.AutoConfig.for_model(name), TABLE[name]
    written, theirs = json.loads(own.to_json_string(use_diff=False)), THEIRS.get(name, {})
    ours = {**family.defaults, **family.absent, **family.only}
    assert theirs.items() <= ours.items()
    for field, value in ours.items() - theirs.items():
        assert written.get(field, getattr(own, field, ABSENT)) == value, field
