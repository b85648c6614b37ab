"""Folders without a supported model, wrong params, and what is read from good folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import BASE, FAMILIES, edited, saved, transformers

from benchmarks.memory import Live
from funcops import CheckpointError, RopeConfig, chain, random, trees
from funcops.models import DecoderConfig, decoder, decoder_x, from_hf, layer_paths, open_hf, to_hf
from funcops.models.families import IGNORED
from funcops.models.fields import read_config


@pytest.fixture
def folder(tmp_path):
    saved("qwen3", tmp_path / "hf")
    return tmp_path / "hf"


def rewritten(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"


def missing(tensors):
    del tensors[NORM], tensors[UP]


def extra(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(2)


def misshaped(tensors):
    tensors[UP] = tensors[UP].T.contiguous()


def mistyped(tensors):
    tensors[NORM] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (missing, ["missing: ", f"{NORM} [32]", f"{UP} [40, 32]"]),
        (extra, ["extra: model.layers.2.mlp.up_proj.weight [2]"]),
        (misshaped, [f"mis-shaped: {UP} [40, 32], got [32, 40]"]),
        (mistyped, [f"mis-typed: {NORM} float64 or float32 or bfloat16 or float16, got I8"]),
    ],
    ids=["missing", "extra", "misshaped", "mistyped"],
)
def test_tensors_that_are_not_the_models_are_listed(folder, change, said):
    rewritten(folder, change)
    with pytest.raises(CheckpointError) as error:
        from_hf(folder)
    assert str(error.value).startswith(f"open_hf: {folder} must hold the model of its config.json, got")
    assert all(one in str(error.value) for one in said)


def test_a_file_that_is_cut_short_raises(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be a safetensors file, got"):
        from_hf(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "bert"}, r"model_type must be one of llama, .*, got 'bert'"),
        ({"model_type": None}, r"model_type must be one of llama, .*, got None"),
        ({"model_type": "llama4"}, r"got 'llama4', a model with a vision tower: save its language model alone, a 'llama4_text'"),
        ({"model_type": "gemma3"}, r"got 'gemma3', a model with a vision tower: save its language model alone, a 'gemma3_text'"),
        ({"gizmo": 1}, r"fields must be known for family 'qwen3', got 'gizmo'"),
        ({"hidden_act": "mish"}, r"hidden_act must be one of silu, .*, got 'mish'"),
        ({"hidden_size": None}, "hidden_size must be given, got none"),
        ({"hidden_size": "32"}, "hidden_size must be int, got '32'"),
        ({"num_key_value_heads": 3}, "kv_heads must be a number that divides heads, 4, got 3"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types must be of 'sliding_attention' and 'full_attention'",
        ),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type must be one of default, .*, got 'spiral'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "twist": 2}}, "'default' must be known, got 'twist'"),
        ({"rope_theta": 7.0}, "rope_scaling must be the same as rope_parameters, or absent"),
    ],
)
def test_a_config_that_is_not_served_names_its_field(folder, fields, said):
    edited(folder, **fields)
    with pytest.raises((ValueError, TypeError), match=said) as error:
        from_hf(folder)
    assert "gizmo" not in fields or str(folder / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("granite", {"logits_scaling": 0.0}, "logits_scaling must be above 0, got 0.0"),
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval must be at least 1, got 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 5, got 2"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 5}, "layer_types must be of 'full_attention', got 'sliding_attention'"),
    ],
)
def test_numbers_that_a_family_does_not_take(name, fields, said, tmp_path):
    saved(name, tmp_path / "hf")
    edited(tmp_path / "hf", **fields)
    with pytest.raises(ValueError, match=said):
        from_hf(tmp_path / "hf")


def test_a_factor_on_embeddings_is_rounded_where_hugging_face_rounds_it(tmp_path):
    """Gemma's, which multiplies by a tensor of the params' dtype; Granite's is a number."""
    for name in ("gemma3", "granite"):
        saved(name, tmp_path / name)
    edited(tmp_path / "granite", embedding_multiplier=3.3)
    assert from_hf(tmp_path / "granite", dtype=torch.bfloat16)[1].embed_scale == 3.3
    assert from_hf(tmp_path / "gemma3", dtype=torch.bfloat16)[1].embed_scale == 5.65625  # of sqrt(32)


