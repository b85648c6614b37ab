"""A config.json that somebody else wrote: whatever a field holds, it is read, or an error names the file and what must be there."""

import json
from random import Random

import pytest
from tiny_hf import BASE, FAMILIES, transformers

from funcops.engine.errors import CheckpointError
from funcops.models import open_hf
from funcops.models.fields import read_config

NAN, INF = float("nan"), float("inf")
ROPES = [
    {},
    {"rope_type": []},
    {"rope_type": "yarn", "factor": 0},
    {"rope_type": "yarn", "factor": "x"},
    {"rope_type": "yarn", "original_max_position_embeddings": 0},
    {"rope_type": "linear", "factor": [], "rope_theta": 1.0},
    {"rope_theta": "x"},
    {"rope_theta": None},
    {"rope_theta": NAN},
    {"full_attention": 1},
    {"full_attention": {}, "sliding_attention": 3},
    {"rope_type": "longrope", "short_factor": ["a"], "long_factor": 3},
    {"rope_type": "longrope", "factor": 1, "original_max_position_embeddings": 0},
]
VALUES = [0, -1, 1, 10**9, 10**30, 10**400, 0.5, NAN, INF, -INF, True, False, "", "x", "silu", [], [1], [None], [[]], *ROPES]
VALUES += [
    ["full_attention"],
    {"a": 1},
    {"quant_method": []},
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": 0},
]
ALSO = ("head_dim", "rope_scaling", "rope_theta", "partial_rotary_factor", "layer_types", "sliding_window", "model_type")


def config_of(name, folder):
    kind, options = FAMILIES[name]
    options = ({} if kind == "gpt2" else BASE) | json.loads(json.dumps(options))
    transformers.AutoConfig.for_model(kind, **options).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def refused_by_name(call, file):
    """Whether the call raises, and then by the file, in the words of every error of the library."""
    try:
        call()
    except (ValueError, TypeError) as error:
        assert str(error).startswith(file) and " must be " in str(error), repr(error)
        return True
    return False


@pytest.mark.parametrize("count", [40, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_of_any_value_is_read_or_refused_by_name(name, count, tmp_path):
    said, refused = config_of(name, tmp_path), 0
    cases = [(field, value) for field in sorted({*said, *ALSO}) for value in VALUES]
    cases = cases if count is None else Random(name).sample(cases, count)
    for field, value in cases:
        refused += refused_by_name(lambda field=field, value=value: read_config("a file", {**said, field: value}, 19), "a file: ")
    assert refused > len(cases) // 4


@pytest.mark.parametrize("value", [value for value in VALUES if value != {}], ids=lambda value: repr(value)[:40])
def test_how_tensors_are_quantised_is_read_or_refused_by_name(value, tmp_path):
    said = config_of("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**said, "quantization_config": value}, default=str) if value != 10**400 else "{}")
    try:
        open_hf(tmp_path)
    except FileNotFoundError as error:  # it was read, and the tensors are missing
        assert "open_hf: folder must have" in str(error)
    except (ValueError, TypeError) as error:
        assert str(error).startswith(f"open_hf: {path}: ") and " must be " in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 10_000,
        "",
        "{",
        "[]",
        "null",
        "NaN",
        '"llama"',
        '{"model_type": NaN}',
        '{"model_type": []}',
    ],
    ids=lambda text: text[:24],
)
def test_a_file_that_is_no_config_is_refused_by_name(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, ValueError, TypeError), match="^open_hf: .*config.json.* must be ") as caught:
        open_hf(tmp_path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 0), ("num_hidden_layers", 2**12 + 1), ("rms_norm_eps", NAN), ("hidden_act", [])]
)
def test_the_field_is_named(field, value, tmp_path):
    with pytest.raises((ValueError, TypeError), match=f"^a file: {field} must be "):
        read_config("a file", {**config_of("llama", tmp_path), field: value})


@pytest.mark.parametrize("field", ["num_attention_heads", "rms_norm_eps", "vocab_size"])
def test_a_truth_value_is_no_number(field, tmp_path):
    with pytest.raises(TypeError, match=f"^a file: {field} must be int( or float)?, got True$"):
        read_config("a file", {**config_of("llama", tmp_path), field: True})


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gpt2", "olmo3", "gemma3")])
def test_a_family_with_one_rope_refuses_two(name, tmp_path):
    given = config_of(name, tmp_path)
    both = {"full_attention": given["rope_parameters"], "sliding_attention": given["rope_parameters"]}
    said = "config.json: rope_parameters must be flat, got nested, by full_attention, sliding_attention"
    read_config("config.json", given)
    with pytest.raises(ValueError) as error:
        read_config("config.json", given | {"rope_parameters": both})
    assert str(error.value) == said


@pytest.mark.parametrize("name", ["llama4", "mixtral"])
def test_a_router_without_noise_alone_is_read(name, tmp_path):
    given = config_of(name, tmp_path)
    read_config("config.json", given | {"router_jitter_noise": 0.0})
    with pytest.raises(ValueError, match=r"config.json: router_jitter_noise must be 0\.0, got 0\.01"):
        read_config("config.json", given | {"router_jitter_noise": 0.01})


WRONG_FIELDS = {  # by what is said: a family, and the fields that are not as in a config of it
    "n_shared_experts must be at least 1, got 0": ("deepseek_v3", dict(n_shared_experts=0)),
    "first_k_dense_replace must be below 2, the layers, got 2": ("deepseek_v3", dict(first_k_dense_replace=2)),
    "shared_expert_intermediate_size must be at least 1, got 0": ("qwen2_moe", dict(shared_expert_intermediate_size=0)),
    "decoder_sparse_step must be at least 1, got 0": ("qwen3_moe", dict(decoder_sparse_step=0)),
    "layer_types must be a list of 5, got 2": ("smollm3", dict(layer_types=["full_attention"] * 2)),
    "layer_types must be a list of 4, got 1": ("gemma2", dict(layer_types=["full_attention"])),
    "layer_types must be a list of 3, got 4": ("qwen3_next", dict(layer_types=["full_attention"] * 4)),
    "sliding_window must be given, got none": ("gemma2", dict(sliding_window=None)),
    "sliding_window_pattern must be at least 1, got 0": ("gemma3", dict(sliding_window_pattern=0)),
    "full_attention_interval must be at least 1, got 0": ("qwen3_next", dict(full_attention_interval=0)),
    "no_rope_layer_interval must be at least 1, got 0": ("smollm3", dict(no_rope_layer_interval=0)),
    "logits_scaling must be above 0, got 0.0": ("granite", dict(logits_scaling=0.0)),
    "hidden_size must be given, got none": ("llama", dict(hidden_size=None)),
}


@pytest.mark.parametrize("said", WRONG_FIELDS)
def test_a_field_that_fits_no_model_is_named(said, tmp_path):
    name, changes = WRONG_FIELDS[said]
    with pytest.raises(ValueError) as raised:
        read_config("a file", config_of(name, tmp_path) | changes)
    assert str(raised.value) == f"a file: {said}"


def test_more_experts_than_any_model_has_are_refused(tmp_path):
    given = config_of("mixtral", tmp_path)
    assert read_config("a file", given | {"num_local_experts": 2**12}).moe.experts.experts == 2**12
    with pytest.raises(ValueError, match=r"ExpertsConfig: experts must be at most 4096, got 4097$"):
        read_config("a file", given | {"num_local_experts": 2**12 + 1})