def test_fields_are_ignored_by_name(folder):
    params, cfg = from_hf(folder)
    edited(folder, gizmo=1, _gizmo={"a": 2})
    assert from_hf(folder, ignore=("gizmo", "_gizmo"))[1] == cfg
    with open_hf(folder, ignore=["gizmo", "_gizmo"]) as weights:
        assert weights.cfg == cfg
    with pytest.raises(ValueError, match=r"fields must be known for family 'qwen3', got '_gizmo'"):
        from_hf(folder, ignore=("gizmo",))
    with pytest.raises(ValueError, match=r"ignore must be of fields that it has \(.*gizmo.*\), got 'gismo'"):
        from_hf(folder, ignore=("gismo", "_gizmo"))
    with pytest.raises(TypeError, match="ignore must be a tuple of fields of config.json, got 'gizmo'"):
        from_hf(folder, ignore="gizmo")


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_metadata_is_ignored(name, tmp_path):
    """All fields that transformers writes beside a model's own, as versions before 4.45 wrote them."""
    saved(name, tmp_path / "hf")
    _, cfg = from_hf(tmp_path / "hf")
    own = json.loads((tmp_path / "hf" / "config.json").read_text())
    edited(tmp_path / "hf", **{field: "some" for field in IGNORED if field not in own and field != "add_cross_attention"})
    assert from_hf(tmp_path / "hf")[1] == cfg


def test_a_downloaded_model_is_found_by_its_name(folder, tmp_path, monkeypatch):
    import huggingface_hub

    cache = tmp_path / "cache"
    snapshot = cache / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--org--tiny" / "refs").mkdir()
    (cache / "models--org--tiny" / "refs" / "main").write_text("a" * 40)
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: real(name, cache_dir=cache, **options))
    assert all(torch.equal(a, b) for a, b in zip(*(trees.tensors(from_hf(one)[0]) for one in ("org/tiny", snapshot)), strict=True))
    for name in ("org/other", "a..b/c"):  # the second cannot be a name on the hub
        with pytest.raises(FileNotFoundError, match="for a model of the hub download it first"):
            from_hf(name)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gpt2", "deepseek_v3", "gpt_oss"])
def test_writing_holds_no_second_copy(name, tmp_path):
    """Rows of several leaves, in another order or transposed, are made a file at a time; all others are views."""
    saved(name, tmp_path / "hf")
    params, cfg = from_hf(tmp_path / "hf")
    largest = max(t.nbytes for t in trees.tensors(params))
    with Live() as counter:
        to_hf(params, cfg, tmp_path / "ours", shard_bytes=largest)
    assert counter.peak < (largest if name == "qwen3" else 3 * largest) < trees.nbytes(params)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3"])
def test_windows_without_layer_types_are_where_hugging_face_has_them(family):
    made = transformers.AutoConfig.for_model(
        family, **BASE | dict(num_hidden_layers=5, use_sliding_window=True, sliding_window=3, max_window_layers=3)
    )
    fields = {name: value for name, value in json.loads(made.to_json_string()).items() if name != "layer_types"}
    want = [3 if one == "sliding_attention" else None for one in made.layer_types]
    assert len(set(want)) == 2 and list(read_config("a test", fields).windows) == want


def test_a_config_of_before_reads_the_same(folder):
    _, cfg = from_hf(folder)
    edited(folder, rope_parameters=None, rope_theta=100.0, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="float32")
    assert from_hf(folder)[1] == cfg


def test_shards_and_their_index(tmp_path):
    saved("qwen3", tmp_path / "hf", max_shard_size="20KB")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    files = sorted(set(found["weight_map"].values()))
    assert len(files) > 1
    params, _ = from_hf(tmp_path / "hf")
    saved("qwen3", tmp_path / "one")
    assert all(torch.equal(a, b) for a, b in zip(trees.tensors(params), trees.tensors(from_hf(tmp_path / "one")[0]), strict=True))

    def indexed(**changes):
        index.write_text(json.dumps(found | {"weight_map": found["weight_map"] | changes}))

    first = next(iter(found["weight_map"]))
    other = next(file for file in files if file != found["weight_map"][first])
    indexed(**{first: other})
    with pytest.raises(CheckpointError, match=rf"index.json must name the file of each tensor, got\n  {first} in {other}"):
        from_hf(tmp_path / "hf")
    indexed(**{first: "../one/model.safetensors"})
    with pytest.raises(CheckpointError, match="must be the name of a file of the folder for each tensor"):
        from_hf(tmp_path / "hf")
    indexed()
    (tmp_path / "hf" / other).unlink()
    with pytest.raises(FileNotFoundError, match=f"must be an existing file, got .*{other}"):
        from_hf(tmp_path / "hf")


def test_a_folder_with_one_file_and_shards_is_read_as_hugging_face_reads_it(tmp_path):
    """The two have different embeddings."""
    saved("qwen3", tmp_path / "hf", max_shard_size="20KB")
    shards = from_hf(tmp_path / "hf")[0]["embed"].weight
    saved("qwen3", tmp_path / "one")
    rewritten(tmp_path / "one", lambda tensors: [t.neg_() for t in tensors.values()])
    (tmp_path / "hf" / "model.safetensors").write_bytes((tmp_path / "one" / "model.safetensors").read_bytes())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").get_input_embeddings().weight
    assert torch.equal(from_hf(tmp_path / "hf")[0]["embed"].weight, theirs) and torch.equal(theirs, -shards)


def test_folders_without_files_raise(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"folder must have the file config.json"):
        from_hf(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"got 'org/a-model' \(for a model of the hub .*snapshot_download"):
        from_hf("org/a-model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"folder must have model.safetensors or model.safetensors.index.json"):
        from_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json must be a JSON file"):
        from_hf(folder)


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    saved("mistral", tmp_path / "hf")
    given, _ = from_hf(tmp_path / "hf")
    assert given["head"].weight is None
    rewritten(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    from_hf(tmp_path / "hf")
    rewritten(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="lm_head.weight must be the embedding's weight, as config.json ties them"):
        from_hf(tmp_path / "hf")


def test_gpt2_without_its_prefix_and_with_its_masks(tmp_path):
    saved("gpt2", tmp_path / "hf")
    want, _ = from_hf(tmp_path / "hf")

    def bare(tensors):
        found = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        tensors.clear()
        tensors |= found | {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.ones(())}

    rewritten(tmp_path / "hf", bare)
    got, _ = from_hf(tmp_path / "hf")
    assert all(torch.equal(a, b) for a, b in zip(trees.tensors(got), trees.tensors(want), strict=True))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.slow) for name in FAMILIES])
def test_rows_of_a_leaf_are_read_alone(name, tmp_path):
    saved(name, tmp_path / "hf")
    params, _ = from_hf(tmp_path / "hf")
    with open_hf(tmp_path / "hf") as weights:
        for path, t in trees.paths(params).items():
            assert (path in weights) == (t is not None)
            if t is not None:
                n = len(t)
                for a, b in ((0, n), (0, 0), (n, n), (1, max(1, n - 1)), (n // 2, n // 2 + 1)):
                    got = weights.read(path, a, b)
                    assert torch.equal(got, t[a:b]) and got.is_contiguous(), (path, a, b)
        with pytest.raises(ValueError, match=r"HFWeights.read: rows must be within 0..48, got 3..49"):
            weights.read("embed.weight", 3, 49)
        with pytest.raises(ValueError, match=r"HFWeights.read: start must be"):
            weights.read("embed.weight", -1, 2)
        with pytest.raises(ValueError, match=r"HFWeights.read: path must be one of .*embed.weight, .*, got 'no'"):
            weights.read("no")


def test_dtypes_on_load(folder):
    params, cfg = from_hf(folder, dtype=torch.bfloat16)
    assert {t.dtype for t in trees.tensors(params)} == {torch.bfloat16}
    same, _ = from_hf(folder)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(trees.tensors(params), trees.tensors(same), strict=True))
    before = [t.clone() for t in trees.tensors(same)]
    rewritten(folder, lambda tensors: [t.zero_() for t in tensors.values()])  # params are not a view of the file
    assert all(torch.equal(a, b) for a, b in zip(trees.tensors(same), before, strict=True))


def test_a_routers_bias_keeps_its_bits_in_16(tmp_path):
    saved("deepseek_v3", tmp_path / "hf")
    params, cfg = from_hf(tmp_path / "hf", dtype=torch.bfloat16)
    by_path = {path: t.dtype for path, t in trees.paths(params).items() if t is not None}
    assert {path for path, dtype in by_path.items() if dtype is not torch.bfloat16} == {"blocks1.0.mlp.moe.routed.route.bias"}
    y, _ = chain.fwd(params, decoder_x(cfg, torch.zeros(1, 3, dtype=torch.int64), torch.bfloat16), decoder(cfg))
    assert y.main.dtype is torch.bfloat16 and y.main.isfinite().all()


LLAMA = DecoderConfig(
    vocab=8, dim=4, layers=2, heads=2, kv_heads=1, head_size=2, hidden=3, context=8, rope=RopeConfig(2), family="llama"
)


def test_only_fields_of_the_family_are_written(tmp_path):
    params = chain.init(decoder(LLAMA), key=random.key(0))
    for change, said in (
        (dict(qk_norm="head"), "cfg.qk_norm must be None for family 'llama' with these other fields, got 'head'"),
        (dict(windows=(None, 3)), "cfg.windows must be .* for family 'llama'"),
        (dict(family=""), "model_type must be one of"),
        (dict(mlp="gelu"), "hidden_act must be"),
    ):
        cfg = DecoderConfig(**{**{n: getattr(LLAMA, n) for n in LLAMA.__dataclass_fields__}, **change})
        with pytest.raises(ValueError, match=said):
            to_hf(params, cfg, tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"params must be decoder\(cfg\)'s, got\n  norm.weight \[4\], got \[5\]"):
        to_hf(trees.put(params, "norm.weight", torch.ones(5)), LLAMA, tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(FileExistsError, match="folder must be new or empty"):
        to_hf(params, LLAMA, tmp_path / "full")
    with pytest.raises(CheckpointError, match="a tensor with values of its own"):  # found when all the others are there
        to_hf(trees.put(params, "norm.weight", torch.ones(4, device="meta")), LLAMA, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
    to_hf(params, LLAMA, tmp_path / "new")
    assert from_hf(tmp_path / "new")[1] == LLAMA


def test_layers_that_differ_have_paths():
    def of(*windows):
        sizes = dict(vocab=8, dim=4, heads=2, kv_heads=1, head_size=2, hidden=3, context=8)
        return layer_paths(DecoderConfig(**sizes, layers=len(windows), windows=windows, rope=RopeConfig(2)))

    two = ["blocks.0.layer0", "blocks.0.layer1", "blocks.1.layer0", "blocks.1.layer1"]
    assert of(None, None, None) == ["blocks.0", "blocks.1", "blocks.2"]
    assert of(2, None, 2, None) == two
    assert of(2, None, 2, None, 2) == [*[path.replace("blocks", "blocks0") for path in two], "blocks1.0"]
    assert of(2, None, None, None) == ["blocks0.0", "blocks1.0", "blocks1.1", "blocks1.2"]
